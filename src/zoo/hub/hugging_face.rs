//! Hugging Face. Commits go through `hf-hub`, which knows Xet; what is read is asked for here, since `hf-hub` 1.0 loses
//! the hashes of large files in listings and does not look at the status of a download.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs};

use hf_hub::progress::{Progress, ProgressEvent, ProgressHandler, UploadEvent};
use hf_hub::repository::{CommitOperation, RepoTypeModel};
use hf_hub::{HFClient, HFClientSync, HFError};
use reqwest::Url;
use reqwest::blocking::{Client, RequestBuilder};
use serde::Deserialize;

use super::account::{Account, Token};
use super::retry::{Failure, Retry};
use super::{Commit, ContentId, Host, Hub, Locator, RemoteFile, Snapshot, Upload, Watch, http};
use crate::hub_cache::{self, path_variable};
use crate::{Error, Result};

const ENDPOINT: &str = "https://huggingface.co";

const LOGIN: &str =
    "run `hf auth login`, or set HF_TOKEN to a token of huggingface.co/settings/tokens";

/// A model repository at huggingface.co, or where `HF_ENDPOINT` says.
pub struct HuggingFace {
    account: Account,
    locator: Locator,
    endpoint: Url,
    reader: Client,
    writer: HFClientSync,
    retry: Retry,
    watch: Arc<dyn Watch>,
}

impl HuggingFace {
    pub fn new(locator: &Locator, watch: Arc<dyn Watch>) -> Result<Self> {
        let account = Account {
            hub: Host::HuggingFace.name(),
            address: "HF_ENDPOINT where it is set",
            repo: locator.repo(),
            login: LOGIN,
            token: token(),
        };
        let endpoint = env::var("HF_ENDPOINT").ok().filter(|url| !url.is_empty());
        let endpoint = endpoint.as_deref().unwrap_or(ENDPOINT);
        let parsed = Url::parse(endpoint)
            .ok()
            .filter(|url| ["http", "https"].contains(&url.scheme()))
            .ok_or_else(|| Error::invalid("HF_ENDPOINT", "holds no http or https address"))?;
        let reader = http::client(&account)?;
        let mut writer = HFClient::builder()
            .endpoint(endpoint)
            .client(http::asynchronous(&account)?)
            // Attempts are counted here, where `Retry-After` is heard.
            .retry_max_attempts(0);
        if let Some(token) = &account.token {
            writer = writer.token(token.secret());
        }
        let writer = writer.build_sync().map_err(|e| account.error(e))?;
        Ok(Self {
            account,
            locator: locator.clone(),
            endpoint: parsed,
            reader,
            writer,
            retry: Retry::new(watch.clone()),
            watch,
        })
    }

    /// A GET below the endpoint; each part of the path is one segment, whatever it holds.
    fn get<'a>(&self, path: impl IntoIterator<Item = &'a str>) -> RequestBuilder {
        let mut url = self.endpoint.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        let request = self.reader.get(url);
        match &self.account.token {
            Some(token) => request.bearer_auth(token.secret()),
            None => request,
        }
    }

    fn look(&self) -> Result<Option<Snapshot>, Failure> {
        let id = &self.locator.id;
        let path = [
            "api",
            "models",
            &id.owner,
            &id.name,
            "revision",
            self.locator.revision(),
        ];
        let request = self.get(path).query(&[("blobs", "true")]);
        let answer = request
            .send()
            .map_err(|e| http::unreachable(&self.account, e))?;
        if answer.status().as_u16() == 404 {
            let code = answer.headers().get("x-error-code");
            return match code.and_then(|code| code.to_str().ok()) {
                Some("RevisionNotFound") => Err(self
                    .account
                    .error(format!(
                        "there is no revision `{}`",
                        self.locator.revision()
                    ))
                    .hint("check the name; branches are made on the hub")
                    .into()),
                _ => Ok(None),
            };
        }
        let info: Info = http::json(&self.account, http::check(&self.account, answer)?)?;
        let files = info.siblings.into_iter().map(|sibling| {
            let content = match (sibling.lfs, sibling.blob_id) {
                (Some(lfs), _) => ContentId::Sha256(lfs.sha256),
                (None, Some(blob)) => ContentId::GitBlob(blob),
                (None, None) => return None,
            };
            Some(RemoteFile {
                path: sibling.rfilename,
                size_bytes: sibling.size?,
                content,
            })
        });
        let files: Option<Vec<RemoteFile>> = files.collect();
        match (info.sha, files) {
            (Some(commit), Some(files)) => Ok(Some(Snapshot { commit, files })),
            _ => Err(self
                .account
                .error("Hugging Face lists files without their sizes and hashes")
                .into()),
        }
    }

    fn send(&self, commit: &Commit<'_>) -> Result<String, Failure> {
        let operations = commit
            .files
            .iter()
            .map(|file| CommitOperation::add_file(&file.path, &file.source))
            .chain(commit.removed.iter().map(CommitOperation::delete))
            .collect();
        let id = &self.locator.id;
        let done = self
            .writer
            .model(&id.owner, &id.name)
            .create_commit()
            .operations(operations)
            .commit_message(commit.title)
            .revision(self.locator.revision())
            .create_pr(commit.pull_request)
            .maybe_parent_commit(commit.parent)
            .progress(Progress::new(Sent::new(self.watch.clone())))
            .send()
            .map_err(|e| self.failure(e, commit.files))?;
        // The hub says where the pull request is, and `hf-hub` 1.0 reads it under another name.
        let address = if commit.pull_request {
            done.pr_url
                .unwrap_or_else(|| format!("{}/discussions", self.address()))
        } else {
            done.commit_url.unwrap_or_else(|| self.address())
        };
        Ok(self.account.shown(&address))
    }

    /// Where people see the repository.
    fn address(&self) -> String {
        let endpoint = self.endpoint.as_str().trim_end_matches('/');
        format!("{endpoint}/{}", self.locator.id.repo())
    }

    fn failure(&self, error: HFError, files: &[Upload]) -> Failure {
        let (context, after) = match error {
            HFError::RateLimited {
                retry_after,
                context,
            } => (context, retry_after),
            HFError::Http { context }
            | HFError::AuthRequired { context }
            | HFError::Forbidden { context }
            | HFError::Conflict { context }
            | HFError::RepoNotFound {
                context: Some(context),
                ..
            } => (context, None),
            HFError::Request { source, .. } => return http::unreachable(&self.account, source),
            // It has made its own attempts.
            HFError::Xet { source, .. } => {
                let causes = http::causes(source.as_ref());
                return self
                    .account
                    .error(format!("sending large files failed: {causes}"))
                    .hint("run the same command again: what was sent is not sent again")
                    .into();
            }
            other => return self.account.error(http::causes(&other)).into(),
        };
        let said = context.server_message.as_deref().unwrap_or(&context.body);
        self.account
            .refused(context.status.as_u16(), said, after, files)
    }
}

