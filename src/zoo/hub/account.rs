//! Who speaks to a hub about which repository, and what the hub's refusals mean.

use std::fmt;
use std::time::Duration;

use serde_json::Value;

use super::Upload;
use super::retry::Failure;
use crate::Error;

/// A secret: shown nowhere.
#[derive(Clone)]
pub(super) struct Token(String);

impl Token {
    /// `None` for what is no token: nothing, or text that no header can carry.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty() && text.chars().all(|c| c.is_ascii_graphic()))
            .then(|| Self(text.to_owned()))
    }

    /// For the request's header, and nothing else.
    pub fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("[token]")
    }
}

/// One repository on one hub, with the token for it. Makes all errors of a hub, so that none shows the token.
#[derive(Clone, Debug)]
pub(super) struct Account {
    /// The hub's name as people know it.
    pub hub: &'static str,
    /// Where its address comes from, for hints.
    pub address: &'static str,
    /// `hf:owner/name`
    pub repo: String,
    /// What to do to have a token, as the hint of a message.
    pub login: &'static str,
    pub token: Option<Token>,
}

/// Whether it changes the direction of the text that follows.
fn turns_text(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

impl Account {
    /// An error about this repository. `problem` may hold what the hub said.
    pub fn error(&self, problem: impl fmt::Display) -> Error {
        Error::invalid(&self.repo, self.shown(&problem.to_string()))
    }

    /// Text of a hub as it may be shown: without the token, if it is repeated, and without what moves a cursor.
    pub fn shown(&self, text: &str) -> String {
        let text = text.replace(|c: char| c != '\n' && (c.is_control() || turns_text(c)), "");
        match &self.token {
            Some(token) => text.replace(token.secret(), "[token]"),
            None => text,
        }
    }

    /// The hub could not be reached, or the connection broke: worth another attempt.
    pub fn unreachable(&self, problem: impl fmt::Display) -> Failure {
        Failure::Broken(
            self.error(format!("{} cannot be reached: {problem}", self.hub))
                .hint(format!(
                    "check the network, and {}; the same command goes on where this one ended",
                    self.address
                )),
        )
    }

    /// What an answer with an error status means. `said` is the hub's own message, `files` what was being sent.
    pub fn refused(
        &self,
        status: u16,
        said: &str,
        after: Option<Duration>,
        files: &[Upload],
    ) -> Failure {
        let hub = self.hub;
        let said = self.brief(said);
        let with = |problem: &str| match said.as_str() {
            "" => self.error(format!("{problem} (HTTP {status})")),
            said => self.error(format!("{problem}: {said} (HTTP {status})")),
        };
        let error = match status {
            401 if self.token.is_none() => {
                with(&format!("{hub} asks for a token")).hint(self.login)
            }
            401 => with(&format!("{hub} does not accept the token")).hint(self.login),
            403 => with("the token may not do this").hint(format!(
                "take a token with the rights for it: {}",
                self.login
            )),
            404 => with("there is no such repository or revision, or the token may not see it")
                .hint("check owner, name and revision; a private repository needs a token"),
            409 | 412 => with("someone else has committed meanwhile")
                .hint("run the same command again: it starts from what is there now"),
            413 => {
                let error = with(&format!("{hub} finds this too large"));
                match files.iter().max_by_key(|file| file.size_bytes) {
                    Some(file) => error.hint(format!(
                        "the largest file is `{}` with {:.1} MiB; publish fewer entries at once, or without it",
                        file.path,
                        file.size_bytes as f64 / f64::from(1 << 20)
                    )),
                    None => error,
                }
            }
            429 => with(&format!("{hub} is asked too often")).hint("run the same command later"),
            500.. => with(&format!("{hub} failed")).hint("run the same command later"),
            _ => with(&format!("{hub} refuses this")),
        };
        match status {
            408 | 429 | 500 | 502..=504 => Failure::Passing { error, after },
            _ => Failure::Final(error),
        }
    }

    /// One line of what the hub said: the message in its JSON, or the text; pages for browsers say nothing here.
    fn brief(&self, said: &str) -> String {
        const CHARACTERS: usize = 300;
        let json: Option<Value> = serde_json::from_str(said).ok();
        let message = json.as_ref().and_then(|json| {
            ["error", "Message", "message"]
                .into_iter()
                .find_map(|key| json.get(key)?.as_str())
        });
        let said = message.unwrap_or(said).trim();
        if said.starts_with('<') {
            return String::new();
        }
        let line = said.split_whitespace().collect::<Vec<_>>().join(" ");
        // Before it is cut: half a token is a secret, too.
        let line = self.shown(&line);
        if line.chars().count() <= CHARACTERS {
            return line;
        }
        line.chars().take(CHARACTERS).chain(['…']).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> Account {
        Account {
            hub: "Hugging Face",
            address: "HF_ENDPOINT where it is set",
            repo: "hf:owner/name".to_owned(),
            login: "run `hf auth login`",
            token: Token::new(" hf_secret\n"),
        }
    }

    fn error(failure: Failure) -> String {
        match failure {
            Failure::Final(error) | Failure::Broken(error) | Failure::Passing { error, .. } => {
                error.to_string()
            }
        }
    }

    #[test]
    fn a_token_that_the_hub_repeats_is_not_shown() {
        let account = account();
        let cut = format!("{} hf_secret", "x ".repeat(147));
        for said in ["who is hf_secret?", cut.as_str(), "hf_\nsecret"] {
            for status in [401, 403, 404, 409, 413, 418, 429, 500] {
                let message = error(account.refused(status, said, None, &[]));
                assert!(!message.contains("hf_secret"), "{message}");
                assert!(!message.contains("hf_sec…"), "{message}");
            }
        }
        let message = error(account.unreachable("https://hf_secret@hub/"));
        assert!(!message.contains("hf_secret"), "{message}");
        assert!(!format!("{account:?}").contains("hf_secret"));
    }

    #[test]
    fn what_is_no_token_is_none() {
        assert!(Token::new(" \n").is_none());
        assert!(Token::new("two words").is_none());
        assert!(Token::new("päss").is_none());
    }

    #[test]
    fn what_passes_is_told_from_what_stays() {
        let account = account();
        for (status, passes) in [
            (401, false),
            (412, false),
            (429, true),
            (500, true),
            (501, false),
            (503, true),
        ] {
            let failure = account.refused(status, "", None, &[]);
            assert_eq!(
                matches!(failure, Failure::Passing { .. }),
                passes,
                "{status}"
            );
        }
    }

    #[test]
    fn what_the_hub_says_is_one_line() {
        let message =
            error(account().refused(403, r#"{"error": "not\nyours", "x": 1}"#, None, &[]));
        assert!(
            message.contains("the token may not do this: not yours (HTTP 403)"),
            "{message}"
        );
        let message = error(account().refused(502, "<html><body>nginx", None, &[]));
        assert!(!message.contains("nginx"), "{message}");
    }
}
