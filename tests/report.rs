//! Promise: a report is one file that shows what an entry does, in any browser, on any screen, without a network.

mod repository;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use oscar_kv::eval::Report;
use oscar_kv::report;
use oscar_kv::zoo::Entry;
use repository::{copy, oscar};
use tempfile::TempDir;

fn page(entry: &Path) -> String {
    fs::read_to_string(report::write(entry).unwrap()).unwrap()
}

#[test]
fn a_page_needs_nothing_else_and_says_what_was_measured() {
    let (_keep, entry) = copy();
    let html = page(&entry);
    // A name, not an address.
    let addresses = html.replace("http://www.w3.org/2000/svg", "");
    for outside in [
        "http:",
        "https:",
        "src=",
        "url(",
        "@import",
        "<link rel=\"stylesheet\"",
    ] {
        assert!(!addresses.contains(outside), "{outside}");
    }
    let measured = Report::read(&entry).unwrap().unwrap();
    for method in &measured.methods {
        assert!(
            html.contains(&format!("</i>{}</th>", method.name)),
            "{}",
            method.name
        );
        assert!(
            html.contains(&format!("{:.2}</td>", method.perplexity)),
            "{}",
            method.name
        );
    }
    // Two measures of three methods before and the entry's.
    assert_eq!(html.matches("class=\"heat\"").count(), 8);
    // Spectrum and importance of keys and values, of every layer.
    assert_eq!(html.matches("data-layer=").count(), 4 * 30);
    // The worst head is the one with the largest error.
    let (layer, head, _) = measured
        .layers
        .iter()
        .flat_map(|layer| {
            let errors = &layer.methods[0].output_error;
            errors
                .iter()
                .enumerate()
                .map(|(head, e)| (layer.layer, head, e.unwrap()))
        })
        .max_by(|a, b| a.2.total_cmp(&b.2))
        .unwrap();
    let rows = html.split("<h2 id=\"worst\">").nth(1).unwrap();
    let first = rows.split("<th scope=\"row\">").nth(1).unwrap();
    assert!(
        first.starts_with(&format!("{layer}, {head} ")),
        "{}",
        &first[..60]
    );
}

#[test]
fn without_a_measurement_it_says_how_to_make_one_and_shows_the_rest() {
    let (_keep, entry) = copy();
    fs::remove_file(entry.join("metrics.json")).unwrap();
    let html = page(&entry);
    assert!(html.contains("has not been measured") && html.contains("oscar validate ENTRY"));
    assert!(
        html.contains("id=\"clip\"")
            && html.contains("id=\"layer\"")
            && html.contains("id=\"worst\"")
    );
    assert!(!html.contains("id=\"heat\"") && !html.contains("id=\"accuracy\""));
}

#[test]
fn a_measurement_of_other_tensors_is_left_out() {
    let (_keep, entry) = copy();
    let path = entry.join("metrics.json");
    let metrics = fs::read_to_string(&path).unwrap();
    let measured = Report::read(&entry).unwrap().unwrap();
    let of = measured.provenance.entry_sha256.unwrap();
    fs::write(&path, metrics.replace(&of, &"0".repeat(64))).unwrap();
    assert!(page(&entry).contains("is of other tensors"));
    fs::write(&path, "{}").unwrap();
    let message = report::write(&entry).unwrap_err().to_string();
    assert!(
        message.contains("metrics.json") && message.contains("hint"),
        "{message}"
    );
}

