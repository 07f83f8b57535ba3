//! Promise: publishing to ModelScope and pulling from it do what they do with Hugging Face, over an API that calls
//! failures successes, has no parent of a commit, and keeps large files elsewhere.
#![cfg(feature = "hub")]

mod hub;
mod pool_entry;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hub::local::{entry, names};
use hub::modelscope::{BRANCH, query};
use hub::{Answer, Failure, Machine, Repo, Request, Server, TOKEN};
use serde_json::{Value, json};

const TENSORS: &str = "rotations.safetensors";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn files(server: &Server, repo: &str) -> BTreeMap<String, Vec<u8>> {
    server.store(|store| store.repos[repo].commit(BRANCH).unwrap().files.clone())
}

fn commits(server: &Server) -> usize {
    server.store(|store| store.repos["org/kv"].branches[BRANCH].len())
}

fn asked(server: &Server, method: &str, path: &str) -> Vec<Request> {
    let mut requests = server.requests();
    requests.retain(|request| request.method == method && request.path.contains(path));
    requests
}

/// A machine, a repository that is there, and an entry that is not in it yet.
fn ready() -> (Server, Machine, PathBuf) {
    let server = Server::start();
    let machine = Machine::new(&server);
    server.store(|store| {
        let mut repo = Repo::default();
        repo.push(BRANCH, "System init", BTreeMap::new());
        store.repos.insert("org/kv".to_owned(), repo);
    });
    let folder = entry(&machine.at("balanced"), "org/toy", 1);
    (server, machine, folder)
}

fn publish(folder: &Path) -> [&str; 4] {
    ["publish", text(folder), "--to", "ms:org/kv"]
}

#[test]
fn an_entry_is_one_commit_and_is_sent_once() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("balanced"), "org/toy", 1);
    fs::write(folder.join("README.md"), "a card").unwrap();
    fs::write(folder.join("metrics.json"), "{}").unwrap();
    // Beyond what a commit carries itself.
    fs::write(folder.join("report.html"), "page ".repeat(300_000)).unwrap();
    let out = machine.fine(&publish(&folder));
    assert!(
        out.contains(&format!("{}/models/org/kv/files", server.url())),
        "{out}"
    );

    let sent = files(&server, "org/kv");
    let own = ["README.md", "metrics.json", "report.html", TENSORS];
    let names: Vec<&str> = sent.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            ".gitattributes",
            own[0],
            "configuration.json",
            own[1],
            own[2],
            own[3]
        ]
    );
    for name in own {
        assert_eq!(sent[name], fs::read(folder.join(name)).unwrap(), "{name}");
    }
    assert!(
        serde_json::from_slice::<Value>(&sent["configuration.json"]).unwrap()["task"].is_string()
    );
    assert_eq!(commits(&server), 2);
    assert!(server.store(|store| !store.repos["org/kv"].private));
    assert_eq!(asked(&server, "PUT", "/store/").len(), 2);
    for request in server.requests() {
        assert!(request.is_authorized(), "{request:?}");
        assert_eq!(request.header("cookie"), format!("m_session_id={TOKEN}"));
    }

    server.forget();
    let out = machine.fine(&publish(&folder));
    assert!(out.contains("holds all of it"), "{out}");
    assert!(
        server
            .requests()
            .iter()
            .all(|request| request.method == "GET")
    );

    // What is new goes alone; what another repository brought is there already.
    fs::write(folder.join("README.md"), "another card").unwrap();
    machine.fine(&publish(&folder));
    machine.fine(&[
        "publish",
        text(&folder),
        "--to",
        "ms:org/second",
        "--private",
    ]);
    assert_eq!(asked(&server, "PUT", "").len(), 0);
    let first = &asked(&server, "POST", "/org/kv/commit/")[0].json()["actions"];
    assert_eq!(first.as_array().unwrap().len(), 1, "{first}");
    assert_eq!(files(&server, "org/kv")["README.md"], b"another card");
    assert_eq!(files(&server, "org/second")[TENSORS], sent[TENSORS]);
    assert!(server.store(|store| store.repos["org/second"].private));
}

