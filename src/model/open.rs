//! Finding a model, checking it from headers, and loading it a part at a time.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, RmsNorm};
use serde::Deserialize;

use super::gguf::{Gguf, gguf_name};
use super::hub;
use super::rope::Tables;
use super::weights::{Encoding, RowOrder, Weights, scale_name};
use super::{Config, DecoderLayer, LmHead};
use crate::hub_cache::Id;
use crate::{Error, Result, files, interrupt};

/// Where and in which numbers to run a model.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub device: Device,
    /// Dtype of activations and of weights once loaded (f32, bf16, f16): f32 on CPU and bf16 elsewhere where `None`.
    pub dtype: Option<DType>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            dtype: None,
        }
    }
}

/// What a tokenizer is built from.
#[derive(Clone, Copy, Debug)]
pub enum TokenizerSource<'a> {
    /// A folder with `tokenizer.json`, and perhaps `tokenizer_config.json` and `chat_template.jinja`.
    Folder(&'a Path),
    /// The `tokenizer.*` metadata of a GGUF file at `path`.
    Gguf {
        path: &'a Path,
        metadata: &'a HashMap<String, Value>,
    },
}

/// Bytes, from headers alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Weights as stored, all tensors that the decoder uses.
    pub stored_bytes: u64,
    /// One decoder layer once loaded, in the activation dtype.
    pub layer_bytes: u64,
    /// Final norm and language-model head once loaded.
    pub head_bytes: u64,
}

/// A model whose headers are read and checked; weights are loaded a part at a time.
pub struct Model {
    id: String,
    revision: Option<String>,
    device: Device,
    dtype: DType,
    config: Arc<Config>,
    config_sha256: String,
    tables: Arc<Tables>,
    weights: Weights,
    source: Source,
}

enum Source {
    Folder(PathBuf),
    Gguf {
        path: PathBuf,
        metadata: HashMap<String, Value>,
    },
}

impl Model {
    /// Opens a Hugging Face folder, a `.gguf` file or a hub id `owner/name[@revision]`, and checks every needed
    /// tensor's name, shape, dtype and extent from headers alone.
    pub fn open(locator: &str, options: &OpenOptions) -> Result<Self> {
        let path = Path::new(locator);
        if path.is_dir() {
            Self::open_folder(path, name_of(path), None, options)
        } else if path.is_file() {
            if path
                .extension()
                .is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
            {
                Self::open_gguf(path, options)
            } else {
                Err(
                    Error::invalid(locator, "neither a folder nor a `.gguf` file")
                        .hint("give the folder that holds `config.json` and `model.safetensors`"),
                )
            }
        } else if let Some(id) = Id::parse(locator) {
            let snapshot = hub::resolve(&id)?;
            Self::open_folder(&snapshot.folder, id.repo(), snapshot.commit, options)
        } else {
            Err(Error::invalid(
                locator,
                "no such file or folder, and not a hub id",
            )
            .hint("a model is a Hugging Face folder, a `.gguf` file or a hub id `owner/name[@revision]`"))
        }
    }

    fn open_folder(
        folder: &Path,
        id: String,
        revision: Option<String>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let config_path = folder.join("config.json");
        let text = files::read_text(&config_path)?;
        let config = Config::from_json(&config_path.display().to_string(), &text)?;
        Self::new(
            safetensors(folder)?,
            Source::Folder(folder.to_path_buf()),
            config,
            files::sha256_bytes(text.as_bytes()),
            id,
            revision,
            options,
        )
    }

