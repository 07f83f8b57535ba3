//! Promise: pulling finds the right entry, checks every hash, goes on where it broke off, and shares the hub's cache.
#![cfg(feature = "hub")]

mod checkpoint;
mod hub;
mod pool_entry;
mod toy;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use hub::hugging_face::git_blob;
use hub::local::{entry, names};
use hub::{Answer, Failure, Machine, Repo, Server, sha256};
use serde_json::Value;

const TENSORS: &str = "rotations.safetensors";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Puts the files of `folders` into a repository, each below its place.
fn hold(server: &Server, repo: &str, folders: &[(&str, &Path)]) -> String {
    let mut files = BTreeMap::new();
    for (place, folder) in folders {
        for name in names(folder) {
            let path = match *place {
                "" => name.clone(),
                place => format!("{place}/{name}"),
            };
            files.insert(path, fs::read(folder.join(name)).unwrap());
        }
    }
    server.store(|store| {
        let repo = store
            .repos
            .entry(repo.to_owned())
            .or_insert_with(Repo::default);
        repo.push("main", "files", files)
    })
}

fn pulled(out: &str) -> PathBuf {
    let line = out.lines().find_map(|line| line.strip_prefix("entry "));
    PathBuf::from(line.unwrap().trim())
}

/// A repository with one entry at its root.
fn single() -> (Server, Machine, PathBuf, String) {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("local"), "org/toy", 1);
    fs::write(folder.join("README.md"), "a card").unwrap();
    let commit = hold(&server, "org/kv", &[("", &folder)]);
    (server, machine, folder, commit)
}

#[test]
fn the_cache_is_the_one_that_hf_shares() {
    let (server, machine, folder, commit) = single();
    let out = machine.fine(&["pull", "hf:org/kv"]);
    let repo = machine.at("hf/hub/models--org--kv");
    let snapshot = repo.join("snapshots").join(&commit);
    assert_eq!(pulled(&out), snapshot);
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), commit);
    for name in ["README.md", TENSORS] {
        let bytes = fs::read(folder.join(name)).unwrap();
        assert_eq!(fs::read(snapshot.join(name)).unwrap(), bytes);
        let hash = if name == TENSORS {
            sha256(&bytes)
        } else {
            git_blob(&bytes)
        };
        assert_eq!(fs::read(repo.join("blobs").join(&hash)).unwrap(), bytes);
        #[cfg(unix)]
        assert_eq!(
            fs::read_link(snapshot.join(name)).unwrap(),
            Path::new("../../blobs").join(hash)
        );
    }
    assert_eq!(names(&repo.join("blobs")).len(), 2);
    machine.fine(&["verify", text(&pulled(&out))]);

    // Nothing is fetched twice; a new commit fetches what is new.
    server.forget();
    machine.fine(&["pull", "hf:org/kv"]);
    assert!(
        server.log().iter().all(|line| !line.contains("/resolve/")),
        "{:?}",
        server.log()
    );
    fs::write(folder.join("README.md"), "another card").unwrap();
    hold(&server, "org/kv", &[("", &folder)]);
    let out = machine.fine(&["pull", "hf:org/kv"]);
    let fetched: Vec<String> = server
        .log()
        .into_iter()
        .filter(|line| line.contains("/resolve/"))
        .collect();
    assert!(
        matches!(&fetched[..], [one] if one.ends_with("/README.md")),
        "{fetched:?}"
    );
    assert_eq!(
        fs::read(pulled(&out).join("README.md")).unwrap(),
        b"another card"
    );

    // A commit that is here is not asked for.
    server.forget();
    let out = machine.fine(&["pull", &format!("hf:org/kv@{commit}")]);
    assert_eq!(fs::read(pulled(&out).join("README.md")).unwrap(), b"a card");
    assert_eq!(server.log(), [""; 0]);
}

