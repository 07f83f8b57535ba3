//! Promise: publishing sends what is new of sound entries, in one commit or not at all, and says what went wrong.
#![cfg(feature = "hub")]

mod hub;
mod pool_entry;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use hub::local::entry;
use hub::{Answer, Failure, Machine, Repo, Server, TOKEN};
use serde_json::Value;

const TENSORS: &str = "rotations.safetensors";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn files(server: &Server, repo: &str, branch: &str) -> BTreeMap<String, Vec<u8>> {
    server.store(|store| store.repos[repo].commit(branch).unwrap().files.clone())
}

fn commits(server: &Server, repo: &str) -> usize {
    server.store(|store| store.repos[repo].branches["main"].len())
}

fn posts(server: &Server) -> Vec<String> {
    let mut log = server.log();
    log.retain(|line| line.contains(" POST "));
    log
}

#[test]
fn an_entry_is_one_commit_and_is_sent_once() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("zoo/org__toy/balanced"), "org/toy", 1);
    fs::write(folder.join("metrics.json"), "{}").unwrap();
    fs::write(folder.join("notes.txt"), "not the entry's own").unwrap();
    fs::write(folder.join("README.md"), "a card").unwrap();
    let publish = ["publish", text(&folder), "--to", "hf:org/toy-kv"];
    let out = machine.fine(&publish);
    assert!(
        out.contains(&format!("{}/org/toy-kv/commit/", server.url())),
        "{out}"
    );

    let sent = files(&server, "org/toy-kv", "main");
    let names: Vec<&String> = sent.keys().collect();
    assert_eq!(
        names,
        [".gitattributes", "README.md", "metrics.json", TENSORS]
    );
    for name in ["README.md", "metrics.json", TENSORS] {
        assert_eq!(sent[name], fs::read(folder.join(name)).unwrap(), "{name}");
    }
    assert_eq!(commits(&server, "org/toy-kv"), 2);

    server.forget();
    let out = machine.fine(&publish);
    assert!(out.contains("holds all of it"), "{out}");
    assert_eq!(posts(&server), [""; 0]);

    fs::write(folder.join("README.md"), "another card").unwrap();
    machine.fine(&publish);
    let last = server.requests().pop().unwrap();
    let body = String::from_utf8(last.body).unwrap();
    assert!(
        body.contains("README.md") && !body.contains(TENSORS),
        "{body}"
    );
    assert!(posts(&server).iter().all(|line| !line.contains("/v1/")));
    assert_eq!(
        files(&server, "org/toy-kv", "main")["README.md"],
        b"another card"
    );
}

#[test]
fn an_entry_without_a_card_gets_one() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("balanced"), "org/toy", 1);
    machine.fine(&["publish", text(&folder), "--to", "hf:org/toy-kv"]);
    let card = files(&server, "org/toy-kv", "main")["README.md"].clone();
    let card = String::from_utf8(card).unwrap();
    assert!(card.contains("base_model: \"org/toy\""), "{card}");
    assert!(!folder.join("README.md").exists());
}

