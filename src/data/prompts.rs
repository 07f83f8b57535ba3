//! Prompts from `.txt`, `.jsonl` and `.parquet` files and folders of them.

use std::path::PathBuf;

use super::chat_template::ChatTemplate;
use crate::Result;

/// One text to run through the model, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// File, and line or row where the file holds more than one.
    pub place: String,
    pub text: String,
    /// Rendered by a chat template, which writes the special tokens itself.
    pub templated: bool,
}

/// All prompts of `paths`, in the order given; a folder's files recursively, sorted by path.
///
/// `template` renders chat `messages`.
pub fn read(paths: &[PathBuf], template: Option<&ChatTemplate>) -> Result<Vec<Prompt>> {
    todo!("{paths:?} {template:?}")
}