#[test]
fn what_was_pulled_once_is_there_offline() {
    let (server, machine, _, _) = single();
    let machine = machine.with("HF_HUB_OFFLINE", "1");
    let message = machine.refused(&["pull", "hf:org/kv"]);
    assert!(
        message.contains("HF_HUB_OFFLINE") && message.contains("oscar pull hf:org/kv"),
        "{message}"
    );
    let machine = machine.without("HF_HUB_OFFLINE");
    let online = machine.fine(&["pull", "hf:org/kv"]);
    server.forget();
    let machine = machine.with("HF_HUB_OFFLINE", "1");
    assert_eq!(
        machine.fine(&["pull", "hf:org/kv", "--model", "org/toy"]),
        online
    );
    let message = machine.refused(&["pull", "hf:org/kv", "--tag", "oscar"]);
    assert!(message.contains("unset HF_HUB_OFFLINE"), "{message}");
    let out = machine.fine(&["pull", "hf:org/kv", "--format", "json"]);
    let value: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(value["offline"], true);
    assert_eq!(server.log(), [""; 0]);

    // What was damaged since is not handed out, and comes anew.
    let card = pulled(&online).join("README.md");
    fs::write(fs::canonicalize(&card).unwrap(), "a c").unwrap();
    let message = machine.refused(&["pull", "hf:org/kv"]);
    assert!(
        message.contains("README.md` of the cache is damaged"),
        "{message}"
    );
    let machine = machine.without("HF_HUB_OFFLINE");
    machine.fine(&["pull", "hf:org/kv"]);
    assert_eq!(fs::read(&card).unwrap(), b"a card");
}

#[test]
fn pulls_at_the_same_time_do_not_disturb_each_other() {
    let (_server, machine, _, _) = single();
    std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| machine.fine(&["pull", "hf:org/kv"])))
            .collect();
        for pull in pulls {
            pull.join().unwrap();
        }
    });
}

#[test]
fn the_entry_is_chosen_by_model_and_tag() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let mut folders = Vec::new();
    for (place, model, seed) in [
        ("org__a/balanced", "org/a", 1),
        ("org__a/oscar", "org/a", 2),
        ("org__b/balanced", "org/b", 3),
    ] {
        folders.push((place, entry(&machine.at(place), model, seed)));
    }
    let held: Vec<(&str, &Path)> = folders
        .iter()
        .map(|(place, folder)| (*place, folder.as_path()))
        .collect();
    let commit = hold(&server, "org/zoo", &held);

    let out = machine.fine(&["pull", "hf:org/zoo", "--model", "org/b"]);
    assert!(pulled(&out).ends_with("org__b/balanced"), "{out}");
    let out = machine.fine(&["pull", "hf:org/zoo", "--model", "org/a", "--tag", "oscar"]);
    assert_eq!(
        fs::read(pulled(&out).join(TENSORS)).unwrap(),
        fs::read(folders[1].1.join(TENSORS)).unwrap()
    );
    let out = machine.fine(&["pull", "hf:org/zoo", "--tag", "oscar"]);
    assert!(pulled(&out).ends_with("org__a/oscar"), "{out}");
    assert!(
        !server
            .log()
            .iter()
            .any(|line| line.contains("org__a/balanced"))
    );

    for (more, parts) in [
        (
            &[][..],
            [
                "several entries",
                "`org/a` (balanced), `org/a` (oscar), `org/b` (balanced)",
            ],
        ),
        (
            &["--model", "org/a"],
            [
                "several entries of `org/a`",
                "`org/a` (balanced), `org/a` (oscar)\n",
            ],
        ),
        (
            &["--model", "org/c"],
            ["no entry of `org/c`", "`org/b` (balanced)"],
        ),
        (
            &["--model", "org/b", "--tag", "oscar"],
            ["no entry of `org/b` with tag `oscar`", "--tag"],
        ),
    ] {
        let message = machine.refused(&[&["pull", "hf:org/zoo"], more].concat());
        for part in parts {
            assert!(message.contains(part), "{more:?}: {message}");
        }
    }
    // What the cache has of a commit decides nothing.
    let pinned = format!("hf:org/zoo@{commit}");
    let message = machine.refused(&["pull", &pinned, "--model", "org/a"]);
    assert!(message.contains("several entries of `org/a`"), "{message}");
    server.forget();
    machine.fine(&["pull", &pinned, "--model", "org/a", "--tag", "oscar"]);
    assert_eq!(server.log(), [""; 0]);
}

