//! ModelScope's side of the hub: what its official client asks, and what its service answers.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::{Answer, Commit, Repo, Request, Store, TOKEN, sha256};

/// The branch that a repository is made with.
pub const BRANCH: &str = "master";

/// The service's code for a name that is taken.
const EXISTS: i64 = 10_010_101_001;

pub fn answer(request: &Request, store: &mut Store) -> Option<Answer> {
    let path: Vec<_> = request.segments().into_iter().map(decoded).collect();
    let path: Vec<_> = path.iter().map(String::as_str).collect();
    let answer = match (request.method.as_str(), path.as_slice()) {
        ("POST", ["api", "v1", "models"]) => create(request, store),
        ("GET", ["api", "v1", "models", owner, name, what @ ..]) => {
            let id = format!("{owner}/{name}");
            match visible(request, store, &id) {
                None => refusal(404, 10_010_205_001, "model not found"),
                Some(repo) => match what {
                    [] => success(&json!({ "Path": owner, "Name": name })),
                    ["commits"] => commits(request, repo),
                    ["repo", "files"] => files(request, repo),
                    ["repo"] => file(request, repo, &store.storage()),
                    _ => return None,
                },
            }
        }
        ("GET", ["api", "v1", "repos", "internalAccelerationInfo"]) => success(&json!({})),
        (_, ["api", "v1", "repos", "models", ..]) if !is_known(request) => {
            refusal(401, 10_010_110_001, "user not logged in")
        }
        (
            "POST",
            [
                "api",
                "v1",
                "repos",
                "models",
                _,
                _,
                "info",
                "lfs",
                "objects",
                "batch",
            ],
        ) => batch(request, store),
        (
            "POST",
            [
                "api",
                "v1",
                "repos",
                "models",
                owner,
                name,
                "commit",
                branch @ ..,
            ],
        ) => commit(
            request,
            store,
            &format!("{owner}/{name}"),
            &branch.join("/"),
        ),
        ("PUT", ["store", oid]) => put(request, store, oid),
        // Storage on another host knows signatures, and refuses to be shown the token.
        ("GET", ["store", oid]) => match (&*request.query, request.header("authorization")) {
            ("signature=1", "") => {
                Answer::bytes(200, store.blobs.get(*oid)?.clone()).ranged(request)
            }
            _ => Answer::bytes(
                400,
                b"<Error>only one of signature and Authorization</Error>".to_vec(),
            ),
        },
        _ => return None,
    };
    Some(answer)
}

fn success(data: &Value) -> Answer {
    let body = json!({ "Code": 200, "Data": data, "Message": "success", "RequestId": "0", "Success": true });
    Answer::json(200, &body)
}

fn refusal(status: u16, code: i64, message: &str) -> Answer {
    let body = json!({ "Code": code, "Message": message, "RequestId": "0", "Success": false });
    Answer::json(status, &body)
}

/// Newer parts of the service read the header and older ones the cookie; both must be there.
fn is_known(request: &Request) -> bool {
    let cookie = format!("m_session_id={TOKEN}");
    request.is_authorized() && request.header("cookie").split("; ").any(|c| c == cookie)
}

fn visible<'a>(request: &Request, store: &'a Store, id: &str) -> Option<&'a Repo> {
    let repo = store.repos.get(id)?;
    (!repo.private || is_known(request)).then_some(repo)
}

fn create(request: &Request, store: &mut Store) -> Answer {
    if !is_known(request) {
        return refusal(401, 10_010_110_001, "user not logged in");
    }
    let body = request.json();
    let id = format!(
        "{}/{}",
        body["Path"].as_str().unwrap(),
        body["Name"].as_str().unwrap()
    );
    assert!(body["License"].is_string(), "{body}");
    if store.repos.contains_key(&id) {
        return refusal(400, EXISTS, "该名称已被注册使用，请重新命名");
    }
    let mut repo = Repo {
        private: match body["Visibility"].as_i64() {
            Some(1) => true,
            Some(5) => false,
            other => panic!("visibility {other:?}"),
        },
        ..Repo::default()
    };
    let attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n".to_vec();
    let first = BTreeMap::from([(".gitattributes".to_owned(), attributes)]);
    repo.push(BRANCH, "System init", first);
    store.repos.insert(id, repo);
    success(&json!({ "Id": 1 }))
}

fn commits(request: &Request, repo: &Repo) -> Answer {
    let branch = query(request, "Ref").unwrap_or(BRANCH.to_owned());
    let size: usize = query(request, "PageSize").map_or(50, |size| size.parse().unwrap());
    let up_to = |commits: &'_ Vec<Commit>| commits.iter().position(|c| c.id == branch);
    let history = match repo.branches.get(&branch) {
        Some(commits) => Some(&commits[..]),
        None => repo
            .branches
            .values()
            .find_map(|commits| Some(&commits[..=up_to(commits)?])),
    };
    let Some(commits) = history else {
        return refusal(404, 10_010_205_004, "revision not found");
    };
    let commits: Vec<_> = commits
        .iter()
        .rev()
        .take(size)
        .map(|c| json!({ "Id": c.id, "ShortId": &c.id[..8], "Title": c.title }))
        .collect();
    success(&json!({ "Commit": commits }))
}

