//! An entry in memory, and `rotations.safetensors` on disk.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, View};
use sha2::{Digest, Sha256};

use super::schema::{Metadata, SCHEMA, Scope};
use super::verify;
use crate::files::{self, canonical_json};
use crate::{Error, Result};

/// Name of the tensors' file in an entry's folder.
pub const FILE: &str = "rotations.safetensors";

/// Name of the file in an entry's folder that says how to make it again.
pub const RECIPE: &str = "recipe.toml";

/// Headers up to this size are read whatever the size of the file.
const LEAST_HEADER_LIMIT: usize = 256 << 10;

/// All files of an entry. Those after the tensors are said of them, and a new fit makes them untrue.
pub const FILES: [&str; 5] = [FILE, "README.md", "metrics.json", "report.html", RECIPE];

/// Rotations of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub metadata: Metadata,
    /// By the model's own layer index; may be sparse.
    pub layers: BTreeMap<usize, Layer>,
}

/// Transforms of one layer's keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    pub head_dim: usize,
    pub k: Side,
    pub v: Side,
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SideName {
    K,
    V,
}

impl SideName {
    pub const ALL: [Self; 2] = [Self::K, Self::V];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::K => "k",
            Self::V => "v",
        }
    }

    /// The tensor that [`Side::dual`] is stored as.
    pub fn dual(self) -> &'static str {
        match self {
            Self::K => "query",
            Self::V => "decode",
        }
    }
}

impl fmt::Display for SideName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Transforms of one layer's keys, or of its values. The outer lists have S items: one a KV head in scope `head`,
/// one alone in scope `layer`. Matrices are (d, d), row-major; rows of activations are multiplied from the left.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Side {
    /// x' = (x − mean) · encode
    pub encode: Vec<Vec<f32>>,
    /// Keys: `query`, encode⁻ᵀ, in q' = q · query. Values: `decode`, encode⁻¹, in o = o' · decode + mean.
    /// `None`: encode is orthogonal.
    pub dual: Option<Vec<Vec<f32>>>,
    /// One (d) a KV head, in either scope. `None`: not centered.
    pub mean: Option<Vec<Vec<f32>>>,
    /// Clip ratio in (0, 1]; 1 clips nothing.
    pub clip: Vec<f32>,
    /// Strictly upper triangular. `None`: plain rounding.
    pub feedback: Option<Vec<Vec<f32>>>,
    /// Eigenvalues (d) that the basis came from, descending. `None`: made without data.
    pub spectrum: Option<Vec<Vec<f32>>>,
}

/// What one KV head uses of a [`Side`].
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    pub encode: &'a [f32],
    pub dual: Option<&'a [f32]>,
    pub mean: Option<&'a [f32]>,
    pub clip: f32,
    pub feedback: Option<&'a [f32]>,
    pub spectrum: Option<&'a [f32]>,
}

impl Side {
    /// The transform of KV head `head`, whichever the scope. `None` beyond the last head.
    pub fn for_head(&self, head: usize) -> Option<Head<'_>> {
        fn at<T>(list: &[T], head: usize) -> Option<&T> {
            if list.len() == 1 {
                list.first()
            } else {
                list.get(head)
            }
        }
        fn part(list: Option<&Vec<Vec<f32>>>, head: usize) -> Option<&[f32]> {
            list.and_then(|list| at(list, head)).map(Vec::as_slice)
        }
        Some(Head {
            encode: at(&self.encode, head)?,
            dual: part(self.dual.as_ref(), head),
            mean: self
                .mean
                .as_ref()
                .and_then(|mean| mean.get(head))
                .map(Vec::as_slice),
            clip: *at(&self.clip, head)?,
            feedback: part(self.feedback.as_ref(), head),
            spectrum: part(self.spectrum.as_ref(), head),
        })
    }
}

impl Head<'_> {
    /// The matrix (d, d) in x = x' · back + mean that undoes `encode`: queryᵀ for keys, decode for values, encodeᵀ
    /// where that is orthogonal.
    pub fn back(&self, side: SideName, d: usize) -> Vec<f32> {
        match (side, self.dual) {
            (SideName::V, Some(decode)) => decode.to_vec(),
            (SideName::K, Some(query)) => transposed(query, d),
            (_, None) => transposed(self.encode, d),
        }
    }
}

fn transposed(matrix: &[f32], d: usize) -> Vec<f32> {
    let mut out = vec![0.0; matrix.len()];
    for (i, row) in matrix.chunks_exact(d).enumerate() {
        for (j, &x) in row.iter().enumerate() {
            out[j * d + i] = x;
        }
    }
    out
}

impl Entry {
    /// Reads an entry, given as its folder or its `rotations.safetensors`, and checks all that
    /// [`super::verify()`] does; the error is the first problem it finds.
    pub fn open(path: &Path) -> Result<Self> {
        let file = file_of(path);
        let bytes = files::read(&file)?;
        let (entry, checks) = verify::read(&bytes);
        let problem = checks.iter().flat_map(|check| &check.problems).next();
        match (entry, problem) {
            (Some(entry), None) => Ok(entry),
            (_, Some(problem)) => Err(Error::invalid(file.display(), problem)
                .hint("`oscar verify` lists every problem; `oscar fit` makes the entry anew")),
            (None, None) => Err(Error::invalid(file.display(), "not a zoo entry")),
        }
    }

