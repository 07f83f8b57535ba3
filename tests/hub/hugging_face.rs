//! What Hugging Face documents of reading, committing and large files. Large files come by Xet: chunks in xorbs, and a
//! shard that says which chunks make which file.

use std::collections::BTreeMap;
use std::io::Cursor;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha1::{Digest, Sha1};
use xet_core_structures::metadata_shard::streaming_shard::MDBMinimalShard;
use xet_core_structures::xorb_object::reconstruct_xorb_with_footer;

use super::{Answer, Commit, Repo, Request, Store, hex, sha256};

/// Another secret: it opens the content-addressed store alone.
const XET_TOKEN: &str = "xet_0123456789SECRET";

pub fn answer(request: &Request, store: &mut Store) -> Option<Answer> {
    let segments = request.segments();
    Some(match (request.method.as_str(), &segments[..]) {
        ("POST", ["api", "repos", "create"]) => create(request, store),
        ("GET", ["api", "models", owner, name]) => info(request, store, owner, name, "main"),
        ("GET", ["api", "models", owner, name, "revision", revision]) => {
            info(request, store, owner, name, &decoded(revision))
        }
        ("GET", ["api", "models", owner, name, "tree", revision]) => {
            tree(request, store, owner, name, &decoded(revision))
        }
        ("POST", ["api", "models", owner, name, "preupload", _]) => {
            preupload(request, store, owner, name)
        }
        ("POST", [_, _, "info", "lfs", "objects", "batch"]) => batch(request),
        ("GET", ["api", "models", _, _, "xet-write-token", _]) => xet_token(request, store),
        ("POST", ["v1", "xorbs", "default", hash]) => xorb(request, store, hash),
        ("POST", ["v1", "shards"]) => shard(request, store),
        ("POST", ["api", "models", owner, name, "commit", branch]) => {
            commit(request, store, owner, name, &decoded(branch))
        }
        ("GET" | "HEAD", [owner, name, "resolve", revision, path @ ..]) => {
            let path: Vec<String> = path.iter().map(|part| decoded(part)).collect();
            resolve(
                request,
                store,
                owner,
                name,
                &decoded(revision),
                &path.join("/"),
            )
        }
        ("GET" | "HEAD", ["cdn", sha256]) => {
            let found = store.blobs.get(*sha256)?;
            Answer::bytes(200, found.clone()).ranged(request)
        }
        _ => return None,
    })
}

fn decoded(segment: &str) -> String {
    segment.replace("%2F", "/").replace("%20", " ")
}

fn refused(status: u16, code: &str, message: &str) -> Answer {
    Answer::json(status, &json!({ "error": message }))
        .with("X-Error-Code", code)
        .with("X-Error-Message", message)
}

/// The repository where the request may see it.
fn seen<'a>(
    request: &Request,
    store: &'a mut Store,
    owner: &str,
    name: &str,
) -> Result<&'a mut Repo, Answer> {
    let found = store.repos.get_mut(&format!("{owner}/{name}"));
    let found = found.filter(|repo| !repo.private || request.is_authorized());
    found.ok_or_else(|| {
        if request.is_authorized() {
            refused(404, "RepoNotFound", "Repository not found")
        } else {
            refused(401, "RepoNotFound", "Invalid username or password.")
        }
    })
}

/// The repository, and a revision of it.
fn at<'a>(
    request: &Request,
    store: &'a mut Store,
    owner: &str,
    name: &str,
    revision: &str,
) -> Result<(&'a Repo, &'a Commit), Answer> {
    let repo = seen(request, store, owner, name)?;
    let missing = || {
        refused(
            404,
            "RevisionNotFound",
            &format!("Invalid rev id: {revision}"),
        )
    };
    Ok((repo, repo.commit(revision).ok_or_else(missing)?))
}

fn create(request: &Request, store: &mut Store) -> Answer {
    if !request.is_authorized() {
        return refused(401, "", "Invalid credentials in Authorization header");
    }
    let asked = request.json();
    assert_eq!(asked["type"], "model");
    let id = format!(
        "{}/{}",
        asked["organization"].as_str().unwrap(),
        asked["name"].as_str().unwrap()
    );
    if store.repos.contains_key(&id) {
        return refused(409, "", "You already created this model repo");
    }
    let mut repo = Repo {
        private: asked["private"] == true,
        ..Repo::default()
    };
    let attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n".to_vec();
    repo.push(
        "main",
        "initial commit",
        BTreeMap::from([(".gitattributes".to_owned(), attributes)]),
    );
    store.repos.insert(id.clone(), repo);
    Answer::json(200, &json!({ "url": format!("{}/{id}", store.url) }))
}

