//! `oscar export` writes what other engines load, says what they cannot express, and loses nothing on the way back.

mod checkpoint;
mod metadata;
mod pt;
mod toy;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::quantized::gguf_file;
use checkpoint::{Checkpoint as ToyCheckpoint, Shape};
use clap::Parser;
use metadata::metadata;
use oscar_kv::model::{Model, OpenOptions};
use oscar_kv::report::card;
use oscar_kv::zoo::formats::sglang_pt::Checkpoint;
use oscar_kv::zoo::formats::{ImportOptions, Orthogonal, Target, gguf, import};
use oscar_kv::zoo::{
    self, Entry, Fit, FitSide, Layer, Method, Rounding, Scope, Side, SideName, Windows,
};
use pt::rotation;
use tempfile::TempDir;
use toy::{Toy, str};

const D: usize = 16;
const KV_HEADS: usize = 2;

/// An entry that every engine can express, of the toy llama's geometry; layer 1 alone has a rotation where `sparse`.
fn entry(scope: Scope, sparse: bool) -> Entry {
    let transforms = if scope == Scope::Head { KV_HEADS } else { 1 };
    let side = |seed: f32, clip: f32| Side {
        encode: (0..transforms)
            .map(|i| rotation(D, seed + i as f32))
            .collect(),
        clip: vec![clip; transforms],
        spectrum: Some(vec![
            (0..D).map(|i| seed * (D - i) as f32).collect();
            transforms
        ]),
        ..Side::default()
    };
    let layer = |id: usize| Layer {
        head_dim: D,
        k: side(id as f32 + 0.2, 0.95),
        v: side(id as f32 + 0.7, 0.91),
    };
    let errors = FitSide {
        exponent: vec![],
        output_error: vec![0.1; transforms],
    };
    let mut metadata = metadata(2, 4, KV_HEADS, D);
    metadata.method = Method::Oscar;
    metadata.scope = scope;
    metadata.windows = Windows {
        sink_tokens: 32,
        recent_tokens: 128,
    };
    metadata.model.id = "org/it's a `model`".into();
    metadata.model.revision = Some("abc".into());
    metadata.fit = Some(Fit {
        k_rounding: Rounding::Nearest,
        v_rounding: Rounding::Nearest,
        k_centered: false,
        v_centered: false,
        k: BTreeMap::from([(1, errors.clone())]),
        v: BTreeMap::from([(1, errors)]),
    });
    Entry {
        metadata,
        layers: (usize::from(sparse)..2).map(|id| (id, layer(id))).collect(),
    }
}

struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        Self {
            folder: TempDir::new().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn entry(&self, name: &str, entry: &Entry) -> PathBuf {
        let path = self.path(name);
        entry.write(&path, true).unwrap();
        path
    }
}

fn oscar(arguments: &[&Path], more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_oscar"))
        .args(arguments)
        .args(more)
        .output()
        .unwrap()
}

fn fine(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refused(output: &Output) -> String {
    let message = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(output.stdout.is_empty());
    message
}

fn names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

fn export(entry: &Path, to: &str, out: &Path, more: &[&str]) -> Output {
    let arguments = [
        Path::new("export"),
        entry,
        Path::new("--out"),
        out,
        Path::new("--to"),
        Path::new(to),
    ];
    oscar(&arguments, more)
}

fn pt_files(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "pt"))
        .collect();
    paths.sort();
    paths
}