#[test]
fn several_entries_lie_in_folders_under_an_index_that_grows() {
    let server = Server::start();
    let machine = Machine::new(&server);
    for (place, model, seed) in [
        ("org__a/balanced", "org/a", 1),
        ("org__a/oscar", "org/a", 2),
        ("org__b/balanced", "org/b", 3),
    ] {
        entry(&machine.at("zoo").join(place), model, seed);
    }
    let (first, rest) = (machine.at("zoo/org__a"), machine.at("zoo/org__b/balanced"));
    machine.fine(&["publish", text(&first), "--to", "hf:org/zoo"]);
    let index = |server: &Server| {
        String::from_utf8(files(server, "org/zoo", "main")["README.md"].clone()).unwrap()
    };
    assert!(index(&server).contains("(org__a/oscar)") && !index(&server).contains("org__b"));

    server.forget();
    let out = machine.fine(&["publish", text(&rest), "--to", "hf:org/zoo"]);
    assert!(
        out.contains("org__b/balanced/rotations.safetensors"),
        "{out}"
    );
    let sent = files(&server, "org/zoo", "main");
    for place in ["org__a/balanced", "org__a/oscar", "org__b/balanced"] {
        let local = fs::read(machine.at("zoo").join(place).join(TENSORS)).unwrap();
        assert_eq!(sent[&format!("{place}/{TENSORS}")], local);
        assert!(
            index(&server).contains(&format!("]({place})")),
            "{}",
            index(&server)
        );
    }

    // A person's page is not replaced.
    server.store(|store| {
        let page = BTreeMap::from([("README.md".to_owned(), b"# Ours".to_vec())]);
        store
            .repos
            .get_mut("org/zoo")
            .unwrap()
            .push("main", "page", page);
    });
    entry(&rest, "org/b", 4);
    let ran = machine.oscar(&["publish", text(&rest), "--to", "hf:org/zoo"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("it stays as it is"), "{}", ran.err);
    assert_eq!(index(&server), "# Ours");
}

#[test]
fn entries_that_would_share_a_place_are_refused() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let one = entry(&machine.at("one/balanced"), "org/toy", 1);
    let two = entry(&machine.at("two/balanced"), "org/toy", 2);
    let message = machine.refused(&["publish", text(&one), text(&two), "--to", "hf:org/zoo"]);
    assert!(message.contains("rename one of the folders"), "{message}");

    machine.fine(&["publish", text(&one), "--to", "hf:org/single"]);
    let foreign = entry(&machine.at("foreign"), "org/foreign", 3);
    let message = machine.refused(&["publish", text(&foreign), "--to", "hf:org/single"]);
    assert!(message.contains("another model, `org/toy`"), "{message}");
    let other = entry(&machine.at("two/oscar"), "org/toy", 3);
    let message = machine.refused(&["publish", text(&one), text(&other), "--to", "hf:org/single"]);
    assert!(message.contains("at the root"), "{message}");
    assert_eq!(commits(&server, "org/single"), 2);
}

#[test]
fn a_dry_run_says_what_differs_and_sends_nothing() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("balanced"), "org/toy", 1);
    fs::write(folder.join("README.md"), "a card").unwrap();
    let to = ["--to", "hf:org/toy-kv", "--dry-run"];
    let out = machine.fine(&[&["publish", text(&folder)], &to[..]].concat());
    assert!(
        out.contains("would be made") && out.contains("would send 2 files"),
        "{out}"
    );
    assert!(server.store(|store| store.repos.is_empty()));

    machine.fine(&["publish", text(&folder), "--to", "hf:org/toy-kv"]);
    fs::write(folder.join("README.md"), "a longer card").unwrap();
    fs::write(folder.join("recipe.toml"), "").unwrap();
    server.forget();
    let out = machine.fine(&[&["publish", text(&folder), "--format", "json"], &to[..]].concat());
    let value: Value = serde_json::from_str(&out).unwrap();
    let changes: Vec<(&str, &str)> = value["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| {
            (
                file["path"].as_str().unwrap(),
                file["change"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        changes,
        [
            ("README.md", "changed"),
            ("recipe.toml", "new"),
            (TENSORS, "same")
        ]
    );
    assert_eq!(value["upload_bytes"], 13);
    assert_eq!(posts(&server), [""; 0]);
    let out = machine.fine(&[&["publish", text(&folder)], &to[..]].concat());
    assert!(out.contains("README.md  (was 6 B)"), "{out}");
}

#[test]
fn new_tensors_take_untrue_measurements_away() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("balanced"), "org/toy", 1);
    for name in ["metrics.json", "README.md"] {
        fs::write(folder.join(name), "{}").unwrap();
    }
    let publish = ["publish", text(&folder), "--to", "hf:org/toy-kv"];
    machine.fine(&publish);
    server.store(|store| {
        let own = BTreeMap::from([("LICENSE".to_owned(), b"mine".to_vec())]);
        store
            .repos
            .get_mut("org/toy-kv")
            .unwrap()
            .push("main", "license", own);
    });
    entry(&folder, "org/toy", 2);
    assert!(!folder.join("metrics.json").exists());
    let out = machine.fine(&publish);
    assert!(out.contains("removed"), "{out}");
    let sent = files(&server, "org/toy-kv", "main");
    assert!(!sent.contains_key("metrics.json") && sent.contains_key("LICENSE"));
    assert_eq!(sent[TENSORS], fs::read(folder.join(TENSORS)).unwrap());
}

