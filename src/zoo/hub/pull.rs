//! From a hub into its cache: the right entry, its hashes checked.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::plan::{entry_of, folder_of_model};
use super::source::{self, Source};
use super::{Locator, Watch, entries, inside};
use crate::hub_cache;
use crate::zoo::{self, Entry};
use crate::{Error, Result};

/// Entries that a message lists.
const MOST_NAMED: usize = 20;

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
    let repo = source::repo(locator)?;
    let revision = locator.revision();
    let cached = repo.snapshot(revision);
    if hub_cache::offline() {
        let (commit, folder) = cached.ok_or_else(|| {
            Error::invalid(
                locator,
                format!(
                    "not in the cache `{}`, and HF_HUB_OFFLINE is set",
                    repo.folder().display()
                ),
            )
            .hint(format!(
                "run `oscar pull {locator}` where there is a network, or unset HF_HUB_OFFLINE"
            ))
        })?;
        return from_cache(locator, wanted, &commit, &folder);
    }
    // A commit never changes. Of several entries in it, the cache may have but one: that is no choice.
    if let Some((commit, folder)) = &cached
        && commit == revision
        && let Ok(pulled) = from_cache(locator, wanted, commit, folder)
        && (pulled.place.is_empty() || wanted.model.is_some() && wanted.tag.is_some())
    {
        return Ok(pulled);
    }
    let source = Source::open(locator, repo, watch).inspect_err(|_| {
        if cached.is_some() {
            watch.note(
                "the cache holds an older look at this repository: HF_HUB_OFFLINE=1 takes it",
            );
        }
    })?;
    let place = choose(locator, wanted, &entries(&source.snapshot))?;
    fetch(&source, wanted, &place)
}

fn from_cache(locator: &Locator, wanted: &Wanted, commit: &str, folder: &Path) -> Result<Pulled> {
    let place = choose(locator, wanted, &entries_below(folder)?)
        .map_err(|e| e.hint("the cache holds only what was pulled: unset HF_HUB_OFFLINE"))?;
    let folder = below(folder, &place);
    for name in zoo::FILES {
        let file = folder.join(name);
        if file.exists() && !source::is_whole(&file)? {
            return Err(Error::invalid(
                locator,
                format!("`{}` of the cache is damaged", file.display()),
            )
            .hint(format!(
                "run `oscar pull {locator}` where there is a network: it fetches the file anew"
            )));
        }
    }
    let entry = check(locator, wanted, &folder)?;
    Ok(Pulled {
        folder,
        place,
        commit: commit.to_owned(),
        model: entry.metadata.model.id,
        offline: true,
    })
}

/// The folder of the entry at `place`, "" for `folder` itself.
fn below(folder: &Path, place: &str) -> PathBuf {
    match place {
        "" => folder.to_owned(),
        place => folder.join(place),
    }
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
    let mut named: Vec<_> = named.collect();
    let more = named.len().saturating_sub(MOST_NAMED);
    named.truncate(MOST_NAMED);
    if more > 0 {
        named.push(format!("and {more} more"));
    }
    named.join(", ")
}

fn fetch(source: &Source<'_>, wanted: &Wanted, place: &str) -> Result<Pulled> {
    let files = zoo::FILES
        .iter()
        .filter_map(|name| source.snapshot.file(&inside(place, name)));
    let blobs = source.blobs(files)?;
    // Before it is linked: what a snapshot of the cache holds is sound.
    let mut model = String::new();
    for (file, blob) in &blobs {
        if entry_of(&file.path).is_some() {
            model = check(source.locator, wanted, blob)?.metadata.model.id;
        }
    }
    Ok(Pulled {
        folder: below(&source.keep(&blobs)?, place),
        place: place.to_owned(),
        commit: source.snapshot.commit.clone(),
        model,
        offline: false,
    })
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
