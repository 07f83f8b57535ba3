//! The command line keeps its promises: help, exit codes, one message an error, resumption after kill -9.

mod checkpoint;
mod toy;

use std::fs;
use std::io::Read;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use toy::{Toy, str};

const COMMANDS: &[&str] = &[
    "calibrate",
    "collect",
    "fit",
    "validate",
    "generate",
    "inspect",
    "verify",
    "report",
    "card",
    "diff",
    "check",
    "import",
    "export",
    #[cfg(feature = "hub")]
    "publish",
    #[cfg(feature = "hub")]
    "pull",
    "bench",
    "completions",
    "man",
];

fn oscar(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_oscar"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs a command that must succeed, and returns its standard output.
fn fine(arguments: &[&str]) -> String {
    let output = oscar(arguments);
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Runs a command that must end with exit code 2, one message on standard error and nothing on standard output.
fn refused(arguments: &[&str]) -> String {
    let output = oscar(arguments);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    assert_eq!(text(&output.stdout), "", "{arguments:?}");
    assert_eq!(message.matches("error: ").count(), 1, "{message}");
    assert!(!message.contains("panicked"), "{message}");
    message
}

#[test]
fn without_arguments_help_is_printed() {
    let output = oscar(&[]);
    assert_eq!(output.status.code(), Some(2));
    let help = text(&output.stderr);
    assert!(help.contains("Usage: oscar [OPTIONS] <COMMAND>"), "{help}");
    for command in COMMANDS {
        assert!(help.contains(command), "{help}");
        let page = fine(&[command, "--help"]);
        assert!(page.contains(&format!("Usage: oscar {command}")), "{page}");
    }
}

#[test]
fn completions_and_manual_name_every_command() {
    let folder = TempDir::new().unwrap();
    fine(&["man", "--out", str(folder.path())]);
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = fine(&["completions", shell]);
        assert!(script.contains("calibrate"), "{shell}");
    }
    let manual = fine(&["man"]);
    for command in COMMANDS {
        assert!(manual.contains(command), "{command}");
        let page = folder.path().join(format!("oscar-{command}.1"));
        assert!(fs::read_to_string(page).unwrap().contains(".TH"));
    }
}

#[test]
fn a_model_is_calibrated_checked_and_measured() {
    let toy = Toy::new();
    let entry = toy.at("entry");
    let moments = toy.at("entry.moments.safetensors");
    let mut arguments = toy.collect(&entry);
    arguments[0] = "calibrate";
    assert!(fine(&arguments).contains(str(&entry)));
    assert!(moments.is_file());

    assert!(fine(&["verify", str(&entry), str(&moments)]).contains("entry: sound"));
    let shown: Value =
        serde_json::from_str(&fine(&["inspect", str(&entry), "--format", "json"])).unwrap();
    assert_eq!(shown["metadata"]["method"], "balanced");
    assert_eq!(shown["layers"].as_array().unwrap().len(), 2);
    assert!(fine(&["inspect", str(&moments), "--layer", "1"]).contains("qq"));

    let model = str(&toy.model);
    let prompts = str(&toy.prompts);
    let mut validate = vec![
        "validate",
        str(&entry),
        "--model",
        model,
        "--data",
        prompts,
        "--tokens",
        "1024",
        "--seq-len",
        "512",
        "--sink",
        "8",
        "--recent",
        "32",
        "--against",
        "naive,oscar,kivi,turboquant",
        "--format",
        "json",
    ];
    let report: Value = serde_json::from_str(&fine(&validate)).unwrap();
    let names: Vec<_> = report["methods"]
        .as_array()
        .unwrap()
        .iter()
        .map(|method| method["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "balanced",
            "naive",
            "oscar",
            "kivi",
            "turboquant2",
            "turboquant3"
        ]
    );
    assert_eq!(report["context"], 512);
    assert!(entry.join("metrics.json").is_file());

    validate.extend(["--max-kl", "1e-9"]);
    let output = oscar(&validate);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("KL of `balanced`"));

    // A path that cannot be read does not hide the verdict on another.
    let output = oscar(&["verify", "no/such/entry", str(&entry)]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stdout).contains("entry: sound"));

    // A damaged entry is a failed check, not an error.
    let file = entry.join("rotations.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 0x10;
    fs::write(&file, bytes).unwrap();
    let output = oscar(&["verify", str(&entry)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("DAMAGED"));
}

#[test]
fn killed_and_interrupted_runs_go_on_to_the_same_bytes() {
    let toy = Toy::new();
    let unbroken = toy.at("unbroken.safetensors");
    fine(&toy.collect(&unbroken));

    let broken = toy.at("broken.safetensors");
    let mut kills = 0;
    for attempt in 1.. {
        let mut child = Command::new(env!("CARGO_BIN_EXE_oscar"))
            .args(toy.collect(&broken))
            .env(
                "RAYON_NUM_THREADS",
                if attempt % 2 == 0 { "1" } else { "2" },
            )
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(40 * attempt));
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success());
            break;
        }
        if attempt % 3 == 0 {
            let pid = child.id().to_string();
            Command::new("kill").args(["-INT", &pid]).status().unwrap();
        } else {
            // SIGKILL on Unix.
            child.kill().unwrap();
        }
        let status = child.wait().unwrap();
        assert_ne!(status.code(), Some(1));
        kills += 1;
        assert!(attempt < 200, "never finishes");
    }
    assert!(kills > 0, "the run was too quick to be killed");
    assert_eq!(fs::read(&unbroken).unwrap(), fs::read(&broken).unwrap());
    assert!(!toy.at("broken.safetensors.partial").exists());
}