#[test]
fn new_tensors_take_untrue_files_away() {
    let (server, machine, folder) = ready();
    fs::write(folder.join("recipe.toml"), "").unwrap();
    machine.fine(&publish(&folder));
    assert!(files(&server, "org/kv").contains_key("recipe.toml"));
    fs::remove_file(folder.join("recipe.toml")).unwrap();
    entry(&folder, "org/toy", 2);
    machine.fine(&publish(&folder));
    let sent = files(&server, "org/kv");
    assert!(!sent.contains_key("recipe.toml") && sent.contains_key("configuration.json"));
    assert_eq!(sent[TENSORS], fs::read(folder.join(TENSORS)).unwrap());
}

#[test]
fn a_dry_run_counts_what_the_service_itself_wants() {
    let (server, machine, folder) = ready();
    let out = machine.fine(&[&publish(&folder)[..], &["--dry-run"]].concat());
    assert!(
        out.contains("configuration.json") && out.contains("would send 3 files"),
        "{out}"
    );
    assert!(
        server
            .requests()
            .iter()
            .all(|request| request.method == "GET")
    );
}

#[test]
fn refusals_name_the_repository_the_reason_and_the_next_step() {
    let (server, machine, folder) = ready();
    let said = format!("no {TOKEN}");
    let failed = |code: i64, message: &str| {
        let body = json!({ "Code": code, "Message": message, "Data": null, "Success": false });
        Failure::Answer(Answer::json(200, &body))
    };
    let html = Failure::Answer(Answer::bytes(200, b"<html>log in to the network".to_vec()));
    for (method, path, failure, parts) in [
        (
            "GET",
            "/commits",
            Failure::status(401, &said),
            ["does not accept the token: no [token]", "modelscope login"],
        ),
        (
            "POST",
            "/objects/batch",
            Failure::status(403, "not yours"),
            [
                "may not do this: not yours",
                "a token with the rights for it",
            ],
        ),
        (
            "PUT",
            "/store/",
            Failure::status(413, "entity too large"),
            ["too large", "`rotations.safetensors` with"],
        ),
        (
            "POST",
            "/commit/",
            Failure::status(409, "conflict"),
            ["someone else has committed", "run the same command again"],
        ),
        (
            "POST",
            "/commit/",
            Failure::status(413, "entity too large"),
            ["too large", "`README.md` with"],
        ),
        (
            "POST",
            "/commit/",
            failed(403, "no rights"),
            ["may not do this: no rights", "modelscope login"],
        ),
        (
            "POST",
            "/commit/",
            failed(10_030_000_007, &said),
            [
                "refuses this: no [token] (code 10030000007)",
                "not sent again",
            ],
        ),
        (
            "PUT",
            "/store/",
            failed(10_030_000_003, "sha256 differs"),
            ["refuses this: sha256 differs", "run the same command"],
        ),
        (
            "GET",
            "/repo/files",
            failed(10_010_000_001, "try the site"),
            ["refuses this: try the site", "run the same command"],
        ),
        (
            "GET",
            "/commits",
            html,
            ["answers something unknown", "MODELSCOPE_ENDPOINT"],
        ),
    ] {
        server.fail(method, path, failure);
        // What was sent before would not be asked for again.
        server.store(|store| store.blobs.clear());
        let message = machine.refused(&publish(&folder));
        for part in ["ms:org/kv", parts[0], parts[1]] {
            assert!(message.contains(part), "{path}, {part}: {message}");
        }
        server.all_failed();
        assert_eq!(commits(&server), 1, "{path}");
    }

    let unknown = machine.without("MODELSCOPE_API_TOKEN");
    let message = unknown.refused(&publish(&folder));
    assert!(message.contains("asks for a token"), "{message}");
}

#[test]
fn a_blob_that_is_refused_is_named() {
    let (server, machine, folder) = ready();
    server.fail(
        "POST",
        "/objects/batch",
        Failure::Change(|answer| {
            let mut body: Value = serde_json::from_slice(&answer.body).unwrap();
            body["Data"]["objects"][0]["error"] =
                json!({ "code": 422, "message": "quota is used up" });
            answer.body = body.to_string().into_bytes();
        }),
    );
    let message = machine.refused(&publish(&folder));
    assert!(
        message.contains("refuses `rotations.safetensors`: quota is used up"),
        "{message}"
    );
}

