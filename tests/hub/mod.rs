//! A hub on this machine: it speaks what Hugging Face and ModelScope document, keeps what it is sent, writes down what
//! it is asked, and fails where a test says so.
//!
//! One connection serves one request, so that a cut connection is a cut request.
#![allow(dead_code)]

pub mod hugging_face;
pub mod local;
pub mod modelscope;

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

/// The one token that hubs here know. It may write everywhere. All secrets here end alike.
pub const TOKEN: &str = "hf_0123456789abcdefSECRET";

/// What was asked.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub method: String,
    /// Percent-encoding is kept: `feature%2Fx` is one segment.
    pub path: String,
    /// Without the question mark.
    pub query: String,
    /// Names in lower case.
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
    /// The status of the answer; 0 where the connection was cut before it.
    pub answered: u16,
}

impl Request {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// Whether it carries [`TOKEN`] as its bearer.
    pub fn is_authorized(&self) -> bool {
        self.header("authorization") == format!("Bearer {TOKEN}")
    }

    /// The path's segments.
    pub fn segments(&self) -> Vec<&str> {
        self.path.trim_matches('/').split('/').collect()
    }
}

#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(status: u16, value: &Value) -> Self {
        Self::bytes(status, value.to_string().into_bytes()).with("Content-Type", "application/json")
    }

    pub fn bytes(status: u16, body: Vec<u8>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body,
        }
    }

    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// The part that the request's `Range` asks for, where it asks for one.
    #[must_use]
    pub fn ranged(self, request: &Request) -> Self {
        let range = request.header("range").strip_prefix("bytes=");
        let Some((from, to)) = range.and_then(|range| range.split_once('-')) else {
            return self.with("Accept-Ranges", "bytes");
        };
        let whole = self.body.len();
        let from: usize = from.parse().unwrap();
        let to = to
            .parse()
            .map_or(whole, |last: usize| (last + 1).min(whole));
        if from >= to {
            return Self::bytes(416, Vec::new()).with("Content-Range", format!("bytes */{whole}"));
        }
        let mut part = self.with("Content-Range", format!("bytes {from}-{}/{whole}", to - 1));
        part.status = 206;
        part.body = part.body[from..to].to_vec();
        part
    }
}

/// What happens instead of, or to, an answer.
#[derive(Clone, Debug)]
pub enum Failure {
    /// This answer, and the request has no effect.
    Answer(Answer),
    /// The connection ends after so many bytes of the request's body; the request has no effect.
    CutRequest(usize),
    /// The request has its effect; the connection ends after so many bytes of the answer's body.
    CutAnswer(usize),
    /// The request has its effect; this is done to its answer.
    Change(fn(&mut Answer)),
    /// Someone else does this first; then the request is answered as usual.
    Meanwhile(fn(&mut Store)),
}

impl Failure {
    /// An error as both hubs write it.
    pub fn status(status: u16, message: &str) -> Self {
        let body = serde_json::json!({ "error": message, "Message": message, "Code": status });
        Self::Answer(Answer::json(status, &body))
    }
}

struct Planned {
    method: &'static str,
    path: String,
    failure: Failure,
}

/// A commit of a repository, with all of the files after it.
#[derive(Clone, Debug, Default)]
pub struct Commit {
    pub id: String,
    pub title: String,
    pub files: BTreeMap<String, Vec<u8>>,
}

/// The branch that a hub makes first is called differently by each.
#[derive(Clone, Debug, Default)]
pub struct Repo {
    pub private: bool,
    /// By branch, oldest first. Pull requests are branches `refs/pr/N`.
    pub branches: BTreeMap<String, Vec<Commit>>,
}

impl Repo {
    /// A branch's name, or a commit's id.
    pub fn commit(&self, revision: &str) -> Option<&Commit> {
        let all = || self.branches.values().flatten();
        match self.branches.get(revision) {
            Some(commits) => commits.last(),
            None => all().find(|commit| commit.id == revision),
        }
    }

    /// Adds a commit with `changed` over the files of the one before it, and returns its id.
    pub fn push(
        &mut self,
        branch: &str,
        title: &str,
        changed: BTreeMap<String, Vec<u8>>,
    ) -> String {
        let count = self.branches.values().map(Vec::len).sum::<usize>();
        let commits = self.branches.entry(branch.to_owned()).or_default();
        let mut files = commits
            .last()
            .map(|last| last.files.clone())
            .unwrap_or_default();
        files.extend(changed);
        // As long as git's.
        let id = sha256(format!("{branch} {title} {count}").as_bytes())[..40].to_owned();
        commits.push(Commit {
            id: id.clone(),
            title: title.to_owned(),
            files,
        });
        id
    }
}