impl Hub for HuggingFace {
    fn snapshot(&self) -> Result<Option<Snapshot>> {
        self.retry.run(|| self.look())
    }

    fn create(&self, private: bool) -> Result<()> {
        self.retry.run(|| {
            self.writer
                .create_repository()
                .repo_id(&self.locator.id.repo())
                .repo_type(RepoTypeModel)
                .private(private)
                .exist_ok(true)
                .send()
                .map(drop)
                .map_err(|e| self.failure(e, &[]))
        })
    }

    fn commit(&self, commit: &Commit<'_>) -> Result<String> {
        let mut first = true;
        self.retry.run(|| {
            if !std::mem::take(&mut first) && commit.has_landed(self.look()?.as_ref())? {
                return Ok(self.address());
            }
            match self.send(commit) {
                // A second pull request is no repetition, and the first is not on the branch to be seen.
                Err(Failure::Broken(error)) if commit.pull_request => {
                    Err(Failure::Final(error.hint(format!(
                        "see whether the pull request is there before running the same command again: {}/discussions",
                        self.address()
                    ))))
                }
                done => done,
            }
        })
    }

    fn fetch(&self, commit: &str, file: &RemoteFile, to: &Path) -> Result<()> {
        let id = &self.locator.id;
        let path = || {
            [&id.owner, &id.name, "resolve", commit]
                .into_iter()
                .chain(file.path.split('/'))
        };
        http::download(
            &self.account,
            &self.retry,
            self.watch.as_ref(),
            || self.get(path()),
            file,
            to,
        )
    }
}

/// What `GET /api/models/…/revision/…?blobs=true` answers.
#[derive(Deserialize)]
struct Info {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
}

/// The token that `hf` would use: `HF_TOKEN`, the file `HF_TOKEN_PATH`, or that of `hf auth login`.
fn token() -> Option<Token> {
    if env::var("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_ok_and(|value| !value.is_empty()) {
        return None;
    }
    let in_file = || {
        let path = path_variable("HF_TOKEN_PATH")
            .or_else(|| Some(hub_cache::hugging_face_home()?.join("token")))?;
        Token::new(&fs::read_to_string(path).ok()?)
    };
    env::var("HF_TOKEN")
        .ok()
        .and_then(|text| Token::new(&text))
        .or_else(in_file)
}

/// Tells of an upload what is new since the last time.
struct Sent {
    watch: Arc<dyn Watch>,
    bytes: AtomicU64,
}

impl Sent {
    fn new(watch: Arc<dyn Watch>) -> Self {
        Self {
            watch,
            bytes: AtomicU64::new(0),
        }
    }
}

impl ProgressHandler for Sent {
    fn on_progress(&self, event: &ProgressEvent) {
        if let ProgressEvent::Upload(UploadEvent::Progress {
            bytes_completed, ..
        }) = event
        {
            let before = self.bytes.fetch_max(*bytes_completed, Ordering::Relaxed);
            self.watch.bytes(bytes_completed.saturating_sub(before));
        }
    }
}