#[test]
fn a_branch_that_moved_while_files_were_sent_is_left_alone() {
    let (server, machine, folder) = ready();
    server.fail(
        "PUT",
        "/store/",
        Failure::Meanwhile(|store| {
            let theirs = BTreeMap::from([("theirs".to_owned(), b"!".to_vec())]);
            let repo = store.repos.get_mut("org/kv").unwrap();
            repo.push(BRANCH, "theirs", theirs);
        }),
    );
    let message = machine.refused(&publish(&folder));
    for part in [
        "someone else has committed",
        "`master` is at",
        "run the same command again",
    ] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(commits(&server), 2);
    machine.fine(&publish(&folder));
    let sent = files(&server, "org/kv");
    assert!(sent.contains_key("theirs") && sent.contains_key(TENSORS));
    assert_eq!(asked(&server, "PUT", "/store/").len(), 1);
}

#[test]
fn what_passes_is_tried_again() {
    let (server, machine, folder) = ready();
    let steps = [
        ("GET", "/commits"),
        ("GET", "/repo/files"),
        ("POST", "/objects/batch"),
        ("PUT", "/store/"),
        ("POST", "/commit/"),
    ];
    for (method, path) in steps {
        server.fail(method, path, Failure::status(500, "busy"));
        server.fail(method, path, Failure::status(500, "busy"));
    }
    // The service's word for a branch that it cannot write to now, though it calls it a bad request.
    let body =
        json!({ "Code": 10_030_000_001_i64, "Message": "branch is locked", "Success": false });
    server.fail(
        "POST",
        "/commit/",
        Failure::Answer(Answer::json(400, &body)),
    );
    let ran = machine.oscar(&publish(&folder));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(
        ran.err
            .matches("ModelScope failed: busy (HTTP 500); trying again in")
            .count(),
        10
    );
    assert!(ran.err.contains("branch is locked"), "{}", ran.err);
    server.all_failed();
    assert_eq!(commits(&server), 2);
}

#[test]
fn the_pause_that_the_service_asks_for_is_kept() {
    let (server, machine, folder) = ready();
    let busy = Answer::json(429, &json!({ "Message": "slow down" })).with("Retry-After", "1");
    server.fail("PUT", "/store/", Failure::Answer(busy));
    let start = Instant::now();
    machine.fine(&publish(&folder));
    assert!(start.elapsed() >= Duration::from_secs(1));
    server.all_failed();
}

#[test]
fn a_connection_cut_while_sending_is_made_anew() {
    let (server, machine, folder) = ready();
    server.fail("PUT", "/store/", Failure::CutRequest(100));
    server.fail("POST", "/commit/", Failure::CutRequest(10));
    machine.fine(&publish(&folder));
    server.all_failed();
    assert_eq!(asked(&server, "PUT", "/store/").len(), 2);
    assert_eq!(
        files(&server, "org/kv")[TENSORS],
        fs::read(folder.join(TENSORS)).unwrap()
    );

    // The bytes arrived, and so did the commit: only the answers were lost.
    let (server, machine, folder) = ready();
    server.fail("PUT", "/store/", Failure::CutAnswer(3));
    server.fail("POST", "/commit/", Failure::CutAnswer(3));
    machine.fine(&publish(&folder));
    server.all_failed();
    assert_eq!(asked(&server, "PUT", "/store/").len(), 1);
    assert_eq!(asked(&server, "POST", "/commit/").len(), 1);
    assert_eq!(commits(&server), 2);
}

#[test]
fn what_the_service_has_not_is_refused() {
    let (server, machine, folder) = ready();
    let message = machine.refused(&[&publish(&folder)[..], &["--pull-request"]].concat());
    assert!(
        message.contains("no pull requests") && message.contains("`--pull-request`"),
        "{message}"
    );
    let message = machine.refused(&["publish", text(&folder), "--to", "ms:org/kv@next"]);
    assert!(message.contains("no revision `next`"), "{message}");
    assert!(
        server
            .requests()
            .iter()
            .all(|request| request.method == "GET")
    );

    let machine = machine.with("MODELSCOPE_ENDPOINT", "ftp://hub");
    let message = machine.refused(&publish(&folder));
    assert!(message.contains("MODELSCOPE_ENDPOINT"), "{message}");
}

