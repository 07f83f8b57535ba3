use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Device, Tensor};

use super::{Config, DecoderLayer, LmHead};
use crate::Result;

/// Where and in which numbers to run a model.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub device: Device,
    /// Dtype of activations and of weights once loaded: f32 on CPU and bf16 elsewhere where `None`.
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

/// A model whose headers are read and checked; weights are loaded a layer at a time.
pub struct Model {}

impl Model {
    /// Opens a Hugging Face folder, a `.gguf` file or a hub id `owner/name[@revision]`, and checks every needed
    /// tensor's name, shape, dtype and extent from headers alone.
    pub fn open(_locator: &str, _options: &OpenOptions) -> Result<Self> {
        unimplemented!()
    }

    pub fn config(&self) -> &Config {
        unimplemented!()
    }

    /// The hub id, or the name of the folder or file.
    pub fn id(&self) -> &str {
        unimplemented!()
    }

    /// Commit of a model from the hub.
    pub fn revision(&self) -> Option<&str> {
        unimplemented!()
    }

    pub fn device(&self) -> &Device {
        unimplemented!()
    }

    /// Dtype of activations.
    pub fn dtype(&self) -> DType {
        unimplemented!()
    }

    /// Identifies the weights without reading all of them: lower-case hexadecimal SHA-256.
    pub fn weights_fingerprint(&self) -> Result<String> {
        unimplemented!()
    }

    /// SHA-256 of `config.json`, or of a GGUF's metadata, lower-case hexadecimal.
    pub fn config_sha256(&self) -> &str {
        unimplemented!()
    }

    pub fn tokenizer_source(&self) -> TokenizerSource<'_> {
        unimplemented!()
    }

    pub fn sizes(&self) -> Sizes {
        unimplemented!()
    }

    /// Embeddings (tokens, hidden) of token ids.
    pub fn embed(&self, _token_ids: &[u32]) -> Result<Tensor> {
        unimplemented!()
    }

    /// Loads the weights of layer `index`; may be called from any thread.
    pub fn layer(&self, _index: usize) -> Result<DecoderLayer> {
        unimplemented!()
    }

    /// Hands layers `first..` to `visit` in order, loading the next one while `visit` runs.
    pub fn for_each_layer(
        &self,
        _first: usize,
        _visit: impl FnMut(DecoderLayer) -> Result<()>,
    ) -> Result<()> {
        unimplemented!()
    }

    /// Loads the final norm and the language-model head.
    pub fn head(&self) -> Result<LmHead> {
        unimplemented!()
    }
}