#[test]
fn hostile_names_stay_text() {
    let (_keep, folder) = copy();
    let metrics = fs::read_to_string(folder.join("metrics.json")).unwrap();
    let mut entry = Entry::open(&folder).unwrap();
    "<script>alert(1)</script>".clone_into(&mut entry.metadata.model.id);
    entry.metadata.model.revision = Some("</style><b>".to_owned());
    let hostile = folder.join("hostile");
    entry.write(&hostile, false).unwrap();
    let mut metrics: serde_json::Value = serde_json::from_str(&metrics).unwrap();
    metrics["provenance"]["entry_sha256"] = serde_json::Value::Null;
    let text = metrics
        .to_string()
        .replace("\"hadamard\"", "\"</script><img>\\u0001\"");
    fs::write(
        hostile.join("metrics.json"),
        text.replace("\"balanced\"", "\"**<i>\""),
    )
    .unwrap();
    let html = page(&hostile);
    for bad in [
        "<script>alert",
        "<img>",
        "<i>**",
        "**<i>",
        "</style><b>",
        "\u{1}",
    ] {
        assert!(!html.contains(bad), "{bad}");
    }
    assert!(html.contains("&lt;script&gt;alert(1)"));
}

#[test]
fn figures_are_written_for_papers() {
    let (keep, entry) = copy();
    let out = keep.path().join("figures");
    let output = oscar(&[
        "report",
        entry.to_str().unwrap(),
        "--svg",
        out.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{output:?}");
    let names: Vec<_> = fs::read_dir(&out)
        .unwrap()
        .map(|f| f.unwrap().path())
        .collect();
    // Two of accuracy, two scales, eight heat maps, two of clips, four of the worst head's layer.
    assert_eq!(names.len(), 18, "{names:?}");
    for path in names {
        let svg = fs::read_to_string(&path).unwrap();
        assert!(svg.starts_with("<svg ") && svg.contains("<title") && svg.contains("<text"));
        assert!(
            !svg.contains("var(") && !svg.contains("\"#0000"),
            "{}",
            path.display()
        );
    }
}

// ---- in a browser --------------------------------------------------------------------------------------------------

fn chromium() -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let found = std::env::split_paths(&paths)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|path| path.is_file());
    if found.is_none() {
        println!("skipped: no chromium");
    }
    found
}

/// Runs Chromium on a page; returns what it printed, and what the console said.
fn browse(chromium: &Path, page: &Path, width: u32, arguments: &[&str]) -> (String, Vec<String>) {
    let profile = TempDir::new().unwrap();
    let output = Command::new(chromium)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
        ])
        .args([
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ])
        .args([
            "--hide-scrollbars",
            "--enable-logging=stderr",
            "--virtual-time-budget=2000",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(format!("--window-size={width},1400"))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    let console = log
        .lines()
        .filter(|line| line.contains("CONSOLE"))
        .map(str::to_owned);
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        console.collect(),
    )
}

/// Uses the page as a reader with a keyboard would, and writes what came of it into the title.
const USE: &str = r#"<script>
addEventListener("load", () => {
  const said = [];
  const wide = [...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll, svg") &&
    e.getBoundingClientRect().right > innerWidth + 1);
  said.push("width " + innerWidth, "overflows " + (document.documentElement.scrollWidth > innerWidth || wide.length > 0));
  const key = (e, key) => e.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const map = document.querySelector(".heat");
  if (map) {
    key(map, "ArrowRight"); key(map, "ArrowDown"); key(map, "ArrowDown");
    said.push(map.closest(".measure").querySelector(".readout").textContent);
  }
  const pick = document.getElementById("pick");
  pick.value = "3";
  pick.dispatchEvent(new Event("change"));
  said.push("shown " + [...document.querySelectorAll(".layer.on")].map((g) => g.dataset.layer).join(" "));
  const paper = () => getComputedStyle(document.documentElement).backgroundColor;
  const theme = document.getElementById("theme");
  theme.click(); const light = paper(); theme.click(); const dark = paper();
  said.push("themes differ " + (light !== dark));
  const small = [...document.querySelectorAll("svg text")].map((t) => t.getBoundingClientRect().height);
  said.push("smallest text " + Math.round(Math.min(...small)));
  const nameless = [...document.querySelectorAll("svg, button, select, [tabindex]")].filter((e) =>
    !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.labels?.length || e.textContent.trim()));
  said.push("nameless " + nameless.length);
  parent.postMessage(said.join("; "), "*");
});
</script>"#;

