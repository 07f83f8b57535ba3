//! Models of the Hugging Face hub: the local cache first, then the network.

use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::{Error, Result};

/// `owner/name[@revision]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Id {
    pub repo: String,
    pub revision: String,
}

impl Id {
    pub fn parse(locator: &str) -> Option<Self> {
        let (repo, revision) = locator.split_once('@').unwrap_or((locator, "main"));
        let (owner, name) = repo.split_once('/')?;
        let plain = |part: &str| {
            !part.is_empty()
                && part.len() <= 96
                && !part.starts_with(['.', '-'])
                && !part.contains("..")
                && part
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let plain_revision = !revision.is_empty() && revision.split('/').all(plain);
        (plain(owner) && plain(name) && plain_revision).then(|| Self {
            repo: repo.to_string(),
            revision: revision.to_string(),
        })
    }
}

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
    if offline() {
        return Err(Error::invalid(
            &id.repo,
            format!("{missing}, and HF_HUB_OFFLINE is set"),
        )
        .hint(format!(
            "run `hf download {} --revision {}` where there is a network, or unset HF_HUB_OFFLINE",
            id.repo, id.revision
        )));
    }
    fetch(id, &missing)?;
    cached(id).map_err(|missing| Error::invalid(&id.repo, missing))
}

fn offline() -> bool {
    env::var("HF_HUB_OFFLINE")
        .is_ok_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()))
}

/// `HF_HUB_CACHE`, `HF_HOME/hub`, or `~/.cache/huggingface/hub`, as huggingface_hub has it.
fn cache_folder() -> Option<PathBuf> {
    let path = |name| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    path("HF_HUB_CACHE")
        .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| path("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
        .or_else(|| env::home_dir().map(|home| home.join(".cache/huggingface/hub")))
}

/// The whole snapshot of `id` in the cache, or what is missing there.
fn cached(id: &Id) -> Result<Snapshot, String> {
    let cache = cache_folder().ok_or("there is no home folder to look for a cache in")?;
    let folder = cache.join(format!("models--{}", id.repo.replace('/', "--")));
    let absent = || {
        format!(
            "revision `{}` is not in the cache `{}`",
            id.revision,
            cache.display()
        )
    };
    let commit = match fs::read_to_string(folder.join("refs").join(&id.revision)) {
        Ok(commit) => commit.trim().to_string(),
        Err(_) => id.revision.clone(),
    };
    let snapshot = folder.join("snapshots").join(&commit);
    if commit.contains(['/', '\\']) || commit.starts_with('.') || !snapshot.is_dir() {
        return Err(absent());
    }
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
    Err(Error::invalid(&id.repo, missing)
        .hint("this build has no feature `hub`: fetch the model into a folder, and give that"))
}

/// Fetches the files that a model needs into the cache; `HF_ENDPOINT` and `HF_TOKEN` are honoured.
#[cfg(feature = "hub")]
fn fetch(id: &Id, missing: &str) -> Result<()> {
    use hf_hub::{HFClient, split_id};

    const FILES: [&str; 7] = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model.safetensors",
        "model-*.safetensors",
    ];
    let failed = |e: hf_hub::HFError| {
        Error::invalid(&id.repo, format!("{missing}, and fetching it failed: {e}"))
            .hint("check the id, the network, and HF_TOKEN for gated models")
    };
    let mut builder = HFClient::builder();
    if let Some(cache) = cache_folder() {
        builder = builder.cache_dir(cache);
    }
    let (owner, name) = split_id(&id.repo);
    builder
        .build_sync()
        .map_err(failed)?
        .model(owner, name)
        .snapshot_download()
        .revision(&id.revision)
        .allow_patterns(FILES.map(String::from).to_vec())
        .send()
        .map_err(failed)?;
    Ok(())
}
