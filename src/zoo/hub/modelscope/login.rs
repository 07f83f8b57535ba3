//! The token for ModelScope: from the environment, or from the file that `modelscope login` writes.

use std::path::PathBuf;
use std::{env, fs};

use super::super::account::Token;

/// The cookie that carries the token.
pub(super) const COOKIE: &str = "m_session_id";

/// What to do to have a token.
pub(super) const HOW: &str = "run `modelscope login --token …`, or set MODELSCOPE_API_TOKEN";

/// The token that the official client would use. Where the environment names one, even an empty one, the file is not
/// read.
pub(super) fn token() -> Option<Token> {
    if let Some(text) = env::var_os("MODELSCOPE_API_TOKEN") {
        return Token::new(&text.to_string_lossy());
    }
    let home = env::var_os("MODELSCOPE_HOME")
        .filter(|home| !home.is_empty())
        .map(PathBuf::from)
        .or_else(|| env::home_dir().map(|home| home.join(".modelscope")))?;
    let jar = fs::read(home.join("credentials").join("cookies")).ok()?;
    Token::new(&session(&jar)?)
}

/// A value of a pickle, as far as a cookie's fields go.
#[derive(Clone, Copy, PartialEq)]
enum Item<'a> {
    Text(&'a str),
    Other,
}

/// The session's cookie in a pickled `RequestsCookieJar`.
///
/// The pickle is a program that could import and call anything. Nothing of it is run here: a cookie is a dict, whose
/// keys and values stand in the pickle one after the other, and texts are followed through the pickle's memo.
fn session(pickle: &[u8]) -> Option<String> {
    let mut rest = pickle;
    let mut memo = Vec::new();
    let mut items = Vec::new();
    loop {
        let opcode = take(&mut rest, 1)?[0];
        let item = match opcode {
            // SHORT_BINUNICODE, BINUNICODE
            0x8c | b'X' => {
                let length = number(&mut rest, if opcode == b'X' { 4 } else { 1 })?;
                let text = std::str::from_utf8(take(&mut rest, length)?).ok()?;
                Item::Text(text)
            }
            // MEMOIZE, BINPUT, LONG_BINPUT
            0x94 => {
                memo.push((memo.len(), *items.last()?));
                continue;
            }
            b'q' | b'r' => {
                let index = number(&mut rest, if opcode == b'q' { 1 } else { 4 })?;
                memo.push((index, *items.last()?));
                continue;
            }
            // BINGET, LONG_BINGET
            b'h' | b'j' => {
                let index = number(&mut rest, if opcode == b'h' { 1 } else { 4 })?;
                memo.iter().rev().find(|(i, _)| *i == index)?.1
            }
            // PROTO, BININT1, BININT2, BININT, BINFLOAT, FRAME, LONG1
            0x80 | b'K' => skip(&mut rest, 1)?,
            b'M' => skip(&mut rest, 2)?,
            b'J' => skip(&mut rest, 4)?,
            b'G' | 0x95 => skip(&mut rest, 8)?,
            0x8a => {
                let length = number(&mut rest, 1)?;
                skip(&mut rest, length)?
            }
            // GLOBAL: two lines
            b'c' => {
                for _ in 0..2 {
                    let line = rest.iter().position(|byte| *byte == b'\n')?;
                    skip(&mut rest, line + 1)?;
                }
                Item::Other
            }
            // What makes containers and objects has no argument.
            b'('
            | b')'
            | b'}'
            | b']'
            | b'N'
            | b'R'
            | b'a'
            | b'b'
            | b'e'
            | b's'
            | b't'
            | b'u'
            | 0x81
            | 0x85..=0x89
            | 0x93 => Item::Other,
            // STOP, and what no jar needs.
            _ => return None,
        };
        items.push(item);
        if let [
            ..,
            Item::Text("name"),
            Item::Text(COOKIE),
            Item::Text("value"),
            Item::Text(value),
        ] = items[..]
        {
            return Some(value.to_owned());
        }
    }
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(length)?;
    *rest = left;
    Some(taken)
}

fn number(rest: &mut &[u8], bytes: usize) -> Option<usize> {
    let digits = take(rest, bytes)?;
    Some(
        digits
            .iter()
            .rev()
            .fold(0, |n, byte| (n << 8) | usize::from(*byte)),
    )
}

fn skip<'a>(rest: &mut &[u8], length: usize) -> Option<Item<'a>> {
    take(rest, length).map(|_| Item::Other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "ms-01234567-89ab-cdef";

    /// A jar as Python's protocol 4 pickles it; the name stands in the memo, because the jar has it as a key too.
    fn jar() -> Vec<u8> {
        let text = |text: &str| [&[0x8c, text.len() as u8], text.as_bytes(), &[0x94]].concat();
        [
            b"\x80\x04\x95\x00\x01\x00\x00\x00\x00\x00\x00".to_vec(),
            text("requests.cookies"),
            text("RequestsCookieJar"),
            b"\x93\x94)\x81\x94}\x94(".to_vec(),
            text("_cookies"),
            b"}\x94".to_vec(),
            text("modelscope.cn"),
            b"}\x94".to_vec(),
            text("m_session_id"),
            b"}\x94(".to_vec(),
            text("version"),
            b"K\x00".to_vec(),
            text("name"),
            b"h\x09".to_vec(),
            text("value"),
            text(SECRET),
            text("expires"),
            b"J\x9e\xa3\x34\x6bubsssub.".to_vec(),
        ]
        .concat()
    }

    #[test]
    fn the_token_stands_in_the_session_cookie() {
        assert_eq!(session(&jar()).as_deref(), Some(SECRET));
    }

    #[test]
    fn a_damaged_jar_holds_no_token() {
        let jar = jar();
        for length in 0..jar.len() {
            let found = session(&jar[..length]);
            assert!(found.is_none_or(|found| found == SECRET));
        }
        for at in 0..jar.len() {
            let mut jar = jar.clone();
            jar[at] ^= 0x55;
            // It must end, and end without a panic.
            let _ = session(&jar);
        }
    }
}