#[test]
fn a_dry_run_says_what_it_takes_and_writes_nothing() {
    let toy = Toy::new();
    let out = toy.at("moments.safetensors");
    let mut arguments = toy.collect(&out);
    arguments.extend(["--dry-run", "--format", "json"]);
    let plan: Value = serde_json::from_str(&fine(&arguments)).unwrap();
    assert_eq!(plan["layers"], 2);
    assert!(plan["peak_memory_bytes"].as_u64().unwrap() > 0);
    assert!(!out.exists());
}

#[test]
fn a_dry_run_refuses_what_the_run_would() {
    let toy = Toy::new();
    let (entry, moments) = (toy.at("entry"), toy.at("m.safetensors"));
    let (inside, text) = (entry.join("m.safetensors"), toy.at("text"));
    fs::write(&text, "mine").unwrap();
    let mut base = toy.collect(&entry);
    base[0] = "calibrate";
    let at = ["--moments", str(&moments)];
    for (more, named) in [
        (&["--group", "0"][..], "--group"),
        (&["--k-clip", "inf"], "--k-clip"),
        (&["-p", "0.3", "--method", "oscar"], "--p"),
        (&["--sink", "18446744073709551615"], "sink"),
        (&["--data", "no/such.txt"], "no/such.txt"),
        (&["--chat-template", "no.jinja"], "no.jinja"),
        (&["--overlong", "error"], "is longer than a sequence"),
        (&["--recipe", "no/such"], "no/such"),
    ] {
        let arguments = [&base[..], &at, more].concat();
        let said = refused(&arguments);
        assert!(said.contains(named), "{said}");
        assert_eq!(said, refused(&[&arguments[..], &["--dry-run"]].concat()));
    }
    let said = refused(&[&base[..], &["--moments", str(&inside), "--dry-run"]].concat());
    assert!(said.contains("inside the entry's folder"), "{said}");
    let said = refused(&[&base[..], &["--moments", str(&text), "--dry-run"]].concat());
    assert!(said.contains("not a moments file"), "{said}");
    assert!(!entry.exists() && !moments.exists());

    fine(&toy.collect(&moments));
    let other = [&base[..], &at, &["--seed", "1"]].concat();
    let said = refused(&[&other[..], &["--dry-run"]].concat());
    assert!(
        said.contains("changed: ") && said.contains("--fresh"),
        "{said}"
    );
    fine(&[&other[..], &["--dry-run", "--fresh"]].concat());
    assert!(moments.exists() && !entry.exists());
}

