//! `hf:OWNER/NAME[@REV]` and `ms:OWNER/NAME[@REV]`.

use std::path::PathBuf;
use std::str::FromStr;
use std::{env, fmt};

use crate::Error;
use crate::hub_cache::{self, Id, path_variable};

/// The hubs that entries are published to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    HuggingFace,
    ModelScope,
}

impl Host {
    pub const ALL: [Self; 2] = [Self::HuggingFace, Self::ModelScope];

    /// What stands before the colon.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::HuggingFace => "hf",
            Self::ModelScope => "ms",
        }
    }

    /// As people know it.
    pub fn name(self) -> &'static str {
        match self {
            Self::HuggingFace => "Hugging Face",
            Self::ModelScope => "ModelScope",
        }
    }

    /// The folder that keeps what was fetched: for Hugging Face the one that `hf` shares, for ModelScope one of the
    /// same form.
    pub fn cache(self) -> Option<PathBuf> {
        match self {
            Self::HuggingFace => hub_cache::hugging_face(),
            Self::ModelScope => path_variable("MODELSCOPE_CACHE")
                .or_else(|| Some(env::home_dir()?.join(".cache/modelscope")))
                .map(|cache| cache.join("oscar")),
        }
    }

    /// Name and content of what the hub itself reads at the root of a repository, and puts it aside without.
    pub fn own_file(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::HuggingFace => None,
            Self::ModelScope => Some((
                "configuration.json",
                "{\"framework\": \"other\", \"task\": \"text-generation\"}\n",
            )),
        }
    }

    /// The branch that is meant where none is named.
    pub fn default_branch(self) -> &'static str {
        match self {
            Self::HuggingFace => "main",
            Self::ModelScope => "master",
        }
    }
}

/// A repository on a hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locator {
    pub host: Host,
    pub id: Id,
}

impl Locator {
    pub fn revision(&self) -> &str {
        self.id.revision_or(self.host.default_branch())
    }

    /// `hf:owner/name`, without the revision.
    pub fn repo(&self) -> String {
        format!("{}:{}", self.host.prefix(), self.id.repo())
    }
}

impl fmt::Display for Locator {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}", self.host.prefix(), self.id)
    }
}

impl FromStr for Locator {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parsed = text.split_once(':').and_then(|(prefix, id)| {
            let host = Host::ALL.into_iter().find(|host| host.prefix() == prefix)?;
            let id = Id::parse(id)?;
            Some(Self { host, id })
        });
        parsed.ok_or_else(|| {
            Error::invalid(
                format!("`{}`", text.escape_debug()),
                "names no repository on a hub",
            )
            .hint("give `hf:OWNER/NAME[@REVISION]` or `ms:OWNER/NAME[@REVISION]`, without folders")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_owner_name_and_revision() {
        let locator: Locator = "hf:org/zoo@v1".parse().unwrap();
        assert_eq!(locator.host, Host::HuggingFace);
        assert_eq!(
            (locator.repo().as_str(), locator.revision()),
            ("hf:org/zoo", "v1")
        );
        let locator: Locator = "ms:org/zoo".parse().unwrap();
        assert_eq!(
            (locator.to_string().as_str(), locator.revision()),
            ("ms:org/zoo", "master")
        );
        for bad in [
            "org/zoo",
            "gh:org/zoo",
            "hf:zoo",
            "hf:org/zoo/balanced",
            "hf:../zoo",
            "hf:/org/zoo",
            "HF:org/zoo",
        ] {
            assert!(bad.parse::<Locator>().is_err(), "{bad}");
        }
    }
}
