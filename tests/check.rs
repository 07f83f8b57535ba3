//! Promise: `check` ends with 1 where an entry got worse than its baseline, and says what.

mod checkpoint;
mod repository;
mod toy;

use std::fs;
use std::path::{Path, PathBuf};

use repository::oscar;
use serde_json::Value;
use toy::{Toy, str};

/// A calibrated and measured toy.
fn baseline(toy: &Toy) -> PathBuf {
    let entry = toy.at("baseline");
    let (model, prompts) = (str(&toy.model), str(&toy.prompts));
    let calibrate = [
        "calibrate",
        "--model",
        model,
        "--data",
        prompts,
        "--tokens",
        "8000",
        "--seq-len",
        "512",
        "--out",
        str(&entry),
    ];
    let output = oscar(&calibrate);
    assert!(output.status.success(), "{output:?}");
    let validate = [
        "validate",
        str(&entry),
        "--model",
        model,
        "--data",
        prompts,
        "--tokens",
        "2048",
        "--seq-len",
        "512",
        "--sink",
        "8",
        "--recent",
        "32",
    ];
    let output = oscar(&validate);
    assert!(output.status.success(), "{output:?}");
    entry
}

/// Runs `check` on the toy; its exit code, JSON and standard error.
fn check(toy: &Toy, entry: &Path, baseline: &Path, more: &[&str]) -> (Option<i32>, Value, String) {
    let mut arguments = vec![
        "check",
        str(entry),
        "--baseline",
        str(baseline),
        "--model",
        str(&toy.model),
        "--data",
        str(&toy.prompts),
        "--format",
        "json",
    ];
    arguments.extend(more);
    let output = oscar(&arguments);
    let json = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (
        output.status.code(),
        json,
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[test]
fn regressions_are_found_named_and_tolerated_on_demand() {
    let toy = Toy::new();
    let baseline = baseline(&toy);
    let (junit, page) = (toy.at("junit.xml"), toy.at("report.html"));

    let (code, json, message) = check(&toy, &baseline, &baseline, &["--junit", str(&junit)]);
    assert_eq!(code, Some(0), "{message}");
    assert_eq!(
        (&json["regressed"], &json["same_tensors"]),
        (&Value::Bool(false), &Value::Bool(true))
    );
    assert_eq!(json["baseline_measured_before"], true, "{message}");
    // KL, perplexity, top-1, bits; a head a layer.
    assert_eq!(json["findings"].as_array().unwrap().len(), 4 + 2);
    assert!(
        fs::read_to_string(&junit)
            .unwrap()
            .contains("tests=\"6\" failures=\"0\"")
    );

    let worse = toy.at("worse");
    let moments = toy.at("baseline.moments.safetensors");
    let fit = [
        "fit",
        str(&moments),
        "--method",
        "identity",
        "--rounding",
        "nearest",
        "--out",
        str(&worse),
    ];
    assert!(oscar(&fit).status.success());
    let more = ["--junit", str(&junit), "--report", str(&page)];
    let (code, json, message) = check(&toy, &worse, &baseline, &more);
    assert_eq!(code, Some(1), "{message}");
    let kl = &json["findings"][0];
    assert!(
        kl["regressed"] == true && kl["now"].as_f64() > kl["limit"].as_f64(),
        "{kl}"
    );
    assert!(message.contains("regressed: KL is "), "{message}");
    let xml = fs::read_to_string(&junit).unwrap();
    let failures = json["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|f| f["regressed"] == true)
        .count();
    assert_eq!(xml.matches("<failure ").count(), failures);
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.contains("identity"));
    assert!(!html.contains("KL / oscar"), "nothing was compared with it");
    assert!(
        !worse.join("metrics.json").exists(),
        "a check leaves the entry as it was"
    );

    let file = toy.at("tolerances.toml");
    fs::write(
        &file,
        "max_kl_ratio = 1e6\nmax_perplexity_ratio = 1e6\nmax_top1_drop = 1\nmax_head_error_ratio = 1e6\n",
    )
    .unwrap();
    let (code, _, message) = check(&toy, &worse, &baseline, &["--tolerances", str(&file)]);
    assert_eq!(code, Some(0), "{message}");
    fs::write(&file, "max_kl_ration = 2").unwrap();
    let (code, _, message) = check(&toy, &worse, &baseline, &["--tolerances", str(&file)]);
    assert_eq!(code, Some(2));
    assert!(
        message.contains("did you mean `max_kl_ratio`?"),
        "{message}"
    );
}

#[test]
fn a_baseline_without_a_measurement_is_measured_beside_the_entry() {
    let toy = Toy::new();
    let baseline = baseline(&toy);
    // Other data than the baseline's measurement was made on.
    let (code, json, message) = check(&toy, &baseline, &baseline, &["--tokens", "1024"]);
    assert_eq!(code, Some(0), "{message}");
    assert_eq!(json["baseline_measured_before"], false);
    assert!(message.contains("is measured, too"), "{message}");
    let kl = &json["findings"][0];
    assert_eq!(kl["now"], kl["baseline"]);
}

#[test]
fn recalibration_repeats_the_baseline() {
    let toy = Toy::new();
    let baseline = baseline(&toy);
    let fresh = toy.at("fresh");
    let more = ["--recalibrate", "--calibration-data", str(&toy.prompts)];
    let (code, json, message) = check(&toy, &fresh, &baseline, &more);
    assert_eq!(code, Some(0), "{message}");
    assert_eq!(json["same_tensors"], true, "{message}");
    for name in [
        "rotations.safetensors",
        "metrics.json",
        "report.html",
        "README.md",
    ] {
        assert!(fresh.join(name).is_file(), "{name}");
    }
    let (code, _, message) = check(&toy, &baseline, &baseline, &more);
    assert_eq!(code, Some(2));
    assert!(message.contains("would replace the baseline"), "{message}");
}
