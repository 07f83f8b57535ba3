//! Damaged, hostile and unsupported models are refused with one message that names file, tensor or key.

mod checkpoint;

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use checkpoint::{Checkpoint, Shape};
use oscar_kv::model::{FullAttention, Model, OpenOptions};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

fn open(path: &Path) -> oscar_kv::Result<Model> {
    Model::open(path.to_str().unwrap(), &OpenOptions::default())
}

/// The message with which `path` is refused.
fn refusal(path: &Path) -> String {
    match open(path) {
        Ok(_) => panic!("{} opens", path.display()),
        Err(e) => e.to_string(),
    }
}

#[track_caller]
fn assert_names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new(checkpoint: &Checkpoint, shards: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        checkpoint.write_folder(folder.path(), shards);
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn weights(&self) -> PathBuf {
        self.path().join("model.safetensors")
    }
}

fn llama_with(change: impl FnOnce(&mut Checkpoint)) -> Folder {
    let mut checkpoint = Checkpoint::llama();
    change(&mut checkpoint);
    Folder::new(&checkpoint, 1)
}

#[test]
fn locators_that_lead_nowhere() {
    assert_names(
        &refusal(Path::new("/no/such/model")),
        &["/no/such/model", "hub id"],
    );
    let folder = tempfile::tempdir().unwrap();
    assert_names(&refusal(folder.path()), &["config.json"]);
    let file = folder.path().join("model.bin");
    fs::write(&file, "weights").unwrap();
    assert_names(&refusal(&file), &["model.bin", ".gguf"]);
}

#[test]
fn configs_without_needed_keys() {
    for key in [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ] {
        let folder = llama_with(|c| {
            c.config.as_object_mut().unwrap().remove(key);
        });
        assert_names(&refusal(folder.path()), &["config.json", key, "missing"]);
    }
    let folder = llama_with(|c| c.config = json!([1]));
    assert_names(
        &refusal(folder.path()),
        &["config.json", "not a JSON object"],
    );
}

#[test]
fn config_values_that_change_the_maths_are_refused_by_name() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let stretched = json!({"type": "linear", "factor": 2.0, "attention_factor": 2.0});
    let cases: Vec<(&str, Value, &[&str])> = vec![
        (
            "model_type",
            json!("gpt_neox"),
            &["gpt_neox", "llama, mistral, qwen2, qwen3"],
        ),
        ("rope_scaling", yarn, &["rope_scaling.rope_type", "yarn"]),
        (
            "rope_scaling",
            stretched,
            &["rope_scaling.attention_factor"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "dynamic", "factor": 2.0}),
            &["dynamic"],
        ),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_theta": 1e4}}),
            &["full_attention"],
        ),
        ("hidden_act", json!("gelu"), &["gelu"]),
        ("mlp_bias", json!(true), &["true"]),
        ("partial_rotary_factor", json!(0.5), &["0.5"]),
        ("final_logit_softcapping", json!(30.0), &["30.0"]),
        ("num_experts", json!(8), &["8"]),
        ("num_local_experts", json!(8), &["8"]),
        (
            "quantization_config",
            json!({"quant_method": "gptq"}),
            &["quant_method", "gptq"],
        ),
        (
            "layer_types",
            json!(["full_attention", "linear_attention"]),
            &["linear_attention"],
        ),
        (
            "auto_map",
            json!({"AutoModel": "code.Model"}),
            &["code.Model"],
        ),
    ];
    for (key, value, parts) in cases {
        let folder = llama_with(|c| c.config[key] = value);
        let message = refusal(folder.path());
        assert_names(&message, &["config.json", key]);
        assert_names(&message, parts);
    }
}

#[test]
fn config_numbers_that_make_no_sense() {
    for (key, value, part) in [
        (
            "num_key_value_heads",
            json!(3),
            "not divisible by `num_key_value_heads` 3",
        ),
        (
            "num_key_value_heads",
            json!(0),
            "`num_key_value_heads` is 0",
        ),
        (
            "num_attention_heads",
            json!(0),
            "`num_attention_heads` is 0",
        ),
        ("head_dim", json!(15), "`head_dim` 15 is odd"),
        ("head_dim", json!(0), "`head_dim` is 0"),
        ("hidden_size", json!(1_u64 << 60), "hidden_size"),
        (
            "num_hidden_layers",
            json!(4_000_000_000_u64),
            "num_hidden_layers",
        ),
        ("vocab_size", json!(-1), "vocab_size"),
        ("rms_norm_eps", json!("tiny"), "rms_norm_eps"),
        ("rms_norm_eps", json!(0.0), "rms_norm_eps"),
        ("rope_theta", json!(0.0), "RoPE base"),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": -2.0}),
            "RoPE scaling",
        ),
    ] {
        let folder = llama_with(|c| c.config[key] = value);
        assert_names(&refusal(folder.path()), &["config.json", part]);
    }
}

