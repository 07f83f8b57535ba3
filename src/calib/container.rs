//! Safetensors files with one JSON metadata key and a hash of their content, written by streaming and read by mapping.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;

use memmap2::Mmap;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use safetensors::{SafeTensorError, SafeTensors};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::files::{self, canonical_json, hex, write_atomic};
use crate::{Error, Result};

/// A tensor to write.
pub(super) struct Part<'a> {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: &'a [u8],
    /// Where the bytes lie in another file.
    source: Option<&'a Container>,
}

impl<'a> Part<'a> {
    /// `values` as they lie in memory: machines with another byte order are not supported.
    pub fn new<T: bytemuck::NoUninit>(dtype: Dtype, shape: &[usize], values: &'a [T]) -> Self {
        const { assert!(cfg!(target_endian = "little"), "files are little-endian") };
        Self {
            dtype,
            shape: shape.to_vec(),
            bytes: bytemuck::cast_slice(values),
            source: None,
        }
    }

    /// Gives memory back once the bytes were used.
    fn release(&self) {
        if let Some(source) = self.source {
            source.release(self.bytes);
        }
    }
}

/// Tensors by name.
pub(super) type Parts<'a> = BTreeMap<String, Part<'a>>;

/// By element size, largest first, then by name, so that all are aligned.
fn in_file_order<'p, 'a>(parts: &'p Parts<'a>) -> Vec<(&'p String, &'p Part<'a>)> {
    let mut order: Vec<_> = parts.iter().collect();
    order.sort_by(|(a, x), (b, y)| y.dtype.bitsize().cmp(&x.dtype.bitsize()).then(a.cmp(b)));
    order
}

fn hash_tensor(hasher: &mut Sha256, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) {
    hasher.update(format!("{name}\n{dtype}\n{shape:?}\n"));
    hasher.update(bytes);
}

/// SHA-256 over names, dtypes, shapes and bytes, in the order of names.
fn content_sha256(parts: &Parts) -> String {
    let mut hasher = Sha256::new();
    for (name, part) in parts {
        hash_tensor(&mut hasher, name, part.dtype, &part.shape, part.bytes);
        part.release();
    }
    hex(&hasher.finalize())
}

/// Writes `parts` with metadata as canonical JSON under `key`, made of the hash of their content, which is computed while
/// they are written; the same input gives the same bytes.
pub(super) fn write<T: Serialize>(
    path: &Path,
    key: &str,
    metadata: impl Fn(String) -> T,
    parts: &Parts,
) -> Result<()> {
    let order = in_file_order(parts);
    let header = |hash: String| -> Result<Vec<u8>> {
        let json = canonical_json(&metadata(hash))?;
        header(key, json, &order).map_err(|problem| Error::invalid(path.display(), problem))
    };
    let unknown = header("0".repeat(64))?;
    thread::scope(|scope| {
        let hash = scope.spawn(|| content_sha256(parts));
        write_atomic(path, |out| {
            out.write_all(&unknown)?;
            for (_, part) in &order {
                out.write_all(part.bytes)?;
                part.release();
            }
            let hash = hash
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let known = header(hash).map_err(io::Error::other)?;
            if known.len() != unknown.len() {
                return Err(io::Error::other("the header grew"));
            }
            out.seek(SeekFrom::Start(0))?;
            out.write_all(&known)
        })
    })
}

/// All that stands in front of the tensors.
fn header(key: &str, json: String, order: &[(&String, &Part)]) -> Result<Vec<u8>, String> {
    let mut at = 0;
    let infos = order
        .iter()
        .map(|(name, part)| {
            let begin = at;
            at += part.bytes.len();
            let info = TensorInfo {
                dtype: part.dtype,
                shape: part.shape.clone(),
                data_offsets: (begin, at),
            };
            ((*name).clone(), info)
        })
        .collect();
    let keys = HashMap::from([(key.to_owned(), json)]);
    let metadata = Metadata::new(Some(keys), infos).map_err(|e| e.to_string())?;
    let mut header = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let len = (header.len() as u64).to_le_bytes();
    Ok([&len[..], &header].concat())
}

/// An open file: its header is checked, its tensors are read when asked for.
pub(super) struct Container {
    path: PathBuf,
    map: Mmap,
    data_at: usize,
    header: Metadata,
    json: String,
}