fn arguments<'a>(folder: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    [&["publish", text(folder)], more].concat()
}

#[test]
fn private_repositories_branches_and_pull_requests() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("balanced"), "org/toy", 1);
    let publish = |more: &[&'static str]| arguments(&folder, more);
    let message = machine.refused(&publish(&["--to", "hf:org/kv", "--pull-request"]));
    assert!(message.contains("no such repository"), "{message}");
    let message = machine.refused(&publish(&["--to", "hf:org/kv@next"]));
    assert!(message.contains("without @BRANCH"), "{message}");
    machine.fine(&publish(&[
        "--to",
        "hf:org/kv",
        "--private",
        "--message",
        "First",
    ]));
    server.store(|store| {
        let repo = store.repos.get_mut("org/kv").unwrap();
        assert!(repo.private);
        assert_eq!(repo.branches["main"].last().unwrap().title, "First");
        repo.branches
            .insert("next/1".to_owned(), repo.branches["main"][..1].to_vec());
    });
    let message = machine.refused(&publish(&["--to", "hf:org/kv@none"]));
    assert!(message.contains("no revision `none`"), "{message}");
    machine.fine(&publish(&["--to", "hf:org/kv@next/1"]));
    assert!(files(&server, "org/kv", "next/1").contains_key(TENSORS));

    entry(&folder, "org/toy", 2);
    let out = machine.fine(&publish(&["--to", "hf:org/kv", "--pull-request"]));
    assert!(out.contains("/org/kv/discussions"), "{out}");
    assert_eq!(commits(&server, "org/kv"), 2);
    let proposed = server.store(|store| {
        let repo = &store.repos["org/kv"];
        let branch = repo
            .branches
            .keys()
            .find(|branch| branch.starts_with("refs/pr/"));
        repo.commit(branch.unwrap()).unwrap().files.clone()
    });
    assert_eq!(proposed[TENSORS], fs::read(folder.join(TENSORS)).unwrap());
}

#[test]
fn addresses_are_shown_without_the_token() {
    let (server, machine, publish) = ready();
    let echo = |answer: &mut Answer| {
        let text = String::from_utf8(answer.body.clone()).unwrap();
        answer.body = text.replace("/commit/", &format!("/{TOKEN}/")).into_bytes();
    };
    server.fail("POST", "/commit/", Failure::Change(echo));
    let out = machine.fine(&args(&publish));
    assert!(out.contains("/org/kv/[token]/"), "{out}");
}

/// A machine, a repository that is there, and an entry that is not in it yet.
fn ready() -> (Server, Machine, Vec<String>) {
    let server = Server::start();
    let machine = Machine::new(&server);
    server.store(|store| {
        let mut repo = Repo::default();
        repo.push("main", "initial commit", BTreeMap::new());
        store.repos.insert("org/kv".to_owned(), repo);
    });
    let folder = entry(&machine.at("balanced"), "org/toy", 1);
    let publish = ["publish", text(&folder), "--to", "hf:org/kv"].map(str::to_owned);
    (server, machine, publish.to_vec())
}

fn args(list: &[String]) -> Vec<&str> {
    list.iter().map(String::as_str).collect()
}

