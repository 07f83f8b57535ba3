//! Checkpoints of random weights for any `config.json`, so that a shape can be measured without its model.
//!
//! What makes caches hard to quantize is there: channels eight times as large in norms, key biases and rows of W_K. The
//! residual stream keeps its scale through any number of layers.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use half::bf16;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde_json::json;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::Config;
use super::open::tensors;
use crate::{Error, Result, files, interrupt};

/// Most bytes of a shard, but for a single tensor that is larger.
const SHARD_BYTES: usize = 1 << 30;

/// Numbers that weights are drawn from.
const TABLE: usize = 1 << 16;

/// Numbers written at a time.
const CHUNK: usize = 1 << 18;

const CHAT_TEMPLATE: &str =
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}";

/// How much larger an outlier is.
const OUTLIER: f32 = 8.0;

/// Writes `folder` with a copy of the `config.json` at `config`, bf16 shards of random weights and a tokenizer whose
/// tokens are bytes; the same `seed` gives the same bytes. Returns the bytes of the weights.
///
/// # Errors
/// A folder that holds a model already; a config that is not supported, or has no room for 256 tokens.
pub fn write(config: &Path, folder: &Path, seed: u64) -> Result<u64> {
    let text = files::read_text(config)?;
    let place = config.display().to_string();
    let parsed = Config::from_json(&place, &text)?;
    let tokenizer = tokenizer();
    if parsed.vocab_size < 256 {
        return Err(Error::invalid(
            place,
            format!("`vocab_size` is {}, less than the bytes", parsed.vocab_size),
        )
        .hint("give a vocabulary of at least 256"));
    }
    if folder.join("config.json").exists() {
        return Err(
            Error::invalid(folder.display(), "holds a model already").hint("choose another folder")
        );
    }
    fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;

    let mut shards: Vec<Vec<Tensor>> = Vec::new();
    let mut room = 0;
    for (number, (_, name, shape)) in tensors(&parsed).into_iter().enumerate() {
        let tensor = Tensor::new(number as u64, name, shape, &parsed);
        if tensor.bytes() > room {
            shards.push(Vec::new());
            room = SHARD_BYTES;
        }
        room = room.saturating_sub(tensor.bytes());
        if let Some(shard) = shards.last_mut() {
            shard.push(tensor);
        }
    }
    let file_name = |i: usize| format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
    let normal = normal_table(seed);
    shards.par_iter().enumerate().try_for_each(|(i, shard)| {
        let path = folder.join(file_name(i));
        write_shard(&path, shard, &normal, seed).map_err(Error::io("write", &path))?;
        interrupt::check()
    })?;

    let weight_map: serde_json::Map<_, _> = shards
        .iter()
        .enumerate()
        .flat_map(|(i, shard)| shard.iter().map(move |t| (i, t)))
        .map(|(i, tensor)| (tensor.name.clone(), file_name(i).into()))
        .collect();
    let total: usize = shards.iter().flatten().map(Tensor::bytes).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    // The config comes last: what a broken run leaves is no model.
    for (name, text) in [
        ("model.safetensors.index.json", index.to_string()),
        ("tokenizer.json", tokenizer),
        ("chat_template.jinja", CHAT_TEMPLATE.to_owned()),
        ("config.json", text),
    ] {
        let path = folder.join(name);
        files::write_atomic(&path, |out| out.write_all(text.as_bytes()))?;
    }
    Ok(total as u64)
}

/// One tensor to be drawn.
struct Tensor {
    /// Its place among all, which its numbers depend on.
    number: u64,
    name: String,
    shape: Vec<usize>,
    center: f32,
    spread: f32,
    /// Of how many rows (or numbers of a vector) one is an outlier; 0 for none.
    outlier_every: usize,
}

impl Tensor {
    fn new(number: u64, name: String, shape: Vec<usize>, config: &Config) -> Self {
        let inputs = *shape.last().unwrap_or(&1) as f32;
        let fan_in = inputs.sqrt().recip();
        let is = |part: &str| name.contains(part);
        let (center, spread, outlier_every) = if is("model.norm") || is("q_norm") {
            (1.0, 0.1, 0)
        } else if is("norm.weight") {
            (1.0, 0.1, if is("k_norm") { 64 } else { 512 })
        } else if is(".bias") {
            (0.0, 0.5, if is("k_proj") { 64 } else { 0 })
        } else if is("embed_tokens") {
            (0.0, 0.5, 0)
        } else if is("lm_head") {
            // Peaked distributions, as of a trained model.
            (0.0, 4.0 * fan_in, 0)
        } else if is("o_proj") || is("down_proj") {
            let additions = 2 * config.num_hidden_layers;
            (0.0, fan_in / (additions as f32).sqrt(), 0)
        } else {
            (0.0, fan_in, if is("k_proj") { 64 } else { 0 })
        };
        Self {
            number,
            name,
            shape,
            center,
            spread,
            outlier_every,
        }
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn bytes(&self) -> usize {
        2 * self.elements()
    }

    fn write(&self, out: &mut impl Write, normal: &[f32], seed: u64) -> std::io::Result<()> {
        let scaled = |scale: f32| -> Vec<u16> {
            let value = |x: &f32| bf16::from_f32((self.center + self.spread * x) * scale);
            normal.iter().map(|x| value(x).to_bits()).collect()
        };
        let (usual, outlier) = (scaled(1.0), scaled(OUTLIER));
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(self.number + 1);
        // A vector's numbers are its rows.
        let columns = if self.shape.len() == 1 {
            1
        } else {
            self.shape[1]
        };
        let offset = random.random_range(0..self.outlier_every.max(1));
        let mut draws = vec![0u16; CHUNK];
        for start in (0..self.elements()).step_by(CHUNK) {
            let n = CHUNK.min(self.elements() - start);
            let draws = &mut draws[..n];
            random.fill_bytes(bytemuck::cast_slice_mut(draws));
            if self.outlier_every == 0 {
                for x in draws.iter_mut() {
                    *x = usual[usize::from(*x)];
                }
            } else {
                for (i, x) in draws.iter_mut().enumerate() {
                    let row = (start + i) / columns;
                    let table = if row % self.outlier_every == offset {
                        &outlier
                    } else {
                        &usual
                    };
                    *x = table[usize::from(*x)];
                }
            }
            out.write_all(bytemuck::cast_slice(draws))?;
        }
        Ok(())
    }
}

fn write_shard(path: &Path, shard: &[Tensor], normal: &[f32], seed: u64) -> std::io::Result<()> {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for tensor in shard {
        let offsets = [at, at + tensor.bytes()];
        at += tensor.bytes();
        let info = json!({ "dtype": "BF16", "shape": tensor.shape, "data_offsets": offsets });
        header.insert(tensor.name.clone(), info);
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for tensor in shard {
        tensor.write(&mut out, normal, seed)?;
    }
    out.flush()
}

/// Numbers of a standard normal distribution (Box and Muller).
fn normal_table(seed: u64) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let draw = |_| {
        let (u, v): (f64, f64) = (1.0 - random.random::<f64>(), random.random());
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    };
    (0..TABLE).map(draw).collect()
}

/// A byte-level BPE without merges: a token a byte.
fn tokenizer() -> String {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let vocab: serde_json::Map<_, _> = alphabet
        .into_iter()
        .enumerate()
        .map(|(id, c)| (c.to_string(), id.into()))
        .collect();
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
    .to_string()
}
