//! Promise: an entry's card says what its files say, and hubs can read it.

mod repository;

use std::fs;
use std::process::Command;

use oscar_kv::eval::Report;
use oscar_kv::report::card;
use oscar_kv::zoo::Entry;
use repository::{copy, oscar};

use std::collections::BTreeMap;

/// The lines between the rules. Cards use little of YAML, and nothing else passes here: comments, `key: scalar`, and
/// one list.
fn front_matter(card: &str) -> BTreeMap<String, String> {
    let inner = card.strip_prefix("---\n").unwrap();
    let (front, _) = inner.split_once("\n---\n").unwrap();
    let mut found = BTreeMap::new();
    for line in front.lines().filter(|line| !line.starts_with('#')) {
        if let Some(item) = line.strip_prefix("- ") {
            let tags: &mut String = found.get_mut("tags").unwrap();
            tags.push_str(item);
            tags.push(' ');
            continue;
        }
        let (key, value) = line.split_once(':').unwrap();
        let value = value.trim();
        let value = if value.starts_with('"') {
            serde_json::from_str(value).unwrap()
        } else {
            assert!(
                value.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
                "{line}"
            );
            value.to_owned()
        };
        assert!(found.insert(key.to_owned(), value).is_none(), "{key} twice");
    }
    found
}

#[test]
fn front_matter_is_what_hubs_ask_for() {
    let (_keep, entry) = copy();
    let text = card::card(&entry, Some("apache-2.0")).unwrap();
    let front = front_matter(&text);
    assert_eq!(front["license"], "apache-2.0");
    assert_eq!(front["base_model"], "HuggingFaceTB/SmolLM2-135M-Instruct");
    assert_eq!(front["pipeline_tag"], "text-generation");
    assert_eq!(front["tags"], "oscar int2 kv-cache quantization rotation ");
    // As measured, to the digits of the table.
    let report = Report::read(&entry).unwrap().unwrap();
    for method in &report.methods {
        assert!(text.contains(&format!(
            "| {:.3} | {:.1} % |",
            method.perplexity,
            method.top1 * 100.0
        )));
    }
    assert!(
        text.contains("cannot load this entry"),
        "a balanced entry needs more than SGLang has"
    );
}

#[test]
fn the_license_of_an_older_card_is_kept() {
    let (_keep, entry) = copy();
    card::write(&entry, Some("llama3.1")).unwrap();
    card::write(&entry, None).unwrap();
    let text = fs::read_to_string(entry.join(card::FILE)).unwrap();
    assert_eq!(front_matter(&text)["license"], "llama3.1");
    fs::write(entry.join(card::FILE), "no card").unwrap();
    let text = card::card(&entry, None).unwrap();
    assert!(!front_matter(&text).contains_key("license"));
    assert!(text.contains("No license is stated"));
    assert!(card::card(&entry, Some("a: b\n")).is_err());
}

#[test]
fn hostile_ids_and_names_stay_text() {
    let (_keep, folder) = copy();
    let mut entry = Entry::open(&folder).unwrap();
    let id = "a\"b\n---\nlicense: mit\u{85}\u{2028}|<script>`*#";
    id.clone_into(&mut entry.metadata.model.id);
    let hostile = folder.join("hostile");
    entry.write(&hostile, false).unwrap();
    let text = card::card(&hostile, None).unwrap();
    assert_eq!(text.matches("\n---\n").count(), 1);
    let front = front_matter(&text);
    assert!(!front.contains_key("license") && !front.contains_key("base_model"));
    assert!(!text.contains("<script>") && !text.contains('\u{85}'));
}

/// PyYAML is what the Hub's own client parses cards with.
#[test]
fn python_reads_the_same() {
    let (_keep, entry) = copy();
    let text = card::card(&entry, Some("mit")).unwrap();
    let inner = text
        .strip_prefix("---\n")
        .unwrap()
        .split_once("\n---\n")
        .unwrap()
        .0;
    let script = "import sys, json, yaml; print(json.dumps(yaml.safe_load(sys.argv[1])))";
    let Ok(output) = Command::new("python3").args(["-c", script, inner]).output() else {
        println!("skipped: no python3");
        return;
    };
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains("No module named"), "{message}");
        println!("skipped: no PyYAML");
        return;
    }
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["license"], "mit");
    assert_eq!(value["base_model"], "HuggingFaceTB/SmolLM2-135M-Instruct");
}

#[test]
fn a_zoo_is_indexed_and_checked() {
    let (keep, entry) = copy();
    let zoo = keep.path();
    let path = zoo.to_str().unwrap();
    let check = |expected| {
        let output = oscar(&["card", path, "--check"]);
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
    };
    check(1);
    assert!(
        oscar(&["card", path, "--license", "apache-2.0"])
            .status
            .success()
    );
    check(0);
    let index = fs::read_to_string(zoo.join("README.md")).unwrap();
    assert!(
        index.contains("(HuggingFaceTB__SmolLM2-135M-Instruct/balanced)"),
        "{index}"
    );
    assert!(index.contains("| 94.8 % | 15.65 | 15.46 |"), "{index}");
    fs::remove_file(entry.join("metrics.json")).unwrap();
    check(1);
    // A card lies beside the tensors, and is no part of what is verified.
    let output = oscar(&["verify", entry.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let output = oscar(&[
        "card",
        entry.parent().unwrap().join("none").to_str().unwrap(),
    ]);
    assert_eq!(output.status.code(), Some(2));
}

/// The repository's own zoo is generated, too.
#[test]
fn the_cards_in_the_repository_are_current() {
    let zoo = concat!(env!("CARGO_MANIFEST_DIR"), "/zoo");
    let output = oscar(&["card", zoo, "--check"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "run `oscar card zoo`: {text}");
}
