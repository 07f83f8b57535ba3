//! Entries to publish.

use std::fs;
use std::path::{Path, PathBuf};

use oscar_kv::kv::attention::Dims;

use crate::pool_entry;

/// Writes a small entry of `model` to `folder`; another `seed`, other tensors.
pub fn entry(folder: &Path, model: &str, seed: u64) -> PathBuf {
    let dims = Dims {
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
    };
    let mut entry = pool_entry::entry(2, dims, 16, seed);
    model.clone_into(&mut entry.metadata.model.id);
    entry.write(folder, true).unwrap();
    folder.to_owned()
}

/// The files of a folder.
pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|item| item.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