pub fn git_blob(bytes: &[u8]) -> String {
    let mut hash = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
    hash.update(bytes);
    hex(&hash.finalize())
}

fn is_large(path: &str) -> bool {
    path.ends_with(".safetensors")
}

fn info(request: &Request, store: &mut Store, owner: &str, name: &str, revision: &str) -> Answer {
    let (repo, commit) = match at(request, store, owner, name, revision) {
        Ok(found) => found,
        Err(refused) => return refused,
    };
    let blobs = request.query.contains("blobs=");
    let siblings: Vec<Value> = commit
        .files
        .iter()
        .map(|(path, bytes)| sibling(path, bytes, blobs))
        .collect();
    Answer::json(
        200,
        &json!({
            "_id": "0", "id": format!("{owner}/{name}"), "modelId": format!("{owner}/{name}"),
            "private": repo.private, "sha": commit.id, "tags": [], "siblings": siblings,
        }),
    )
}

/// What the Python client asks for instead.
fn tree(request: &Request, store: &mut Store, owner: &str, name: &str, revision: &str) -> Answer {
    let (_, commit) = match at(request, store, owner, name, revision) {
        Ok(found) => found,
        Err(refused) => return refused,
    };
    let list = commit.files.iter().map(|(path, bytes)| {
        let mut file = sibling(path, bytes, true);
        let mut item = json!({
            "type": "file", "path": path, "size": bytes.len(), "oid": file["blobId"],
        });
        if is_large(path) {
            file["lfs"]["oid"] = file["lfs"]["sha256"].take();
            item["lfs"] = file["lfs"].take();
        }
        item
    });
    Answer::json(200, &list.collect())
}

fn sibling(path: &str, bytes: &[u8], blobs: bool) -> Value {
    let mut sibling = json!({ "rfilename": path });
    if blobs {
        sibling["size"] = json!(bytes.len());
        // Of a large file, git holds a pointer.
        let pointer = format!(
            "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n",
            sha256(bytes),
            bytes.len()
        );
        if is_large(path) {
            sibling["blobId"] = json!(git_blob(pointer.as_bytes()));
            sibling["lfs"] = json!({ "sha256": sha256(bytes), "size": bytes.len(), "pointerSize": pointer.len() });
        } else {
            sibling["blobId"] = json!(git_blob(bytes));
        }
    }
    sibling
}

fn preupload(request: &Request, store: &mut Store, owner: &str, name: &str) -> Answer {
    if !request.is_authorized() {
        return refused(401, "", "Invalid credentials in Authorization header");
    }
    if let Err(refused) = seen(request, store, owner, name) {
        return refused;
    }
    let asked = request.json();
    let files: Vec<Value> = asked["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| {
            let large = is_large(file["path"].as_str().unwrap());
            json!({
                "path": file["path"], "uploadMode": if large { "lfs" } else { "regular" }, "shouldIgnore": false,
            })
        })
        .collect();
    Answer::json(200, &json!({ "files": files }))
}

fn batch(request: &Request) -> Answer {
    let asked = request.json();
    assert_eq!(asked["operation"], "upload");
    assert!(
        asked["transfers"]
            .as_array()
            .unwrap()
            .contains(&json!("xet"))
    );
    Answer::json(
        200,
        &json!({ "transfer": "xet", "objects": asked["objects"] }),
    )
}

fn xet_token(request: &Request, store: &Store) -> Answer {
    if !request.is_authorized() {
        return refused(401, "", "Invalid credentials in Authorization header");
    }
    Answer::json(
        200,
        &json!({ "accessToken": XET_TOKEN, "exp": 4_000_000_000_u64, "casUrl": store.url }),
    )
}

fn is_xet(request: &Request) -> bool {
    request.header("authorization") == format!("Bearer {XET_TOKEN}")
}

fn xorb(request: &Request, store: &mut Store, hash: &str) -> Answer {
    if !is_xet(request) {
        return Answer::bytes(401, Vec::new());
    }
    let mut whole = Vec::new();
    let (_, found) = reconstruct_xorb_with_footer(&mut whole, &request.body).unwrap();
    assert_eq!(found.hex(), hash);
    let inserted = store
        .xorbs
        .insert(hash.to_owned(), request.body.clone())
        .is_none();
    Answer::json(200, &json!({ "was_inserted": inserted }))
}