impl Container {
    /// Checks everything that the header says: lengths, offsets that neither overlap nor leave holes, and shapes that
    /// fit them.
    pub fn open(path: &Path, key: &str) -> Result<Self> {
        let file = files::open(path)?;
        #[allow(unsafe_code)]
        // SAFETY: written files are only ever replaced by rename, never changed in place.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?;
        let (header_len, header) =
            SafeTensors::read_metadata(&map).map_err(|e| broken_header(path, map.len(), &e))?;
        let json = header
            .metadata()
            .as_ref()
            .and_then(|keys| keys.get(key))
            .ok_or_else(|| {
                Error::invalid(path.display(), format!("has no `{key}` metadata"))
                    .hint("is this another kind of safetensors file?")
            })?
            .clone();
        Ok(Self {
            path: path.to_owned(),
            map,
            data_at: 8 + header_len,
            header,
            json,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of the metadata key.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names = self.header.offset_keys();
        names.sort();
        names
    }

    pub fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.header
            .info(name)
            .ok_or_else(|| self.wrong(name, "is missing"))
    }

    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let (begin, end) = self.info(name)?.data_offsets;
        Ok(&self.map[self.data_at + begin..self.data_at + end])
    }

    /// A tensor as it stands, to be copied to another file.
    pub fn part(&self, name: &str) -> Result<Part<'_>> {
        let info = self.info(name)?;
        Ok(Part {
            source: Some(self),
            ..Part::new(info.dtype, &info.shape, self.bytes(name)?)
        })
    }

    /// Takes pages that were read out of this process's memory: a large file, read through once, must not count as
    /// memory in use. They are read again from the file where they are needed again.
    fn release(&self, bytes: &[u8]) {
        #[cfg(unix)]
        {
            let offset = bytes.as_ptr().addr() - self.map.as_ptr().addr();
            #[allow(unsafe_code)]
            // SAFETY: the map is a shared one of a file and read-only, so that dropped pages keep their content.
            let _ = unsafe {
                self.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    offset,
                    bytes.len(),
                )
            };
        }
    }

    /// # Errors
    /// Where the tensor is missing or its dtype or shape is another.
    pub fn expect(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<()> {
        let info = self.info(name)?;
        if info.dtype != dtype {
            return Err(self.wrong(name, format!("is {}, not {dtype}", info.dtype)));
        }
        if info.shape != shape {
            return Err(self.wrong(name, format!("has shape {:?}, not {shape:?}", info.shape)));
        }
        Ok(())
    }

    /// Values of an F64 tensor, all finite.
    pub fn f64(&self, name: &str) -> Result<Vec<f64>> {
        let read = |bytes: [u8; 8]| f64::from_le_bytes(bytes);
        self.values(name, Dtype::F64, read, f64::is_finite)
    }

    /// Values of an F32 tensor, all finite.
    pub fn f32(&self, name: &str) -> Result<Vec<f32>> {
        let read = |bytes: [u8; 4]| f32::from_le_bytes(bytes);
        self.values(name, Dtype::F32, read, f32::is_finite)
    }

    /// Values of a BF16 tensor, widened, all finite.
    pub fn bf16(&self, name: &str) -> Result<Vec<f32>> {
        let read = |bytes: [u8; 2]| half::bf16::from_le_bytes(bytes).to_f32();
        self.values(name, Dtype::BF16, read, f32::is_finite)
    }

    /// Values of a U32 tensor.
    pub fn u32(&self, name: &str) -> Result<Vec<u32>> {
        self.values(name, Dtype::U32, u32::from_le_bytes, |_| true)
    }

    fn values<const N: usize, T: Copy>(
        &self,
        name: &str,
        dtype: Dtype,
        read: impl Fn([u8; N]) -> T,
        good: impl Fn(T) -> bool,
    ) -> Result<Vec<T>> {
        let found = self.info(name)?.dtype;
        if found != dtype {
            return Err(self.wrong(name, format!("is {found}, not {dtype}")));
        }
        let bytes = self.bytes(name)?;
        let values: Vec<T> = bytes
            .as_chunks::<N>()
            .0
            .iter()
            .map(|&bytes| read(bytes))
            .collect();
        self.release(bytes);
        match values.iter().position(|&x| !good(x)) {
            Some(at) => Err(self.wrong(name, format!("has a non-finite value at element {at}"))),
            None => Ok(values),
        }
    }

    /// As [`content_sha256`] of what was written.
    pub fn content_sha256(&self) -> Result<String> {
        let mut hasher = Sha256::new();
        for name in self.names() {
            let info = self.info(&name)?;
            let bytes = self.bytes(&name)?;
            hash_tensor(&mut hasher, &name, info.dtype, &info.shape, bytes);
            self.release(bytes);
        }
        Ok(hex(&hasher.finalize()))
    }

    /// Says what is wrong with tensor `name` of this file.
    pub fn wrong(&self, name: &str, problem: impl std::fmt::Display) -> Error {
        Error::invalid(format!("{}: tensor `{name}`", self.path.display()), problem)
    }
}

fn broken_header(path: &Path, file_bytes: usize, e: &SafeTensorError) -> Error {
    let problem = match e {
        SafeTensorError::MetadataIncompleteBuffer | SafeTensorError::InvalidHeaderLength => {
            format!("truncated or damaged: {file_bytes} bytes do not hold what its header declares")
        }
        _ => format!("not a readable safetensors file: {e}"),
    };
    Error::invalid(path.display(), problem)
}
