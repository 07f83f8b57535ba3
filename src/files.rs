//! Files appear whole: written beside their place, synced, renamed.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use serde::Serialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::{Error, Result};

/// A file in `folder` for what `path` will hold, locked as long as its writer lives; those that killed writers of `path`
/// left are removed.
fn temporary(folder: &Path, path: &Path) -> io::Result<NamedTempFile> {
    let name = path.file_name().unwrap_or_default();
    let prefix = format!(".oscar-{}-", &sha256_bytes(name.as_encoded_bytes())[..16]);
    for item in fs::read_dir(folder).into_iter().flatten().flatten() {
        if item.file_name().to_string_lossy().starts_with(&prefix)
            && item.file_type().is_ok_and(|kind| kind.is_file())
            && let Ok(file) = File::options().write(true).open(item.path())
            && file.try_lock().is_ok()
        {
            let _ = fs::remove_file(item.path());
        }
    }
    loop {
        let file = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(".tmp")
            .tempfile_in(folder)?;
        // File systems without locks keep what killed writers leave.
        let _ = file.as_file().lock();
        // Another writer may have taken it for a dead one's before it was locked.
        if file.path().exists() {
            return Ok(file);
        }
    }
}

/// Writes `path` through `fill`. A crash, a full disk or an error in `fill` leaves the old file, or none.
pub fn write_atomic(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>,
) -> Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
    let write = || -> io::Result<()> {
        let mut temporary = temporary(folder, path)?;
        let mut writer = BufWriter::with_capacity(1 << 20, temporary.as_file_mut());
        fill(&mut writer)?;
        writer.flush()?;
        drop(writer);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            temporary
                .as_file()
                .set_permissions(fs::Permissions::from_mode(0o644))?;
        }
        temporary.as_file().sync_all()?;
        temporary.persist(path).map_err(|e| e.error)?;
        // The rename itself must survive a power cut; folders cannot be synced on every system.
        if let Ok(folder) = File::open(folder) {
            let _ = folder.sync_all();
        }
        Ok(())
    };
    write().map_err(Error::io("write", path))
}

/// Opens a file to read; folders, and devices and pipes, which may never end, are refused.
pub fn open(path: &Path) -> Result<File> {
    let kind = fs::metadata(path).map_err(Error::io("read", path))?;
    if !kind.is_file() {
        return Err(Error::invalid(path.display(), "not a regular file"));
    }
    File::open(path).map_err(Error::io("read", path))
}

/// Reads a whole file, which [`open`] takes.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?
        .read_to_end(&mut bytes)
        .map_err(Error::io("read", path))?;
    Ok(bytes)
}

/// Reads a whole text file; says so where it is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    let bytes = read(path)?;
    String::from_utf8(bytes).map_err(|e| {
        Error::invalid(
            path.display(),
            format!("not UTF-8 text (byte {})", e.utf8_error().valid_up_to()),
        )
    })
}

/// SHA-256 of bytes, lower-case hexadecimal.
pub fn sha256_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// JSON with sorted keys and no spaces: the same value gives the same bytes.
pub fn canonical_json(value: &impl Serialize) -> Result<String> {
    let sorted = serde_json::to_value(value).map(sort_keys);
    let text = sorted.and_then(|value| serde_json::to_string(&value));
    text.map_err(|e| Error::invalid("metadata", e))
}

/// The map of `Value` keeps the order of insertion where any crate asks for that.
fn sort_keys(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let map: BTreeMap<_, _> = map.into_iter().collect();
            map.into_iter().map(|(k, v)| (k, sort_keys(v))).collect()
        }
        Value::Array(list) => list.into_iter().map(sort_keys).collect(),
        other => other,
    }
}

/// A name that a safetensors header has twice; the safetensors crate lets the last one win.
pub fn duplicate_key(json: &str) -> Option<String> {
    struct Keys(Option<String>);
    impl<'de> Visitor<'de> for &mut Keys {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
            let mut seen = HashSet::new();
            while let Some((key, IgnoredAny)) = map.next_entry::<String, _>()? {
                if !seen.insert(key.clone()) {
                    self.0 = Some(key);
                }
            }
            Ok(())
        }
    }
    let mut keys = Keys(None);
    // Malformed JSON is reported by the safetensors crate.
    let _ = serde_json::Deserializer::from_str(json).deserialize_map(&mut keys);
    keys.0
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// What a killed writer of `path` leaves.
    fn left(path: &Path) -> PathBuf {
        let file = temporary(path.parent().unwrap(), path).unwrap();
        file.into_temp_path().keep().unwrap()
    }

    #[test]
    fn a_write_removes_what_killed_writers_of_its_file_left() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("a"), folder.path().join("a-"));
        let (dead, of_other) = (left(&path), left(&other));
        let alive = temporary(folder.path(), &path).unwrap();
        assert!(!dead.exists());
        write_atomic(&path, |out| {
            write_atomic(&path, |out| out.write_all(b"inner")).unwrap();
            out.write_all(b"outer")
        })
        .unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"outer");
        assert!(alive.path().exists() && of_other.exists());
        drop(alive);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
