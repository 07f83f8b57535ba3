//! Files appear whole: written beside their place, synced, renamed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// Writes `path` through `fill`. A crash, a full disk or an error in `fill` leaves the old file, or none.
pub fn write_atomic(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<&mut File>) -> std::io::Result<()>,
) -> Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
    let write = || -> std::io::Result<()> {
        let mut temporary = tempfile::Builder::new()
            .prefix(".oscar-")
            .suffix(".tmp")
            .tempfile_in(folder)?;
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

/// Reads a whole text file; says so where it is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    let bytes = fs::read(path).map_err(Error::io("read", path))?;
    String::from_utf8(bytes).map_err(|e| {
        Error::invalid(
            path.display(),
            format!("not UTF-8 text (byte {})", e.utf8_error().valid_up_to()),
        )
    })
}

/// SHA-256 of a file, lower-case hexadecimal.
pub fn sha256_file(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let n = file.read(&mut buffer).map_err(Error::io("read", path))?;
        if n == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..n]);
    }
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
