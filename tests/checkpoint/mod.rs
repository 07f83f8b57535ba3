//! Tiny random checkpoints of every family, as Hugging Face folders and as GGUF files.
#![allow(dead_code)]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value as GgufValue};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

pub const VOCAB: usize = 50;

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub model_type: &'static str,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub hidden: usize,
    pub tied: bool,
    /// Llama 3's RoPE scaling.
    pub llama3: bool,
}

#[derive(Clone)]
pub struct Checkpoint {
    pub shape: Shape,
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Checkpoint {
    pub fn new(shape: Shape) -> Self {
        Self::with_layers(shape, 2)
    }

    pub fn with_layers(shape: Shape, layers: usize) -> Self {
        let Shape {
            model_type,
            heads,
            kv_heads,
            head_dim,
            hidden,
            tied,
            llama3,
        } = shape;
        let width = 96;
        let mut config = json!({
            "model_type": model_type,
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": VOCAB,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
            "hidden_act": "silu",
            "sliding_window": null,
            "attention_bias": false,
            "bos_token_id": 1,
            "eos_token_id": 2
        });
        if model_type.starts_with("qwen") {
            config["max_window_layers"] = json!(layers);
            config["use_sliding_window"] = json!(false);
            config["sliding_window"] = json!(512);
        }
        if llama3 {
            config["rope_scaling"] = json!({
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16
            });
        }
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let mut tensors = BTreeMap::new();
        let mut random = |name: String, dims: &[usize], mean: f32, spread: f32| {
            let n: usize = dims.iter().product();
            let values: Vec<f32> = (0..n)
                .map(|_| mean + spread * rng.random_range(-1.0..1.0f32))
                .collect();
            let tensor = Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
            tensors.insert(name, tensor);
        };
        random(
            "model.embed_tokens.weight".into(),
            &[VOCAB, hidden],
            0.0,
            0.3,
        );
        random("model.norm.weight".into(), &[hidden], 1.0, 0.3);
        if !tied {
            random("lm_head.weight".into(), &[VOCAB, hidden], 0.0, 0.3);
        }
        for layer in 0..layers {
            let at = |rest: &str| format!("model.layers.{layer}.{rest}");
            random(at("input_layernorm.weight"), &[hidden], 1.0, 0.3);
            random(at("post_attention_layernorm.weight"), &[hidden], 1.0, 0.3);
            for (name, heads) in [("q", heads), ("k", kv_heads), ("v", kv_heads)] {
                let rows = heads * head_dim;
                random(
                    at(&format!("self_attn.{name}_proj.weight")),
                    &[rows, hidden],
                    0.0,
                    0.25,
                );
                if model_type == "qwen2" {
                    random(
                        at(&format!("self_attn.{name}_proj.bias")),
                        &[rows],
                        0.0,
                        1.0,
                    );
                }
            }
            random(
                at("self_attn.o_proj.weight"),
                &[hidden, heads * head_dim],
                0.0,
                0.2,
            );
            if model_type == "qwen3" {
                random(at("self_attn.q_norm.weight"), &[head_dim], 1.0, 0.3);
                random(at("self_attn.k_norm.weight"), &[head_dim], 1.0, 0.3);
            }
            random(at("mlp.gate_proj.weight"), &[width, hidden], 0.0, 0.25);
            random(at("mlp.up_proj.weight"), &[width, hidden], 0.0, 0.25);
            random(at("mlp.down_proj.weight"), &[hidden, width], 0.0, 0.2);
        }
        Self {
            shape,
            config,
            tensors,
        }
    }

    /// A small llama.
    pub fn llama() -> Self {
        Self::new(Shape {
            model_type: "llama",
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            hidden: 64,
            tied: false,
            llama3: false,
        })
    }

    pub fn write_folder(&self, folder: &Path, shards: usize) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        if shards == 1 {
            let all: HashMap<_, _> = self.tensors.clone().into_iter().collect();
            candle_core::safetensors::save(&all, folder.join("model.safetensors")).unwrap();
            return;
        }
        let mut weight_map = BTreeMap::new();
        for shard in 0..shards {
            let file = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
            let part: HashMap<_, _> = (self.tensors.clone().into_iter().enumerate())
                .filter(|(i, _)| i % shards == shard)
                .map(|(_, pair)| pair)
                .collect();
            candle_core::safetensors::save(&part, folder.join(&file)).unwrap();
            weight_map.extend(part.into_keys().map(|name| (name, file.clone())));
        }
        fs::write(
            folder.join("model.safetensors.index.json"),
            json!({ "metadata": {}, "weight_map": weight_map }).to_string(),
        )
        .unwrap();
    }

