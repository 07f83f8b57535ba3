//! What publishing changes: which files, where they go, and how they differ from what the hub holds.

use std::collections::BTreeSet;

use super::{Locator, Snapshot, Upload};
use crate::zoo;
use crate::{Error, Result};

/// Where entries lie in a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One entry alone, at the root: its card is the repository's page.
    Root,
    /// `<org>__<model>/<tag>` each, with an index at the root.
    Zoo,
}

impl Layout {
    /// Of a repository that is to hold `sent` entries besides those in it.
    ///
    /// # Errors
    /// More than one entry where one lies at the root.
    pub fn of(sent: usize, remote: Option<&Snapshot>, locator: &Locator) -> Result<Self> {
        let there = remote.map(entries).unwrap_or_default();
        let (root, zoo) = (there.contains(""), there.iter().any(|e| !e.is_empty()));
        match (root, zoo || sent > 1) {
            (true, true) => Err(Error::invalid(
                locator,
                "one entry lies at the root of this repository, which leaves no room for others",
            )
            .hint("publish to another repository, or that entry alone")),
            (_, true) => Ok(Self::Zoo),
            (_, false) => Ok(Self::Root),
        }
    }

    /// The place of the entry of `model` with `tag`.
    ///
    /// # Errors
    /// Names that make no path.
    pub fn place(self, model: &str, tag: &str) -> Result<String> {
        if self == Self::Root {
            return Ok(String::new());
        }
        let place = format!("{}/{tag}", folder_of_model(model));
        match entry_of(&inside(&place, zoo::FILE)) {
            Some(_) => Ok(place),
            None => Err(Error::invalid(
                format!("`{}`", place.escape_debug()),
                "is no place in a repository",
            )
            .hint("rename the entry's folder: its name is the tag")),
        }
    }
}

/// The folder of a model's entries, as `oscar fit` has it.
pub(super) fn folder_of_model(id: &str) -> String {
    id.replace('/', "__")
}

/// Folders of the entries in a repository, "" for its root.
pub fn entries(snapshot: &Snapshot) -> BTreeSet<String> {
    let paths = snapshot.files.iter().map(|file| file.path.as_str());
    paths.filter_map(entry_of).map(str::to_owned).collect()
}

/// The folder of the entry whose tensors lie at `path`.
pub(super) fn entry_of(path: &str) -> Option<&str> {
    let folder = path.strip_suffix(zoo::FILE)?;
    match folder.strip_suffix('/') {
        // `<org>__<model>/<tag>`, of names that make a path on any system.
        Some(folder) => {
            let plain = |part: &str| {
                !part.is_empty()
                    && !part.starts_with('.')
                    && !part.contains(|c: char| c.is_control() || "\\:?*<>|\"".contains(c))
            };
            (folder.split('/').count() == 2 && folder.split('/').all(plain)).then_some(folder)
        }
        None => folder.is_empty().then_some(""),
    }
}

/// The path of a file of the entry at `place`.
pub fn inside(place: &str, name: &str) -> String {
    match place {
        "" => name.to_owned(),
        place => format!("{place}/{name}"),
    }
}

/// How a file differs from the hub's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    New,
    /// The hub's has so many bytes.
    Changed {
        from_bytes: u64,
    },
    Same,
    /// Measured or drawn of tensors that are replaced, and not made anew.
    Removed,
}

/// A file of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    pub path: String,
    pub size_bytes: u64,
    pub change: Change,
}

/// A commit to be, against what the hub holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// In order of their paths.
    pub files: Vec<Planned>,
    /// What is new or changed.
    pub uploads: Vec<Upload>,
    pub removed: Vec<String>,
}

impl Plan {
    /// Compares what is to be published with the repository.
    pub fn new(uploads: Vec<Upload>, remote: Option<&Snapshot>) -> Result<Self> {
        let mut plan = Self {
            files: Vec::new(),
            uploads: Vec::new(),
            removed: Vec::new(),
        };
        let sent: BTreeSet<String> = uploads.iter().map(|upload| upload.path.clone()).collect();
        for upload in uploads {
            let change = match remote.and_then(|remote| remote.file(&upload.path)) {
                None => Change::New,
                Some(file) if upload.is(file)? => Change::Same,
                Some(file) => Change::Changed {
                    from_bytes: file.size_bytes,
                },
            };
            plan.files.push(Planned {
                path: upload.path.clone(),
                size_bytes: upload.size_bytes,
                change,
            });
            if change != Change::Same {
                plan.uploads.push(upload);
            }
        }
        // New tensors make old measurements untrue.
        for upload in plan.uploads.iter().map(|upload| &upload.path) {
            let Some(folder) = upload.strip_suffix(zoo::FILE) else {
                continue;
            };
            for name in zoo::FILES {
                let path = format!("{folder}{name}");
                if let Some(file) = remote.and_then(|remote| remote.file(&path))
                    && !sent.contains(&path)
                {
                    plan.files.push(Planned {
                        path: path.clone(),
                        size_bytes: file.size_bytes,
                        change: Change::Removed,
                    });
                    plan.removed.push(path);
                }
            }
        }
        plan.files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(plan)
    }

    /// Whether the hub holds all of it already.
    pub fn is_empty(&self) -> bool {
        self.uploads.is_empty() && self.removed.is_empty()
    }

    pub fn upload_bytes(&self) -> u64 {
        self.uploads.iter().map(|upload| upload.size_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_lie_at_the_root_or_two_folders_deep() {
        for (path, entry) in [
            ("rotations.safetensors", Some("")),
            (
                "Qwen__Qwen3-8B/balanced/rotations.safetensors",
                Some("Qwen__Qwen3-8B/balanced"),
            ),
            ("balanced/rotations.safetensors", None),
            ("a/b/c/rotations.safetensors", None),
            ("../b/rotations.safetensors", None),
            ("a/../rotations.safetensors", None),
            ("/b/rotations.safetensors", None),
            ("c:/b/rotations.safetensors", None),
            ("a\\b/c/rotations.safetensors", None),
            ("a/b\n/rotations.safetensors", None),
            ("my_rotations.safetensors", None),
        ] {
            assert_eq!(entry_of(path), entry, "{path}");
        }
    }
}