#[test]
fn refusals_name_the_repository_the_reason_and_the_next_step() {
    let (server, machine, publish) = ready();
    // Two of them repeat the token, as careless servers do.
    let said = format!("no {TOKEN}");
    for (path, status, said, parts) in [
        (
            "/revision/",
            401,
            said.as_str(),
            ["hf:org/kv", "does not accept the token", "hf auth login"],
        ),
        (
            "/preupload/",
            403,
            &said,
            [
                "hf:org/kv",
                "the token may not do this: no [token]",
                "a token with the rights",
            ],
        ),
        (
            "/commit/",
            403,
            "You have no write rights",
            ["hf:org/kv", "You have no write rights", "hf auth login"],
        ),
        (
            "/commit/",
            409,
            "Conflict",
            [
                "hf:org/kv",
                "someone else has committed",
                "run the same command again",
            ],
        ),
        (
            "/commit/",
            413,
            "Payload Too Large",
            ["hf:org/kv", "too large", "`rotations.safetensors` with"],
        ),
        (
            "/commit/",
            422,
            "Bad \u{1b}[31mcard",
            ["hf:org/kv", "refuses this: Bad [31mcard", "HTTP 422"],
        ),
    ] {
        let method = if path == "/revision/" { "GET" } else { "POST" };
        server.fail(method, path, Failure::status(status, said));
        let message = machine.refused(&args(&publish));
        for part in parts {
            assert!(message.contains(part), "{status}: {message}");
        }
        server.all_failed();
        assert_eq!(commits(&server, "org/kv"), 1, "{status}");
    }
}

#[test]
fn a_commit_on_a_branch_that_moved_is_refused() {
    let (server, machine, publish) = ready();
    server.fail(
        "POST",
        "/commit/",
        Failure::Meanwhile(|store| {
            let theirs = BTreeMap::from([("theirs".to_owned(), Vec::new())]);
            store
                .repos
                .get_mut("org/kv")
                .unwrap()
                .push("main", "theirs", theirs);
        }),
    );
    let message = machine.refused(&args(&publish));
    assert!(
        message.contains("someone else has committed meanwhile"),
        "{message}"
    );
    assert_eq!(commits(&server, "org/kv"), 2);
    machine.fine(&args(&publish));
    let sent = files(&server, "org/kv", "main");
    assert!(sent.contains_key("theirs") && sent.contains_key(TENSORS));
}

#[test]
fn what_passes_is_tried_again() {
    let (server, machine, publish) = ready();
    for path in ["/revision/", "/preupload/", "/commit/"] {
        let method = if path == "/revision/" { "GET" } else { "POST" };
        server.fail(method, path, Failure::status(500, "busy"));
        server.fail(method, path, Failure::status(500, "busy"));
    }
    let ran = machine.oscar(&args(&publish));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(
        ran.err
            .matches("Hugging Face failed: busy (HTTP 500); trying again in")
            .count(),
        6,
        "{}",
        ran.err
    );
    server.all_failed();
    assert_eq!(commits(&server, "org/kv"), 2);
}

#[test]
fn attempts_end() {
    let (server, machine, publish) = ready();
    for _ in 0..6 {
        server.fail("POST", "/commit/", Failure::status(503, "down"));
    }
    let message = machine.refused(&args(&publish));
    assert!(
        message.contains("error: hf:org/kv: Hugging Face failed: down"),
        "{message}"
    );
    server.all_failed();
}

#[test]
fn the_pause_that_the_hub_asks_for_is_kept() {
    let (server, machine, publish) = ready();
    let busy = |seconds: u32| {
        let answer = Answer::json(429, &serde_json::json!({ "error": "slow down" }));
        Failure::Answer(answer.with("Retry-After", seconds.to_string()))
    };
    server.fail("POST", "/commit/", busy(1));
    let start = Instant::now();
    machine.fine(&args(&publish));
    assert!(start.elapsed() >= Duration::from_secs(1));
    server.all_failed();

    server.fail("GET", "/revision/", busy(7200));
    let message = machine.refused(&args(&publish));
    assert!(message.contains("pause of 7200 s"), "{message}");
}

#[test]
fn a_commit_whose_answer_was_lost_is_not_made_twice() {
    let (server, machine, publish) = ready();
    server.fail("POST", "/commit/", Failure::CutAnswer(3));
    machine.fine(&args(&publish));
    server.all_failed();
    assert_eq!(commits(&server, "org/kv"), 2);

    // Of a pull request nobody can see that.
    let (server, machine, mut publish) = ready();
    publish.push("--pull-request".to_owned());
    server.fail("POST", "/commit/", Failure::CutAnswer(3));
    let message = machine.refused(&args(&publish));
    assert!(message.contains("/org/kv/discussions"), "{message}");
    assert_eq!(
        server
            .log()
            .iter()
            .filter(|line| line.contains("/commit/"))
            .count(),
        1
    );
}