#[test]
fn entries_come_back_as_they_were() {
    let place = Place::new();
    for (scope, sparse, k_name) in [
        (Scope::Layer, false, "k_rotation_qqt_r_h_pbr.pt"),
        (Scope::Layer, true, "k_rotation_qqt_r_h_pbr.pt"),
        (Scope::Head, false, "k_rotation_perhead.pt"),
    ] {
        let from = place.entry("entry", &entry(scope, sparse));
        let bytes = fs::read(from.join(zoo::FILE)).unwrap();
        let mut again = Vec::new();
        for name in ["first", "second"] {
            let out = place.path(name);
            fine(&export(&from, "sglang", &out, &["--force"]));
            let files = pt_files(&out);
            assert!(files.iter().any(|file| file.ends_with(k_name)));
            let wanted: Vec<_> = files
                .into_iter()
                .filter(|file| is_of(file, scope))
                .collect();
            assert_eq!(wanted.len(), 2);
            again.push(
                wanted
                    .iter()
                    .map(|file| fs::read(file).unwrap())
                    .collect::<Vec<_>>(),
            );

            let back = place.path("back");
            let arguments = [
                Path::new("import"),
                &wanted[1],
                &wanted[0],
                Path::new("--out"),
                &back,
            ];
            fine(&oscar(&arguments, &[]));
            assert!(
                fs::read(back.join(zoo::FILE)).unwrap() == bytes,
                "{scope:?}"
            );
        }
        assert!(again[0] == again[1], "the same bytes on every run");

        let file = place.path("plain.safetensors");
        fine(&export(
            &from,
            "safetensors-orthogonal",
            &file,
            &["--force"],
        ));
        let back = place.path("back");
        fine(&oscar(
            &[Path::new("import"), &file, Path::new("--out"), &back],
            &[],
        ));
        assert!(
            fs::read(back.join(zoo::FILE)).unwrap() == bytes,
            "{scope:?}"
        );
    }
}

fn is_of(file: &Path, scope: Scope) -> bool {
    let per_head = file
        .file_name()
        .unwrap()
        .to_string_lossy()
        .contains("perhead");
    per_head == (scope == Scope::Head)
}

/// What an import of foreign files made goes out, and comes back, with all that is known of it.
#[test]
fn foreign_files_pass_through() {
    let place = Place::new();
    let d = 8;
    for (k, v) in [
        (
            pt::Rotations::of_layers("qqt_r_h_pbr", d, &[1, 5]),
            pt::Rotations::of_layers("sst_r_h_pbr", d, &[1, 5]),
        ),
        (
            pt::Rotations::of_heads("qqt_r_h_pbr", d, 2, &[1, 5]),
            pt::Rotations::of_heads("sst_r_h_pbr", d, 2, &[1, 5]),
        ),
    ] {
        let files = [
            k.saved().write(&place.path(""), "k_rotation.pt"),
            v.saved().write(&place.path(""), "v_rotation.pt"),
        ];
        let options = ImportOptions {
            model_id: Some("org/model".into()),
            heads: Some(4),
            kv_heads: Some(2),
            ..ImportOptions::default()
        };
        let made = import(&files, &options).unwrap().entry;
        let from = place.entry("foreign", &made);
        let out = TempDir::new().unwrap();
        fine(&export(&from, "sglang", out.path(), &[]));
        let exported = pt_files(out.path());
        let again = import(&exported, &ImportOptions::default()).unwrap().entry;
        assert_eq!(again, made);
        let first = Checkpoint::read("k", &fs::read(&files[0]).unwrap()).unwrap();
        let second = Checkpoint::read("k", &fs::read(&exported[0]).unwrap()).unwrap();
        assert_eq!(first.layers, second.layers);
        assert_eq!(
            (first.format_version, first.objective),
            (second.format_version, second.objective)
        );
    }
}

const PROGRAM: &str = r"
import json, struct, sys
import torch
out = {}
for path in sys.argv[1:]:
    data = torch.load(path, map_location='cpu', weights_only=True)
    mapped = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    layers = {}
    for key, layer in data['layers'].items():
        assert type(key) is int and key == layer['layer_id'], key
        parts = {}
        for name in ('rotation', 'eigenvalues'):
            tensor = layer[name]
            assert tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.requires_grad
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 4, 'a storage of its own'
            assert mapped['layers'][key][name].data_ptr() % 64 == 0, 'aligned'
            assert torch.equal(tensor, mapped['layers'][key][name])
            parts[name] = {'shape': list(tensor.shape), 'bits': tensor.view(torch.int32).flatten().tolist()}
        layers[str(key)] = parts
    out[path] = {key: data[key] for key in ('format_version', 'objective', 'source_grouping')} | {'layers': layers}
