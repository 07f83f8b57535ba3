//! Models of the Hugging Face hub: the local cache first, then the network.

use std::fs;
use std::path::{Path, PathBuf};

use crate::hub_cache::{self, CachedRepo, Id};
use crate::{Error, Result};

const MAIN: &str = "main";

/// A model's files on this machine.
pub(super) struct Snapshot {
    pub folder: PathBuf,
    pub commit: Option<String>,
}

/// Finds the files of `id` in the cache, or fetches what is missing.
pub(super) fn resolve(id: &Id) -> Result<Snapshot> {
    let missing = match cached(id) {
        Ok(snapshot) => return Ok(snapshot),
        Err(missing) => missing,
    };
    if hub_cache::offline() {
        return Err(Error::invalid(
            id.repo(),
            format!("{missing}, and HF_HUB_OFFLINE is set"),
        )
        .hint(format!(
            "run `hf download {} --revision {}` where there is a network, or unset HF_HUB_OFFLINE",
            id.repo(),
            id.revision_or(MAIN)
        )));
    }
    fetch(id, &missing)?;
    cached(id).map_err(|missing| Error::invalid(id.repo(), missing))
}

/// The whole snapshot of `id` in the cache, or what is missing there.
fn cached(id: &Id) -> Result<Snapshot, String> {
    let cache =
        hub_cache::hugging_face().ok_or("there is no home folder to look for a cache in")?;
    let revision = id.revision_or(MAIN);
    let Some((commit, snapshot)) = CachedRepo::new(&cache, id).snapshot(revision) else {
        return Err(format!(
            "revision `{revision}` is not in the cache `{}`",
            cache.display()
        ));
    };
    match missing_file(&snapshot) {
        Some(name) => Err(format!(
            "`{name}` is not in the cache `{}`",
            snapshot.display()
        )),
        None => Ok(Snapshot {
            folder: snapshot,
            commit: Some(commit),
        }),
    }
}

/// A file that a model needs and `snapshot` lacks.
fn missing_file(snapshot: &Path) -> Option<String> {
    let lacks = |name: &str| !snapshot.join(name).is_file();
    for name in ["config.json", "tokenizer.json"] {
        if lacks(name) {
            return Some(name.to_string());
        }
    }
    let Ok(index) = fs::read_to_string(snapshot.join("model.safetensors.index.json")) else {
        return lacks("model.safetensors").then(|| "model.safetensors".to_string());
    };
    // An index that cannot be read is reported when the model is opened.
    let index: serde_json::Value = serde_json::from_str(&index).ok()?;
    index
        .get("weight_map")?
        .as_object()?
        .values()
        .filter_map(|shard| shard.as_str())
        .find(|shard| lacks(shard))
        .map(str::to_string)
}

#[cfg(not(feature = "hub"))]
fn fetch(id: &Id, missing: &str) -> Result<()> {
    Err(Error::invalid(id.repo(), missing)
        .hint("this build has no feature `hub`: fetch the model into a folder, and give that"))
}

/// Fetches the files that a model needs into the cache.
#[cfg(feature = "hub")]
fn fetch(id: &Id, _missing: &str) -> Result<()> {
    use std::sync::Arc;

    use crate::zoo::hub::{self, Host, Locator, Watch};

    /// A model is opened without a bar, but a wait for the next attempt is said.
    struct Notes;
    impl Watch for Notes {
        fn expect(&self, _: u64) {}
        fn bytes(&self, _: u64) {}
        fn note(&self, text: &str) {
            eprintln!("note: {text}");
        }
    }

    let locator = Locator {
        host: Host::HuggingFace,
        id: id.clone(),
    };
    let watch: Arc<dyn Watch> = Arc::new(Notes);
    hub::fetch(&locator, is_needed, &watch)
}

/// Whether a file at the root of a repository is part of a model.
#[cfg(feature = "hub")]
fn is_needed(path: &str) -> bool {
    let is_weights = || {
        let shard = path.strip_prefix("model")?.strip_suffix(".safetensors")?;
        Some(shard.is_empty() || shard.starts_with('-') && !shard.contains('/'))
    };
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ]
    .contains(&path)
        || is_weights().unwrap_or(false)
}
