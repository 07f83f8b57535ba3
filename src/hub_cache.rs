//! Ids of hub repositories, and the folder in which `huggingface_hub` keeps what it has fetched of them, so that models
//! and entries are shared with it.
//!
//! ```text
//! models--owner--name/refs/main             the commit that the branch was at when it was last looked at
//! models--owner--name/blobs/HASH            contents
//! models--owner--name/snapshots/COMMIT/PATH links to contents
//! ```

use std::path::{Path, PathBuf};
use std::{env, fmt, fs};

/// `owner/name[@revision]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Id {
    pub owner: String,
    pub name: String,
    pub revision: Option<String>,
}

impl Id {
    /// `None` for what no hub calls a repository: names become folders, and parts of addresses.
    pub fn parse(text: &str) -> Option<Self> {
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (text, None),
        };
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
        let plain_revision = revision.is_none_or(|revision| revision.split('/').all(plain));
        (plain(owner) && plain(name) && plain_revision).then(|| Self {
            owner: owner.to_owned(),
            name: name.to_owned(),
            revision: revision.map(str::to_owned),
        })
    }

    /// `owner/name`
    pub fn repo(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The revision, or a hub's `default`.
    pub fn revision_or<'a>(&'a self, default: &'a str) -> &'a str {
        self.revision.as_deref().unwrap_or(default)
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        match &self.revision {
            Some(revision) => write!(f, "@{revision}"),
            None => Ok(()),
        }
    }
}

/// Whether `text` can be a commit's id: it becomes the name of a folder.
pub fn is_commit(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_alphanumeric())
}

/// Whether `HF_HUB_OFFLINE` forbids the network.
pub fn offline() -> bool {
    env::var("HF_HUB_OFFLINE")
        .is_ok_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_uppercase().as_str()))
}

/// An environment variable that names a path.
pub fn path_variable(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// `HF_HOME`, or `~/.cache/huggingface`, as huggingface_hub has it.
pub fn hugging_face_home() -> Option<PathBuf> {
    path_variable("HF_HOME")
        .or_else(|| path_variable("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
        .or_else(|| env::home_dir().map(|home| home.join(".cache/huggingface")))
}

/// `HF_HUB_CACHE`, or `hub` in [`hugging_face_home`].
pub fn hugging_face() -> Option<PathBuf> {
    path_variable("HF_HUB_CACHE")
        .or_else(|| path_variable("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| hugging_face_home().map(|home| home.join("hub")))
}

/// One repository's part of a cache.
#[derive(Clone, Debug)]
pub struct CachedRepo {
    folder: PathBuf,
    locks: PathBuf,
}

impl CachedRepo {
    /// Of a model repository; nothing need be there.
    pub fn new(cache: &Path, id: &Id) -> Self {
        let name = format!("models--{}--{}", id.owner, id.name);
        Self {
            folder: cache.join(&name),
            locks: cache.join(".locks").join(name),
        }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The commit that `revision` was at when it was last looked at, or `revision` where it is a commit, and its
    /// files; `None` where none of them are here.
    pub fn snapshot(&self, revision: &str) -> Option<(String, PathBuf)> {
        let commit = match fs::read_to_string(self.reference(revision)) {
            Ok(commit) => commit.trim().to_owned(),
            Err(_) => revision.to_owned(),
        };
        let folder = self.files(&commit);
        (is_commit(&commit) && folder.is_dir()).then_some((commit, folder))
    }

    /// Where the files of `commit` lie.
    pub fn files(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Where the commit that `revision` was at is written down.
    pub fn reference(&self, revision: &str) -> PathBuf {
        self.folder.join("refs").join(revision)
    }

    /// The file that is locked while the content with this hash is fetched.
    pub fn lock(&self, hash: &str) -> PathBuf {
        self.locks.join(format!("{hash}.lock"))
    }

    /// Where the content with this hash lies.
    pub fn blob(&self, hash: &str) -> PathBuf {
        self.folder.join("blobs").join(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_two_plain_names() {
        for good in [
            "a/b",
            "Qwen/Qwen3-8B",
            "a/b@main",
            "a/b@refs/pr/3",
            "a/b_c.d@v1.0",
        ] {
            assert_eq!(Id::parse(good).unwrap().to_string(), good);
        }
        for bad in [
            "",
            "a",
            "a/",
            "/b",
            "a/b/c",
            "a/../b",
            "../b",
            "a/..",
            "a/.b",
            "-a/b",
            "a/b@",
            "a/b@../x",
            "a/b@x//y",
            "a/b?c",
            "a/b#c",
            "a/b%2fc",
            "a\\b/c",
            "a/b c",
            "a/b\n",
            "a/ü",
            "/etc/passwd",
            "https://a/b",
        ] {
            assert_eq!(Id::parse(bad), None, "{bad}");
        }
    }
}
