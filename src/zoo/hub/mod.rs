//! Entries on Hugging Face and ModelScope: one seam, two hubs.
//!
//! A hub is a folder of files with a history. [`Hub`] says what publishing and pulling need of it; everything that does
//! not depend on the hub (which files, what changed, retries, messages) stands on this side of the seam.

mod account;
mod content;
mod http;
mod hugging_face;
mod locator;
mod modelscope;
mod plan;
mod pull;
mod retry;
mod source;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::hub_cache;
use crate::{Error, Result};

pub use content::ContentId;
pub use hugging_face::HuggingFace;
pub use locator::{Host, Locator};
pub use modelscope::ModelScope;
pub use plan::{Change, Layout, Plan, Planned, entries, inside};
pub use pull::{Pulled, Wanted, pull};
pub use source::fetch;

/// A file that a hub holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Path in the repository, `/` between folders.
    pub path: String,
    pub size_bytes: u64,
    pub content: ContentId,
}

/// A repository at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The commit's id.
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

impl Snapshot {
    /// The file at `path`.
    pub fn file(&self, path: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// A file to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upload {
    /// Path in the repository, `/` between folders.
    pub path: String,
    pub source: PathBuf,
    pub size_bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

impl Upload {
    /// Reads the file at `source` for its size and hash.
    pub fn new(path: impl Into<String>, source: impl Into<PathBuf>) -> Result<Self> {
        let source = source.into();
        let (size_bytes, sha256) = content::sha256_of(&source)?;
        Ok(Self {
            path: path.into(),
            source,
            size_bytes,
            sha256,
        })
    }

    /// Whether the hub's file has the same content.
    pub fn is(&self, remote: &RemoteFile) -> Result<bool> {
        if remote.size_bytes != self.size_bytes {
            return Ok(false);
        }
        match &remote.content {
            ContentId::Sha256(sha256) => Ok(*sha256 == self.sha256),
            git @ ContentId::GitBlob(_) => git.is_of(&self.source),
        }
    }
}

/// One atomic change of a repository.
#[derive(Clone, Debug)]
pub struct Commit<'a> {
    /// The first line of the message.
    pub title: &'a str,
    /// The commit that this one was planned on; a hub refuses where the branch moved on.
    pub parent: Option<&'a str>,
    /// As a pull request instead of on the branch.
    pub pull_request: bool,
    pub files: &'a [Upload],
    /// Paths of files to delete; a hub that cannot delete them in the same commit refuses.
    pub removed: &'a [String],
}

impl Commit<'_> {
    /// Whether the branch has moved on to just what this commit makes of it: an attempt whose answer was lost.
    pub fn has_landed(&self, now: Option<&Snapshot>) -> Result<bool> {
        let Some(now) = now else {
            return Ok(false);
        };
        if self.parent == Some(&now.commit) {
            return Ok(false);
        }
        for file in self.files {
            match now.file(&file.path) {
                Some(remote) if file.is(remote)? => {}
                _ => return Ok(false),
            }
        }
        Ok(self.removed.iter().all(|path| now.file(path).is_none()))
    }
}

/// What a hub can do with one repository, at one revision of it.
pub trait Hub {
    /// The repository now; `None` where there is none (or none that this token may see).
    fn snapshot(&self) -> Result<Option<Snapshot>>;

    /// Makes the repository; one that is there already is left as it is.
    fn create(&self, private: bool) -> Result<()>;

    /// Sends files and commits them, all or none; returns the address where people see the commit or pull request.
    fn commit(&self, commit: &Commit<'_>) -> Result<String>;

    /// Writes one file of the snapshot `commit` to `to`; what lies there of an earlier try is gone on from or replaced.
    fn fetch(&self, commit: &str, file: &RemoteFile, to: &Path) -> Result<()>;
}

/// What a transfer tells the person who waits for it.
pub trait Watch: Send + Sync {
    /// So many bytes more are to be sent or received.
    fn expect(&self, count: u64);

    /// So many bytes more were sent or received.
    fn bytes(&self, count: u64);

    /// Something worth a line, such as an attempt that failed and is repeated.
    fn note(&self, text: &str);
}

/// The hub of `locator`, with the token of this machine's environment; nothing is sent yet.
///
/// # Errors
/// Where `HF_HUB_OFFLINE` forbids the network, or the environment names no address of a hub.
pub fn open(locator: &Locator, watch: Arc<dyn Watch>) -> Result<Box<dyn Hub>> {
    if hub_cache::offline() {
        return Err(Error::invalid(locator, "HF_HUB_OFFLINE is set").hint("unset HF_HUB_OFFLINE"));
    }
    match locator.host {
        Host::HuggingFace => Ok(Box::new(HuggingFace::new(locator, watch)?)),
        Host::ModelScope => Ok(Box::new(ModelScope::new(locator, watch)?)),
    }
}