#[test]
fn a_list_that_the_service_cuts_is_read_by_folder() {
    let (server, machine, folder) = ready();
    let many = |folder: &'static str| {
        (0..1600).map(move |n| (format!("{folder}/{n}/{TENSORS}"), b"many".to_vec()))
    };
    server.store(|store| {
        let repo = store.repos.get_mut("org/kv").unwrap();
        repo.push(BRANCH, "many", many("a__a").chain(many("b__b")).collect());
    });
    let place = format!("org__toy/balanced/{TENSORS}");
    machine.fine(&publish(&folder));
    assert!(files(&server, "org/kv").contains_key(&place));
    server.forget();
    let out = machine.fine(&publish(&folder));
    assert!(out.contains("holds all of it"), "{out}");
}

#[test]
fn an_entry_comes_back_as_it_was_sent() {
    let (server, machine, folder) = ready();
    fs::write(folder.join("README.md"), "a card").unwrap();
    machine.fine(&publish(&folder));
    let bytes = fs::read(folder.join(TENSORS)).unwrap();
    server.forget();

    // Storage elsewhere is not shown the token, and goes on where the connection broke.
    server.fail("GET", "/store/", Failure::CutAnswer(1000));
    let out = machine.fine(&["pull", "ms:org/kv", "--out", text(&machine.at("out"))]);
    assert!(out.contains("org/toy"), "{out}");
    assert_eq!(names(&machine.at("out")), ["README.md", TENSORS]);
    assert_eq!(fs::read(machine.at("out").join(TENSORS)).unwrap(), bytes);
    let stored = asked(&server, "GET", "/store/");
    let ranges: Vec<_> = stored
        .iter()
        .map(|request| request.header("range"))
        .collect();
    assert_eq!(ranges, ["", "bytes=1000-"]);
    assert!(
        stored
            .iter()
            .all(|request| request.header("cookie").is_empty())
    );
    for request in asked(&server, "GET", "/org/kv/repo") {
        let revision = query(&request, "Revision").unwrap();
        assert_eq!(
            revision.len(),
            40,
            "a commit, and not what the branch is meanwhile"
        );
    }

    let offline = machine.with("HF_HUB_OFFLINE", "1");
    server.forget();
    offline.fine(&["pull", "ms:org/kv"]);
    assert_eq!(server.log(), [""; 0]);
}

#[test]
fn an_older_entry_is_there_by_its_commit() {
    let (server, machine, folder) = ready();
    machine.fine(&publish(&folder));
    let bytes = fs::read(folder.join(TENSORS)).unwrap();
    let commit = server.store(|store| store.repos["org/kv"].commit(BRANCH).unwrap().id.clone());
    entry(&folder, "org/toy", 2);
    machine.fine(&publish(&folder));
    for (from, is_older) in [
        ("ms:org/kv".to_owned(), false),
        (format!("ms:org/kv@{commit}"), true),
    ] {
        let out = machine.at("out");
        machine.fine(&["pull", &from, "--out", text(&out)]);
        assert_eq!(
            fs::read(out.join(TENSORS)).unwrap() == bytes,
            is_older,
            "{from}"
        );
    }
    let message = machine.refused(&["pull", "ms:org/kv@v9"]);
    assert!(message.contains("no revision `v9`"), "{message}");
}

#[test]
fn what_is_not_what_was_listed_is_refused_and_not_kept() {
    let (server, machine, folder) = ready();
    machine.fine(&publish(&folder));
    let flipped = Failure::Change(|answer| *answer.body.last_mut().unwrap() ^= 1);
    let shorter = Failure::Change(|answer| answer.body.truncate(100));
    let failed =
        json!({ "Code": 10_010_205_099_i64, "Message": "being checked", "Success": false });
    for (failure, said) in [
        (flipped, "SHA-256"),
        (shorter, "has 100 bytes"),
        (Failure::Answer(Answer::json(200, &failed)), "being checked"),
        (Failure::status(404, "gone"), "gone"),
    ] {
        server.fail("GET", "/store/", failure);
        let message = machine.refused(&["pull", "ms:org/kv"]);
        assert!(
            message.contains("ms:org/kv") && message.contains(said),
            "{said}: {message}"
        );
        server.all_failed();
        let blobs = machine.at("ms/oscar/models--org--kv/blobs");
        let tensors = server.store(|store| store.blobs.keys().next().unwrap().clone());
        assert!(!blobs.join(tensors).exists(), "{said}");
    }
    machine.fine(&["pull", "ms:org/kv"]);
}