    /// Writes `folder`/`rotations.safetensors`, whole or not at all. Where that changes the file, it removes what
    /// an older run said of it (metrics, report, card, recipe).
    ///
    /// # Errors
    /// Refuses to replace the entry of another model, or one it cannot read, unless `force`; refuses to write an
    /// entry that [`Self::open`] would refuse.
    pub fn write(&self, folder: &Path, force: bool) -> Result<PathBuf> {
        Self::check_folder(folder)?;
        let file = folder.join(FILE);
        let bytes = self.to_bytes(&file)?;
        if let Some(problem) = verify::first_problem(&bytes) {
            return Err(Error::invalid(file.display(), problem));
        }
        if file.exists() && files::read(&file)? == bytes {
            return Ok(file);
        }
        if !force {
            let model = &self.metadata.model;
            Self::check_place(folder, &model.id, &model.weights_fingerprint)?;
        }
        // Removed first: after a crash in between, an entry may lack metrics, but never have another's.
        for name in FILES.into_iter().filter(|name| *name != FILE) {
            let path = folder.join(name);
            match fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io("remove", path)(e));
                }
                _ => {}
            }
        }
        files::write_atomic(&file, |out| out.write_all(&bytes))?;
        Ok(file)
    }

    /// Refuses a place that cannot become an entry's folder, so that a long run need not end in that.
    ///
    /// # Errors
    /// A file where the folder would be or above it, a folder that is called as an entry's file.
    pub fn check_folder(folder: &Path) -> Result<()> {
        if let Some(there) = folder.ancestors().find(|place| place.exists())
            && !there.is_dir()
        {
            return Err(
                Error::invalid(there.display(), "is a file, and an entry is a folder")
                    .hint("choose another folder"),
            );
        }
        for file in FILES.map(|name| folder.join(name)) {
            if file.is_dir() {
                return Err(Error::invalid(
                    file.display(),
                    "is a folder, and an entry has a file of that name",
                )
                .hint("remove it, or choose another folder"));
            }
        }
        Ok(())
    }

    /// Refuses a folder that holds what [`Self::write`] would not replace with an entry of this model.
    ///
    /// # Errors
    /// The entry of another model or of other weights, a file that is no readable entry, and those of
    /// [`Self::check_folder`].
    pub fn check_place(folder: &Path, id: &str, weights_fingerprint: &str) -> Result<()> {
        Self::check_folder(folder)?;
        let file = folder.join(FILE);
        if !file.exists() {
            return Ok(());
        }
        let hint = "choose another folder, or pass `--force` to replace it";
        let old = metadata(&files::read(&file)?).map_err(|problem| {
            Error::invalid(
                file.display(),
                format!("holds a file that is no readable entry ({problem})"),
            )
            .hint(hint)
        })?;
        let old = &old.model;
        if old.id == id && old.weights_fingerprint == weights_fingerprint {
            return Ok(());
        }
        let what = if old.id == id {
            format!("other weights of `{id}`")
        } else {
            format!("another model, `{}`, not `{id}`", old.id)
        };
        Err(Error::invalid(file.display(), format!("holds the entry of {what}")).hint(hint))
    }

    /// The file's bytes: the same for equal entries.
    fn to_bytes(&self, place: &Path) -> Result<Vec<u8>> {
        let mut metadata = self.metadata.clone();
        let tensors = self.tensors();
        metadata.content_sha256 = content_sha256(
            tensors
                .iter()
                .map(|(name, part)| (name.as_str(), part.shape.as_slice(), part.bytes().into())),
        );
        let json = canonical_json(&metadata)?;
        let header = HashMap::from([("oscar".to_owned(), json)]);
        safetensors::serialize(&tensors, Some(header))
            .map_err(|e| Error::invalid(place.display(), e))
    }

    fn tensors<'a>(&'a self) -> BTreeMap<String, Part<'a>> {
        let mut out = BTreeMap::new();
        for (&layer, parts) in &self.layers {
            let d = parts.head_dim;
            for (name, side) in [(SideName::K, &parts.k), (SideName::V, &parts.v)] {
                let mut put = |part: &str, part_of: Part<'a>| {
                    out.insert(format!("layers.{layer}.{name}.{part}"), part_of);
                };
                put("encode", Part::new(&side.encode, &[d, d]));
                let clip = Part {
                    shape: vec![side.clip.len()],
                    lists: vec![&side.clip],
                };
                put("clip", clip);
                for (part, list, inner) in [
                    (name.dual(), &side.dual, &[d, d][..]),
                    ("mean", &side.mean, &[d]),
                    ("feedback", &side.feedback, &[d, d]),
                    ("spectrum", &side.spectrum, &[d]),
                ] {
                    if let Some(list) = list {
                        put(part, Part::new(list, inner));
                    }
                }
            }
        }
        out
    }

    /// The most by which a number differs from its counterpart in `other`, as a share of the largest of its tensor.
    /// `None` where the two have other tensors.
    pub fn distance(&self, other: &Self) -> Option<f64> {
        let (ours, theirs) = (self.tensors(), other.tensors());
        if ours.len() != theirs.len() {
            return None;
        }
        let mut most = 0.0_f64;
        for ((name, a), (other_name, b)) in ours.iter().zip(&theirs) {
            if name != other_name || a.shape != b.shape {
                return None;
            }
            let (mut largest, mut apart) = (0.0_f32, 0.0_f32);
            let numbers = a.lists.iter().copied().flatten();
            for (x, y) in numbers.zip(b.lists.iter().copied().flatten()) {
                largest = largest.max(x.abs());
                apart = apart.max((x - y).abs());
            }
            if apart > 0.0 {
                most = most.max(f64::from(apart) / f64::from(largest));
            }
        }
        Some(most)
    }

    /// Transforms a layer: KV heads in scope `head`, 1 in scope `layer`.
    pub fn transforms(&self, layer: usize) -> usize {
        match self.metadata.scope {
            Scope::Layer => 1,
            Scope::Head => self
                .metadata
                .model
                .kv_heads
                .get(layer)
                .copied()
                .unwrap_or(0),
        }
    }
}