    fn open_gguf(path: &Path, options: &OpenOptions) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        let config = gguf.config()?;
        let source = Source::Gguf {
            path: gguf.path,
            metadata: gguf.metadata,
        };
        Self::new(
            gguf.weights,
            source,
            config,
            gguf.metadata_sha256,
            name_of(path),
            None,
            options,
        )
    }

    fn new(
        weights: Weights,
        source: Source,
        config: Config,
        config_sha256: String,
        id: String,
        revision: Option<String>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let device = options.device.clone();
        let default = if device.is_cpu() {
            DType::F32
        } else {
            DType::BF16
        };
        let model = Self {
            id,
            revision,
            dtype: options.dtype.unwrap_or(default),
            device,
            tables: Arc::new(Tables::new(&config.rope, config.head_dim)),
            config: Arc::new(config),
            config_sha256,
            weights,
            source,
        };
        model.check()?;
        Ok(model)
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Names the model otherwise than its folder or file does.
    #[must_use]
    pub fn with_id(mut self, id: &str) -> Self {
        id.clone_into(&mut self.id);
        self
    }

    /// The hub id, or the name of the folder or file.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Commit of a model from the hub.
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Dtype of activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Identifies the weights without reading all of them: SHA-256 in lower-case hexadecimal, over every tensor in
    /// the order of names: its name, a zero byte, its encoding and shape as text, a zero byte, its length in bytes
    /// as a little-endian u64, and its first and last 64 KiB (all of it up to 128 KiB).
    pub fn weights_fingerprint(&self) -> Result<String> {
        Ok(self.weights.fingerprint())
    }

    /// SHA-256 of `config.json`, or of a GGUF's metadata, lower-case hexadecimal.
    pub fn config_sha256(&self) -> &str {
        &self.config_sha256
    }

    pub fn tokenizer_source(&self) -> TokenizerSource<'_> {
        match &self.source {
            Source::Folder(folder) => TokenizerSource::Folder(folder),
            Source::Gguf { path, metadata } => TokenizerSource::Gguf { path, metadata },
        }
    }

    pub fn sizes(&self) -> Sizes {
        let needed = tensors(&self.config);
        let loaded = |part: Part| -> u64 {
            let elements: usize = needed
                .iter()
                .filter(|(of, ..)| *of == part)
                .map(|(.., shape)| shape.iter().product::<usize>())
                .sum();
            (elements * self.dtype.size_in_bytes()) as u64
        };
        let stored: usize = needed
            .iter()
            .filter_map(|(_, name, _)| self.weights.get(&self.stored_name(name)))
            .map(|stored| stored.bytes)
            .sum();
        let head = self.config.vocab_size * self.config.hidden_size * self.dtype.size_in_bytes();
        let untied = !self.config.tie_word_embeddings;
        Sizes {
            stored_bytes: stored as u64,
            layer_bytes: loaded(Part::Layer(0)),
            head_bytes: loaded(Part::Head) + if untied { 0 } else { head as u64 },
        }
    }

    /// Embeddings (tokens, hidden) of token ids.
    ///
    /// # Errors
    /// A token id beyond the vocabulary.
    pub fn embed(&self, token_ids: &[u32]) -> Result<Tensor> {
        let vocab = self.config.vocab_size;
        if let Some(id) = token_ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::invalid(
                "token ids",
                format!("{id} is beyond the model's vocabulary of {vocab}"),
            )
            .hint("the tokenizer does not belong to this model"));
        }
        let rows = self
            .weights
            .gather(&self.stored_name(EMBEDDING), token_ids)?;
        let shape = (token_ids.len(), self.config.hidden_size);
        Ok(Tensor::from_vec(rows, shape, &self.device)?.to_dtype(self.dtype)?)
    }

    /// Loads the weights of layer `index`; may be called from any thread.
    ///
    /// # Errors
    /// A NaN or an infinity in a weight, by layer and tensor.
    pub fn layer(&self, index: usize) -> Result<DecoderLayer> {
        let config = &self.config;
        if index >= config.num_hidden_layers {
            return Err(Error::invalid(
                format!("layer {index}"),
                format!("the model has {} layers", config.num_hidden_layers),
            ));
        }
        let what = format!("layer {index}");
        let name = |rest: &str| format!("model.layers.{index}.{rest}");
        let stack = |names: &[&str], kind: &str| -> Result<Tensor> {
            let names: Vec<_> = names.iter().map(|n| name(&format!("{n}.{kind}"))).collect();
            self.stack(&what, &names)
        };
        let norm = |rest: &str| -> Result<RmsNorm> {
            Ok(RmsNorm::new(stack(&[rest], "weight")?, config.rms_norm_eps))
        };
        let linear = |names: &[&str], bias: bool| -> Result<Linear> {
            let bias = bias.then(|| stack(names, "bias")).transpose()?;
            Ok(Linear::new(stack(names, "weight")?, bias))
        };
        let head_norm = |rest: &str| config.qk_norm.then(|| norm(rest)).transpose();
        Ok(DecoderLayer {
            index,
            config: Arc::clone(config),
            tables: Arc::clone(&self.tables),
            input_norm: norm("input_layernorm")?,
            qkv: linear(&QKV, config.qkv_bias)?,
            q_norm: head_norm("self_attn.q_norm")?,
            k_norm: head_norm("self_attn.k_norm")?,
            output: linear(&["self_attn.o_proj"], config.output_bias)?,
            mlp_norm: norm("post_attention_layernorm")?,
            gate_up: linear(&["mlp.gate_proj", "mlp.up_proj"], false)?,
            down: linear(&["mlp.down_proj"], false)?,
        })
    }

    /// Hands layers `first..` to `visit` in order, loading the next one while `visit` runs; stops with
    /// [`Error::Interrupted`] between layers.
    pub fn for_each_layer(
        &self,
        first: usize,
        mut visit: impl FnMut(DecoderLayer) -> Result<()>,
    ) -> Result<()> {
        let last = self.config.num_hidden_layers;
        if first >= last {
            return Ok(());
        }
        thread::scope(|scope| {
            let mut next = self.layer(first);
            for index in first..last {
                interrupt::check()?;
                let layer = next?;
                let load = (index + 1 < last).then(|| scope.spawn(move || self.layer(index + 1)));
                visit(layer)?;
                let Some(load) = load else { break };
                next = load
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
            Ok(())
        })
    }

    /// Loads the final norm and the language-model head.
    pub fn head(&self) -> Result<LmHead> {
        let head = if self.config.tie_word_embeddings {
            EMBEDDING
        } else {
            "lm_head.weight"
        };
        let load = |name: &str| self.stack("the head", &[name.to_string()]);
        Ok(LmHead {
            config: Arc::clone(&self.config),
            norm: RmsNorm::new(load("model.norm.weight")?, self.config.rms_norm_eps),
            head: Linear::new(load(head)?, None),
        })
    }

    fn stack(&self, what: &str, names: &[String]) -> Result<Tensor> {
        let head_dim = self.config.head_dim;
        let interleaved =
            matches!(self.source, Source::Gguf { .. }) && self.config.model_type == "llama";
        let parts: Vec<_> = names
            .iter()
            .map(|name| {
                let turned = name.contains(".q_proj.") || name.contains(".k_proj.");
                let order = if interleaved && turned {
                    RowOrder::Interleaved { head_dim }
                } else {
                    RowOrder::AsStored
                };
                (self.stored_name(name), order)
            })
            .collect();
        self.weights.stack(what, &parts, self.dtype, &self.device)
    }

    /// The name in this checkpoint of what the Hugging Face format calls `name`.
    fn stored_name(&self, name: &str) -> String {
        match self.source {
            Source::Folder(_) => name.to_string(),
            Source::Gguf { .. } => gguf_name(name),
        }
    }

    /// Every tensor that the decoder needs is there, and none that it would ignore.
    fn check(&self) -> Result<()> {
        let mut known = HashSet::new();
        for (_, name, shape) in tensors(&self.config) {
            let name = self.stored_name(&name);
            let stored = self.weights.expect(&name, &shape)?;
            if stored.encoding == Encoding::Float8 {
                known.insert(scale_name(&name));
            }
            known.insert(name);
        }
        // Tables that old checkpoints store though every program computes them, a head that is tied all the same, and
        // the rotations of a cache, which `oscar export` appends to a GGUF file.
        let harmless = |name: &str| {
            name.ends_with(".rotary_emb.inv_freq")
                || name == "rope_freqs.weight"
                || name == "lm_head.weight"
                || name.ends_with(".attn_k_rot.weight")
                || name.ends_with(".attn_v_rot.weight")
        };
        match self
            .weights
            .names()
            .find(|name| !known.contains(*name) && !harmless(name))
        {
            Some(name) => Err(Error::invalid(
                self.weights.place(name),
                format!(
                    "no part of a {} decoder of {} layers",
                    self.config.model_type, self.config.num_hidden_layers
                ),
            )
            .hint("ignoring it would change what the model computes")),
            None => Ok(()),
        }
    }
}

