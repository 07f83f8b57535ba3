//! Promise: the hubs' own Python clients find what we publish, and we find what they publish.
//!
//! Needs `huggingface_hub` and `modelscope` in `python3`, or in the interpreter that `OSCAR_PYTHON` names.
#![cfg(feature = "hub")]

mod hub;
mod pool_entry;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use hub::local::entry;
use hub::{Machine, Server, TOKEN};

const FILES: [&str; 3] = ["README.md", "report.html", "rotations.safetensors"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs a program on `machine`, or says why not and returns `false`.
fn python(machine: &Machine, needs: &str, program: &str) -> bool {
    let python = std::env::var("OSCAR_PYTHON").unwrap_or_else(|_| "python3".into());
    let run = |program: &str| {
        let mut command = Command::new(&python);
        machine.environment(&mut command);
        command.args(["-c", program]).output()
    };
    if !run(&format!("import {needs}")).is_ok_and(|output| output.status.success()) {
        println!("skipped: `{python}` has no {needs} (OSCAR_PYTHON names one that has)");
        return false;
    }
    let output = run(program).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {said}");
    true
}

fn ready() -> (Server, Machine, PathBuf) {
    let server = Server::start();
    let machine = Machine::new(&server);
    let folder = entry(&machine.at("zoo/org__toy/balanced"), "org/toy", 1);
    fs::write(folder.join("README.md"), "a card\n").unwrap();
    fs::write(folder.join("report.html"), "page ".repeat(300_000)).unwrap();
    (server, machine, folder)
}

/// Asserts that `found` holds the entry in `folder`.
fn same(found: &Path, folder: &Path) {
    for name in FILES {
        let (found, sent) = (fs::read(found.join(name)), fs::read(folder.join(name)));
        assert!(found.unwrap() == sent.unwrap(), "{name}");
    }
}

#[test]
fn huggingface_hub_downloads_what_we_publish() {
    let (_server, machine, folder) = ready();
    machine.fine(&["publish", text(&folder), "--to", "hf:org/kv", "--private"]);
    let out = machine.at("out");
    let program = format!(
        "from huggingface_hub import hf_hub_download, snapshot_download
for name in {FILES:?}:
    hf_hub_download('org/kv', name, local_dir={out:?})
snapshot_download('org/kv')"
    );
    if !python(&machine, "huggingface_hub", &program) {
        return;
    }
    same(&out, &folder);
    // What `hf` has in its cache, we find there.
    let offline = machine.with("HF_HUB_OFFLINE", "1");
    offline.fine(&["pull", "hf:org/kv", "--out", text(&offline.at("pulled"))]);
    same(&offline.at("pulled"), &folder);
}

#[test]
fn huggingface_hub_finds_in_the_cache_what_we_pull() {
    let (_server, machine, folder) = ready();
    machine.fine(&["publish", text(&folder), "--to", "hf:org/kv"]);
    machine.fine(&["pull", "hf:org/kv"]);
    let out = machine.at("out");
    let program = format!(
        "import shutil
from huggingface_hub import hf_hub_download
for name in {FILES:?}:
    path = hf_hub_download('org/kv', name, local_files_only=True)
    shutil.copyfile(path, {out:?} + '/' + name)"
    );
    fs::create_dir(&out).unwrap();
    if python(&machine, "huggingface_hub", &program) {
        same(&out, &folder);
    }
}

#[test]
fn modelscope_downloads_what_we_publish() {
    let (_server, machine, folder) = ready();
    machine.fine(&["publish", text(&folder), "--to", "ms:org/kv", "--private"]);
    let out = machine.at("out");
    let program = format!(
        "from modelscope import snapshot_download
snapshot_download('org/kv', local_dir={out:?})"
    );
    if python(&machine, "modelscope", &program) {
        same(&out, &folder);
    }
}

#[test]
fn we_pull_what_modelscope_uploads() {
    let (_server, machine, folder) = ready();
    let program = format!(
        "from modelscope.hub.api import HubApi
api = HubApi()
api.create_repo('org/kv', repo_type='model', visibility='private')
api.upload_folder(repo_id='org/kv', folder_path={folder:?})"
    );
    if python(&machine, "modelscope", &program) {
        let out = machine.at("out");
        machine.fine(&["pull", "ms:org/kv", "--out", text(&out)]);
        same(&out, &folder);
    }
}

#[test]
fn the_login_of_modelscope_is_ours() {
    let (server, machine, folder) = ready();
    let machine = machine.without("MODELSCOPE_API_TOKEN");
    let publish = ["publish", text(&folder), "--to", "ms:org/kv"];
    let program = format!(
        "from modelscope_hub.config import HubConfig
HubConfig().save_token('{TOKEN}')"
    );
    if python(&machine, "modelscope_hub", &program) {
        machine.fine(&publish);
        assert!(server.requests().iter().all(hub::Request::is_authorized));
    }
}
