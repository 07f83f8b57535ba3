//! What names a file's content on a hub.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::files::hex;
use crate::{Error, Result};

/// What names a file's content on a hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContentId {
    /// SHA-256 of the bytes, lower-case hexadecimal.
    Sha256(String),
    /// SHA-1 that git gives to a blob of these bytes, lower-case hexadecimal.
    GitBlob(String),
}

impl ContentId {
    /// The hash alone, by which a cache calls the content.
    pub fn hash(&self) -> &str {
        match self {
            Self::Sha256(hash) | Self::GitBlob(hash) => hash,
        }
    }

    /// Whether it is a hash at all: it becomes the name of a file.
    pub fn is_sound(&self) -> bool {
        let digits = match self {
            Self::Sha256(_) => 64,
            Self::GitBlob(_) => 40,
        };
        let hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        self.hash().len() == digits && self.hash().bytes().all(hex)
    }

    /// The same kind of hash of the file at `path`.
    pub fn of_file(&self, path: &Path) -> Result<Self> {
        match self {
            Self::Sha256(_) => Ok(Self::Sha256(sha256_of(path)?.1)),
            Self::GitBlob(_) => Ok(Self::GitBlob(git_blob_of(path)?)),
        }
    }

    /// Whether the file at `path` has this content.
    pub fn is_of(&self, path: &Path) -> Result<bool> {
        Ok(self.of_file(path)? == *self)
    }
}

/// Size and SHA-256 of a file.
pub(super) fn sha256_of(path: &Path) -> Result<(u64, String)> {
    let (size_bytes, digest) = digest(path, |_| Sha256::new())?;
    Ok((size_bytes, digest))
}

fn git_blob_of(path: &Path) -> Result<String> {
    let (_, digest) = digest(path, |size_bytes| {
        Sha1::new_with_prefix(format!("blob {size_bytes}\0"))
    })?;
    Ok(digest)
}

fn digest<D: Digest>(path: &Path, start: impl FnOnce(u64) -> D) -> Result<(u64, String)> {
    let run = || -> io::Result<(u64, String)> {
        let mut file = File::open(path)?;
        let size_bytes = file.metadata()?.len();
        let mut hash = start(size_bytes);
        let mut buffer = vec![0; 1 << 16];
        let mut read_bytes = 0;
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    hash.update(&buffer[..count]);
                    read_bytes += count as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok((read_bytes, hex(&hash.finalize())))
    };
    run().map_err(Error::io("read", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_sha256sum_and_git() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hello");
        std::fs::write(&path, "hello\n").unwrap();
        // `git hash-object`
        let git = ContentId::GitBlob("ce013625030ba8dba906f756967f9e9ca394464a".to_owned());
        assert!(git.is_of(&path).unwrap() && git.is_sound());
        let (size_bytes, sha256) = sha256_of(&path).unwrap();
        assert_eq!(size_bytes, 6);
        assert_eq!(
            sha256,
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
        );
        let other = ContentId::Sha256("../../etc/passwd".to_owned());
        assert!(!other.is_of(&path).unwrap() && !other.is_sound());
    }
}