#[test]
fn an_entry_of_another_model_is_refused() {
    let (_server, machine, folder, _) = single();
    let message = machine.refused(&["pull", "hf:org/kv", "--model", "org/other"]);
    assert!(
        message.contains("no entry of `org/other`; there is one of `org/toy`"),
        "{message}"
    );

    // A folder can lie about what is in it.
    let server = Server::start();
    let machine = Machine::new(&server);
    hold(&server, "org/zoo", &[("org__other/balanced", &folder)]);
    let message = machine.refused(&["pull", "hf:org/zoo", "--model", "org/other"]);
    assert!(message.contains("there is one of `org/toy`"), "{message}");
}

#[test]
fn a_blob_that_broke_off_is_gone_on_with() {
    let (server, machine, folder, _) = single();
    server.fail("GET", "/cdn/", Failure::CutAnswer(1000));
    server.fail("GET", "/cdn/", Failure::CutAnswer(500));
    let out = machine.fine(&["pull", "hf:org/kv"]);
    server.all_failed();
    assert_eq!(
        fs::read(pulled(&out).join(TENSORS)).unwrap(),
        fs::read(folder.join(TENSORS)).unwrap()
    );
    let ranges: Vec<String> = server
        .requests()
        .iter()
        .filter(|request| request.path.starts_with("/cdn/"))
        .map(|request| request.header("range").to_owned())
        .collect();
    assert_eq!(ranges, ["", "bytes=1000-", "bytes=1500-"]);

    // The next command goes on, too.
    let (server, machine, _, _) = single();
    for _ in 0..6 {
        server.fail("GET", "/cdn/", Failure::CutAnswer(100));
    }
    let message = machine.refused(&["pull", "hf:org/kv"]);
    assert!(message.contains("cannot be reached"), "{message}");
    server.forget();
    machine.fine(&["pull", "hf:org/kv"]);
    let range = server
        .requests()
        .iter()
        .find(|r| r.path.starts_with("/cdn/"))
        .unwrap()
        .header("range")
        .to_owned();
    assert_eq!(range, "bytes=600-");
}

