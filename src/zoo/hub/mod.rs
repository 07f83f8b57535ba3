//! Entries on Hugging Face and ModelScope: one seam, two hubs.
//!
//! A hub is a folder of files with a history. [`Hub`] says what publishing and pulling need of it; everything that does
//! not depend on the hub (which files, what changed, retries, messages) stands on this side of the seam.

mod account;
mod retry;

use std::path::{Path, PathBuf};

use crate::Result;

/// What names a file's content on a hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContentId {
    /// SHA-256 of the bytes, lower-case hexadecimal.
    Sha256(String),
    /// SHA-1 that git gives to a blob of these bytes, lower-case hexadecimal.
    GitBlob(String),
}

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
    /// So many bytes more were sent or received.
    fn bytes(&self, count: u64);

    /// Something worth a line, such as an attempt that failed and is repeated.
    fn note(&self, text: &str);
}
