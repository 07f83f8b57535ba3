//! A model small enough for a test, and text for it.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::checkpoint::{Checkpoint, VOCAB};

pub fn str(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A small llama with a tokenizer that knows single characters, and prompts to run through it.
pub struct Toy {
    folder: TempDir,
    pub model: PathBuf,
    pub prompts: PathBuf,
}

impl Toy {
    pub fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let model = folder.path().join("toy");
        Checkpoint::llama().write_folder(&model, 1);
        let letters: Vec<char> = (' '..).take(VOCAB).collect();
        let vocab: serde_json::Map<String, Value> = letters
            .iter()
            .enumerate()
            .map(|(id, letter)| (letter.to_string(), json!(id)))
            .collect();
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": { "type": "BPE", "vocab": vocab, "merges": [] }
        });
        fs::write(model.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let prompts = folder.path().join("prompts");
        fs::create_dir(&prompts).unwrap();
        let mut state = 1u32;
        for document in 0..8 {
            let prompt: String = (0..1500)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    letters[(state >> 16) as usize % VOCAB]
                })
                .collect();
            fs::write(prompts.join(format!("{document}.txt")), prompt).unwrap();
        }
        Self {
            folder,
            model,
            prompts,
        }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn collect<'a>(&'a self, out: &'a Path) -> Vec<&'a str> {
        vec![
            "collect",
            "--model",
            str(&self.model),
            "--data",
            str(&self.prompts),
            "--tokens",
            "8000",
            "--seq-len",
            "512",
            "--holdout",
            "1024",
            "--out",
            str(out),
        ]
    }
}