print(json.dumps(out))
";

#[test]
fn pytorch_loads_every_value() {
    let python = std::env::var("OSCAR_PYTHON").unwrap_or_else(|_| "python3".into());
    let version = Command::new(&python)
        .args(["-c", "import torch; print(torch.__version__)"])
        .output();
    if !version.is_ok_and(|output| output.status.success()) {
        println!("skipped: `{python}` has no torch (OSCAR_PYTHON names one that has)");
        return;
    }
    let place = Place::new();
    let mut program = fs::File::create(place.path("load.py")).unwrap();
    program.write_all(PROGRAM.as_bytes()).unwrap();
    for scope in [Scope::Layer, Scope::Head] {
        let entry = entry(scope, false);
        let from = place.entry("entry", &entry);
        let out = TempDir::new().unwrap();
        fine(&export(&from, "sglang", out.path(), &[]));
        let files = pt_files(out.path());
        let loaded = Command::new(&python)
            .arg(place.path("load.py"))
            .args(&files)
            .output()
            .unwrap();
        assert!(
            loaded.status.success(),
            "{}",
            String::from_utf8_lossy(&loaded.stderr)
        );
        let loaded: serde_json::Value = serde_json::from_slice(&loaded.stdout).unwrap();
        for (path, side) in files.iter().zip(SideName::ALL) {
            let file = &loaded[path.to_str().unwrap()];
            let (version, grouping) = if scope == Scope::Layer {
                (1, "layer")
            } else {
                (2, "per_kv_head")
            };
            assert_eq!(file["format_version"], version);
            assert_eq!(file["source_grouping"], grouping);
            assert_eq!(file["layers"].as_object().unwrap().len(), 2);
            for (id, layer) in &entry.layers {
                let said = if side == SideName::K {
                    &layer.k
                } else {
                    &layer.v
                };
                let ascending: Vec<f32> = said
                    .spectrum
                    .iter()
                    .flatten()
                    .flat_map(|list| list.iter().rev().copied())
                    .collect();
                let outer: &[usize] = if scope == Scope::Layer {
                    &[]
                } else {
                    &[KV_HEADS]
                };
                for (name, expected, inner) in [
                    ("rotation", said.encode.concat(), &[D, D][..]),
                    ("eigenvalues", ascending, &[D]),
                ] {
                    let found = &file["layers"][id.to_string()][name];
                    assert_eq!(found["shape"], serde_json::json!([outer, inner].concat()));
                    let bits: Vec<i32> =
                        expected.iter().map(|x| x.to_bits().cast_signed()).collect();
                    assert_eq!(
                        found["bits"],
                        serde_json::json!(bits),
                        "{side} layer {id} {name}"
                    );
                }
            }
        }
    }
}