/// Puts the files of a shard together from their chunks.
fn shard(request: &Request, store: &mut Store) -> Answer {
    if !is_xet(request) {
        return Answer::bytes(401, Vec::new());
    }
    let shard = MDBMinimalShard::from_reader(&mut Cursor::new(&request.body), true, true).unwrap();
    for number in 0..shard.num_files() {
        let file = shard.file(number).unwrap();
        let mut bytes = Vec::new();
        for entry in (0..file.num_entries()).map(|entry| file.entry(entry)) {
            let mut whole = Vec::new();
            let (xorb, _) =
                reconstruct_xorb_with_footer(&mut whole, &store.xorbs[&entry.xorb_hash.hex()])
                    .unwrap();
            let part = xorb
                .get_bytes_by_chunk_range(
                    &mut Cursor::new(whole),
                    entry.chunk_index_start,
                    entry.chunk_index_end,
                )
                .unwrap();
            bytes.extend(part);
        }
        store.blobs.insert(sha256(&bytes), bytes);
    }
    Answer::json(200, &json!({ "result": 1 }))
}

fn commit(request: &Request, store: &mut Store, owner: &str, name: &str, branch: &str) -> Answer {
    if !request.is_authorized() {
        return refused(401, "", "Invalid credentials in Authorization header");
    }
    let (blobs, url) = (store.blobs.clone(), store.url.clone());
    let repo = match seen(request, store, owner, name) {
        Ok(repo) => repo,
        Err(refused) => return refused,
    };
    let lines: Vec<Value> = request
        .body
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect();
    let header = &lines[0]["value"];
    assert_eq!(lines[0]["key"], "header");
    let Some(head) = repo.commit(branch).map(|commit: &Commit| commit.id.clone()) else {
        return refused(
            404,
            "RevisionNotFound",
            &format!("Invalid rev id: {branch}"),
        );
    };
    if header
        .get("parentCommit")
        .is_some_and(|parent| *parent != json!(head))
    {
        return refused(
            412,
            "",
            "A commit has happened since. Please refresh and try again.",
        );
    }
    let (mut changed, mut removed) = (BTreeMap::new(), Vec::new());
    for line in &lines[1..] {
        let value = &line["value"];
        let path = value["path"].as_str().unwrap().to_owned();
        match line["key"].as_str().unwrap() {
            "file" => {
                assert!(!is_large(&path), "{path} was sent inline");
                changed.insert(
                    path,
                    STANDARD.decode(value["content"].as_str().unwrap()).unwrap(),
                );
            }
            "lfsFile" => match blobs.get(value["oid"].as_str().unwrap()) {
                Some(bytes) => drop(changed.insert(path, bytes.clone())),
                None => {
                    return refused(400, "", "LFS pointer pointed to a file that does not exist");
                }
            },
            "deletedFile" => removed.push(path),
            other => panic!("{other} in a commit"),
        }
    }
    let branch = if request.query.contains("create_pr=1") {
        let number = repo.branches.len();
        let request_branch = format!("refs/pr/{number}");
        let base = repo.branches[branch].clone();
        repo.branches.insert(request_branch.clone(), base);
        request_branch
    } else {
        branch.to_owned()
    };
    let id = repo.push(&branch, header["summary"].as_str().unwrap(), changed);
    let last = repo.branches.get_mut(&branch).unwrap().last_mut().unwrap();
    last.files.retain(|path, _| !removed.contains(path));
    let mut answer = json!({
        "success": true, "commitOid": id, "commitUrl": format!("{url}/{owner}/{name}/commit/{id}"), "hookOutput": "",
    });
    if let Some(number) = branch.strip_prefix("refs/pr/") {
        answer["pullRequestUrl"] = json!(format!("{url}/{owner}/{name}/discussions/{number}"));
    }
    Answer::json(200, &answer)
}

fn resolve(
    request: &Request,
    store: &mut Store,
    owner: &str,
    name: &str,
    revision: &str,
    path: &str,
) -> Answer {
    let storage = store.storage();
    let (_, commit) = match at(request, store, owner, name, revision) {
        Ok(found) => found,
        Err(refused) => return refused,
    };
    let Some(bytes) = commit.files.get(path).cloned() else {
        return refused(404, "EntryNotFound", "Entry not found").with("X-Repo-Commit", &commit.id);
    };
    let commit = commit.id.clone();
    if !is_large(path) {
        return Answer::bytes(200, bytes.clone())
            .ranged(request)
            .with("ETag", format!("\"{}\"", git_blob(&bytes)))
            .with("X-Repo-Commit", commit);
    }
    let hash = sha256(&bytes);
    let size = bytes.len();
    store.blobs.insert(hash.clone(), bytes);
    Answer::bytes(302, Vec::new())
        .with("Location", format!("{storage}/cdn/{hash}"))
        .with("ETag", format!("\"{hash}\""))
        .with("X-Linked-ETag", format!("\"{hash}\""))
        .with("X-Linked-Size", size.to_string())
        .with("X-Repo-Commit", commit)
}
