//! Text into token ids, as the model's authors do it.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;

use super::pack::TokenizedPrompt;
use super::prompts::Prompt;
use crate::Result;
use crate::model::{Model, TokenizerSource};

/// A model's tokenizer with its special tokens and chat template.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    sha256: String,
    bos: Option<u32>,
    eos: Option<u32>,
    pub(super) chat_template: Option<String>,
}

impl Tokenizer {
    /// The tokenizer that `model` came with.
    pub fn load(model: &Model) -> Result<Self> {
        match model.tokenizer_source() {
            TokenizerSource::Folder(folder) => Self::from_folder(folder),
            TokenizerSource::Gguf { path, metadata } => Self::from_gguf_metadata(path, metadata),
        }
    }

    /// From `tokenizer.json` of a Hugging Face folder, with `tokenizer_config.json` and `chat_template.jinja` where they
    /// exist.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        todo!("{folder:?}")
    }

    /// Rebuilt from the vocabulary and merges of a GGUF file.
    pub fn from_gguf(path: &Path) -> Result<Self> {
        todo!("{path:?}")
    }

    /// [`Self::from_gguf`] of metadata already read from `path`.
    pub fn from_gguf_metadata(path: &Path, metadata: &HashMap<String, Value>) -> Result<Self> {
        todo!("{path:?} {metadata:?}")
    }

    /// Token ids of `text`; `add_special` adds what the tokenizer puts around a text, such as BOS.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        todo!("{text:?} {add_special} {:?}", self.inner)
    }

    /// All prompts, in parallel and in order.
    ///
    /// # Errors
    /// A token id at or beyond `model_vocab_size` (rows of the embedding), by prompt.
    pub fn encode_prompts(
        &self,
        prompts: &[Prompt],
        model_vocab_size: usize,
    ) -> Result<Vec<TokenizedPrompt>> {
        todo!("{prompts:?} {model_vocab_size}")
    }

    /// Text of token ids, special tokens included.
    pub fn decode(&self, token_ids: &[u32]) -> Result<String> {
        todo!("{token_ids:?}")
    }

    /// Of `tokenizer.json`, or of its canonical rebuilding from a GGUF file.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Token ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// What stands between joined documents: the end-of-sequence token, else the begin-of-sequence token.
    pub fn separator(&self) -> Option<u32> {
        self.eos.or(self.bos)
    }
}