#[test]
fn bad_usage_names_the_flag() {
    let toy = Toy::new();
    let out = toy.at("out.safetensors");
    let model = str(&toy.model);
    let prompts = str(&toy.prompts);
    let collect = |extra: &[&str]| {
        let mut arguments = toy.collect(&out);
        arguments.extend(extra);
        refused(&arguments)
    };
    assert!(
        refused(&["collect", "--model", "no/such/model", "--out", str(&out)])
            .contains("no/such/model")
    );
    let too_long = refused(&[
        "collect",
        "--model",
        model,
        "--data",
        prompts,
        "--seq-len",
        "513",
        "--out",
        str(&out),
    ]);
    assert!(
        too_long.contains("--seq-len") && too_long.contains("512"),
        "{too_long}"
    );
    let overlong = collect(&["--overlong", "error"]);
    assert!(overlong.contains("0.txt"), "{overlong}");
    let few = refused(&[
        "collect",
        "--model",
        model,
        "--data",
        prompts,
        "--seq-len",
        "512",
        "--tokens",
        "12",
        "--out",
        str(&out),
    ]);
    assert!(few.contains("12"), "{few}");
    assert!(!out.exists());

    let entry = toy.at("entry");
    let clip = refused(&[
        "calibrate",
        "--model",
        model,
        "--data",
        prompts,
        "--k-clip",
        "1.5",
        "--out",
        str(&entry),
    ]);
    assert!(clip.contains("--k-clip"), "{clip}");
    assert!(!entry.exists() && !toy.at("entry.moments.safetensors").exists());
}

#[test]
fn odd_numbers_are_refused_by_flag() {
    let toy = Toy::new();
    let moments = toy.at("moments.safetensors");
    fine(&toy.collect(&moments));
    let entry = toy.at("entry");
    let window = refused(&[
        "fit",
        str(&moments),
        "--sink",
        "18446744073709551615",
        "--out",
        str(&entry),
    ]);
    assert!(window.contains("sink"), "{window}");
    fine(&["fit", str(&moments), "--out", str(&entry)]);
    for (flag, value) in [
        ("--max-kl", "nan"),
        ("--max-kl=-1", ""),
        ("--min-top1", "99"),
        ("--recent", "18446744073709551615"),
    ] {
        let mut arguments = vec![
            "validate",
            str(&entry),
            "--model",
            str(&toy.model),
            "--data",
            str(&toy.prompts),
            flag,
        ];
        arguments.extend((!value.is_empty()).then_some(value));
        let message = refused(&arguments);
        let name = flag.trim_start_matches("--").split('=').next().unwrap();
        assert!(message.contains(name), "{flag} {value}: {message}");
    }
    for id in ["..", "", "a/b/c", "a\nb", "/etc"] {
        let message = refused(&[
            "calibrate",
            "--model",
            str(&toy.model),
            "--data",
            str(&toy.prompts),
            "--model-id",
            id,
            "--zoo",
            str(&toy.at("zoo")),
        ]);
        assert!(message.contains("--model-id"), "{message}");
    }
    assert!(!toy.at("zoo").exists());
}

#[test]
fn calibrate_refuses_a_place_before_it_works() {
    let toy = Toy::new();
    let entry = toy.at("entry");
    let mut arguments = toy.collect(&entry);
    arguments[0] = "calibrate";
    let inside = entry.join("moments.safetensors");
    let message = refused(&[&arguments[..], &["--moments", str(&inside)]].concat());
    assert!(message.contains("--moments"), "{message}");
    fine(&arguments);
    let moments = toy.at("m");
    let other = [
        &arguments[..],
        &["--model-id", "another/model", "--moments", str(&moments)],
    ]
    .concat();
    let message = refused(&other);
    assert!(
        message.contains("another/model") && message.contains("--force"),
        "{message}"
    );
    assert!(!moments.exists() && !toy.at("m.partial").exists());
}