#[test]
fn a_connection_cut_while_sending_is_made_anew() {
    let (server, machine, publish) = ready();
    server.fail("POST", "/v1/xorbs/", Failure::CutRequest(100));
    server.fail("POST", "/commit/", Failure::CutRequest(10));
    machine.fine(&args(&publish));
    server.all_failed();
    assert_eq!(commits(&server, "org/kv"), 2);
    assert!(files(&server, "org/kv", "main").contains_key(TENSORS));
}

#[test]
fn damaged_entries_stay_at_home() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let good = entry(&machine.at("good"), "org/toy", 1);
    let bad = entry(&machine.at("bad"), "org/toy", 2);
    let mut bytes = fs::read(bad.join(TENSORS)).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(bad.join(TENSORS), bytes).unwrap();
    let message = machine.refused(&["publish", text(&good), text(&bad), "--to", "hf:org/kv"]);
    assert!(message.contains("oscar verify"), "{message}");
    let message = machine.refused(&["publish", text(machine.home.path()), "--to", "hf:org/kv"]);
    assert!(message.contains("bad"), "{message}");
    fs::create_dir(machine.at("empty")).unwrap();
    let message = machine.refused(&["publish", text(&machine.at("empty")), "--to", "hf:org/kv"]);
    assert!(message.contains("holds no zoo entry"), "{message}");
    assert_eq!(server.log(), [""; 0]);
}

#[test]
fn a_repository_has_an_owner_a_name_and_no_path() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("balanced"), "org/toy", 1);
    for to in [
        "org/kv",
        "hf:kv",
        "hf:org/kv/balanced",
        "hf:../kv",
        "hf:org/..",
        "gh:org/kv",
        "hf:org/kv@",
        "hf:org/kv@a b",
    ] {
        let message = machine.refused(&["publish", text(&folder), "--to", to]);
        assert!(message.contains("hf:OWNER/NAME"), "{message}");
    }
    assert_eq!(server.log(), [""; 0]);
}

#[test]
fn the_token_is_that_of_the_hubs_own_login() {
    let (server, machine, publish) = ready();
    let machine = machine.without("HF_TOKEN");
    let message = machine.refused(&args(&publish));
    assert!(
        message.contains("asks for a token") && message.contains("hf auth login"),
        "{message}"
    );

    fs::create_dir_all(machine.at("hf")).unwrap();
    fs::write(machine.at("hf/token"), format!("{TOKEN}\n")).unwrap();
    machine.fine(&args(&publish));

    let wrong = machine.with("HF_TOKEN", "hf_wrong");
    entry(&wrong.at("balanced"), "org/toy", 2);
    let message = wrong.refused(&args(&publish));
    assert!(message.contains("does not accept the token"), "{message}");
    assert!(!message.contains("hf_wrong"), "{message}");

    let machine = wrong.without("HF_TOKEN");
    fs::remove_file(machine.at("hf/token")).unwrap();
    fs::write(machine.at("secret"), TOKEN).unwrap();
    let path = machine.at("secret");
    machine
        .with("HF_TOKEN_PATH", text(&path))
        .fine(&args(&publish));
    assert_eq!(commits(&server, "org/kv"), 3);
}

#[test]
fn nothing_is_sent_offline_or_to_no_address() {
    let (server, machine, publish) = ready();
    let machine = machine.with("HF_HUB_OFFLINE", "1");
    let message = machine.refused(&args(&publish));
    assert!(message.contains("HF_HUB_OFFLINE"), "{message}");
    let machine = machine
        .without("HF_HUB_OFFLINE")
        .with("HF_ENDPOINT", "hub.example");
    let message = machine.refused(&args(&publish));
    assert!(message.contains("HF_ENDPOINT"), "{message}");
    let machine = machine.with("HF_ENDPOINT", "http://127.0.0.1:9");
    let message = machine.refused(&args(&publish));
    assert!(message.contains("cannot be reached"), "{message}");
    assert_eq!(server.log(), [""; 0]);
}
