//! One request of ModelScope's API a method. Each is one attempt; repeating them is up to the caller.

use std::collections::{BTreeMap, HashSet};
use std::env;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use reqwest::Url;
use reqwest::blocking::{Body, Client, RequestBuilder};
use reqwest::header::{AUTHORIZATION, COOKIE, HeaderValue, RETRY_AFTER};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::account::Account;
use super::super::http::{client, unreachable};
use super::super::retry::{Failure, retry_after};
use super::super::{ContentId, Host, Locator, RemoteFile, Snapshot, Upload, Watch};
use super::login;
use crate::{Error, Result, interrupt};

const ENDPOINT: &str = "https://www.modelscope.cn";
/// To keep a file that was sent.
const STORE_TIMEOUT: Duration = Duration::from_mins(1);
/// A commit writes to a git repository before it answers.
const COMMIT_TIMEOUT: Duration = Duration::from_mins(3);
/// Slower than this, an upload is taken for one that stands still.
const SLOWEST_BYTES_PER_S: u64 = 32 << 10;

/// The service cuts a list of files off here, and does not say so.
const LIST_LIMIT: usize = 3000;
/// No answer but a file's is longer.
const ANSWER_LIMIT_BYTES: u64 = 64 << 20;

/// Codes of the service for a name that is taken, on its Chinese and its international site.
const EXISTS: [i64; 2] = [10_010_101_001, 10_010_202_004];
/// Its code for a branch that it cannot write to at this moment: it moves, or was written to too often.
const BUSY: i64 = 10_030_000_001;

/// One repository of models on one ModelScope.
pub(super) struct Api {
    pub account: Account,
    client: Client,
    endpoint: Url,
    owner: String,
    name: String,
    watch: Arc<dyn Watch>,
}

/// What a request was answered, as far as it can be told without knowing what was asked.
struct Answer {
    /// The status of HTTP, or where that is 200, the `Code` inside.
    status: i64,
    body: Value,
    after: Option<Duration>,
}

impl Answer {
    /// The service writes its fields with capitals; what stands before it does not.
    fn field(&self, capital: &str) -> Option<&Value> {
        let object = self.body.as_object()?;
        let found = object.get(capital);
        found.or_else(|| object.get(&capital.to_lowercase()))
    }

    fn code(&self) -> Option<i64> {
        let code = self.field("Code")?;
        code.as_i64().or_else(|| code.as_str()?.parse().ok())
    }

    fn message(&self) -> &str {
        let text = self.body.as_str();
        let message = ["Message", "Error"]
            .iter()
            .find_map(|name| self.field(name)?.as_str());
        message.or(text).unwrap_or_default()
    }
}

/// Where to send a large file.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Target {
    href: String,
    header: Option<BTreeMap<String, String>>,
}

/// What a commit does to one file.
#[derive(Debug, Serialize)]
pub(super) struct Action<'a> {
    #[serde(rename = "action")]
    verb: &'static str,
    path: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    /// Of a large file, which was sent before.
    sha256: &'a str,
    /// Of a small file, in Base64.
    content: String,
    encoding: &'static str,
}

impl<'a> Action<'a> {
    /// `create` is also the word for writing over a file.
    pub fn large(file: &'a Upload) -> Self {
        Self {
            verb: "create",
            path: &file.path,
            kind: "lfs",
            size: file.size_bytes,
            sha256: &file.sha256,
            content: String::new(),
            encoding: "",
        }
    }

    pub fn small(path: &'a str, content: &[u8]) -> Self {
        Self {
            verb: "create",
            path,
            kind: "normal",
            size: content.len() as u64,
            sha256: "",
            content: BASE64_STANDARD.encode(content),
            encoding: "base64",
        }
    }

    pub fn delete(path: &'a str) -> Self {
        Self {
            verb: "delete",
            path,
            kind: "normal",
            size: 0,
            sha256: "",
            content: String::new(),
            encoding: "",
        }
    }
}

impl Api {
    pub fn new(locator: &Locator, watch: Arc<dyn Watch>) -> Result<Self> {
        let account = Account {
            hub: locator.host.name(),
            address: "MODELSCOPE_ENDPOINT where it is set",
            repo: locator.repo(),
            login: login::HOW,
            token: login::token(),
        };
        Ok(Self {
            client: client(&account)?,
            account,
            endpoint: endpoint()?,
            owner: locator.id.owner.clone(),
            name: locator.id.name.clone(),
            watch,
        })
    }

