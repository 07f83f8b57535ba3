//! `oscar check`: is an entry as good as the one before it?

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};

use super::common::{
    EvaluationDataArgs, Format, ModelArgs, entry_folder, moments_beside, print, print_json,
    same_place,
};
use super::progress::Meter;
use super::{Outcome, calibrate, entry_recipe};
use crate::Error;
use crate::data::Tokenizer;
use crate::eval::diff::check_shapes;
use crate::eval::tolerances::{Finding, Tolerances, compare};
use crate::eval::{EvalMethod, EvalOptions, Report, check_entry, significant, validate};
use crate::files::{read_text, write_atomic};
use crate::model::Model;
use crate::report::{self, Inputs, card};
use crate::zoo::Entry;

/// Tokens to evaluate on where neither a flag nor the baseline's measurement says.
const DEFAULT_TOKENS: usize = 16_384;

/// Measure an entry, or calibrate it anew, and compare it with a baseline: ends with 1 where it regressed.
///
/// Evaluates on the data that the baseline was measured on; where its metrics.json is of other data, other weights or
/// absent, the baseline is measured beside the entry. What counts as a regression is set by --tolerances, a TOML file of
///
///   max_kl_ratio = 1.1            KL as a multiple of the baseline's,
///   kl_slack = 0.0001             or this many nats more
///   max_perplexity_ratio = 1.005
///   max_top1_drop = 0.005         share of positions
///   max_bits_increase = 0.0       bits a cached number at 128K tokens
///   max_head_error_ratio = 1.5    attention output of any head, as a multiple of the baseline's,
///   head_error_slack = 0.05       if above this
///
/// which are the defaults.
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The entry's folder; with --recalibrate, where the new entry goes
    entry: PathBuf,

    /// Folder of the entry to hold it against
    #[arg(short, long, value_name = "ENTRY")]
    baseline: PathBuf,

    #[command(flatten)]
    model: ModelArgs,

    /// Calibrate the model anew first, by the baseline's recipe
    #[arg(long, help_heading = "Calibration")]
    recalibrate: bool,

    /// Calibration prompts, files or folders; those of the baseline's recipe where none is given
    #[arg(
        long,
        value_name = "PATH",
        requires = "recalibrate",
        help_heading = "Calibration"
    )]
    calibration_data: Vec<PathBuf>,

    /// Evaluation data, files or folders; the bundled evaluation corpus where none is given
    #[arg(short, long, value_name = "PATH", help_heading = "Data")]
    data: Vec<PathBuf>,

    /// Evaluation tokens; as many as the baseline was measured on where not given
    #[arg(short, long, help_heading = "Data")]
    tokens: Option<usize>,

    /// Tokens of a window; those of the baseline's measurement where not given
    #[arg(long, value_name = "TOKENS", help_heading = "Data")]
    seq_len: Option<usize>,

    /// Chooses which windows are taken
    #[arg(long, default_value_t = 0, help_heading = "Data")]
    seed: u64,

    /// TOML file of tolerances
    #[arg(long, value_name = "FILE", help_heading = "Thresholds")]
    tolerances: Option<PathBuf>,

    /// Write the result as JUnit XML
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    junit: Option<PathBuf>,

    /// Write the report of what was measured, one HTML page
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report: Option<PathBuf>,

    /// How the result is printed; text is a Markdown table
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let tolerances = match &args.tolerances {
        Some(path) => Tolerances::parse(&read_text(path)?, &path.display().to_string())?,
        None => Tolerances::default(),
    };
    let baseline = Entry::open(&args.baseline)?;
    let old = Report::read(entry_folder(&args.baseline)?)?.filter(|old| {
        let of = old.provenance.entry_sha256.as_ref();
        !old.methods.is_empty() && of == Some(&baseline.metadata.content_sha256)
    });
    let mut model = args.model.open()?;
    if args.recalibrate && !args.model.is_named() {
        model = model.with_id(&baseline.metadata.model.id);
    }
    let entry = if args.recalibrate {
        recalibrate(args, &baseline, &model)?
    } else {
        Entry::open(&args.entry)?
    };
    check_shapes(&baseline, &entry)?;
    for warning in check_entry(&entry, &model)? {
        eprintln!("warning: {warning}");
    }

    let tokenizer = Tokenizer::load(&model)?;
    let data = EvaluationDataArgs {
        data: args.data.clone(),
        tokens: args
            .tokens
            .or(old.as_ref().map(|old| old.tokens))
            .unwrap_or(DEFAULT_TOKENS),
        seq_len: args.seq_len.or(old.as_ref().map(|old| old.context)),
        seed: args.seed,
        chat_template: None,
    };
    let corpus = data.read(&model, &tokenizer)?;
    let windows = old
        .as_ref()
        .map_or(baseline.metadata.windows, |old| old.windows);
    let weights = model.weights_fingerprint()?;
    let old = old.filter(|old| {
        let p = &old.provenance;
        p.token_ids_sha256 == corpus.token_ids_sha256 && p.weights_fingerprint == weights
    });
    let mut methods = vec![EvalMethod::from_entry(
        entry.metadata.method.as_str(),
        &entry,
    )?];
    if old.is_none() {
        eprintln!(
            "note: the baseline has no measurement on this data and these weights, so it is measured, too"
        );
        methods.push(EvalMethod::from_entry("baseline", &baseline)?);
    }
    let options = EvalOptions {
        sink: windows.sink_tokens,
        recent: windows.recent_tokens,
        entry_sha256: Some(entry.metadata.content_sha256.clone()),
        ..EvalOptions::default()
    };
    let mut meter = Meter::new();
    let now = validate(&model, &corpus, &methods, &options, &mut |step| {
        meter.step(step);
    })?;
    meter.finish();

    let findings = match &old {
        Some(old) => compare(&now, old, &old.methods[0].name, &tolerances)?,
        None => compare(&now, &now, "baseline", &tolerances)?,
    };
    if args.recalibrate {
        now.write(&args.entry)?;
        report::write(&args.entry)?;
        let license = card::stated_license(entry_folder(&args.baseline)?);
        card::write(&args.entry, license.as_deref())?;
    }
    if let Some(path) = &args.report {
        let html = Inputs::new(entry.clone(), Some(now)).page()?.html()?;
        write_atomic(path, |out| out.write_all(html.as_bytes()))?;
    }
    if let Some(path) = &args.junit {
        let xml = junit(&baseline.metadata.model.id, &args.entry, &findings);
        write_atomic(path, |out| out.write_all(xml.as_bytes()))?;
    }
    let regressed = findings.iter().filter(|f| f.regressed).count();
    match args.format {
        Format::Json => print_json(&serde_json::json!({
            "entry": args.entry.display().to_string(),
            "baseline": args.baseline.display().to_string(),
            "same_tensors": entry.layers == baseline.layers,
            "baseline_measured_before": old.is_some(),
            "tolerances": tolerances,
            "regressed": regressed > 0,
            "findings": findings,
        }))?,
        Format::Text => print(&text(&findings, entry.layers == baseline.layers))?,
    }
    for finding in findings.iter().filter(|f| f.regressed) {
        eprintln!("regressed: {}", finding.message());
    }
    Ok(if regressed == 0 {
        Outcome::Fine
    } else {
        Outcome::CheckFailed
    })
}