#[test]
fn a_sliding_window_bounds_the_prompt() {
    let mut checkpoint = Checkpoint::new(Shape {
        model_type: "mistral",
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        hidden: 64,
        tied: false,
        llama3: false,
    });
    checkpoint.config["sliding_window"] = json!(8);
    let folder = Folder::new(&checkpoint, 1);
    let model = open(folder.path()).unwrap();
    assert_eq!(model.config().max_position_embeddings, 8);
    let hidden = model.embed(&[1; 9]).unwrap();
    let error = model
        .layer(0)
        .unwrap()
        .forward(&hidden, &[9], &mut FullAttention);
    assert_names(
        &error.unwrap_err().to_string(),
        &["9 tokens", "context of 8"],
    );
}

type Change = dyn Fn(&mut Checkpoint);

#[test]
fn tensors_that_are_missing_misshapen_or_unknown() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let cases: [(&Change, &[&str]); 5] = [
        (&|c| drop(c.tensors.remove(name)), &[name, "missing"]),
        (
            &|c| {
                let wide = c.tensors["model.embed_tokens.weight"].clone();
                c.tensors.insert(name.into(), wide);
            },
            &[name, "[50, 64]", "[96, 64]"],
        ),
        (
            &|c| {
                let whole = c.tensors[name].to_dtype(DType::U32).unwrap();
                c.tensors.insert(name.into(), whole);
            },
            &[name, "U32"],
        ),
        (
            &|c| {
                let extra = c.tensors[name].clone();
                c.tensors
                    .insert("model.layers.1.mlp.extra.weight".into(), extra);
            },
            &[
                "model.layers.1.mlp.extra.weight",
                "no part of a llama decoder",
            ],
        ),
        (
            &|c| c.config["num_hidden_layers"] = json!(1),
            &["model.layers.1.", "of 1 layers"],
        ),
    ];
    for (change, parts) in cases {
        let message = refusal(llama_with(change).path());
        assert_names(&message, &["model.safetensors"]);
        assert_names(&message, parts);
    }
}

#[test]
fn shards_and_their_index() {
    let index = |folder: &Folder| folder.path().join("model.safetensors.index.json");
    let change = |edit: &dyn Fn(&Folder)| {
        let folder = Folder::new(&Checkpoint::llama(), 2);
        edit(&folder);
        refusal(folder.path())
    };
    let second = "model-00002-of-00002.safetensors";
    let missing = change(&|f| fs::remove_file(f.path().join(second)).unwrap());
    assert_names(&missing, &["index.json", second, "missing"]);

    let edit_map = |f: &Folder, edit: &dyn Fn(&mut Value)| {
        let mut json: Value = serde_json::from_str(&fs::read_to_string(index(f)).unwrap()).unwrap();
        edit(&mut json["weight_map"]);
        fs::write(index(f), json.to_string()).unwrap();
    };
    let absent = change(&|f| {
        edit_map(f, &|map| {
            map["model.ghost.weight"] = json!(second);
        });
    });
    assert_names(&absent, &["index.json", "model.ghost.weight", second]);
    let outside = change(&|f| {
        edit_map(f, &|map| {
            map["model.norm.weight"] = json!("../x.safetensors");
        });
    });
    assert_names(&outside, &["index.json", "../x.safetensors"]);
    let broken = change(&|f| fs::write(index(f), "{").unwrap());
    assert_names(&broken, &["index.json", "not an index"]);

    let twice = change(&|f| {
        fs::copy(
            f.path().join("model-00001-of-00002.safetensors"),
            f.path().join(second),
        )
        .unwrap();
    });
    assert_names(&twice, &[second, "also in"]);
}

#[test]
fn truncated_and_corrupt_safetensors() {
    let folder = llama_with(|_| {});
    let whole = fs::read(folder.weights()).unwrap();
    for length in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(folder.weights(), &whole[..length]).unwrap();
        assert_names(&refusal(folder.path()), &["model.safetensors"]);
    }
    fs::write(folder.weights(), [whole.as_slice(), b"more"].concat()).unwrap();
    assert_names(&refusal(folder.path()), &["model.safetensors"]);
}