    /// The page on which people see the repository's files.
    pub fn page(&self) -> String {
        self.url(&["models", &self.owner, &self.name, "files"])
            .into()
    }

    /// The branch's last commit, empty where the branch has none; `None` where there is no such repository.
    pub fn head(&self, revision: &str) -> Result<Option<String>, Failure> {
        #[derive(Deserialize)]
        struct Commits {
            #[serde(rename = "Commit", default)]
            commits: Option<Vec<Commit>>,
        }
        #[derive(Deserialize)]
        struct Commit {
            #[serde(rename = "Id")]
            id: String,
        }
        let mut url = self.model(&["commits"]);
        url.query_pairs_mut().extend_pairs([
            ("Ref", revision),
            ("PageNumber", "1"),
            ("PageSize", "1"),
        ]);
        let answer = self.ask(self.client.get(url))?;
        if answer.status == 404 {
            return self.empty_or_none(revision);
        }
        let data: Commits = self.data(&answer, &[])?;
        let last = data.commits.unwrap_or_default().into_iter().next();
        Ok(Some(last.map_or_else(String::new, |last| last.id)))
    }

    /// What it means that a branch has no commits.
    fn empty_or_none(&self, revision: &str) -> Result<Option<String>, Failure> {
        let answer = self.ask(self.client.get(self.model(&[])))?;
        if answer.status == 404 {
            return Ok(None);
        }
        self.data::<Value>(&answer, &[])?;
        if revision == Host::ModelScope.default_branch() {
            return Ok(Some(String::new()));
        }
        let problem = format!("there is no revision `{revision}`");
        let error = self.account.error(problem);
        Err(error
            .hint("check the name; branches are made on the hub")
            .into())
    }

    /// The repository at the end of a branch; `None` where there is no such repository.
    pub fn snapshot(&self, revision: &str) -> Result<Option<Snapshot>, Failure> {
        let Some(commit) = self.head(revision)? else {
            return Ok(None);
        };
        let files = match commit.as_str() {
            "" => Vec::new(),
            commit => self.list(commit)?,
        };
        Ok(Some(Snapshot { commit, files }))
    }

