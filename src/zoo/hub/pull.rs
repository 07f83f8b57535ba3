//! From a hub into its cache: the right entry, its hashes checked.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::plan::{entry_of, folder_of_model};
use super::{ContentId, Hub, Locator, RemoteFile, Snapshot, Watch, entries, inside, open};
use crate::hub_cache::{self, CachedRepo};
use crate::zoo::{self, Entry};
use crate::{Error, Result, files};

/// Which entry of a repository.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// The model's id, such as `owner/name`.
    pub model: Option<String>,
    pub tag: Option<String>,
}

/// An entry on this machine.
#[derive(Clone, Debug)]
pub struct Pulled {
    /// In the cache.
    pub folder: PathBuf,
    /// In the repository, "" for its root.
    pub place: String,
    pub commit: String,
    pub model: String,
    /// Whether nothing was asked of the network.
    pub offline: bool,
}

/// Finds the entry in the cache or on the hub, and fetches what the cache lacks.
///
/// # Errors
/// A repository or entry that is not there, a file that is not what the hub or the entry says.
pub fn pull(locator: &Locator, wanted: &Wanted, watch: &Arc<dyn Watch>) -> Result<Pulled> {
    let cache = locator.host.cache().ok_or_else(|| {
        Error::invalid(locator, "there is no home folder to keep a cache in")
            .hint("set HF_HOME, or MODELSCOPE_CACHE for ModelScope, to a folder")
    })?;
    let repo = CachedRepo::new(&cache, &locator.id);
    let revision = locator.revision();
    let cached = repo.snapshot(revision);
    if hub_cache::offline() {
        let (commit, folder) = cached.ok_or_else(|| {
            Error::invalid(
                locator,
                format!(
                    "not in the cache `{}`, and HF_HUB_OFFLINE is set",
                    cache.display()
                ),
            )
            .hint(format!(
                "run `oscar pull {locator}` where there is a network, or unset HF_HUB_OFFLINE"
            ))
        })?;
        return from_cache(locator, wanted, &commit, &folder);
    }
    // A commit never changes.
    if let Some((commit, folder)) = &cached
        && commit == revision
        && let Ok(pulled) = from_cache(locator, wanted, commit, folder)
    {
        return Ok(pulled);
    }
    let hub = open(locator, watch.clone())?;
    let snapshot = match hub.snapshot() {
        Ok(Some(snapshot)) => snapshot,
        Ok(None) => {
            return Err(Error::invalid(
                locator,
                format!(
                    "{} has no such repository, or the token may not see it",
                    locator.host.name()
                ),
            )
            .hint("check owner and name; a private repository needs a token"));
        }
        Err(error) => {
            if cached.is_some() {
                watch.note(
                    "the cache holds an older look at this repository: HF_HUB_OFFLINE=1 takes it",
                );
            }
            return Err(error);
        }
    };
    let place = choose(locator, wanted, &entries(&snapshot))?;
    fetch(
        locator,
        wanted,
        &repo,
        &snapshot,
        &place,
        hub.as_ref(),
        watch.as_ref(),
    )
}

fn from_cache(locator: &Locator, wanted: &Wanted, commit: &str, folder: &Path) -> Result<Pulled> {
    let place = choose(locator, wanted, &entries_below(folder)?)
        .map_err(|e| e.hint("the cache holds only what was pulled: unset HF_HUB_OFFLINE"))?;
    let folder = folder.join(&place);
    let entry = check(locator, wanted, &folder)?;
    Ok(Pulled {
        folder,
        place,
        commit: commit.to_owned(),
        model: entry.metadata.model.id,
        offline: true,
    })
}

/// Folders of the entries in a snapshot of the cache.
fn entries_below(folder: &Path) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![String::new()];
    while let Some(place) = folders.pop() {
        let path = folder.join(&place);
        for item in fs::read_dir(&path).map_err(Error::io("list", &path))? {
            let item = item.map_err(Error::io("list", &path))?;
            let Some(name) = item.file_name().to_str().map(str::to_owned) else {
                continue;
            };
            let path = inside(&place, &name);
            if item.path().is_dir() && path.matches('/').count() < 2 {
                folders.push(path);
            } else {
                found.extend(entry_of(&path).map(str::to_owned));
            }
        }
    }
    Ok(found)
}

/// The one entry that is wanted.
fn choose(locator: &Locator, wanted: &Wanted, there: &BTreeSet<String>) -> Result<String> {
    let folder = wanted.model.as_deref().map(folder_of_model);
    let fits = |place: &str| match place.split_once('/') {
        Some((model, tag)) => {
            folder.as_deref().is_none_or(|wanted| wanted == model)
                && wanted.tag.as_deref().is_none_or(|wanted| wanted == tag)
        }
        // What it is of is in the entry itself.
        None => wanted.tag.is_none(),
    };
    let fitting: Vec<&String> = there.iter().filter(|place| fits(place)).collect();
    match fitting[..] {
        [place] => Ok(place.clone()),
        [] if there.is_empty() => Err(Error::invalid(locator, "holds no zoo entry").hint(format!(
            "an entry lies in <org>__<model>/<tag>/{} or at the root",
            zoo::FILE
        ))),
        [] => Err(Error::invalid(
            locator,
            format!(
                "holds no entry {}; there are {}",
                described(wanted),
                listed(there.iter())
            ),
        )
        .hint("choose one of them with --model and --tag")),
        _ => Err(Error::invalid(
            locator,
            format!(
                "holds several entries {}: {}",
                described(wanted),
                listed(fitting.into_iter())
            ),
        )
        .hint("choose one of them with --model and --tag")),
    }
}