#[test]
fn a_missing_file_is_named_once() {
    let message = refused(&["inspect", "no/such/entry"]);
    assert_eq!(message.matches("No such file").count(), 1, "{message}");
}

/// A tokenizer that drops merges at random would give other tokens, and other moments, on every run.
#[test]
fn random_tokenizers_are_made_sure() {
    let toy = Toy::new();
    let path = toy.model.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["model"]["dropout"] = json!(0.5);
    tokenizer["model"]["vocab"]["AA"] = json!(3);
    tokenizer["model"]["merges"] = json!([["A", "A"]]);
    fs::write(&path, tokenizer.to_string()).unwrap();
    let (first, second) = (toy.at("first.safetensors"), toy.at("second.safetensors"));
    fine(&toy.collect(&first));
    fine(&toy.collect(&second));
    assert_eq!(fs::read(&first).unwrap(), fs::read(&second).unwrap());

    // What the tokenizers crate asserts is an error here.
    tokenizer["model"]["merges"] = json!([["A", "B"]]);
    fs::write(&path, tokenizer.to_string()).unwrap();
    let message = refused(&toy.collect(&toy.at("third.safetensors")));
    assert!(message.contains("tokenizer.json"), "{message}");
}

/// A shape is measured without its model, and the random weights that stand in for it are those of the seed.
#[test]
fn a_shape_is_measured_on_random_weights() {
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("config.json");
    let shape = json!({
        "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, "tie_word_embeddings": false,
    });
    fs::write(&config, shape.to_string()).unwrap();
    let measured = fine(&[
        "bench",
        "collect",
        "--config",
        str(&config),
        "--device",
        "cpu",
        "--tokens",
        "2048",
        "--holdout",
        "512",
        "--format",
        "json",
    ]);
    let measured: Value = serde_json::from_str(&measured).unwrap();
    for number in [
        "compute",
        "total",
        "fit",
        "tokens_per_second",
        "moments_bytes",
    ] {
        assert!(measured[number].as_f64().unwrap() > 0.0, "{number}");
    }
    assert!(measured["peak_device_bytes"].is_null());

    let bytes = |name: &str, seed: &str| {
        let out = folder.path().join(name);
        let arguments = [
            "bench",
            "synthesize",
            "--config",
            str(&config),
            "--out",
            str(&out),
            "--seed",
            seed,
        ];
        fine(&arguments);
        assert!(refused(&arguments).contains("holds a model already"));
        fs::read(out.join("model-00001-of-00001.safetensors")).unwrap()
    };
    let first = bytes("first", "1");
    assert!(first == bytes("again", "1"));
    assert!(first != bytes("other", "2"));
}

#[test]
fn read_only_output_is_refused_before_work() {
    let toy = Toy::new();
    // A file where a folder should be: refused for root too, whom permissions do not stop.
    let blocked = toy.at("file");
    fs::write(&blocked, "in the way").unwrap();
    let out = blocked.join("moments.safetensors");
    let message = refused(&toy.collect(&out));
    assert!(message.contains("file"), "{message}");
    assert_eq!(fs::read_to_string(&blocked).unwrap(), "in the way");
}