    fn list(&self, commit: &str) -> Result<Vec<RemoteFile>, Failure> {
        let mut files = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            let mut items = self.items(commit, &folder, true)?;
            if items.len() >= LIST_LIMIT {
                items = self.items(commit, &folder, false)?;
                if items.len() >= LIST_LIMIT {
                    let problem =
                        format!("folder `/{folder}` holds more files than ModelScope lists");
                    return Err(self
                        .account
                        .error(problem)
                        .hint("spread them over folders")
                        .into());
                }
                let inner = items.iter().filter(|item| item.is_folder());
                folders.extend(inner.map(|item| item.path.clone()));
            }
            let there = items.into_iter().filter(|item| !item.is_folder());
            files.extend(there.map(|item| RemoteFile {
                path: item.path,
                size_bytes: item.size,
                content: ContentId::Sha256(item.sha256.to_ascii_lowercase()),
            }));
        }
        Ok(files)
    }

    fn items(&self, commit: &str, folder: &str, recursive: bool) -> Result<Vec<Item>, Failure> {
        #[derive(Deserialize)]
        struct List {
            #[serde(rename = "Files")]
            files: Option<Vec<Item>>,
        }
        let mut url = self.model(&["repo", "files"]);
        let recursive = if recursive { "True" } else { "False" };
        url.query_pairs_mut()
            .extend_pairs([("Revision", commit), ("Recursive", recursive)])
            .extend_pairs(Some(("Root", folder)).filter(|_| !folder.is_empty()));
        let answer = self.ask(self.client.get(url))?;
        let list: List = self.data(&answer, &[])?;
        // A revision that is not there is answered with 200 and no list.
        list.files.ok_or_else(|| {
            let problem = format!("ModelScope lists no files at commit `{commit}`");
            self.account
                .error(problem)
                .hint("run the same command again")
                .into()
        })
    }

    /// Makes the repository, where there is none.
    pub fn create(&self, private: bool) -> Result<(), Failure> {
        let body = json!({
            "Path": self.owner,
            "Name": self.name,
            "Visibility": if private { 1 } else { 5 },
            // The service wants to be told one; what the card states is what people see.
            "License": "Other",
        });
        let url = self.url(&["api", "v1", "models"]);
        let answer = self.ask(self.client.post(url).json(&body))?;
        if answer.status == 409 || answer.code().is_some_and(|code| EXISTS.contains(&code)) {
            return Ok(());
        }
        self.data(&answer, &[]).map(|_: Value| ())
    }

    /// Where to send those of `files` that the service does not hold, by SHA-256.
    pub fn missing(&self, files: &[Upload]) -> Result<BTreeMap<String, Target>, Failure> {
        #[derive(Deserialize)]
        struct Batch {
            objects: Vec<Object>,
        }
        #[derive(Deserialize)]
        struct Object {
            oid: String,
            actions: Option<Actions>,
            error: Option<Value>,
        }
        #[derive(Deserialize)]
        struct Actions {
            upload: Option<Target>,
        }
        let mut seen = HashSet::new();
        let objects: Vec<_> = files
            .iter()
            .filter(|file| seen.insert(&file.sha256))
            .map(|file| json!({ "oid": file.sha256, "size": file.size_bytes }))
            .collect();
        let url = self.repo(&["info", "lfs", "objects", "batch"]);
        let body = json!({ "operation": "upload", "objects": objects });
        let answer = self.ask(self.client.post(url).json(&body))?;
        let batch: Batch = self.data(&answer, files)?;
        let mut targets = BTreeMap::new();
        for object in batch.objects {
            if let Some(error) = object.error {
                let file = files.iter().find(|file| file.sha256 == object.oid);
                let path = file.map_or(object.oid.as_str(), |file| &file.path);
                let said = error
                    .get("message")
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                let problem = format!("ModelScope refuses `{path}`: {said}");
                let error = self.account.error(problem);
                return Err(error
                    .hint("publish without it, or see to it on the site")
                    .into());
            }
            if let Some(target) = object.actions.and_then(|actions| actions.upload) {
                targets.insert(object.oid, target);
            }
        }
        Ok(targets)
    }

    /// Sends a large file.
    pub fn send(&self, file: &Upload, target: &Target) -> Result<(), Failure> {
        let source = File::open(&file.source).map_err(Error::io("read", &file.source))?;
        let body = Body::sized(
            Sending {
                source,
                watch: self.watch.clone(),
            },
            file.size_bytes,
        );
        let url = self.endpoint.join(&target.href).map_err(|_| {
            self.account
                .error(format!("ModelScope names no address for `{}`", file.path))
        })?;
        let is_safe = url.scheme() == "https" || url.origin() == self.endpoint.origin();
        let mut request = self
            .client
            .put(url)
            .timeout(STORE_TIMEOUT + Duration::from_secs(file.size_bytes / SLOWEST_BYTES_PER_S))
            .body(body);
        for (name, value) in target.header.iter().flatten() {
            request = request.header(name, value);
        }
        // The service's storage wants the token, unless it is told what else to want.
        if is_safe && target.header.is_none() {
            request = self.authorized(request);
        }
        let answer = self.answer(request)?;
        match answer.status {
            200..300 => Ok(()),
            _ => Err(self.refusal(&answer, std::slice::from_ref(file))),
        }
    }

    /// Adds a commit to a branch.
    pub fn commit(
        &self,
        revision: &str,
        title: &str,
        actions: &[Action],
        files: &[Upload],
    ) -> Result<(), Failure> {
        let branch: Vec<_> = ["commit"].into_iter().chain(revision.split('/')).collect();
        let url = self.repo(&branch);
        let body = json!({ "commit_message": title, "actions": actions });
        let request = self.client.post(url).timeout(COMMIT_TIMEOUT).json(&body);
        let mut answer = self.ask(request)?;
        if answer.code() == Some(BUSY) {
            answer.status = 503;
        }
        self.data(&answer, files).map(|_: Value| ())
    }

    /// Asks for the bytes of a file.
    pub fn file(&self, commit: &str, path: &str) -> RequestBuilder {
        let mut url = self.model(&["repo"]);
        url.query_pairs_mut()
            .extend_pairs([("Revision", commit), ("FilePath", path)]);
        self.authorized(self.client.get(url))
    }

    fn url(&self, segments: &[&str]) -> Url {
        let mut url = self.endpoint.clone();
        // An endpoint is `http` or `https`, and such addresses have segments.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    fn model(&self, segments: &[&str]) -> Url {
        self.url(&[&["api", "v1", "models", &self.owner, &self.name], segments].concat())
    }

    fn repo(&self, segments: &[&str]) -> Url {
        let repo = ["api", "v1", "repos", "models", &self.owner, &self.name];
        self.url(&[&repo, segments].concat())
    }

    /// Newer parts of the service read the header, older ones the cookie.
    fn authorized(&self, request: RequestBuilder) -> RequestBuilder {
        let Some(token) = &self.account.token else {
            return request;
        };
        let (header, cookie) = (
            format!("Bearer {}", token.secret()),
            format!("{}={}", login::COOKIE, token.secret()),
        );
        [(AUTHORIZATION, header), (COOKIE, cookie)]
            .into_iter()
            .fold(request, |request, (name, value)| {
                let Ok(mut value) = HeaderValue::try_from(value) else {
                    return request;
                };
                value.set_sensitive(true);
                request.header(name, value)
            })
    }

    fn ask(&self, request: RequestBuilder) -> Result<Answer, Failure> {
        self.answer(self.authorized(request))
    }

    fn answer(&self, request: RequestBuilder) -> Result<Answer, Failure> {
        let response = request.send().map_err(|e| unreachable(&self.account, e))?;
        let status = i64::from(response.status().as_u16());
        let after = response.headers().get(RETRY_AFTER);
        let after = after.and_then(|after| retry_after(after.to_str().ok()?));
        let mut text = Vec::new();
        response
            .take(ANSWER_LIMIT_BYTES)
            .read_to_end(&mut text)
            .map_err(|e| self.account.unreachable(e))?;
        let body = serde_json::from_slice(&text)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&text).into_owned()));
        let mut answer = Answer {
            status,
            body,
            after,
        };
        if status == 200 {
            let failed = answer.field("Success") == Some(&Value::Bool(false));
            answer.status = match answer.code() {
                Some(code) => code,
                None if failed => 0,
                None => status,
            };
        }
        Ok(answer)
    }

    /// What the service answered, taken out of its envelope.
    fn data<T: for<'de> Deserialize<'de>>(
        &self,
        answer: &Answer,
        files: &[Upload],
    ) -> Result<T, Failure> {
        if !(200..300).contains(&answer.status) {
            return Err(self.refusal(answer, files));
        }
        if !answer.body.is_object() {
            return Err(self.unknown("it is no JSON"));
        }
        let data = answer.field("Data").filter(|data| !data.is_null());
        let data = data.unwrap_or(&answer.body).clone();
        serde_json::from_value(data).map_err(|e| self.unknown(&e.to_string()))
    }

    fn unknown(&self, problem: &str) -> Failure {
        self.account
            .error(format!("ModelScope answers something unknown: {problem}"))
            .hint("check MODELSCOPE_ENDPOINT, and that no proxy answers in its place")
            .into()
    }

    fn refusal(&self, answer: &Answer, files: &[Upload]) -> Failure {
        let said = answer.message();
        match u16::try_from(answer.status) {
            Ok(status @ 300..600) => self.account.refused(status, said, answer.after, files),
            _ => self
                .account
                .error(format!(
                    "ModelScope refuses this: {said} (code {})",
                    answer.status
                ))
                .hint("run the same command later; what was sent already is not sent again")
                .into(),
        }
    }
}