/// A tensor to be written: its bytes are made when they are asked for, one tensor at a time.
struct Part<'a> {
    shape: Vec<usize>,
    lists: Vec<&'a [f32]>,
}

impl<'a> Part<'a> {
    /// One item of `list`, of shape `inner`, an index of the first axis.
    fn new(list: &'a [Vec<f32>], inner: &[usize]) -> Self {
        Self {
            shape: [&[list.len()], inner].concat(),
            lists: list.iter().map(Vec::as_slice).collect(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(View::data_len(&self));
        for x in self.lists.iter().copied().flatten() {
            bytes.extend(x.to_le_bytes());
        }
        bytes
    }
}

impl View for &Part<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes().into()
    }

    fn data_len(&self) -> usize {
        self.lists.iter().map(|list| size_of_val(*list)).sum()
    }
}

/// A folder stands for the file in it.
pub(super) fn file_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join(FILE)
    } else {
        path.to_owned()
    }
}

/// SHA-256 over tensors in byte order of their names: name, a zero byte, number of dimensions and each dimension as
/// u64 (little-endian), then the data.
pub(super) fn content_sha256<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a [usize], Cow<'a, [u8]>)>,
) -> String {
    let mut hasher = Sha256::new();
    for (name, shape, data) in tensors {
        hasher.update(name.as_bytes());
        hasher.update([0]);
        hasher.update((shape.len() as u64).to_le_bytes());
        for &dim in shape {
            hasher.update((dim as u64).to_le_bytes());
        }
        hasher.update(&*data);
    }
    files::hex(&hasher.finalize())
}

#[derive(serde::Deserialize)]
struct Schema {
    schema: u32,
}

/// The header's `oscar` value, and the schema checked before the rest is read.
pub(super) fn metadata(bytes: &[u8]) -> Result<Metadata, String> {
    let header = header(bytes)?;
    if let Some(name) = files::duplicate_key(header) {
        return Err(format!("the header names `{name}` twice"));
    }
    let (_, parsed) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
    let json = parsed
        .metadata()
        .as_ref()
        .and_then(|map| map.get("oscar"))
        .ok_or("no `oscar` key in the metadata: not a zoo entry")?;
    let Schema { schema } =
        serde_json::from_str(json).map_err(|e| format!("metadata key `oscar`: {e}"))?;
    if schema == 0 || schema > SCHEMA {
        return Err(format!(
            "schema {schema} is newer than this tool's {SCHEMA}: update the tool"
        ));
    }
    let metadata: Metadata =
        serde_json::from_str(json).map_err(|e| format!("metadata key `oscar`: {e}"))?;
    metadata.windows.check().map_err(|e| e.to_string())?;
    Ok(metadata)
}

/// The JSON part, its length checked against the file's.
pub(super) fn header(bytes: &[u8]) -> Result<&str, String> {
    let cut = || format!("truncated, or no safetensors file ({} bytes)", bytes.len());
    let length = bytes
        .first_chunk()
        .map(|raw| u64::from_le_bytes(*raw))
        .ok_or_else(cut)?;
    let header = usize::try_from(length)
        .ok()
        .and_then(|length| bytes.get(8..)?.get(..length))
        .ok_or_else(|| format!("{}: its header claims {length} bytes", cut()))?;
    // Parsed, a header takes ten times its size.
    if header.len() > LEAST_HEADER_LIMIT + bytes.len() / 16 {
        return Err(format!(
            "its header takes {length} of {} bytes, more than that of any entry",
            bytes.len()
        ));
    }
    std::str::from_utf8(header).map_err(|_| "the header is not UTF-8".to_owned())
}
