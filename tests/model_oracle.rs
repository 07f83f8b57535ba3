//! The decoder computes what candle-transformers' models compute, from safetensors and from GGUF files alike.

#![allow(clippy::float_cmp)] // equal to the bit

mod checkpoint;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, mistral, qwen2, qwen3};
use checkpoint::{Checkpoint, Shape, VOCAB};
use oscar_kv::model::{FullAttention, Model, OpenOptions};

const TOKENS: [u32; 14] = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 49, 0, 3, 14];

fn shape(
    model_type: &'static str,
    [heads, kv_heads, head_dim, hidden]: [usize; 4],
    tied: bool,
) -> Shape {
    Shape {
        model_type,
        heads,
        kv_heads,
        head_dim,
        hidden,
        tied,
        llama3: false,
    }
}

/// Every family, groups of 1 to 8, head_dim 16 to 128, tied and not.
fn shapes() -> Vec<Shape> {
    vec![
        shape("llama", [4, 4, 16, 64], true),
        shape("llama", [8, 1, 32, 256], false),
        Shape {
            llama3: true,
            ..shape("llama", [3, 1, 64, 192], false)
        },
        shape("llama", [2, 1, 128, 256], true),
        shape("mistral", [6, 2, 32, 64], false),
        shape("mistral", [4, 1, 128, 96], false),
        shape("qwen2", [4, 2, 16, 64], true),
        shape("qwen2", [7, 1, 32, 224], false),
        shape("qwen2", [2, 2, 64, 128], false),
        shape("qwen3", [4, 2, 16, 96], true),
        shape("qwen3", [5, 1, 128, 64], false),
        shape("qwen3", [8, 2, 96, 64], true),
    ]
}

fn open(locator: &std::path::Path) -> Model {
    Model::open(locator.to_str().unwrap(), &OpenOptions::default()).unwrap()
}

/// Logits (tokens, vocab) of one packed sequence.
fn logits(model: &Model, token_ids: &[u32], prompt_lens: &[usize]) -> Tensor {
    let mut hidden = model.embed(token_ids).unwrap();
    model
        .for_each_layer(0, |layer| {
            hidden = layer.forward(&hidden, prompt_lens, &mut FullAttention)?;
            Ok(())
        })
        .unwrap();
    model.head().unwrap().logits(&hidden).unwrap()
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let difference = (a - b).unwrap().abs().unwrap();
    difference.max_all().unwrap().to_scalar().unwrap()
}

type Step = dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>;

/// candle-transformers' logits at every position, one token after the other through its KV cache.
fn oracle(checkpoint: &Checkpoint) -> Tensor {
    let tensors = checkpoint.tensors.clone().into_iter().collect();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let text = checkpoint.config.to_string();
    let mut step: Box<Step> = match checkpoint.shape.model_type {
        "llama" => {
            let config: llama::LlamaConfig = serde_json::from_str(&text).unwrap();
            let config = config.into_config(false);
            let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
            let model = llama::Llama::load(vb, &config).unwrap();
            Box::new(move |ids, at| model.forward(ids, at, &mut cache))
        }
        "mistral" => {
            let config: mistral::Config = serde_json::from_str(&text).unwrap();
            let mut model = mistral::Model::new(&config, vb).unwrap();
            Box::new(move |ids, at| model.forward(ids, at))
        }
        "qwen2" => {
            let config: qwen2::Config = serde_json::from_str(&text).unwrap();
            let mut model = qwen2::ModelForCausalLM::new(&config, vb).unwrap();
            Box::new(move |ids, at| model.forward(ids, at))
        }
        "qwen3" => {
            let config: qwen3::Config = serde_json::from_str(&text).unwrap();
            let mut model = qwen3::ModelForCausalLM::new(&config, vb).unwrap();
            Box::new(move |ids, at| model.forward(ids, at))
        }
        other => unreachable!("{other}"),
    };
    let rows: Vec<Tensor> = TOKENS
        .iter()
        .enumerate()
        .map(|(at, id)| {
            let ids = Tensor::new(&[[*id]], &Device::Cpu).unwrap();
            step(&ids, at).unwrap().reshape((1, VOCAB)).unwrap()
        })
        .collect();
    Tensor::cat(&rows, 0).unwrap()
}

#[test]
fn logits_equal_candle_transformers_at_every_position() {
    for (i, shape) in shapes().into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::new(shape);
        checkpoint.write_folder(folder.path(), 1 + i % 3);
        let ours = logits(&open(folder.path()), &TOKENS, &[TOKENS.len()]);
        let theirs = oracle(&checkpoint);
        let difference = largest_difference(&ours, &theirs);
        assert!(difference < 1e-4, "{shape:?}: {difference:e}");
    }
}

#[test]
fn gguf_and_safetensors_of_the_same_weights_agree() {
    for shape in shapes() {
        if shape.model_type == "mistral" {
            continue; // llama.cpp writes it as llama
        }
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::new(shape);
        checkpoint.write_folder(folder.path(), 1);
        let path = folder.path().join("model.gguf");
        checkpoint.write_gguf(&path);
        let (a, b) = (open(folder.path()), open(&path));
        let prompt = [TOKENS.len()];
        let difference =
            largest_difference(&logits(&a, &TOKENS, &prompt), &logits(&b, &TOKENS, &prompt));
        assert!(difference < 1e-5, "{shape:?}: {difference:e}");
        assert_eq!(a.config().head_dim, b.config().head_dim);
        assert_eq!(a.sizes(), b.sizes());
    }
}