/// A limit on file sizes stands in for a full disk: writes fail half-way, without root and without a small disk.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_no_half_written_file() {
    let toy = Toy::new();
    let out = toy.at("moments.safetensors");
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$@\"", "sh"])
        .arg(env!("CARGO_BIN_EXE_oscar"))
        .args(toy.collect(&out))
        .output()
        .unwrap();
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("cannot write"), "{message}");
    assert!(!out.exists());
    let left = fs::read_dir(toy.at("moments.safetensors.partial")).unwrap();
    for file in left.map(|file| file.unwrap().file_name().into_string().unwrap()) {
        assert!(["state.json", "lock"].contains(&file.as_str()), "{file}");
    }
    // With room again, the same command ends well.
    fine(&toy.collect(&out));
    fine(&["verify", str(&out)]);
}

#[test]
fn what_does_not_exist_is_named() {
    let mut commands = vec![
        &["report", "nothing"][..],
        &["validate", "nothing", "-m", "m"],
    ];
    if cfg!(feature = "hub") {
        commands.push(&["publish", "nothing", "--to", "hf:o/n"]);
    }
    for command in commands {
        let said = refused(command);
        assert!(said.contains("`nothing"), "{command:?}: {said}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn output_that_cannot_be_written_is_named() {
    for command in [&["devices"][..], &["completions", "bash"], &["man"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_oscar"))
            .args(command)
            .stdout(full)
            .output()
            .unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("cannot write to standard output"), "{said}");
    }
}

#[test]
fn a_closed_pipe_is_success() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_oscar"))
        .args(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut message = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut message)
        .unwrap();
    assert_eq!(
        (child.wait().unwrap().code(), message.as_str()),
        (Some(0), "")
    );
}

/// An entry of a model that is not at hand.
const SMOLLM2: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/zoo/HuggingFaceTB__SmolLM2-135M-Instruct/balanced"
);

#[test]
fn generate_streams_text_and_tells_scripts_the_rest() {
    let toy = Toy::new();
    let model = str(&toy.model);
    let base = [
        "generate", "--model", model, "--kv", "bf16", "--prompt", "12345", "-n", "9",
    ];
    let streamed = fine(&base);
    let json: Value =
        serde_json::from_str(&fine(&[&base[..], &["--format", "json"]].concat())).unwrap();
    let run = &json["runs"][0];
    assert_eq!(format!("{}\n", run["text"].as_str().unwrap()), streamed);
    assert_eq!(
        (&json["prompt_tokens"], &run["kv"]),
        (&json!(5), &json!("bf16"))
    );
    assert!(run["cache_bytes"].as_u64() > Some(0));

    let chat = toy.at("chat.json");
    fs::write(&chat, r#"[{"role": "user", "content": "12"}]"#).unwrap();
    let with = |arguments: &[&str]| refused(&[&["generate", "--model", model], arguments].concat());
    for (arguments, problem) in [
        (&["--prompt", "1"][..], "--zoo"),
        (&["--kv", "bf16", "--prompt", ""], "holds no token"),
        (
            &["--kv", "bf16", "--messages", str(&chat)],
            "no chat template",
        ),
        (
            &["--kv", "bf16", "--prompt", "1", "--kv-memory", "1KiB"],
            "--kv-memory",
        ),
        (
            &["--kv", "bf16", "--prompt", "1", "--temperature", "-1"],
            "--temperature: -1",
        ),
        (
            &["--kv", "bf16", "--prompt", "1", "-n", "-1"],
            "for '--max-tokens",
        ),
        (
            &["--kv", "bf16", "--prompt", &"1".repeat(600)],
            "give a shorter prompt",
        ),
        (
            &["--kv", "bf16", "--prompt", "1", "--chat-template", "t"],
            "--chat",
        ),
        (
            &["--zoo", SMOLLM2, "--prompt", "1"],
            "layers 30, and the model `toy` has 2",
        ),
        (
            &["--kv", "bf16", "--prompt", "1", "--top-k", "3"],
            "--temperature",
        ),
        (
            &["--kv", "bf16", "--prompt", "1", "--recent", "100"],
            "multiples of 64",
        ),
    ] {
        let message = with(arguments);
        assert!(message.contains(problem), "{arguments:?}: {message}");
    }
}