#[test]
fn hostile_safetensors_headers() {
    let folder = llama_with(|_| {});
    let write = |length: u64, header: &str, data: usize| {
        let bytes = [&length.to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat();
        fs::write(folder.weights(), bytes).unwrap();
        assert_names(&refusal(folder.path()), &["model.safetensors"]);
    };
    let of = |a: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"F32","shape":[4],"data_offsets":{a}}},"b":{{"dtype":"F32","shape":[4],"data_offsets":{b}}}}}"#
        )
    };
    write(u64::MAX, "{}", 0);
    write(1 << 40, "{}", 0);
    for (a, b) in [
        ("[0,16]", "[8,24]"),
        ("[0,16]", "[0,16]"),
        ("[0,16]", "[16,1600000]"),
        ("[16,0]", "[16,32]"),
        ("[0,16]", "[18446744073709551600,18446744073709551615]"),
    ] {
        let header = of(a, b);
        write(header.len() as u64, &header, 32);
    }
    let huge = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,16]}}"#;
    write(huge.len() as u64, huge, 16);
    write(9, "not json!", 0);
}

#[test]
fn weights_and_activations_that_are_not_finite() {
    let name = "model.layers.1.self_attn.k_proj.weight";
    for bad in [f32::NAN, f32::INFINITY] {
        let folder = llama_with(|c| {
            let mut rows = c.tensors[name].to_vec2::<f32>().unwrap();
            rows[17][5] = bad;
            c.tensors
                .insert(name.into(), Tensor::new(rows, &Device::Cpu).unwrap());
        });
        let model = open(folder.path()).unwrap();
        assert!(model.layer(0).is_ok());
        let Err(error) = model.layer(1) else {
            panic!("layer 1 loads");
        };
        assert_names(
            &error.to_string(),
            &["model.safetensors", name, "layer 1", "row 17"],
        );
    }

    let folder = llama_with(|c| {
        for (part, factor) in [("up", 1e6), ("down", 1e38)] {
            let name = format!("model.layers.1.mlp.{part}_proj.weight");
            let large = (&c.tensors[&name] * factor).unwrap();
            c.tensors.insert(name, large);
        }
    });
    let model = open(folder.path()).unwrap();
    let mut hidden = model.embed(&[1, 2, 3]).unwrap();
    let error = model
        .for_each_layer(0, |layer| {
            hidden = layer.forward(&hidden, &[3], &mut FullAttention)?;
            Ok(())
        })
        .unwrap_err();
    assert_names(&error.to_string(), &["layer 1", "NaN or an infinity"]);
}

#[test]
fn tokens_and_layers_that_do_not_exist() {
    let folder = llama_with(|_| {});
    let model = open(folder.path()).unwrap();
    assert_names(
        &model.embed(&[1, 50]).unwrap_err().to_string(),
        &["50", "vocabulary"],
    );
    assert!(model.layer(2).is_err());
    let hidden = model.embed(&[1, 2, 3]).unwrap();
    let layer = model.layer(0).unwrap();
    for prompts in [vec![2], vec![3, 1], vec![3, 0]] {
        assert!(
            layer
                .forward(&hidden, &prompts, &mut FullAttention)
                .is_err()
        );
    }
}

fn gguf(folder: &Path) -> (PathBuf, Vec<u8>) {
    let path = folder.join("model.gguf");
    Checkpoint::llama().write_gguf(&path);
    let bytes = fs::read(&path).unwrap();
    (path, bytes)
}

fn position(bytes: &[u8], needle: &str) -> usize {
    bytes
        .windows(needle.len())
        .position(|w| w == needle.as_bytes())
        .unwrap()
}

