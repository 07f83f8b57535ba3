//! Requests whose failures are told apart, and files that are gone on with where a connection broke.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;

use reqwest::StatusCode;
use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::header::{CONTENT_RANGE, RANGE, RETRY_AFTER};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::account::Account;
use super::retry::{Failure, Retry, retry_after};
use super::{RemoteFile, Watch};
use crate::{Error, Result, interrupt};

const USER_AGENT: &str = concat!("oscar-kv/", env!("CARGO_PKG_VERSION"));

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(10);

/// How long nothing may come.
const STILL: Duration = Duration::from_mins(1);

/// How much of an error is read.
const SAID_BYTES: u64 = 64 << 10;

/// More than any list of files takes.
const MOST_JSON_BYTES: u64 = 64 << 20;

/// A client that gives up on a connection that stands still: before the answer, or in the midst of it. A request with
/// a large body takes a `timeout` of its own, which counts until the answer begins.
pub(super) fn client(account: &Account) -> Result<Client> {
    Client::builder()
        .user_agent(USER_AGENT)
        .connect_timeout(CONNECT)
        .timeout(STILL)
        .build()
        .map_err(|e| account.error(e))
}

/// The same, for a library that brings its own runtime.
pub(super) fn asynchronous(account: &Account) -> Result<reqwest::Client> {
    reqwest::Client::builder()
        .user_agent(USER_AGENT)
        .connect_timeout(CONNECT)
        .read_timeout(STILL)
        .build()
        .map_err(|e| account.error(e))
}

/// Sends a request and takes what is no success for a failure.
pub(super) fn send(account: &Account, request: RequestBuilder) -> Result<Response, Failure> {
    check(
        account,
        request.send().map_err(|e| unreachable(account, e))?,
    )
}

/// Takes what is no success for a failure.
pub(super) fn check(account: &Account, answer: Response) -> Result<Response, Failure> {
    if answer.status().is_success() {
        return Ok(answer);
    }
    Err(refused(account, answer))
}

fn refused(account: &Account, answer: Response) -> Failure {
    let status = answer.status().as_u16();
    let after = answer
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| retry_after(value.to_str().ok()?));
    account.refused(status, &said(answer), after, &[])
}

/// The begin of an answer's text; what broke off in the midst has said enough.
fn said(answer: Response) -> String {
    let mut said = Vec::new();
    let _ = answer.take(SAID_BYTES).read_to_end(&mut said);
    String::from_utf8_lossy(&said).into_owned()
}

/// The JSON of an answer.
pub(super) fn json<T: DeserializeOwned>(account: &Account, answer: Response) -> Result<T, Failure> {
    // What broke off is worth another attempt, what says something else is not.
    let mut text = Vec::new();
    answer
        .take(MOST_JSON_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|e| account.unreachable(format!("the answer broke off: {}", causes(&e))))?;
    if text.len() as u64 > MOST_JSON_BYTES {
        let problem = format!("{} answered more than was asked for", account.hub);
        return Err(account.error(problem).into());
    }
    Ok(serde_json::from_slice(&text)
        .map_err(|e| account.error(format!("{} answered what was not asked: {e}", account.hub)))?)
}

/// Writes the file that `request` answers with to `to`, after the bytes that lie there already.
pub(super) fn download(
    account: &Account,
    retry: &Retry,
    watch: &dyn Watch,
    request: impl Fn() -> RequestBuilder,
    file: &RemoteFile,
    to: &Path,
) -> Result<()> {
    retry.run(|| attempt(account, watch, request(), file, to))
}

fn attempt(
    account: &Account,
    watch: &dyn Watch,
    mut request: RequestBuilder,
    file: &RemoteFile,
    to: &Path,
) -> Result<(), Failure> {
    let mut out = OpenOptions::new()
        .append(true)
        .create(true)
        .open(to)
        .map_err(Error::io("write", to))?;
    let mut have = fs::metadata(to).map_err(Error::io("read", to))?.len();
    if have > file.size_bytes {
        out.set_len(0).map_err(Error::io("write", to))?;
        have = 0;
    }
    if have == file.size_bytes {
        return Ok(());
    }
    if have > 0 {
        request = request.header(RANGE, format!("bytes={have}-"));
    }
    let mut answer = send(account, request)?;
    if answer.status() != StatusCode::PARTIAL_CONTENT || !starts_at(&answer, have) {
        out.set_len(0).map_err(Error::io("write", to))?;
        if answer.status() == StatusCode::PARTIAL_CONTENT {
            return Err(
                account.unreachable(format!("`{}` came in parts that do not fit", file.path))
            );
        }
        have = 0;
    }
    let comes = answer.content_length().map(|bytes| have + bytes);
    if let Some(bytes) = comes.filter(|bytes| *bytes != file.size_bytes) {
        return Err(other(account, answer, file, bytes));
    }
    let mut buffer = vec![0; 64 << 10];
    while have < file.size_bytes {
        interrupt::check()?;
        let count = match answer.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(account.unreachable(format!("`{}` broke off: {e}", file.path))),
        };
        out.write_all(&buffer[..count])
            .map_err(Error::io("write", to))?;
        have += count as u64;
        watch.bytes(count as u64);
    }
    if have != file.size_bytes {
        return Err(account.unreachable(format!(
            "`{}` ended after {have} of {} bytes",
            file.path, file.size_bytes
        )));
    }
    out.sync_all().map_err(Error::io("write", to))?;
    Ok(())
}

/// What it means that `bytes` come instead of a file: another file, or an error that is called a success.
fn other(account: &Account, answer: Response, file: &RemoteFile, bytes: u64) -> Failure {
    let status = answer.status().as_u16();
    let said = said(answer);
    if serde_json::from_str::<Value>(&said).is_ok_and(|said| said.is_object()) {
        return account.refused(status, &said, None, &[]);
    }
    let problem = format!(
        "`{}` has {bytes} bytes, and {} lists it with {}",
        file.path, account.hub, file.size_bytes
    );
    let error = account.error(problem);
    error
        .hint("run the same command again; if this stays, publish the entry anew")
        .into()
}

/// Whether a part of a file begins where the part that is here ends.
fn starts_at(answer: &Response, have: u64) -> bool {
    answer
        .headers()
        .get(CONTENT_RANGE)
        .and_then(|range| range.to_str().ok())
        .is_some_and(|range| range.starts_with(&format!("bytes {have}-")))
}

/// What a transport error means. The address is left out: it can hold signatures.
pub(super) fn unreachable(account: &Account, error: reqwest::Error) -> Failure {
    account.unreachable(causes(&error.without_url()))
}

/// An error and its causes, which often say more.
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = inner.source();
    }
    text
}
