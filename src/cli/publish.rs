//! `oscar publish`: entries onto a model hub, in one commit.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use indicatif::HumanBytes;
use tempfile::TempDir;

use super::Outcome;
use super::common::{Format, entry_folder, print, print_json};
use super::progress::Transfer;
use crate::report::card;
use crate::zoo::hub::{
    self, Change, Commit, Hub, Layout, Locator, Plan, Snapshot, Upload, Watch, inside,
};
use crate::zoo::{self, Entry};
use crate::{Error, files};

/// Publish entries on Hugging Face or ModelScope.
///
/// Every entry is verified first. All files go in one commit; what the hub holds already is not sent again. One entry
/// lies at the repository's root, several in `<org>__<model>/<tag>` with an index; the tag is the name of the entry's
/// folder. Only an entry's own files are sent: tensors, card, metrics, report, recipe.
///
/// The token is the one that the hub's own tool would use: HF_TOKEN or `hf auth login`, MODELSCOPE_API_TOKEN or
/// `modelscope login`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Folders of entries, or of a zoo
    #[arg(required = true, value_name = "ENTRY")]
    entries: Vec<PathBuf>,

    /// Repository: hf:OWNER/NAME[@BRANCH] or ms:OWNER/NAME[@BRANCH]; made where it is not there
    #[arg(long, value_name = "REPO")]
    to: Locator,

    /// Open a pull request instead of committing
    #[arg(long)]
    pull_request: bool,

    /// Where the repository is made: only for its owners
    #[arg(long)]
    private: bool,

    /// Message of the commit
    #[arg(short, long, value_name = "TITLE")]
    message: Option<String>,

    /// Only say what would be sent: files, sizes, what differs from the hub
    #[arg(long)]
    dry_run: bool,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

/// A sound entry on this machine.
struct Local {
    folder: PathBuf,
    model: String,
    tag: String,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let locals = locals(&args.entries)?;
    let transfer = Arc::new(Transfer::new());
    let hub = hub::open(&args.to, transfer.clone())?;
    let mut remote = hub.snapshot()?;
    if remote.is_none() {
        can_be_made(args)?;
    }
    // Cards that are made for this commit alone.
    let made = TempDir::new().map_err(Error::io("create", std::env::temp_dir()))?;
    let uploads = uploads(&locals, &args.to, hub.as_ref(), remote.as_ref(), &made)?;
    let plan = Plan::new(uploads, remote.as_ref())?;
    let mut address = None;
    if !args.dry_run && !plan.is_empty() {
        if remote.is_none() {
            hub.create(args.private)?;
            remote = hub.snapshot()?;
        } else if args.private {
            eprintln!("note: the repository is there already: --private changes nothing");
        }
        transfer.expect(plan.upload_bytes());
        let done = hub.commit(&Commit {
            title: &args.message.clone().unwrap_or_else(|| title(&locals)),
            parent: remote.as_ref().map(|remote| remote.commit.as_str()),
            pull_request: args.pull_request,
            files: &plan.uploads,
            removed: &plan.removed,
        });
        transfer.finish();
        address = Some(done?);
    }
    show(args, &plan, remote.as_ref(), address.as_deref())?;
    Ok(Outcome::Fine)
}

/// What a repository that is not there yet cannot be asked for.
fn can_be_made(args: &Args) -> Result<()> {
    let missing = |problem| Error::invalid(&args.to, problem);
    if args.pull_request {
        return Err(
            missing("there is no such repository to open a pull request for")
                .hint("check owner and name, or publish without --pull-request to make it")
                .into(),
        );
    }
    if args.to.revision() != args.to.host.default_branch() {
        return Err(
            missing("there is no such repository, and a new one has no such branch")
                .hint("publish without @BRANCH first")
                .into(),
        );
    }
    Ok(())
}

/// Finds the entries that are named, and refuses the damaged.
fn locals(paths: &[PathBuf]) -> Result<Vec<Local>> {
    let mut folders = Vec::new();
    for path in paths {
        let folder = entry_folder(path)?;
        if folder.join(zoo::FILE).is_file() {
            folders.push(folder.to_owned());
            continue;
        }
        let found = card::entries(folder)?;
        if found.is_empty() {
            return Err(Error::invalid(folder.display(), "holds no zoo entry")
                .hint(format!("an entry is a folder with {}", zoo::FILE))
                .into());
        }
        folders.extend(found);
    }
    let mut locals: Vec<Local> = Vec::new();
    for folder in folders {
        let entry = Entry::open(&folder)?;
        // `.` and `..` have no name of their own.
        let named = folder.canonicalize().map_err(Error::io("read", &folder))?;
        let local = Local {
            model: entry.metadata.model.id,
            tag: named
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            folder,
        };
        if let Some(other) = locals
            .iter()
            .find(|other| (&other.model, &other.tag) == (&local.model, &local.tag))
        {
            return Err(Error::invalid(
                local.folder.display(),
                format!(
                    "has the place of `{}`: model `{}`, tag `{}`",
                    other.folder.display(),
                    local.model,
                    local.tag
                ),
            )
            .hint("rename one of the folders: their names are the tags")
            .into());
        }
        locals.push(local);
    }
    Ok(locals)
}