/// A frame of a phone's width: Chromium opens no window as narrow.
fn framed(page: &Path, width: u32) -> String {
    format!(
        "<!doctype html><script>onmessage = (e) => {{ document.title = e.data; }};</script>\
         <iframe style=\"border:0\" width=\"{width}\" height=\"900\" src=\"{}\"></iframe>",
        page.file_name().unwrap().to_str().unwrap()
    )
}

#[test]
fn it_works_in_a_browser_without_a_word_on_the_console() {
    let Some(chromium) = chromium() else { return };
    let (_keep, entry) = copy();
    let html = page(&entry);
    let used = entry.join("used.html");
    fs::write(&used, html.replace("</body>", &format!("{USE}</body>"))).unwrap();
    let measured = Report::read(&entry).unwrap().unwrap();
    // Layer 1, head 2 of the first map.
    let naive = measured.layers[1]
        .methods
        .iter()
        .find(|m| m.name == "naive")
        .unwrap();
    let error = naive.output_error[2].unwrap();
    for width in [390, 1280] {
        let frame = entry.join("frame.html");
        fs::write(&frame, framed(&used, width)).unwrap();
        let (dom, console) = browse(&chromium, &frame, 1400, &["--dump-dom"]);
        assert_eq!(console, [""; 0], "{width}");
        let title = dom
            .split("<title>")
            .nth(1)
            .unwrap()
            .split("</title>")
            .next()
            .unwrap();
        println!("{title}");
        assert!(
            title.contains(&format!("width {width}; overflows false")),
            "{title}"
        );
        assert!(
            title.contains(&format!(
                "Layer 1, head 2: naive {}",
                &format!("{error}")[..4]
            )),
            "{title}"
        );
        assert!(
            title.contains("shown 3 3 3 3;") && title.contains("themes differ true"),
            "{title}"
        );
        assert!(title.contains("nameless 0"), "{title}");
        let height: f64 = title
            .split("smallest text ")
            .nth(1)
            .unwrap()
            .split(';')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        assert!(height >= 10.0, "text of {height} pixels");
    }
}

#[test]
fn screenshots_and_paper() {
    let Some(chromium) = chromium() else { return };
    let (keep, entry) = copy();
    let path = report::write(&entry).unwrap();
    // Kept where one is asked for, to be looked at.
    let out =
        std::env::var_os("OSCAR_SCREENSHOTS").map_or_else(|| keep.path().to_owned(), PathBuf::from);
    fs::create_dir_all(&out).unwrap();
    let dark = "--blink-settings=preferredColorScheme=0";
    for (name, width, more) in [
        ("phone", 390, None),
        ("wide", 1280, None),
        ("dark", 1280, Some(dark)),
    ] {
        let file = out.join(format!("{name}.png"));
        let shot = format!("--screenshot={}", file.display());
        let arguments: Vec<&str> = [shot.as_str()].into_iter().chain(more).collect();
        let (_, console) = browse(&chromium, &path, width, &arguments);
        assert_eq!(console, [""; 0], "{name}");
        let png = fs::read(&file).unwrap();
        // Width from the PNG's header.
        assert_eq!(
            u32::from_be_bytes(png[16..20].try_into().unwrap()),
            width,
            "{name}"
        );
    }
    let (wide, dark) = (
        fs::read(out.join("wide.png")).unwrap(),
        fs::read(out.join("dark.png")).unwrap(),
    );
    assert!(wide != dark, "dark looks the same");
    let pdf = out.join("print.pdf");
    let print = format!("--print-to-pdf={}", pdf.display());
    browse(&chromium, &path, 1280, &[&print, "--no-pdf-header-footer"]);
    let pdf = fs::read(pdf).unwrap();
    let pages = pdf
        .windows(11)
        .filter(|w| w.starts_with(b"/Type /Page") && w[10] != b's')
        .count();
    let more = pdf.windows(12).filter(|w| *w == b"/Type /Pages").count();
    assert!((3..=9).contains(&(pages - more)), "{} pages", pages - more);
}