fn described(wanted: &Wanted) -> String {
    match (&wanted.model, &wanted.tag) {
        (Some(model), Some(tag)) => format!("of `{model}` with tag `{tag}`"),
        (Some(model), None) => format!("of `{model}`"),
        (None, Some(tag)) => format!("with tag `{tag}`"),
        (None, None) => "to choose from".to_owned(),
    }
}

fn listed<'a>(places: impl Iterator<Item = &'a String>) -> String {
    let named = places.map(|place| match place.split_once('/') {
        Some((model, tag)) => format!("`{}` ({tag})", model.replacen("__", "/", 1)),
        None => "one at the root, without a tag".to_owned(),
    });
    named.collect::<Vec<_>>().join(", ")
}

fn fetch(
    locator: &Locator,
    wanted: &Wanted,
    repo: &CachedRepo,
    snapshot: &Snapshot,
    place: &str,
    hub: &dyn Hub,
    watch: &dyn Watch,
) -> Result<Pulled> {
    let wanted_files = zoo::FILES
        .iter()
        .filter_map(|name| snapshot.file(&inside(place, name)));
    let mut blobs = Vec::new();
    for file in wanted_files {
        blobs.push((file, blob(locator, repo, snapshot, file, hub, watch)?));
    }
    // Before it is linked: what a snapshot of the cache holds is sound.
    let mut model = String::new();
    for (file, blob) in &blobs {
        if entry_of(&file.path).is_some() {
            model = check(locator, wanted, blob)?.metadata.model.id;
        }
    }
    let folder = repo.files(&snapshot.commit);
    // The tensors last: an entry with them is whole.
    for (file, blob) in blobs.iter().rev() {
        link(blob, &folder.join(&file.path))?;
    }
    if locator.revision() != snapshot.commit {
        let reference = repo.reference(locator.revision());
        files::write_atomic(&reference, |out| out.write_all(snapshot.commit.as_bytes()))?;
    }
    Ok(Pulled {
        folder: folder.join(place),
        place: place.to_owned(),
        commit: snapshot.commit.clone(),
        model,
        offline: false,
    })
}

/// The content of `file` in the cache, fetched where it is not there or is not what it should be.
fn blob(
    locator: &Locator,
    repo: &CachedRepo,
    snapshot: &Snapshot,
    file: &RemoteFile,
    hub: &dyn Hub,
    watch: &dyn Watch,
) -> Result<PathBuf> {
    let place = format!("{locator}, `{}`", file.path);
    if !file.content.is_sound() {
        return Err(Error::invalid(place, "the hub gives no hash of this file"));
    }
    let blob = repo.blob(file.content.hash());
    if blob.is_file() && file.content.is_of(&blob)? {
        return Ok(blob);
    }
    if let Some(folder) = blob.parent() {
        fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
    }
    let mut partial = blob.clone().into_os_string();
    partial.push(".incomplete");
    let partial = PathBuf::from(partial);
    watch.expect(file.size_bytes);
    hub.fetch(&snapshot.commit, file, &partial)?;
    let found = file.content.of_file(&partial)?;
    if found != file.content {
        fs::remove_file(&partial).map_err(Error::io("remove", &partial))?;
        let kind = match file.content {
            ContentId::Sha256(_) => "SHA-256",
            ContentId::GitBlob(_) => "git hash",
        };
        return Err(Error::invalid(
            place,
            format!(
                "what came has the {kind} {}, the hub says {}",
                found.hash(),
                file.content.hash()
            ),
        )
        .hint("run the same command again; if it stays, the file is damaged on the hub"));
    }
    fs::rename(&partial, &blob).map_err(Error::io("rename", &partial))?;
    Ok(blob)
}

/// The entry at `path` is sound, and of the model that is wanted.
fn check(locator: &Locator, wanted: &Wanted, path: &Path) -> Result<Entry> {
    let entry = Entry::open(path)
        .map_err(|e| Error::invalid(locator, format!("the entry is damaged: {e}")))?;
    let id = &entry.metadata.model.id;
    match &wanted.model {
        Some(model) if model != id => Err(Error::invalid(
            locator,
            format!("holds no entry of `{model}`; there is one of `{id}`"),
        )
        .hint(format!(
            "an entry serves its own model alone: pull it with --model {id}"
        ))),
        _ => Ok(entry),
    }
}

/// Makes `path` show the content `blob`, as `huggingface_hub` does.
fn link(blob: &Path, path: &Path) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
    }
    if path.symlink_metadata().is_ok() {
        fs::remove_file(path).map_err(Error::io("remove", path))?;
    }
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(relative(blob, path), path).map_err(Error::io("link", path))
    }
    #[cfg(not(unix))]
    {
        fs::copy(blob, path)
            .map(drop)
            .map_err(Error::io("copy", path))
    }
}

/// `REPO/blobs/HASH` as seen from `REPO/snapshots/COMMIT/…`: a cache may be moved as a whole.
#[cfg(unix)]
fn relative(blob: &Path, path: &Path) -> PathBuf {
    let repo = blob.parent().and_then(Path::parent);
    let inside = repo.and_then(|repo| {
        path.strip_prefix(repo)
            .ok()
            .zip(blob.strip_prefix(repo).ok())
    });
    match inside {
        Some((path, blob)) => {
            let up = path.components().skip(1).map(|_| "..");
            up.collect::<PathBuf>().join(blob)
        }
        None => blob.to_owned(),
    }
}
