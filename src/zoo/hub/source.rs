//! From a repository into the cache on this machine: every file by its hash.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{ContentId, Hub, Locator, RemoteFile, Snapshot, Watch, open};
use crate::hub_cache::{self, CachedRepo};
use crate::{Error, Result, files};

/// The part of the cache that is `locator`'s.
pub(super) fn repo(locator: &Locator) -> Result<CachedRepo> {
    match locator.host.cache() {
        Some(cache) => Ok(CachedRepo::new(&cache, &locator.id)),
        None => Err(
            Error::invalid(locator, "there is no home folder to keep a cache in")
                .hint("set HF_HOME, or MODELSCOPE_CACHE for ModelScope, to a folder"),
        ),
    }
}

/// The repository now, which must be there.
fn look(locator: &Locator, hub: &dyn Hub) -> Result<Snapshot> {
    let snapshot = hub.snapshot()?.ok_or_else(|| {
        Error::invalid(
            locator,
            format!(
                "{} has no such repository, or the token may not see it",
                locator.host.name()
            ),
        )
        .hint("check owner and name; a private repository needs a token")
    })?;
    if !hub_cache::is_commit(&snapshot.commit) {
        return Err(Error::invalid(
            locator,
            format!(
                "{} calls its commit `{}`, which is none",
                locator.host.name(),
                snapshot.commit.escape_debug()
            ),
        )
        .hint("check the address of the hub, such as HF_ENDPOINT"));
    }
    Ok(snapshot)
}

/// Brings those files of a repository into the cache whose paths are `wanted`.
///
/// # Errors
/// A repository that is not there or cannot be reached, a file that is not what the hub says.
pub fn fetch(
    locator: &Locator,
    wanted: impl Fn(&str) -> bool,
    watch: &Arc<dyn Watch>,
) -> Result<()> {
    let source = Source::open(locator, repo(locator)?, watch)?;
    let files = source.snapshot.files.iter();
    source.keep(&source.blobs(files.filter(|file| wanted(&file.path)))?)?;
    Ok(())
}

/// A repository as it was looked at, and the cache for it.
pub(super) struct Source<'a> {
    pub locator: &'a Locator,
    pub snapshot: Snapshot,
    repo: CachedRepo,
    hub: Box<dyn Hub>,
    watch: &'a dyn Watch,
}

impl<'a> Source<'a> {
    /// Looks at the repository, which must be there.
    pub fn open(locator: &'a Locator, repo: CachedRepo, watch: &'a Arc<dyn Watch>) -> Result<Self> {
        let hub = open(locator, watch.clone())?;
        Ok(Self {
            locator,
            snapshot: look(locator, hub.as_ref())?,
            repo,
            hub,
            watch: watch.as_ref(),
        })
    }

    /// The contents of `files` in the cache.
    pub fn blobs<'f>(
        &self,
        files: impl Iterator<Item = &'f RemoteFile>,
    ) -> Result<Vec<(&'f RemoteFile, PathBuf)>> {
        files.map(|file| Ok((file, self.blob(file)?))).collect()
    }

    /// Makes the snapshot's folder in the cache show these files, and says where it is. The first one comes last:
    /// where it is, the others are.
    pub fn keep(&self, blobs: &[(&RemoteFile, PathBuf)]) -> Result<PathBuf> {
        let folder = self.repo.files(&self.snapshot.commit);
        for (file, blob) in blobs.iter().rev() {
            link(blob, &folder.join(&file.path))?;
        }
        let revision = self.locator.revision();
        if revision != self.snapshot.commit {
            files::write_atomic(&self.repo.reference(revision), |out| {
                out.write_all(self.snapshot.commit.as_bytes())
            })?;
        }
        Ok(folder)
    }

    /// The content of `file` in the cache, fetched where it is not there or is not what it should be.
    fn blob(&self, file: &RemoteFile) -> Result<PathBuf> {
        let place = format!("{}, `{}`", self.locator, file.path);
        if !file.content.is_sound() {
            return Err(Error::invalid(place, "the hub gives no hash of this file"));
        }
        let _lock = lock(&self.repo.lock(file.content.hash()))?;
        let blob = self.repo.blob(file.content.hash());
        if blob.is_file() && file.content.is_of(&blob)? {
            return Ok(blob);
        }
        if let Some(folder) = blob.parent() {
            fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
        }
        let mut partial = blob.clone().into_os_string();
        partial.push(".incomplete");
        let partial = PathBuf::from(partial);
        self.watch.expect(file.size_bytes);
        self.hub.fetch(&self.snapshot.commit, file, &partial)?;
        let found = file.content.of_file(&partial)?;
        if found != file.content {
            fs::remove_file(&partial).map_err(Error::io("remove", &partial))?;
            let kind = match file.content {
                ContentId::Sha256(_) => "SHA-256",
                ContentId::GitBlob(_) => "git hash",
            };
            return Err(Error::invalid(
                place,
                format!(
                    "what came has the {kind} {}, the hub says {}",
                    found.hash(),
                    file.content.hash()
                ),
            )
            .hint("run the same command again; if it stays, the file is damaged on the hub"));
        }
        fs::rename(&partial, &blob).map_err(Error::io("rename", &partial))?;
        Ok(blob)
    }
}

/// Whether a file of the cache has the hash by which its content is called there. Files that are no links have none.
pub(super) fn is_whole(path: &Path) -> Result<bool> {
    let Ok(blob) = fs::read_link(path) else {
        return Ok(true);
    };
    let hash = blob.file_name().unwrap_or_default().to_string_lossy();
    let content = match hash.len() {
        40 => ContentId::GitBlob(hash.into_owned()),
        64 => ContentId::Sha256(hash.into_owned()),
        _ => return Ok(true),
    };
    content.is_of(path)
}

/// Waits until no other program fetches the same content; `huggingface_hub` heeds the same lock.
fn lock(path: &Path) -> Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
    }
    let file = File::create(path).map_err(Error::io("create", path))?;
    file.lock().map_err(Error::io("lock", path))?;
    Ok(file)
}

/// Makes `path` show the content `blob`, as `huggingface_hub` does.
fn link(blob: &Path, path: &Path) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
    }
    // Others may be reading it, or making the same link: what is right stays, what is not is replaced in one step.
    #[cfg(unix)]
    {
        let target = relative(blob, path);
        if fs::read_link(path).is_ok_and(|there| there == target) {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(Path::new("."));
        let made = tempfile::Builder::new()
            .prefix(".oscar-")
            .make_in(folder, |link| std::os::unix::fs::symlink(&target, link))
            .map_err(Error::io("link in", folder))?;
        made.persist(path)
            .map(drop)
            .map_err(|e| Error::io("link", path)(e.error))
    }
    #[cfg(not(unix))]
    {
        let mut bytes = fs::File::open(blob).map_err(Error::io("read", blob))?;
        files::write_atomic(path, |out| std::io::copy(&mut bytes, out).map(drop))
    }
}

/// `REPO/blobs/HASH` as seen from `REPO/snapshots/COMMIT/…`: a cache may be moved as a whole.
#[cfg(unix)]
fn relative(blob: &Path, path: &Path) -> PathBuf {
    let repo = blob.parent().and_then(Path::parent);
    let inside = repo.and_then(|repo| {
        path.strip_prefix(repo)
            .ok()
            .zip(blob.strip_prefix(repo).ok())
    });
    match inside {
        Some((path, blob)) => {
            let up = path.components().skip(1).map(|_| "..");
            up.collect::<PathBuf>().join(blob)
        }
        None => blob.to_owned(),
    }
}