/// Every file that the repository is to hold of these entries.
fn uploads(
    locals: &[Local],
    to: &Locator,
    hub: &dyn Hub,
    remote: Option<&Snapshot>,
    made: &TempDir,
) -> Result<Vec<Upload>> {
    let layout = Layout::of(locals.len(), remote, to)?;
    let (mut uploads, mut placed) = (Vec::new(), Vec::new());
    for (number, local) in locals.iter().enumerate() {
        let place = layout.place(&local.model, &local.tag)?;
        for name in zoo::FILES {
            let mut source = local.folder.join(name);
            if name == card::FILE && !source.is_file() {
                source = made.path().join(format!("{number}.md"));
                card::put(&source, &card::card(&local.folder, None)?)?;
            }
            if source.is_file() {
                uploads.push(Upload::new(inside(&place, name), source)?);
            }
        }
        placed.push((place, local.folder.clone()));
    }
    let scratch = made.path().join(card::FILE);
    if let (Layout::Root, [local], Some(remote)) = (layout, locals, remote)
        && let Some(tensors) = remote.file(zoo::FILE)
        && let Some(sent) = uploads.iter().find(|sent| sent.path == tensors.path)
        && !sent.is(tensors)?
        && let Some(older) = older_card(hub, remote, &scratch)?
        && let Some(model) = card::stated_model(&older)
        && model != local.model
    {
        return Err(Error::invalid(
            to,
            format!(
                "holds the entry of another model, `{model}`, not `{}`",
                local.model
            ),
        )
        .hint("publish to another repository, or delete that entry there first")
        .into());
    }
    if let Some((name, content)) = to.host.own_file()
        && remote.is_none_or(|remote| remote.file(name).is_none())
    {
        let source = made.path().join(name);
        fs::write(&source, content).map_err(Error::io("write", &source))?;
        uploads.push(Upload::new(name, source)?);
    }
    if layout == Layout::Zoo
        && let Some(text) = index_text(&placed, hub, remote, &scratch)?
    {
        card::put(&scratch, &text)?;
        uploads.push(Upload::new(card::FILE, scratch)?);
    }
    Ok(uploads)
}

/// The index of the entries sent and of those that the hub holds; `None` where a person wrote the one that is there.
fn index_text(
    placed: &[(String, PathBuf)],
    hub: &dyn Hub,
    remote: Option<&Snapshot>,
    scratch: &Path,
) -> Result<Option<String>> {
    let (mut older, mut others) = (String::new(), BTreeSet::new());
    if let Some(remote) = remote {
        others = hub::entries(remote);
        if let Some(there) = older_card(hub, remote, scratch)? {
            older = there;
            if !card::is_generated(&older) {
                eprintln!(
                    "note: {} of the repository was not made by `oscar card`: it stays as it is",
                    card::FILE
                );
                return Ok(None);
            }
        }
    }
    Ok(Some(card::index_of(placed, &others, &older)?))
}

/// The page of a repository, fetched to `scratch`.
fn older_card(hub: &dyn Hub, remote: &Snapshot, scratch: &Path) -> Result<Option<String>> {
    let Some(file) = remote.file(card::FILE) else {
        return Ok(None);
    };
    hub.fetch(&remote.commit, file, scratch)?;
    Ok(Some(files::read_text(scratch)?))
}

fn title(locals: &[Local]) -> String {
    match locals {
        [local] => format!("{}, {}", local.model, local.tag),
        more => format!("{} entries", more.len()),
    }
}

fn show(args: &Args, plan: &Plan, remote: Option<&Snapshot>, address: Option<&str>) -> Result<()> {
    let word = |change: &Change| match change {
        Change::New => "new",
        Change::Changed { .. } => "changed",
        Change::Same => "same",
        Change::Removed => "removed",
    };
    if args.format == Format::Json {
        let files: Vec<_> = plan
            .files
            .iter()
            .map(|file| {
                serde_json::json!({
                    "path": file.path,
                    "size_bytes": file.size_bytes,
                    "change": word(&file.change),
                })
            })
            .collect();
        return print_json(&serde_json::json!({
            "repo": args.to.repo(),
            "revision": args.to.revision(),
            "parent": remote.map(|remote| &remote.commit),
            "dry_run": args.dry_run,
            "files": files,
            "upload_bytes": plan.upload_bytes(),
            "address": address,
        }));
    }
    let mut text = String::new();
    if args.dry_run {
        let there = match remote {
            Some(remote) => format!("against commit {}", remote.commit),
            None => "which would be made".to_owned(),
        };
        writeln!(text, "{}, {there}", args.to)?;
    }
    for file in &plan.files {
        write!(
            text,
            "{:<8} {:>11}  {}",
            word(&file.change),
            HumanBytes(file.size_bytes).to_string(),
            file.path
        )?;
        if let Change::Changed { from_bytes } = file.change {
            write!(text, "  (was {})", HumanBytes(from_bytes))?;
        }
        text.push('\n');
    }
    let sum = format!(
        "{} files, {}",
        plan.uploads.len(),
        HumanBytes(plan.upload_bytes())
    );
    match address {
        Some(address) => writeln!(text, "sent {sum}\n{address}")?,
        None if plan.is_empty() => writeln!(text, "{} holds all of it", args.to)?,
        None => writeln!(text, "would send {sum}")?,
    }
    print(&text)
}