/// Every tensor of the decoder, by its Hugging Face name, and its shape.
pub(super) fn tensors(config: &Config) -> Vec<(Part, String, Vec<usize>)> {
    let Config {
        hidden_size: hidden,
        intermediate_size: width,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        vocab_size,
        ..
    } = *config;
    let mut all = vec![
        (
            Part::Embedding,
            EMBEDDING.to_string(),
            vec![vocab_size, hidden],
        ),
        (Part::Head, "model.norm.weight".to_string(), vec![hidden]),
    ];
    if !config.tie_word_embeddings {
        all.push((
            Part::Head,
            "lm_head.weight".to_string(),
            vec![vocab_size, hidden],
        ));
    }
    for layer in 0..config.num_hidden_layers {
        let mut add = |name: &str, shape: &[usize]| {
            let name = format!("model.layers.{layer}.{name}");
            all.push((Part::Layer(layer), name, shape.to_vec()));
        };
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        for (name, heads) in QKV.into_iter().zip([heads, kv_heads, kv_heads]) {
            add(&format!("{name}.weight"), &[heads * head_dim, hidden]);
            if config.qkv_bias {
                add(&format!("{name}.bias"), &[heads * head_dim]);
            }
        }
        if config.qk_norm {
            add("self_attn.q_norm.weight", &[head_dim]);
            add("self_attn.k_norm.weight", &[head_dim]);
        }
        add("self_attn.o_proj.weight", &[hidden, heads * head_dim]);
        if config.output_bias {
            add("self_attn.o_proj.bias", &[hidden]);
        }
        add("mlp.gate_proj.weight", &[width, hidden]);
        add("mlp.up_proj.weight", &[width, hidden]);
        add("mlp.down_proj.weight", &[hidden, width]);
    }
    all
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Embedding,
    Layer(usize),
    Head,
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];

