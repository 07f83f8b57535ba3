//! Offline calibration of rotations for 2-bit KV caches.
//!
//! ```text
//!  prompts ──data──▶ token ids ──model (one layer at a time)──▶ q, k, v, o ──calib──▶ moments
//!                                                                                      │
//!               eval ──▶ KL, perplexity, top-1 ◀──kv──quant◀──zoo entry◀──rotation◀────┘
//! ```
//!
//! Modules stand in the order in which data flows, and import only those below them. The command line in [`cli`] is a
//! thin layer over calls like these, which calibrate a random toy model:
//!
//! ```
//! use std::collections::HashMap;
//!
//! use candle_core::{Device, Tensor};
//! use oscar_kv::calib::fit::{FitOptions, fit};
//! use oscar_kv::calib::progress::Silent;
//! use oscar_kv::calib::{CollectOptions, Moments, collect};
//! use oscar_kv::data::{PackOptions, TokenizedPrompt, pack};
//! use oscar_kv::model::{Model, OpenOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A llama of one layer: 2 heads of 16 channels over 1 KV head.
//! let folder = tempfile::tempdir()?;
//! let config = r#"{
//!     "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
//!     "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
//!     "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": true,
//!     "hidden_act": "silu"
//! }"#;
//! std::fs::write(folder.path().join("config.json"), config)?;
//! let layer = "model.layers.0";
//! let mut weights = HashMap::new();
//! for (name, rows, columns) in [
//!     ("model.embed_tokens".to_owned(), 64, 32),
//!     (format!("{layer}.self_attn.q_proj"), 32, 32),
//!     (format!("{layer}.self_attn.k_proj"), 16, 32),
//!     (format!("{layer}.self_attn.v_proj"), 16, 32),
//!     (format!("{layer}.self_attn.o_proj"), 32, 32),
//!     (format!("{layer}.mlp.gate_proj"), 48, 32),
//!     (format!("{layer}.mlp.up_proj"), 48, 32),
//!     (format!("{layer}.mlp.down_proj"), 32, 48),
//! ] {
//!     let weight = Tensor::randn(0f32, 0.5, (rows, columns), &Device::Cpu)?;
//!     weights.insert(format!("{name}.weight"), weight);
//! }
//! for norm in ["input_layernorm", "post_attention_layernorm"] {
//!     weights.insert(format!("{layer}.{norm}.weight"), Tensor::ones(32, candle_core::DType::F32, &Device::Cpu)?);
//! }
//! weights.insert("model.norm.weight".to_owned(), Tensor::ones(32, candle_core::DType::F32, &Device::Cpu)?);
//! candle_core::safetensors::save(&weights, folder.path().join("model.safetensors"))?;
//!
//! // Prompts, through the model, into moments, into an entry.
//! let model = Model::open(&folder.path().to_string_lossy(), &OpenOptions::default())?;
//! let prompts: Vec<_> = (0..10u32)
//!     .map(|prompt| TokenizedPrompt {
//!         place: format!("prompt {prompt}"),
//!         token_ids: (0..512).map(|i| (i * i + 31 * prompt + i / 7) % 64).collect(),
//!     })
//!     .collect();
//! let corpus = pack(&prompts, &PackOptions { seq_len: 512, holdout_tokens: 1024, ..PackOptions::default() })?;
//! let options = CollectOptions::new(folder.path().join("moments.safetensors"), "");
//! let moments = Moments::open(&collect(&model, &corpus, &options, &mut Silent)?.path)?;
//! let entry = fit(&moments, &FitOptions::default())?.entry;
//! assert_eq!(entry.layers.len(), 1);
//! entry.write(&folder.path().join("entry"), false)?;
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "cuda")]
pub mod bench;
pub mod calib;
pub mod cli;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod data;
pub mod device;
pub mod eval;
pub mod kv;
pub mod model;
pub mod quant;
pub mod report;
pub mod rotation;
pub mod serve;
pub mod zoo;

mod error;
pub mod files;
pub mod hub_cache;
pub mod interrupt;
pub mod linalg;

pub use error::{Error, Result};