#[test]
fn packed_prompts_equal_prompts_alone() {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::llama().write_folder(folder.path(), 1);
    let model = open(folder.path());
    let packed = logits(&model, &TOKENS, &[5, 9]);
    let alone = [&TOKENS[..5], &TOKENS[5..]].map(|ids| logits(&model, ids, &[ids.len()]));
    let alone = Tensor::cat(&alone, 0).unwrap();
    assert!(largest_difference(&packed, &alone) < 1e-5);
}

#[test]
fn weights_count_as_stored_in_any_float_dtype() {
    for dtype in [DType::BF16, DType::F16] {
        let folder = tempfile::tempdir().unwrap();
        let mut checkpoint = Checkpoint::llama();
        for tensor in checkpoint.tensors.values_mut() {
            *tensor = tensor.to_dtype(dtype).unwrap();
        }
        checkpoint.write_folder(&folder.path().join("half"), 2);
        for tensor in checkpoint.tensors.values_mut() {
            *tensor = tensor.to_dtype(DType::F32).unwrap();
        }
        checkpoint.write_folder(&folder.path().join("full"), 1);
        let (half, full) = (
            open(&folder.path().join("half")),
            open(&folder.path().join("full")),
        );
        let prompt = [TOKENS.len()];
        assert_eq!(
            largest_difference(
                &logits(&half, &TOKENS, &prompt),
                &logits(&full, &TOKENS, &prompt)
            ),
            0.0
        );
        assert_ne!(
            half.weights_fingerprint().unwrap(),
            full.weights_fingerprint().unwrap()
        );
        assert_eq!(half.config_sha256(), full.config_sha256());
    }
}

#[test]
fn bf16_activations_stay_near_f32() {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::llama().write_folder(folder.path(), 1);
    let options = OpenOptions {
        dtype: Some(DType::BF16),
        ..OpenOptions::default()
    };
    let half = Model::open(folder.path().to_str().unwrap(), &options).unwrap();
    assert_eq!(
        half.layer(0).unwrap().output_projection().dtype(),
        DType::BF16
    );
    let prompt = [TOKENS.len()];
    let a = logits(&half, &TOKENS, &prompt);
    let b = logits(&open(folder.path()), &TOKENS, &prompt);
    let difference = largest_difference(&a, &b);
    assert!(difference > 0.0 && difference < 0.3, "{difference}");
}

#[test]
fn float8_weights_are_scaled_by_their_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoint = Checkpoint::new(shape("qwen3", [4, 2, 64, 160], false));
    checkpoint.config["quantization_config"] = serde_json::json!({
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"]
    });
    let mut stored = checkpoint.clone();
    for (name, tensor) in &mut checkpoint.tensors {
        if !name.contains("_proj") {
            continue;
        }
        let small = (&*tensor * 8.0).unwrap().to_dtype(DType::F8E4M3).unwrap();
        let (rows, columns) = tensor.dims2().unwrap();
        let blocks = (rows.div_ceil(128), columns.div_ceil(128));
        let scales: Vec<f32> = (0..blocks.0 * blocks.1)
            .map(|i| 0.1 + 0.02 * i as f32)
            .collect();
        let mut values: Vec<Vec<f32>> = small.to_dtype(DType::F32).unwrap().to_vec2().unwrap();
        for (r, row) in values.iter_mut().enumerate() {
            for (c, value) in row.iter_mut().enumerate() {
                *value *= scales[r / 128 * blocks.1 + c / 128];
            }
        }
        *tensor = Tensor::new(values, &Device::Cpu).unwrap();
        let scales = Tensor::from_vec(scales, blocks, &Device::Cpu).unwrap();
        stored.tensors.insert(format!("{name}_scale_inv"), scales);
        stored.tensors.insert(name.clone(), small);
    }
    stored.write_folder(&folder.path().join("float8"), 1);
    checkpoint.write_folder(&folder.path().join("full"), 1);
    let prompt = [TOKENS.len()];
    let [a, b] =
        ["float8", "full"].map(|name| logits(&open(&folder.path().join(name)), &TOKENS, &prompt));
    assert_eq!(largest_difference(&a, &b), 0.0);
}

#[test]
fn transformers_5_configs_say_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoint = Checkpoint::new(Shape {
        llama3: true,
        ..shape("llama", [4, 2, 16, 64], true)
    });
    checkpoint.write_folder(&folder.path().join("old"), 1);
    let keys = checkpoint.config.as_object_mut().unwrap();
    let mut parameters = keys.remove("rope_scaling").unwrap();
    parameters["rope_theta"] = keys.remove("rope_theta").unwrap();
    keys.insert("rope_parameters".into(), parameters);
    checkpoint.write_folder(&folder.path().join("new"), 1);
    let [old, new] = ["old", "new"].map(|name| open(&folder.path().join(name)));
    assert_eq!(old.config(), new.config());
}

#[test]
fn sizes_are_those_of_the_loaded_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::new(shape("qwen2", [4, 2, 16, 64], true));
    checkpoint.write_folder(folder.path(), 2);
    let sizes = open(folder.path()).sizes();
    let bytes = |prefix: &str| -> u64 {
        let named = checkpoint
            .tensors
            .iter()
            .filter(|(name, _)| name.starts_with(prefix));
        named.map(|(_, t)| 4 * t.elem_count() as u64).sum()
    };
    assert_eq!(sizes.stored_bytes, bytes(""));
    assert_eq!(sizes.layer_bytes, bytes("model.layers.1."));
    assert_eq!(
        sizes.head_bytes,
        bytes("model.embed_tokens") + bytes("model.norm")
    );
}