#[test]
fn hostile_ggufs() {
    let folder = tempfile::tempdir().unwrap();
    let (path, whole) = gguf(folder.path());
    let refused = |at: usize, bytes: &[u8], parts: &[&str]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(&path, changed).unwrap();
        let message = refusal(&path);
        assert_names(&message, &["model.gguf"]);
        assert_names(&message, parts);
    };
    refused(0, b"GGML", &["not a GGUF file"]);
    refused(4, &1u32.to_le_bytes(), &["version 1"]);
    refused(4, &3u32.to_be_bytes(), &["version"]);
    refused(8, &u64::MAX.to_le_bytes(), &["tensor count"]);
    refused(16, &(1u64 << 50).to_le_bytes(), &["metadata count"]);
    let key = position(&whole, "general.architecture");
    refused(key - 8, &(1u64 << 62).to_le_bytes(), &["metadata key"]);
    refused(
        key + 20,
        &99u32.to_le_bytes(),
        &["general.architecture", "type 99"],
    );
    refused(key + 32, b"gemma", &["general.architecture", "gemma"]);
    refused(
        position(&whole, "llama.block_count"),
        b"llama.block_cound",
        &["llama.block_count", "missing"],
    );

    // After a tensor's name: u32 dimensions, two u64 sizes, u32 type, u64 offset.
    let tensor = "blk.1.ffn_up.weight";
    let info = position(&whole, tensor) + tensor.len();
    refused(info, &9u32.to_le_bytes(), &[tensor, "9 dimensions"]);
    refused(info + 4, &u64::MAX.to_le_bytes(), &[tensor, "too large"]);
    refused(info + 4, &32u64.to_le_bytes(), &[tensor, "[96, 32]"]);
    refused(info + 20, &23u32.to_le_bytes(), &[tensor, "type 23"]);
    refused(
        info + 24,
        &(1u64 << 40).to_le_bytes(),
        &[tensor, "past the end"],
    );
    refused(
        info + 24,
        &u64::MAX.to_le_bytes(),
        &[tensor, "past the end"],
    );
    refused(info + 24, &0u64.to_le_bytes(), &[tensor, "overlap"]);
    refused(info + 24, &4u64.to_le_bytes(), &[tensor, "misaligned"]);
    refused(
        position(&whole, tensor),
        b"blk.1.ffn_xx.weight",
        &[tensor, "missing"],
    );
}

#[test]
fn damaged_files_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let (path, whole) = gguf(folder.path());
    let header = position(&whole, "output_norm.weight") + 40;
    for length in (0..header).step_by(3).chain([whole.len() / 2]) {
        fs::write(&path, &whole[..length]).unwrap();
        assert_names(&refusal(&path), &["model.gguf"]);
    }
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut flip = |path: &Path, locator: &Path, whole: &[u8], header: usize| {
        for _ in 0..400 {
            let mut changed = whole.to_vec();
            for _ in 0..rng.random_range(1..4) {
                changed[rng.random_range(0..header)] = rng.random();
            }
            fs::write(path, changed).unwrap();
            if let Ok(model) = open(locator) {
                // What opens may be another model, but loads or is refused.
                let _ = model.layer(0).map(|_| ());
            }
        }
    };
    flip(&path, &path, &whole, header);
    let safetensors = llama_with(|_| {});
    let whole = fs::read(safetensors.weights()).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    flip(&safetensors.weights(), safetensors.path(), &whole, header);
}

/// Runs `child` of this file in a process with its own environment.
fn run_child(child: &str, variables: &[(&str, &str)]) {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", child, "--ignored", "--nocapture"]);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn hub_ids_are_found_in_the_cache_and_missed_offline() {
    let cache = tempfile::tempdir().unwrap();
    let repo = cache.path().join("models--toy--llama");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let snapshot = repo.join("snapshots").join(commit);
    Checkpoint::llama().write_folder(&snapshot, 2);
    fs::write(snapshot.join("tokenizer.json"), "{}").unwrap();
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), commit).unwrap();
    let cache = cache.path().to_str().unwrap();
    run_child(
        "child_opens_hub_ids",
        &[("HF_HUB_CACHE", cache), ("HF_HUB_OFFLINE", "1")],
    );
}

#[test]
#[ignore = "run by hub_ids_are_found_in_the_cache_and_missed_offline in a process of its own"]
fn child_opens_hub_ids() {
    let model = open(Path::new("toy/llama")).unwrap();
    assert_eq!(model.id(), "toy/llama");
    assert_eq!(
        model.revision(),
        Some("0123456789abcdef0123456789abcdef01234567")
    );
    let pinned = open(Path::new(
        "toy/llama@0123456789abcdef0123456789abcdef01234567",
    ))
    .unwrap();
    assert_eq!(pinned.revision(), model.revision());
    let missing = refusal(Path::new("toy/other@v2"));
    assert_names(
        &missing,
        &[
            "toy/other",
            "`v2`",
            "HF_HUB_OFFLINE",
            "hf download toy/other --revision v2",
        ],
    );
    let cache = PathBuf::from(std::env::var("HF_HUB_CACHE").unwrap());
    let snapshot = cache
        .join("models--toy--llama/snapshots")
        .join(model.revision().unwrap());
    fs::remove_file(snapshot.join("model-00002-of-00002.safetensors")).unwrap();
    assert_names(
        &refusal(Path::new("toy/llama")),
        &["model-00002-of-00002.safetensors", "HF_HUB_OFFLINE"],
    );
}