/// What a hub keeps.
#[derive(Default)]
pub struct Store {
    /// By `owner/name`.
    pub repos: BTreeMap<String, Repo>,
    /// Large files that were sent, by SHA-256.
    pub blobs: HashMap<String, Vec<u8>>,
    /// Chunks of large files, by Xet's hash.
    pub xorbs: HashMap<String, Vec<u8>>,
    /// The server's own address, for answers that hold one.
    pub url: String,
}

impl Store {
    /// The server by another name: hubs keep large files on other hosts, and clients show those no token.
    pub fn storage(&self) -> String {
        self.url.replace("127.0.0.1", "localhost")
    }
}

#[derive(Default)]
struct State {
    store: Store,
    requests: Vec<Request>,
    planned: Vec<Planned>,
}

/// Answers on a port of its own until the test's process ends.
pub struct Server {
    state: Arc<Mutex<State>>,
    address: SocketAddr,
}

/// What each hub documents; `None` where a path is not its own.
type Contract = fn(&Request, &mut Store) -> Option<Answer>;
const CONTRACTS: &[Contract] = &[hugging_face::answer, modelscope::answer];

impl Server {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let server = Self {
            state: state.clone(),
            address,
        };
        server.store(|store| store.url = format!("http://{address}"));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = state.clone();
                // A client that goes away is no failure of the server's.
                thread::spawn(move || serve(&stream, &state));
            }
        });
        server
    }

    /// `http://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Looks at, or changes, what the hub keeps.
    pub fn store<T>(&self, look: impl FnOnce(&mut Store) -> T) -> T {
        look(&mut self.state().store)
    }

    /// Plans a failure for the next request with this method whose path holds `path`; each is used once, in order.
    pub fn fail(&self, method: &'static str, path: &str, failure: Failure) {
        self.state().planned.push(Planned {
            method,
            path: path.to_owned(),
            failure,
        });
    }

    /// Asserts that every planned failure has happened.
    pub fn all_failed(&self) {
        let state = self.state();
        let left: Vec<_> = state.planned.iter().map(|p| (p.method, &p.path)).collect();
        assert!(
            left.is_empty(),
            "planned and not met: {left:?}; asked: {:?}",
            log(&state.requests)
        );
    }

    /// What was asked since the start, or since [`Self::forget`].
    pub fn requests(&self) -> Vec<Request> {
        self.state().requests.clone()
    }

    /// `METHOD path` of every request.
    pub fn log(&self) -> Vec<String> {
        log(&self.state().requests)
    }

    pub fn forget(&self) {
        self.state().requests.clear();
    }
}

/// A machine with a cache and a login of its own, whose hubs are a server here.
pub struct Machine {
    /// Its home folder.
    pub home: TempDir,
    url: String,
    variables: BTreeMap<&'static str, String>,
}

impl Machine {
    /// Logged in by [`TOKEN`] in the environment.
    pub fn new(server: &Server) -> Self {
        let variables = ["HF_TOKEN", "MODELSCOPE_API_TOKEN"];
        Self {
            home: TempDir::new().unwrap(),
            url: server.url(),
            variables: variables.map(|name| (name, TOKEN.to_owned())).into(),
        }
    }

    #[must_use]
    pub fn with(mut self, variable: &'static str, value: &str) -> Self {
        self.variables.insert(variable, value.to_owned());
        self
    }

    #[must_use]
    pub fn without(mut self, variable: &'static str) -> Self {
        self.variables.remove(variable);
        self
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.home.path().join(path)
    }

    /// Sets the environment of a command: this one alone, whatever that of the test is.
    pub fn environment(&self, command: &mut Command) {
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.home.path())
            .env("HF_HOME", self.at("hf"))
            .env("MODELSCOPE_CACHE", self.at("ms"))
            .env("HF_ENDPOINT", &self.url)
            .env("MODELSCOPE_ENDPOINT", &self.url)
            .env("OSCAR_RETRY_DELAY_MS", "2")
            .env("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
            .envs(&self.variables);
    }

    /// Runs `oscar`. It shows no token, whatever happens.
    pub fn oscar(&self, arguments: &[&str]) -> Ran {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oscar"));
        self.environment(&mut command);
        let output = command
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let ran = Ran {
            code: output.status.code(),
            out: text(output.stdout),
            err: text(output.stderr),
        };
        for shown in [&ran.out, &ran.err] {
            assert!(
                !shown.contains("SECRET"),
                "{arguments:?} shows a token: {shown}"
            );
            assert!(!shown.contains('\u{1b}'), "{arguments:?}: {shown:?}");
            assert!(!shown.contains("panicked"), "{arguments:?}: {shown}");
        }
        ran
    }

