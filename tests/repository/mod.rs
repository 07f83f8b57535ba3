//! A copy of the entry that the repository keeps, as part of a zoo.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

const ENTRY: &str = "HuggingFaceTB__SmolLM2-135M-Instruct/balanced";

/// The zoo's folder, and the entry in it: tensors and measurement alone.
pub fn copy() -> (TempDir, PathBuf) {
    let zoo = TempDir::new().unwrap();
    let entry = zoo.path().join(ENTRY);
    fs::create_dir_all(&entry).unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("zoo")
        .join(ENTRY);
    for name in ["rotations.safetensors", "metrics.json"] {
        fs::copy(from.join(name), entry.join(name)).unwrap();
    }
    (zoo, entry)
}

pub fn oscar(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_oscar"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}