    /// As llama.cpp's converter writes it: q and k of llama have every head's halves interleaved.
    pub fn write_gguf(&self, path: &Path) {
        let architecture = self.shape.model_type;
        let mut tensors: Vec<(String, QTensor)> = Vec::new();
        for (name, tensor) in &self.tensors {
            let heads = match name.as_str() {
                _ if architecture != "llama" => None,
                name if name.contains("q_proj") => Some(self.shape.heads),
                name if name.contains("k_proj") => Some(self.shape.kv_heads),
                _ => None,
            };
            let tensor = match heads {
                None => tensor.clone(),
                Some(heads) => {
                    let (rows, columns) = tensor.dims2().unwrap();
                    tensor
                        .reshape((heads, 2, rows / heads / 2, columns))
                        .and_then(|t| t.transpose(1, 2))
                        .and_then(|t| t.contiguous()?.reshape((rows, columns)))
                        .unwrap()
                }
            };
            let tensor = QTensor::quantize(&tensor, GgmlDType::F32).unwrap();
            tensors.push((gguf_name(name), tensor));
        }
        if self.shape.llama3 {
            let factors = llama3_factors(self.shape.head_dim);
            let factors = Tensor::new(factors, &Device::Cpu).unwrap();
            let factors = QTensor::quantize(&factors, GgmlDType::F32).unwrap();
            tensors.push(("rope_freqs.weight".into(), factors));
        }
        let number = |key: &str| GgufValue::U32(self.config[key].as_u64().unwrap() as u32);
        let own = |rest: &str| format!("{architecture}.{rest}");
        let metadata = [
            (
                "general.architecture".into(),
                GgufValue::String(architecture.into()),
            ),
            (own("embedding_length"), number("hidden_size")),
            (own("feed_forward_length"), number("intermediate_size")),
            (own("block_count"), number("num_hidden_layers")),
            (own("attention.head_count"), number("num_attention_heads")),
            (
                own("attention.head_count_kv"),
                number("num_key_value_heads"),
            ),
            (own("attention.key_length"), number("head_dim")),
            (own("context_length"), number("max_position_embeddings")),
            (
                own("attention.layer_norm_rms_epsilon"),
                GgufValue::F32(1e-5),
            ),
            (own("rope.freq_base"), GgufValue::F32(10_000.0)),
            ("tokenizer.ggml.eos_token_id".into(), GgufValue::U32(2)),
        ];
        let metadata: Vec<_> = metadata
            .iter()
            .map(|(k, v): &(String, _)| (k.as_str(), v))
            .collect();
        let tensors: Vec<_> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let mut file = fs::File::create(path).unwrap();
        gguf_file::write(&mut file, &metadata, &tensors).unwrap();
    }
}

fn gguf_name(name: &str) -> String {
    [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ]
    .iter()
    .fold(name.to_string(), |name, (from, to)| name.replace(from, to))
}

/// As llama.cpp's converter computes them, for the scaling of [`Checkpoint::new`].
fn llama3_factors(head_dim: usize) -> Vec<f32> {
    let (factor, low, high, original) = (8.0f64, 1.0, 4.0, 16.0);
    (0..head_dim / 2)
        .map(|i| {
            let frequency = 10_000f64.powf(-2.0 * i as f64 / head_dim as f64);
            let wavelength = 2.0 * std::f64::consts::PI / frequency;
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor as f32
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
            }
        })
        .collect()
}