fn files(request: &Request, repo: &Repo) -> Answer {
    let revision = query(request, "Revision").unwrap_or(BRANCH.to_owned());
    // Not an error: there is just no list.
    let Some(commit) = repo.commit(&revision) else {
        return success(&json!({ "Files": null, "LatestCommitter": null }));
    };
    let recursive = query(request, "Recursive").is_some_and(|r| r.eq_ignore_ascii_case("true"));
    let below = query(request, "Root").map_or(String::new(), |root| format!("{root}/"));
    let mut entries = BTreeMap::new();
    for (path, content) in &commit.files {
        let Some(rest) = path.strip_prefix(&below) else {
            continue;
        };
        for (end, _) in rest.match_indices('/') {
            let folder = format!("{below}{}", &rest[..end]);
            if recursive || !rest[..end].contains('/') {
                let entry = json!({ "Path": folder, "Name": folder, "Type": "tree", "Size": 0, "Sha256": "" });
                entries.insert(folder, entry);
            }
        }
        if recursive || !rest.contains('/') {
            let name = path.rsplit('/').next().unwrap();
            let entry = json!({
                "Path": path,
                "Name": name,
                "Type": "blob",
                "Size": content.len(),
                "Sha256": sha256(content),
                "IsLFS": is_large(path, content),
                "Revision": commit.id,
            });
            entries.insert(path.clone(), entry);
        }
    }
    // The service cuts its list here without a word.
    let entries: Vec<_> = entries.into_values().take(3000).collect();
    let last = json!({ "Id": "", "ShortId": &commit.id[..8] });
    success(&json!({ "Files": entries, "LatestCommitter": last }))
}

fn file(request: &Request, repo: &Repo, storage: &str) -> Answer {
    let revision = query(request, "Revision").unwrap_or(BRANCH.to_owned());
    let path = query(request, "FilePath").unwrap_or_default();
    let Some(content) = repo.commit(&revision).and_then(|c| c.files.get(&path)) else {
        return refusal(404, 10_010_205_001, "file not found");
    };
    if is_large(&path, content) {
        return Answer::bytes(302, Vec::new()).with(
            "Location",
            format!("{storage}/store/{}?signature=1", sha256(content)),
        );
    }
    // Small files come whole, whatever range is asked for.
    Answer::bytes(200, content.clone())
}

fn is_large(path: &str, content: &[u8]) -> bool {
    path.ends_with(".safetensors") || content.len() > 1 << 20
}

fn batch(request: &Request, store: &Store) -> Answer {
    let body = request.json();
    assert_eq!(body["operation"], "upload");
    let objects: Vec<_> = body["objects"]
        .as_array()
        .unwrap()
        .iter()
        .map(|object| {
            let oid = object["oid"].as_str().unwrap();
            let mut answer = json!({ "oid": oid, "size": object["size"] });
            if !store.blobs.contains_key(oid) {
                let href = format!("{}/store/{oid}", store.url);
                answer["actions"] = json!({ "upload": { "href": href } });
            }
            answer
        })
        .collect();
    success(&json!({ "objects": objects }))
}

fn put(request: &Request, store: &mut Store, oid: &str) -> Answer {
    if !is_known(request) {
        return refusal(401, 10_010_110_001, "user not logged in");
    }
    if sha256(&request.body) != oid {
        return refusal(400, 10_030_000_003, "sha256 differs");
    }
    store.blobs.insert(oid.to_owned(), request.body.clone());
    success(&json!({}))
}

fn commit(request: &Request, store: &mut Store, id: &str, branch: &str) -> Answer {
    let body = request.json();
    let Some(last) = store.repos.get(id).and_then(|repo| repo.commit(branch)) else {
        return refusal(404, 10_010_205_001, "model not found");
    };
    let mut files = last.files.clone();
    for action in body["actions"].as_array().unwrap() {
        let text = |name: &str| action[name].as_str().unwrap();
        let path = text("path").to_owned();
        let content = match (text("action"), text("type")) {
            ("create", "lfs") => match store.blobs.get(text("sha256")) {
                Some(content) => content.clone(),
                None => return refusal(400, 10_030_000_002, &format!("`{path}` was not sent")),
            },
            ("create", "normal") => {
                assert_eq!(text("encoding"), "base64");
                BASE64_STANDARD.decode(text("content")).unwrap()
            }
            ("delete", "normal") => {
                if files.remove(&path).is_none() {
                    return refusal(400, 10_030_000_002, &format!("there is no `{path}`"));
                }
                continue;
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(action["size"], content.len());
        files.insert(path, content);
    }
    if files == last.files {
        return refusal(400, 10_030_000_002, "nothing to commit");
    }
    let repo = store.repos.get_mut(id).unwrap();
    let id = repo.push(
        branch,
        body["commit_message"].as_str().unwrap(),
        BTreeMap::new(),
    );
    let commits: &mut Vec<Commit> = repo.branches.get_mut(branch).unwrap();
    commits.last_mut().unwrap().files = files;
    success(&json!({ "oid": id }))
}

/// The value of a query's field.
pub fn query(request: &Request, name: &str) -> Option<String> {
    let fields = request
        .query
        .split('&')
        .filter_map(|field| field.split_once('='));
    let value = fields.into_iter().find(|(field, _)| *field == name)?.1;
    Some(decoded(&value.replace('+', " ")))
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        let digits = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        match digits.and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => bytes.push(*first),
        }
    }
    String::from_utf8(bytes).unwrap()
}