/// Collects and fits by the baseline's recipe.
fn recalibrate(args: &Args, baseline: &Entry, model: &Model) -> Result<Entry> {
    if same_place(&args.entry, entry_folder(&args.baseline)?) {
        return Err(Error::invalid(
            "--recalibrate",
            "would replace the baseline with what it is compared with",
        )
        .hint("give another folder for the new entry")
        .into());
    }
    Entry::check_place(&args.entry, model.id(), &model.weights_fingerprint()?)?;

    let recipe = entry_recipe::read(&args.baseline)?;
    let locator = args.model.locator();
    let (settings, values) = calibrate::Args::of_recipe(&recipe, locator, &args.calibration_data)?;
    let tokenizer = Tokenizer::load(model)?;
    let corpus = settings.data.read(model, &tokenizer)?;
    if corpus.token_ids_sha256 != baseline.metadata.calibration.token_ids_sha256 {
        eprintln!("note: the calibration tokens are not those of the baseline");
    }
    let prompts = (&tokenizer, &corpus);
    let moments = moments_beside(&args.entry);
    calibrate::make(model, prompts, &settings, &values, &moments, &args.entry)?;
    Ok(Entry::open(&args.entry)?)
}

/// Everything but heads that held, then one line for those.
fn text(findings: &[Finding], same_tensors: bool) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(["", "baseline", "now", "limit", ""]);
    let is_head = |finding: &&Finding| finding.what.starts_with("output error");
    let held = findings
        .iter()
        .filter(|f| is_head(f) && !f.regressed)
        .max_by(|a, b| (a.now / a.limit).total_cmp(&(b.now / b.limit)));
    let shown = findings
        .iter()
        .filter(|f| f.regressed || !is_head(f))
        .chain(held);
    for finding in shown {
        table.add_row([
            finding.what.clone(),
            significant(finding.baseline, 4),
            significant(finding.now, 4),
            format!(
                "{} {}",
                if finding.at_least { "≥" } else { "≤" },
                significant(finding.limit, 4)
            ),
            if finding.regressed { "REGRESSED" } else { "ok" }.to_owned(),
        ]);
    }
    let mut out = table.to_string();
    let regressed = findings.iter().filter(|f| f.regressed).count();
    let _ = write!(
        out,
        "\n\n{} of {} checks regressed{}\n",
        regressed,
        findings.len(),
        if same_tensors {
            "; the tensors are the baseline's"
        } else {
            ""
        }
    );
    out
}