    /// Runs what must succeed; its standard output.
    pub fn fine(&self, arguments: &[&str]) -> String {
        let ran = self.oscar(arguments);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {}", ran.err);
        ran.out
    }

    /// Runs what must be refused with exit code 2 and nothing on standard output; the message.
    pub fn refused(&self, arguments: &[&str]) -> String {
        let ran = self.oscar(arguments);
        assert_eq!(ran.code, Some(2), "{arguments:?}: {} {}", ran.out, ran.err);
        assert_eq!(ran.out, "", "{arguments:?}");
        let errors = ran.err.lines().filter(|line| line.starts_with("error: "));
        assert_eq!(errors.count(), 1, "{}", ran.err);
        ran.err
    }
}

/// How a command ended.
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

fn log(requests: &[Request]) -> Vec<String> {
    requests
        .iter()
        .map(|r| format!("{} {} {}", r.answered, r.method, r.path))
        .collect()
}

/// One request. `None` where the connection ended before its time, by either side.
fn serve(stream: &TcpStream, state: &Mutex<State>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut request = head(&mut reader)?;
    let failure = {
        let mut state = state.lock().unwrap();
        let met = state
            .planned
            .iter()
            .position(|p| p.method == request.method && request.path.contains(&p.path));
        met.map(|met| state.planned.remove(met).failure)
    };
    if let Some(Failure::CutRequest(bytes)) = failure {
        let _ = reader.take(bytes as u64).read_to_end(&mut request.body);
        state.lock().unwrap().requests.push(request);
        let _ = stream.shutdown(Shutdown::Both);
        return None;
    }
    if request
        .header("expect")
        .eq_ignore_ascii_case("100-continue")
    {
        (&*stream)
            .write_all(b"HTTP/1.1 100 Continue\r\n\r\n")
            .ok()?;
    }
    request.body = body(&mut reader, &request)?;
    let mut answer = if let Some(Failure::Answer(answer)) = &failure {
        answer.clone()
    } else {
        let store = &mut state.lock().unwrap().store;
        if let Some(Failure::Meanwhile(happens)) = failure {
            happens(store);
        }
        CONTRACTS
            .iter()
            .find_map(|contract| contract(&request, store))
            .unwrap_or_else(|| Answer::bytes(404, b"no such page".to_vec()))
    };
    if let Some(Failure::Change(change)) = failure {
        change(&mut answer);
    }
    request.answered = answer.status;
    let is_head = request.method == "HEAD";
    state.lock().unwrap().requests.push(request);
    let mut head = format!("HTTP/1.1 {} Answer\r\nConnection: close\r\n", answer.status);
    if !answer
        .headers
        .iter()
        .any(|(name, _)| name == "Content-Length")
    {
        let length = answer.body.len().to_string();
        answer = answer.with("Content-Length", length);
    }
    for (name, value) in &answer.headers {
        head.extend([name, ": ", value, "\r\n"]);
    }
    let mut out = stream;
    out.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    let sent = match failure {
        Some(Failure::CutAnswer(bytes)) => bytes.min(answer.body.len()),
        _ if is_head => 0,
        _ => answer.body.len(),
    };
    out.write_all(&answer.body[..sent]).ok()?;
    let _ = stream.shutdown(Shutdown::Both);
    Some(())
}

fn head(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    let mut next = || {
        line.clear();
        reader.read_line(&mut line).ok()?;
        Some(line.trim_end().to_owned())
    };
    let first = next()?;
    let mut words = first.split(' ');
    let method = words.next()?.to_owned();
    let target = words.next()?;
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request {
        method,
        path: path.to_owned(),
        query: query.to_owned(),
        ..Request::default()
    };
    loop {
        let line = next()?;
        let Some((name, value)) = line.split_once(':') else {
            return Some(request);
        };
        request
            .headers
            .insert(name.to_lowercase(), value.trim().to_owned());
    }
}

fn body(reader: &mut impl BufRead, request: &Request) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    if !request
        .header("transfer-encoding")
        .eq_ignore_ascii_case("chunked")
    {
        let length = request.header("content-length").parse().unwrap_or(0);
        reader.take(length).read_to_end(&mut body).ok()?;
        return (body.len() as u64 == length).then_some(body);
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let length = u64::from_str_radix(line.trim(), 16).ok()?;
        let before = body.len() as u64;
        reader.take(length).read_to_end(&mut body).ok()?;
        // The line's end after the chunk.
        reader.read_line(&mut String::new()).ok()?;
        if length == 0 {
            return Some(body);
        }
        if body.len() as u64 != before + length {
            return None;
        }
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    oscar_kv::files::hex(bytes)
}
