//! ModelScope: entries in its repositories of models.
//!
//! Large files go to its store first, and then all files become one commit. The API cannot be told which commit that
//! one must follow. So the branch is looked at again just before: where it moved since the change was planned, nothing
//! is committed. Two commits that cross in that last moment become two commits, the later one over the earlier.

mod api;
mod login;

use std::path::Path;
use std::sync::Arc;
use std::{mem, slice};

use self::api::{Action, Api};
use super::retry::Retry;
use super::{Commit, Hub, Locator, RemoteFile, Snapshot, Upload, Watch, http};
use crate::{Error, Result, files};

/// Beyond this a file is not sent inside the commit.
const INLINE_LIMIT_BYTES: u64 = 1 << 20;

/// Files in one question for what is missing, as the official client has it.
const BATCH: usize = 64;

/// The service takes no commit of more files.
const COMMIT_LIMIT: usize = 2000;

const MOVED: &str = "run the same command again: it starts from what is there now";

/// A repository of models on ModelScope, at one revision.
pub struct ModelScope {
    api: Api,
    revision: String,
    retry: Retry,
    watch: Arc<dyn Watch>,
}

impl ModelScope {
    /// Reads endpoint and token as the official client does: `MODELSCOPE_ENDPOINT`, and `MODELSCOPE_API_TOKEN` or the
    /// file of `modelscope login`.
    ///
    /// # Errors
    /// An endpoint that is no web address.
    pub fn new(locator: &Locator, watch: Arc<dyn Watch>) -> Result<Self> {
        Ok(Self {
            api: Api::new(locator, watch.clone())?,
            revision: locator.revision().to_owned(),
            retry: Retry::new(watch.clone()),
            watch,
        })
    }

    /// Sends those of `large` that the service does not hold.
    fn send(&self, large: &[Upload]) -> Result<()> {
        for group in large.chunks(BATCH) {
            self.send_group(group)?;
        }
        Ok(())
    }

    fn send_group(&self, large: &[Upload]) -> Result<()> {
        let mut missing = self.retry.run(|| self.api.missing(large))?;
        for file in large {
            // What is held already has no address, and files of the same content have one together.
            let Some(address) = missing.remove(&file.sha256) else {
                continue;
            };
            let mut address = Some(address);
            self.retry.run(|| {
                // An address serves one attempt: it ends after a while, and the bytes may have arrived after all.
                let address = match address.take() {
                    Some(address) => Some(address),
                    None => self
                        .api
                        .missing(slice::from_ref(file))?
                        .remove(&file.sha256),
                };
                address.map_or(Ok(()), |address| self.api.send(file, &address))
            })?;
        }
        Ok(())
    }
}

impl Hub for ModelScope {
    fn snapshot(&self) -> Result<Option<Snapshot>> {
        self.retry.run(|| self.api.snapshot(&self.revision))
    }

    fn create(&self, private: bool) -> Result<()> {
        self.retry.run(|| self.api.create(private))
    }

    fn commit(&self, commit: &Commit<'_>) -> Result<String> {
        if commit.pull_request {
            let problem = "ModelScope has no pull requests that a program can make";
            let error = self.api.account.error(problem);
            return Err(
                error.hint("leave `--pull-request` out, or publish to a repository of your own")
            );
        }
        if commit.files.len() + commit.removed.len() > COMMIT_LIMIT {
            let problem = format!("ModelScope takes {COMMIT_LIMIT} files in one commit at most");
            let error = self.api.account.error(problem);
            return Err(error.hint("publish fewer entries at once"));
        }
        let (large, small): (Vec<_>, Vec<_>) = commit.files.iter().cloned().partition(is_large);
        let mut actions: Vec<_> = large.iter().map(Action::large).collect();
        for file in &small {
            let content = inline(file)?;
            actions.push(Action::small(&file.path, &content));
        }
        actions.extend(commit.removed.iter().map(|path| Action::delete(path)));
        self.send(&large)?;

        let mut first = true;
        self.retry.run(|| {
            // The answer to an earlier attempt may have been lost, and not the commit.
            if !mem::take(&mut first)
                && commit.has_landed(self.api.snapshot(&self.revision)?.as_ref())?
            {
                return Ok(());
            }
            let head = self.api.head(&self.revision)?;
            let head = head.ok_or_else(|| self.api.account.refused(404, "", None, &[]))?;
            if let Some(parent) = commit.parent.filter(|parent| *parent != head) {
                let problem = format!(
                    "someone else has committed meanwhile: `{}` is at {head}, and this was planned on {parent}",
                    self.revision
                );
                let error = self.api.account.error(problem);
                return Err(error.hint(MOVED).into());
            }
            self.api
                .commit(&self.revision, commit.title, &actions, &small)
        })?;
        Ok(self.api.page())
    }

    fn fetch(&self, commit: &str, file: &RemoteFile, to: &Path) -> Result<()> {
        http::download(
            &self.api.account,
            &self.retry,
            self.watch.as_ref(),
            || self.api.file(commit, &file.path),
            file,
            to,
        )
    }
}

fn is_large(file: &Upload) -> bool {
    file.size_bytes > INLINE_LIMIT_BYTES
        || Path::new(&file.path)
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"))
}

/// The bytes of a small file, in which nothing has changed since it was planned to send them.
fn inline(file: &Upload) -> Result<Vec<u8>> {
    let content = files::read(&file.source)?;
    if files::sha256_bytes(&content) == file.sha256 {
        return Ok(content);
    }
    let error = Error::invalid(file.source.display(), "changed while it was published");
    Err(error.hint("run the same command again when nothing writes to it"))
}