/// A file or folder as the service lists it.
#[derive(Deserialize)]
struct Item {
    #[serde(rename = "Path")]
    path: String,
    #[serde(rename = "Type", default)]
    kind: String,
    #[serde(rename = "Size", default)]
    size: u64,
    #[serde(rename = "Sha256", default)]
    sha256: String,
}

impl Item {
    fn is_folder(&self) -> bool {
        self.kind == "tree"
    }
}

/// A file on its way: tells how far it is, and ends at Ctrl-C.
struct Sending {
    source: File,
    watch: Arc<dyn Watch>,
}

impl Read for Sending {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        // Not the kind `Interrupted`, which readers try again.
        interrupt::check().map_err(std::io::Error::other)?;
        let read = self.source.read(buffer)?;
        self.watch.bytes(read as u64);
        Ok(read)
    }
}

/// `MODELSCOPE_ENDPOINT`, with or without `https://`.
fn endpoint() -> Result<Url> {
    const VARIABLE: &str = "MODELSCOPE_ENDPOINT";
    let named = env::var(VARIABLE).unwrap_or_default();
    let named = match named.trim() {
        "" => ENDPOINT.to_owned(),
        bare if !bare.contains("://") => format!("https://{bare}"),
        whole => whole.to_owned(),
    };
    let url = Url::parse(&named).ok();
    url.filter(|url| ["http", "https"].contains(&url.scheme()))
        .ok_or_else(|| {
            Error::invalid(VARIABLE, "is no web address").hint(format!(
                "set it to an address such as {ENDPOINT}, or unset it"
            ))
        })
}
