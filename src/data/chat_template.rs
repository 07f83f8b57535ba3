//! Chat messages into the text that a model was trained on.

use std::path::Path;

use minijinja::Value;

use super::tokenizer::Tokenizer;
use crate::Result;

/// A model's chat template, a Jinja program.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
}

impl ChatTemplate {
    /// The template that a tokenizer came with, or `None`.
    pub fn of(tokenizer: &Tokenizer) -> Result<Option<Self>> {
        todo!("{tokenizer:?}")
    }

    /// A template given by a person, for the special tokens of `tokenizer`.
    pub fn from_file(path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        todo!("{path:?} {tokenizer:?}")
    }

    /// `messages` and `tools` as in Hugging Face's `apply_chat_template`, with no generation prompt.
    pub fn render(&self, place: &str, messages: &Value, tools: &Value) -> Result<String> {
        todo!("{place:?} {messages:?} {tools:?} {}", self.source)
    }
}
