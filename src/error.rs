//! One error type: what went wrong, where, and what to do next.

use std::fmt;
use std::path::PathBuf;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong. The command line maps all of them to exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused to read or write `path`.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// Input that a person gave (a file, a tensor in it, a flag) is wrong.
    #[error(transparent)]
    Invalid(#[from] Box<Invalid>),
    /// A computation met a number it cannot go on with.
    #[error("{place}: {problem}")]
    Numeric { place: String, problem: String },
    /// Ctrl-C or SIGTERM; the same command goes on from the last finished layer.
    #[error(
        "interrupted\n  hint: the same command goes on: finished layers of a collection and what came of a download are kept"
    )]
    Interrupted,
    /// A tensor operation failed.
    #[error("tensor operation failed: {0}")]
    Candle(#[from] candle_core::Error),
}

/// See [`Error::invalid`].
#[derive(Debug)]
pub struct Invalid {
    place: String,
    problem: String,
    hint: Option<String>,
}

impl std::error::Error for Invalid {}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.problem)?;
        if let Some(hint) = &self.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        Ok(())
    }
}

impl Error {
    /// `place` names the file, tensor, layer or flag; `problem` says what is wrong with it, with no full stop.
    pub fn invalid(place: impl fmt::Display, problem: impl fmt::Display) -> Self {
        Self::Invalid(Box::new(Invalid {
            place: place.to_string(),
            problem: problem.to_string(),
            hint: None,
        }))
    }

    /// Adds the next step to an [`Error::invalid`]; other errors pass through.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        if let Self::Invalid(invalid) = &mut self {
            invalid.hint = Some(hint.to_string());
        }
        self
    }

    /// At `place` stands a `name` that is none of `known`; `what` is what they are called. The hint is the nearest of
    /// them, or all.
    pub fn unknown(
        place: impl fmt::Display,
        what: impl fmt::Display,
        name: &str,
        known: &[&str],
    ) -> Self {
        let error = Self::invalid(
            place,
            format!("no {what} is called `{}`", name.escape_debug()),
        );
        match nearest(name, known) {
            Some(known) => error.hint(format!("did you mean `{known}`?")),
            None => error.hint(format!("known are {}", known.join(", "))),
        }
    }

    /// A computation at `place` (layer, head, side) met a number it cannot go on with.
    pub fn numeric(place: impl fmt::Display, problem: impl fmt::Display) -> Self {
        Self::Numeric {
            place: place.to_string(),
            problem: problem.to_string(),
        }
    }

    /// For `map_err`: the operating system refused to `action` (a verb) `path`.
    pub fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

/// The name that `name` was meant to be, where one is near.
fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|known| (strsim::levenshtein(name, known), *known))
        .min()
        .filter(|(distance, known)| *distance <= (known.len() / 3).max(1))
        .map(|(_, known)| known)
}