fn junit(model: &str, entry: &Path, findings: &[Finding]) -> String {
    let escape = report::escape;
    let failures = findings.iter().filter(|f| f.regressed).count();
    let counts = format!("tests=\"{}\" failures=\"{failures}\"", findings.len());
    let mut xml = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"oscar check\" {counts}>\n  <testsuite name=\"{}\" \
         {counts} errors=\"0\" skipped=\"0\">\n",
        escape(model)
    );
    for finding in findings {
        // Another head may be the worst of its layer next time: a test keeps its name, or its history is lost.
        let name = finding.what.split(", head").next().unwrap_or_default();
        let _ = write!(
            xml,
            "    <testcase classname=\"{}\" name=\"{}\"",
            escape(&entry.display().to_string()),
            escape(name)
        );
        if finding.regressed {
            let message = escape(&finding.message());
            let _ = writeln!(
                xml,
                "><failure type=\"regression\" message=\"{message}\"/></testcase>"
            );
        } else {
            xml.push_str("/>\n");
        }
    }
    xml + "  </testsuite>\n</testsuites>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn junit_is_escaped_and_counts() {
        let finding = |what: &str, regressed| Finding {
            what: what.to_owned(),
            baseline: 1.0,
            now: 2.0,
            limit: 1.5,
            at_least: false,
            regressed,
        };
        let head = "output error of layer 3, head 4";
        let findings = [finding("KL", true), finding(head, false)];
        let xml = junit("a\"<b>&\u{1}", Path::new("x/'y'"), &findings);
        assert!(xml.contains("tests=\"2\" failures=\"1\""), "{xml}");
        assert_eq!(xml.matches("<failure").count(), 1);
        assert!(xml.contains("name=\"output error of layer 3\""), "{xml}");
        assert!(
            xml.contains("KL is 2.000, above 1.500 (baseline 1.000)"),
            "{xml}"
        );
        assert!(!xml.contains("<b>") && !xml.contains('\u{1}'), "{xml}");
    }

    #[test]
    fn the_table_shows_what_regressed_and_the_nearest_head() {
        let head = |head, now: f64| Finding {
            what: format!("output error of layer 0, head {head}"),
            baseline: 0.1,
            now,
            limit: 0.2,
            at_least: false,
            regressed: now > 0.2,
        };
        let text = text(&[head(0, 0.1), head(1, 0.19), head(2, 0.3)], false);
        assert!(
            !text.contains("head 0") && text.contains("head 1"),
            "{text}"
        );
        assert!(
            text.contains("REGRESSED") && text.contains("1 of 3 checks regressed"),
            "{text}"
        );
    }
}