#[test]
fn a_file_with_another_hash_does_not_stay() {
    let (server, machine, _, _) = single();
    for path in ["/cdn/", "/README.md"] {
        server.fail("GET", path, Failure::Change(|answer| answer.body[2] ^= 1));
        let message = machine.refused(&["pull", "hf:org/kv"]);
        assert!(message.contains("the hub says"), "{message}");
        server.all_failed();
        assert!(!machine.at("hf/hub/models--org--kv/snapshots").exists());
    }
    machine.fine(&["pull", "hf:org/kv"]);

    // Nor does one that was changed in the cache.
    let blobs = machine.at("hf/hub/models--org--kv/blobs");
    for name in names(&blobs) {
        let path = blobs.join(name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[2] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    let offline = machine.with("HF_HUB_OFFLINE", "1");
    let message = offline.refused(&["pull", "hf:org/kv"]);
    assert!(message.contains("damaged"), "{message}");
    let online = offline.without("HF_HUB_OFFLINE");
    let out = online.fine(&["pull", "hf:org/kv"]);
    assert_eq!(fs::read(pulled(&out).join("README.md")).unwrap(), b"a card");
}

#[test]
fn an_entry_that_is_damaged_on_the_hub_is_refused() {
    let (server, machine, folder, _) = single();
    let mut bytes = fs::read(folder.join(TENSORS)).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    server.store(|store| {
        let files = BTreeMap::from([(TENSORS.to_owned(), bytes)]);
        store
            .repos
            .get_mut("org/kv")
            .unwrap()
            .push("main", "oops", files);
    });
    let message = machine.refused(&["pull", "hf:org/kv"]);
    assert!(
        message.contains("damaged") && message.contains("content_sha256"),
        "{message}"
    );
}

#[test]
fn hostile_repositories_write_nowhere_else() {
    let (server, machine, folder, _) = single();
    let bytes = fs::read(folder.join(TENSORS)).unwrap();
    server.store(|store| {
        let paths = [
            "../evil/rotations.safetensors",
            "a/../../rotations.safetensors",
            "/etc/rotations.safetensors",
        ];
        let files = paths.map(|path| (path.to_owned(), bytes.clone()));
        store.repos.insert("org/evil".to_owned(), Repo::default());
        store
            .repos
            .get_mut("org/evil")
            .unwrap()
            .push("main", "evil", files.into());
    });
    let message = machine.refused(&["pull", "hf:org/evil"]);
    assert!(message.contains("holds no zoo entry"), "{message}");

    // A hash is the name of a file.
    server.fail(
        "GET",
        "/revision/",
        Failure::Change(|answer| {
            let text = String::from_utf8(answer.body.clone()).unwrap();
            let mut value: Value = serde_json::from_str(&text).unwrap();
            for file in value["siblings"].as_array_mut().unwrap() {
                file["blobId"] = "../../../evil".into();
                file.as_object_mut().unwrap().remove("lfs");
            }
            answer.body = value.to_string().into_bytes();
        }),
    );
    let message = machine.refused(&["pull", "hf:org/kv"]);
    assert!(message.contains("gives no hash"), "{message}");

    // A commit's id is the name of a folder.
    let commits: [fn(&mut Answer); 3] = [
        |answer| call_commit(answer, "../../../../evil"),
        |answer| call_commit(answer, "/tmp/evil"),
        |answer| call_commit(answer, ""),
    ];
    for change in commits {
        server.fail("GET", "/revision/", Failure::Change(change));
        let message = machine.refused(&["pull", "hf:org/kv"]);
        assert!(message.contains("which is none"), "{message}");
    }
    assert!(!machine.at("hf/hub").exists(), "something was written");
}

fn call_commit(answer: &mut Answer, id: &str) {
    let mut value: Value = serde_json::from_slice(&answer.body).unwrap();
    value["sha"] = id.into();
    answer.body = value.to_string().into_bytes();
}

#[test]
fn refusals_and_retries() {
    let (server, machine, _, _) = single();
    for (path, status, part) in [
        ("/revision/", 401, "hf auth login"),
        ("/revision/", 403, "the token may not do this: gated"),
        ("/resolve/", 404, "there is no such repository or revision"),
    ] {
        server.fail("GET", path, Failure::status(status, "gated"));
        let message = machine.refused(&["pull", "hf:org/kv"]);
        assert!(
            message.contains("hf:org/kv") && message.contains(part),
            "{message}"
        );
    }
    let message = machine.refused(&["pull", "hf:org/none"]);
    assert!(message.contains("no such repository"), "{message}");
    let message = machine.refused(&["pull", "hf:org/kv@none"]);
    assert!(message.contains("no revision `none`"), "{message}");
    let message = machine.refused(&["pull", "hf:org/kv/folder"]);
    assert!(message.contains("without folders"), "{message}");

    for path in ["/revision/", "/resolve/", "/cdn/"] {
        server.fail("GET", path, Failure::status(500, "busy"));
        server.fail("GET", path, Failure::status(503, "busy"));
        server.fail("GET", path, Failure::CutAnswer(0));
    }
    machine.fine(&["pull", "hf:org/kv"]);
    server.all_failed();

    // Where the hub is away, the cache is named and not taken by itself.
    let away = machine.with("HF_ENDPOINT", "http://127.0.0.1:9");
    let message = away.refused(&["pull", "hf:org/kv"]);
    assert!(message.contains("HF_HUB_OFFLINE=1 takes it"), "{message}");
}

#[test]
fn a_private_repository_needs_the_token() {
    let (server, machine, _, _) = single();
    server.store(|store| store.repos.get_mut("org/kv").unwrap().private = true);
    let machine = machine.without("HF_TOKEN");
    let message = machine.refused(&["pull", "hf:org/kv"]);
    assert!(message.contains("asks for a token"), "{message}");
    machine
        .with("HF_TOKEN", hub::TOKEN)
        .fine(&["pull", "hf:org/kv"]);
    // The storage behind the hub sees no token.
    let mut stored = server.requests();
    stored.retain(|request| request.path.starts_with("/cdn/"));
    assert!(!stored.is_empty() && !stored.iter().any(hub::Request::is_authorized));
}

#[test]
fn out_is_a_copy() {
    let (_server, machine, folder, _) = single();
    let out = machine.at("out");
    entry(&out, "org/toy", 9);
    fs::write(out.join("metrics.json"), "of the older tensors").unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let said = machine.fine(&["pull", "hf:org/kv", "--out", text(&out)]);
    assert_eq!(pulled(&said), out);
    assert_eq!(names(&out), ["README.md", "notes.txt", TENSORS]);
    assert_eq!(
        fs::read(out.join(TENSORS)).unwrap(),
        fs::read(folder.join(TENSORS)).unwrap()
    );
    assert!(!out.join(TENSORS).is_symlink());

    let other = machine.at("other");
    entry(&other, "org/other", 9);
    let message = machine.refused(&["pull", "hf:org/kv", "--out", text(&other)]);
    assert!(
        message.contains("another model") && message.contains("--force"),
        "{message}"
    );
    machine.fine(&["pull", "hf:org/kv", "--out", text(&other), "--force"]);
}

#[test]
fn a_model_comes_in_the_same_way() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let toy = toy::Toy::new();
    let model = &toy.model;
    fs::write(
        model.join("pytorch_model.bin"),
        "the same weights once more",
    )
    .unwrap();
    hold(&server, "org/toy", &[("", model)]);
    server.fail(
        "GET",
        "/config.json",
        Failure::status(500, "a page of errors"),
    );
    server.fail("GET", "/cdn/", Failure::CutAnswer(100));
    let plan = [
        "calibrate",
        "--model",
        "org/toy",
        "--data",
        text(&toy.prompts),
        "--tokens",
        "8000",
        "--seq-len",
        "512",
        "--dry-run",
    ];
    let out = machine.fine(&plan);
    server.all_failed();
    assert!(!server.log().iter().any(|line| line.contains(".bin")));
    let offline = machine.with("HF_HUB_OFFLINE", "1");
    assert_eq!(offline.fine(&plan), out);
    let message = offline.refused(&["calibrate", "--model", "org/none", "--dry-run"]);
    assert!(message.contains("HF_HUB_OFFLINE"), "{message}");
    let online = offline.without("HF_HUB_OFFLINE");
    let message = online.refused(&["calibrate", "--model", "org/none", "--dry-run"]);
    assert!(message.contains("no such repository"), "{message}");
}

#[test]
fn what_was_published_is_pulled() {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("zoo/org__toy/balanced"), "org/toy", 1);
    machine.fine(&["publish", text(&folder), "--to", "hf:org/kv"]);
    let elsewhere = Machine::new(&server).without("HF_TOKEN");
    let out = elsewhere.fine(&["pull", "hf:org/kv", "--model", "org/toy"]);
    assert_eq!(
        fs::read(pulled(&out).join(TENSORS)).unwrap(),
        fs::read(folder.join(TENSORS)).unwrap()
    );
}