#[test]
fn storages_are_aligned_and_the_script_serves_what_was_fitted() {
    let place = Place::new();
    let entry = entry(Scope::Layer, false);
    let from = place.entry("entry", &entry);
    let out = place.path("out");
    let printed = fine(&export(&from, "sglang", &out, &["--format", "json"]));
    let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(printed["files"].as_array().unwrap().len(), 3);
    assert_eq!(printed["losses"], serde_json::json!([]));

    let bytes = fs::read(out.join("v_rotation_sst_r_h_pbr.pt")).unwrap();
    for layer in entry.layers.values() {
        let matrix: Vec<u8> = layer.v.encode[0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let at = bytes
            .windows(matrix.len())
            .position(|part| part == matrix)
            .unwrap();
        assert_eq!(at % 64, 0);
    }

    let script = fs::read_to_string(out.join("serve.sh")).unwrap();
    names(
        &script,
        &[
            "SGLANG_OSCAR_K_CLIP_RATIO=0.95\n",
            "SGLANG_OSCAR_V_CLIP_RATIO=0.91\n",
            "SGLANG_OSCAR_ABSORB_V_ROTATION=1\n",
            "SGLANG_MIXED_KV_PREFIX_TOKENS=32\n",
            "SGLANG_MIXED_KV_RECENT_TOKENS=128\n",
            "--kv-cache-dtype int2",
            "--kv-cache-quant-group-size 16",
        ],
    );
    // Run with a python3 that tells what it was asked.
    let bin = place.path("bin");
    fs::create_dir(&bin).unwrap();
    let stub =
        "#!/bin/sh\nfor word; do echo \"[$word]\"; done\necho \"$SGLANG_OSCAR_K_ROTATION_PATH\"\n";
    fs::write(bin.join("python3"), stub).unwrap();
    fine(
        &Command::new("chmod")
            .arg("+x")
            .arg(bin.join("python3"))
            .output()
            .unwrap(),
    );
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let run = |model: Option<&str>| {
        let mut command = Command::new(out.join("serve.sh"));
        command
            .env("PATH", &path)
            .env_remove("MODEL")
            .arg("--port=1");
        if let Some(model) = model {
            command.env("MODEL", model);
        }
        fine(&command.output().unwrap())
    };
    let k = out.join("k_rotation_qqt_r_h_pbr.pt");
    names(
        &run(None),
        &[
            "[org/it's a `model`]",
            "[--revision]\n[abc]",
            "[--port=1]",
            k.to_str().unwrap(),
        ],
    );
    let other = run(Some("/models/other"));
    names(&other, &["[/models/other]"]);
    assert!(!other.contains("revision"), "{other}");
}

#[test]
fn what_an_engine_cannot_express_is_refused_with_the_remedy() {
    let place = Place::new();
    let sound = || entry(Scope::Layer, false);
    let change = |of: &dyn Fn(&mut Side)| {
        let mut entry = sound();
        let layer = entry.layers.get_mut(&1).unwrap();
        of(&mut layer.k);
        of(&mut layer.v);
        entry
    };
    let identity = || {
        (0..D * D)
            .map(|i| f32::from(u8::from(i / D == i % D)))
            .collect::<Vec<_>>()
    };
    let skewed = change(&|side| {
        side.encode = vec![identity()];
        side.dual = Some(vec![identity()]);
    });
    let centered = change(&|side| side.mean = Some(vec![vec![0.5; D]; KV_HEADS]));
    let fed_back = change(&|side| {
        let above = |i: usize| if i / D < i % D { 0.125 } else { 0.0 };
        side.feedback = Some(vec![(0..D * D).map(above).collect()]);
    });
    let clipped = change(&|side| side.clip = vec![0.85]);
    let mut balanced = change(&|side| {
        side.encode = vec![identity()];
        side.dual = Some(vec![identity()]);
        side.mean = Some(vec![vec![0.5; D]; KV_HEADS]);
    });
    balanced.metadata.method = Method::Balanced;
    let mut wide = sound();
    wide.metadata.quantizer.bits = 3;

    for (name, entry, says, may_be_lost) in [
        ("skewed", skewed, &["not orthogonal"][..], false),
        (
            "balanced",
            balanced,
            &["not orthogonal", "centering"],
            false,
        ),
        ("wide", wide, &["3 bits"], false),
        ("centered", centered, &["centering"], true),
        ("feedback", fed_back, &["feedback"], true),
        (
            "clipped",
            clipped,
            &["clip ratios of k", "0.85 to 0.95", "clip ratios of v"],
            true,
        ),
    ] {
        let from = place.entry(name, &entry);
        let out = place.path("out");
        for to in ["sglang", "safetensors-orthogonal"] {
            let message = refused(&export(&from, to, &out, &[]));
            names(&message, says);
            names(
                &message,
                &["hint", "`oscar fit MOMENTS --method oscar --scope layer"],
            );
            assert_eq!(message.contains("--lossy"), may_be_lost, "{message}");
            assert!(!out.exists());
            // And the card says so.
            let card = card::card(&from, None).unwrap();
            let offered = card.contains("oscar export ENTRY --to sglang --out DIR --lossy\n");
            assert_eq!(offered, may_be_lost, "{card}");
            // The remedy is a command that this program takes.
            let command = message
                .split('`')
                .find(|part| part.starts_with("oscar fit "))
                .unwrap();
            let parsed = oscar_kv::cli::Cli::try_parse_from(command.split_whitespace());
            assert!(parsed.is_ok(), "{command}: {}", parsed.unwrap_err());
        }
        let forced = export(&from, "sglang", &out, &["--lossy"]);
        if may_be_lost {
            fine(&forced);
            let warning = String::from_utf8(forced.stderr).unwrap();
            names(&warning, &["warning: "]);
            let script = fs::read_to_string(out.join("serve.sh")).unwrap();
            let loss = warning
                .lines()
                .next()
                .unwrap()
                .strip_prefix("warning: ")
                .unwrap();
            names(&script, &["# NOTE: ", loss]);
            // What comes back does not claim what was lost.
            let back = import(&pt_files(&out), &ImportOptions::default())
                .unwrap()
                .entry;
            let fit = back.metadata.fit.unwrap();
            assert_eq!((fit.k_rounding, fit.k_centered), (Rounding::Nearest, false));
            assert!(fit.k[&1].output_error.is_empty());
            fs::remove_dir_all(&out).unwrap();
        } else {
            refused(&forced);
            assert!(!out.exists());
        }
    }
}

/// What was fitted here and came in through an engine's files is as good as what was not, by every comparison.
#[test]
fn an_imported_entry_compares_with_the_one_it_was() {
    let toy = Toy::new();
    let (moments, fitted) = (toy.at("m.safetensors"), toy.at("fitted"));
    let run = |arguments: &[&str]| fine(&oscar(&[], arguments));
    run(&toy.collect(&moments));
    let fit = "--method oscar --scope layer --v-moment vwv --rounding nearest --k-clip 0.96 --v-clip 0.92";
    let fit: Vec<&str> = fit.split(' ').collect();
    run(&[&["fit", str(&moments), "--out", str(&fitted)], &fit[..]].concat());
    let card = fs::read_to_string(fitted.join("README.md")).unwrap();
    for command in [
        "--to sglang --out DIR\n",
        "--to gguf --base MODEL.gguf --out ROTATED.gguf\n",
    ] {
        assert!(card.contains(command), "{card}");
    }
    let served = toy.at("served");
    fine(&export(&fitted, "sglang", &served, &[]));

    let files = pt_files(&served);
    let back = toy.at("back");
    let model = str(&toy.model);
    run(&[
        "import",
        str(&files[0]),
        str(&files[1]),
        "--model",
        model,
        "--out",
        str(&back),
    ]);
    assert!(back.join("README.md").is_file());
    assert!(run(&["verify", str(&back)]).contains("sound"));

    let diff = run(&[
        "diff",
        str(&fitted),
        str(&back),
        "--moments",
        str(&moments),
        "--format",
        "json",
    ]);
    let diff: serde_json::Value = serde_json::from_str(&diff).unwrap();
    assert_eq!(diff["same_tensors"], true, "{diff}");
    let prompts = str(&toy.prompts);
    let validate = |entry: &Path, more: &[&str]| -> serde_json::Value {
        let data = ["--data", prompts, "--tokens", "1024", "--seq-len", "512"];
        let windows = ["--sink", "8", "--recent", "32", "--format", "json"];
        let base = ["validate", str(entry), "--model", model];
        serde_json::from_str(&run(&[&base, &data[..], &windows, more].concat())).unwrap()
    };
    let both = validate(&fitted, &["--against", str(&back)]);
    let [ours, theirs] = [0, 1].map(|i| both["methods"][i].clone());
    for number in ["kl", "perplexity", "top1", "bits_per_element"] {
        assert_eq!(ours[number], theirs[number], "{number}");
    }
    assert_eq!(validate(&back, &[])["methods"][0]["kl"], ours["kl"]);
}

#[test]
fn files_are_not_replaced_unasked() {
    let place = Place::new();
    let from = place.entry("entry", &entry(Scope::Layer, false));
    let out = place.path("out");
    fine(&export(&from, "sglang", &out, &[]));
    let script = out.join("serve.sh");
    fs::write(&script, "mine").unwrap();
    names(
        &refused(&export(&from, "sglang", &out, &[])),
        &["exists already", "--force"],
    );
    assert_eq!(fs::read_to_string(&script).unwrap(), "mine");
    fine(&export(&from, "sglang", &out, &["--force"]));
    names(
        &refused(&export(&from, "safetensors-orthogonal", &out, &["--force"])),
        &["is a folder"],
    );
    names(
        &refused(&export(&from, "gguf", &place.path("x.gguf"), &[])),
        &["--base"],
    );
    names(
        &refused(&export(&place.path("absent"), "sglang", &out, &[])),
        &["absent"],
    );
}

fn toy(model_type: &'static str) -> ToyCheckpoint {
    ToyCheckpoint::new(Shape {
        model_type,
        heads: 4,
        kv_heads: KV_HEADS,
        head_dim: D,
        hidden: 64,
        tied: false,
        llama3: false,
    })
}

#[test]
fn gguf_copies_differ_by_the_rotations_alone() {
    let place = Place::new();
    for model_type in ["llama", "qwen2"] {
        let base = place.path("base.gguf");
        toy(model_type).write_gguf(&base);
        let entry = entry(Scope::Layer, true);
        let from = place.entry("entry", &entry);
        let out = place.path("out.gguf");
        let printed = fine(&export(
            &from,
            "gguf",
            &out,
            &["--base", base.to_str().unwrap(), "--force"],
        ));
        names(
            &printed,
            &[
                "LLAMA_KV_NO_HADAMARD=1",
                "LLAMA_KV_CLIP_RATIO=0.93",
                "LLAMA_KV_HP_SINK=32",
                "LLAMA_KV_HP_RECENT=128",
            ],
        );

        let (old, new) = (fs::read(&base).unwrap(), fs::read(&out).unwrap());
        let (old_header, new_header) = (header(&base), header(&out));
        let infos = old_header.tensor_infos.len();
        assert_eq!(new_header.tensor_infos.len(), infos + 2);
        // Magic, version, two counts; then the keys and the tensors' places, whose offsets count from the data on.
        assert_eq!(old[..8], new[..8]);
        assert_eq!(new[8..16], (infos as u64 + 2).to_le_bytes());
        let keys_and_places = |bytes: &[u8], until: u64| bytes[16..until as usize].to_vec();
        let padding = old_header.tensor_data_offset - 40;
        assert_eq!(
            keys_and_places(&old, padding),
            keys_and_places(&new, padding)
        );
        let data = &old[old_header.tensor_data_offset as usize..];
        let start = new_header.tensor_data_offset as usize;
        assert!(new[start..start + data.len()] == *data);
        for (name, info) in &old_header.tensor_infos {
            let same = &new_header.tensor_infos[name];
            assert_eq!(
                (info.offset, &info.shape, info.ggml_dtype),
                (same.offset, &same.shape, same.ggml_dtype)
            );
        }

        let mut file = fs::File::open(&out).unwrap();
        let mut read = |side| {
            let name = gguf::tensor_name(1, side);
            let device = candle_core::Device::Cpu;
            let tensor = new_header.tensor(&mut file, &name, &device).unwrap();
            tensor
                .dequantize(&device)
                .unwrap()
                .to_vec2::<f32>()
                .unwrap()
        };
        let (k, v) = (read(SideName::K), read(SideName::V));
        // ggml multiplies by rows: row j of the file times a key is channel j of the rotated one. The file's keys have
        // channel c of half h of a head at 2c + h in the llama architecture.
        let order: Vec<usize> = (0..D)
            .map(|i| {
                if model_type == "llama" {
                    2 * (i % (D / 2)) + i / (D / 2)
                } else {
                    i
                }
            })
            .collect();
        let key: Vec<f32> = (0..D).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut stored = vec![0.0; D];
        (0..D).for_each(|i| stored[order[i]] = key[i]);
        let layer = &entry.layers[&1];
        for (matrix, rows, row) in [
            (&layer.k.encode[0], &k, &stored),
            (&layer.v.encode[0], &v, &key),
        ] {
            for j in 0..D {
                let expected: f32 = (0..D).map(|i| key[i] * matrix[i * D + j]).sum();
                let found: f32 = rows[j].iter().zip(row).map(|(a, b)| a * b).sum();
                assert!(
                    (expected - found).abs() < 1e-5,
                    "{model_type}: {expected} {found}"
                );
            }
        }
        // It is still a model.
        let model = Model::open(out.to_str().unwrap(), &OpenOptions::default()).unwrap();
        assert_eq!(model.config().num_hidden_layers, 2);

        let twice = export(
            &from,
            "gguf",
            &place.path("twice.gguf"),
            &["--base", out.to_str().unwrap()],
        );
        names(&refused(&twice), &["holds rotations already", "hint"]);
        let itself = export(
            &from,
            "gguf",
            &base,
            &["--base", base.to_str().unwrap(), "--force"],
        );
        names(&refused(&itself), &["base file itself"]);
        assert!(fs::read(&base).unwrap() == old);
    }
}

fn header(path: &Path) -> gguf_file::Content {
    gguf_file::Content::read(&mut fs::File::open(path).unwrap()).unwrap()
}

#[test]
fn gguf_bases_must_fit() {
    let place = Place::new();
    let base = place.path("base.gguf");
    toy("llama").write_gguf(&base);
    let base = base.to_str().unwrap();
    let out = place.path("out.gguf");
    let heads = place.entry("heads", &entry(Scope::Head, false));
    names(
        &refused(&export(&heads, "gguf", &out, &["--base", base])),
        &["one matrix a KV head", "--scope layer"],
    );
    let mut larger = entry(Scope::Layer, false);
    larger.metadata.model.layers = 3;
    for list in [
        &mut larger.metadata.model.heads,
        &mut larger.metadata.model.kv_heads,
        &mut larger.metadata.model.head_dim,
    ] {
        list.push(list[0]);
    }
    let larger = place.entry("larger", &larger);
    names(
        &refused(&export(&larger, "gguf", &out, &["--base", base])),
        &["2 layers", "has 3", "hint"],
    );
    let mut junk = fs::read(base).unwrap();
    junk.extend([1; 100]);
    let longer = place.path("longer.gguf");
    fs::write(&longer, &junk).unwrap();
    let from = place.entry("entry", &entry(Scope::Layer, false));
    let refusal = refused(&export(
        &from,
        "gguf",
        &out,
        &["--base", longer.to_str().unwrap()],
    ));
    names(&refusal, &["longer.gguf", "bytes after its last tensor"]);
    fs::write(&longer, &junk[..junk.len() / 2]).unwrap();
    let refusal = refused(&export(
        &from,
        "gguf",
        &out,
        &["--base", longer.to_str().unwrap()],
    ));
    names(&refusal, &["longer.gguf", "past the end"]);
    assert!(!out.exists());
}

/// The library says the same as the command line.
#[test]
fn targets_differ_in_what_they_take() {
    let per_head = entry(Scope::Head, false);
    assert!(Orthogonal::new(&per_head, Target::Sglang, false).is_ok());
    assert!(Orthogonal::new(&per_head, Target::Safetensors, false).is_ok());
    assert!(Orthogonal::new(&per_head, Target::Gguf, false).is_err());
    let mut clipped = entry(Scope::Layer, false);
    clipped.layers.get_mut(&0).unwrap().k.clip = vec![0.9];
    let lossy = Orthogonal::new(&clipped, Target::Sglang, true).unwrap();
    assert_eq!(lossy.losses.len(), 1);
    assert!((lossy.k_clip - 0.95).abs() < 1e-6 && (lossy.v_clip - 0.91).abs() < 1e-6);
}