fn name_of(path: &Path) -> String {
    // `.` and `..` have names only once resolved.
    let resolved = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    resolved
        .file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The tensors of a folder: of the shards in its index, or of its one file.
fn safetensors(folder: &Path) -> Result<Weights> {
    let index_path = folder.join("model.safetensors.index.json");
    if !index_path.is_file() {
        let single = folder.join("model.safetensors");
        if single.is_file() {
            return Weights::from_safetensors(&[single]);
        }
        return Err(Error::invalid(
            folder.display(),
            "holds neither `model.safetensors` nor `model.safetensors.index.json`",
        ));
    }
    let wrong = |problem: String| Error::invalid(index_path.display(), problem);
    let index: Index = serde_json::from_str(&files::read_text(&index_path)?)
        .map_err(|e| wrong(format!("not an index of shards: {e}")))?;
    let shards: BTreeSet<&String> = index.weight_map.values().collect();
    if shards.is_empty() {
        return Err(wrong("names no tensor".to_owned()).hint("fetch the model again"));
    }
    let mut paths = Vec::new();
    for shard in shards {
        if Path::new(shard).file_name() != Some(OsStr::new(shard)) {
            return Err(wrong(format!("shard `{shard}` is not the name of a file")));
        }
        let path = folder.join(shard);
        if !path.is_file() {
            return Err(wrong(format!("shard `{shard}` is missing")).hint("fetch the model again"));
        }
        paths.push(path);
    }
    let weights = Weights::from_safetensors(&paths)?;
    for (name, shard) in &index.weight_map {
        let found = weights.get(name).map(|stored| weights.path_of(stored));
        if found.and_then(Path::file_name) != Some(OsStr::new(shard)) {
            return Err(wrong(format!("tensor `{name}` is not in shard `{shard}`")));
        }
    }
    Ok(weights)
}
