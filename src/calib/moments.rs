//! The moments file: what a model's attention sees, as sums that shards of a calibration can add up.
//!
//! One safetensors file. For every layer `i`, with d = head_dim:
//!
//! | tensor `layers.{i}.…` | dtype, shape | content |
//! |---|---|---|
//! | `qq`, `oo` | F64 (kv_heads, d, d) | Σ over tokens and the group's query heads of qᵀq, oᵀo |
//! | `kk`, `vv` | F64 (kv_heads, d, d) | Σ over tokens of kᵀk, vᵀv |
//! | `k_sum`, `v_sum` | F64 (kv_heads, d) | Σ over tokens of k, v |
//! | `vsv`, `vsv_weight` | F64 (kv_heads, d, d), (kv_heads) | Σ w·vᵀv and Σ w, with w = Σ over queries of S² |
//! | `vwv`, `vwv_weight` | F64 (kv_heads, d, d), (kv_heads) | Σ w·vᵀv and Σ w, with w = k·qq·kᵀ, `qq` the final mean |
//! | `wo` | F64 (kv_heads, d, d) | Σ over the group's query heads of W_Oᵀ·W_O, so that δ·wo·δᵀ is the error after W_O |
//! | `sample.{q,k,v,o}` | F32 (rows, heads or kv_heads, d) | some tokens, for inspection |
//! | `holdout.{q,k,v}` | BF16 (tokens, heads or kv_heads, d) | whole sequences that entered no moment |
//!
//! and once `holdout.prompt_lens`, U32 (prompts): the lengths of the held-out prompts.
//!
//! Everything is post-RoPE and post-q/k-norm. Means come from the counts in the metadata (key `oscar_moments`, see
//! [`Meta`]).

use std::path::Path;

use nalgebra::{DMatrix, DVector};
use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use super::accumulate::HoldoutRows;
use super::container::{self, Container, Part, Parts};
use crate::files::sha256_bytes;
use crate::kv::attention::Dims;
use crate::zoo::{Calibration, ModelInfo, Tool};
use crate::{Error, Result};

/// The metadata key.
pub const KEY: &str = "oscar_moments";
/// Version of the file format; readers refuse newer ones.
pub const SCHEMA: u32 = 1;
/// Version of the computation (`tool.algorithm`): grows whenever the same input gives other bytes.
pub const ALGORITHM: u32 = 1;

/// Provenance, geometry and counts of a moments file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    pub schema: u32,
    pub model: ModelInfo,
    /// `tokens` is the count behind every sum.
    pub calibration: Calibration,
    /// Tokens of the sequences that entered no moment.
    pub holdout_tokens: usize,
    /// Tokens kept in `sample`.
    pub sample_rows: usize,
    pub tool: Tool,
    /// Over tensor names, dtypes, shapes and bytes.
    pub content_sha256: String,
}

impl Meta {
    /// Shape of layer `i`'s attention.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn dims(&self, i: usize) -> Dims {
        Dims {
            heads: self.model.heads[i],
            kv_heads: self.model.kv_heads[i],
            head_dim: self.model.head_dim[i],
        }
    }
}

/// Moments of one layer as means (method.md, section 1), one item per KV head, and the sample.
#[derive(Clone, Debug)]
pub struct LayerMoments {
    pub layer: usize,
    /// Tokens behind the means.
    pub tokens: usize,
    /// (d, d): mean of qᵀq over tokens and the group's query heads.
    pub qq: Vec<DMatrix<f64>>,
    /// (d, d): mean of kᵀk, not centered; see [`Self::key_covariance`].
    pub kk: Vec<DMatrix<f64>>,
    /// (d, d): mean of oᵀo over tokens and the group's query heads.
    pub oo: Vec<DMatrix<f64>>,
    /// (d, d): mean of vᵀv.
    pub vv: Vec<DMatrix<f64>>,
    /// (d, d): mean of w·vᵀv, w = Σ over queries of S² scaled to mean 1.
    pub vsv: Vec<DMatrix<f64>>,
    /// (d, d): mean of w·vᵀv, w = k·qq·kᵀ scaled to mean 1.
    pub vwv: Vec<DMatrix<f64>>,
    pub k_mean: Vec<DVector<f64>>,
    pub v_mean: Vec<DVector<f64>>,
    /// (d, d): Σ over the group's query heads of W_Oᵀ·W_O; a sum, not a mean.
    pub wo: Vec<DMatrix<f64>>,
    pub sample: Sample,
}

impl LayerMoments {
    /// Centered `kk` of a KV head: mean of (k − k_mean)ᵀ(k − k_mean).
    pub fn key_covariance(&self, kv_head: usize) -> DMatrix<f64> {
        let mean = &self.k_mean[kv_head];
        &self.kk[kv_head] - mean * mean.transpose()
    }

    /// Centered `vv` of a KV head.
    pub fn value_covariance(&self, kv_head: usize) -> DMatrix<f64> {
        let mean = &self.v_mean[kv_head];
        &self.vv[kv_head] - mean * mean.transpose()
    }
}

/// The sums of one layer, as the file stores them.
#[derive(Clone, Debug, PartialEq)]
pub struct Sums {
    pub dims: Dims,
    pub tokens: usize,
    pub qq: Vec<f64>,
    pub kk: Vec<f64>,
    pub oo: Vec<f64>,
    pub vv: Vec<f64>,
    pub vsv: Vec<f64>,
    pub vwv: Vec<f64>,
    pub k_sum: Vec<f64>,
    pub v_sum: Vec<f64>,
    pub vsv_weight: Vec<f64>,
    pub vwv_weight: Vec<f64>,
}

impl Sums {
    /// Of no tokens.
    pub fn zero(dims: Dims) -> Self {
        let Dims {
            kv_heads,
            head_dim: d,
            ..
        } = dims;
        let zeros = |per_head: usize| vec![0.0; kv_heads * per_head];
        Self {
            dims,
            tokens: 0,
            qq: zeros(d * d),
            kk: zeros(d * d),
            oo: zeros(d * d),
            vv: zeros(d * d),
            vsv: zeros(d * d),
            vwv: zeros(d * d),
            k_sum: zeros(d),
            v_sum: zeros(d),
            vsv_weight: zeros(1),
            vwv_weight: zeros(1),
        }
    }

    /// With the names of their tensors.
    fn named_mut(&mut self) -> [(&'static str, &mut Vec<f64>); 10] {
        [
            ("qq", &mut self.qq),
            ("kk", &mut self.kk),
            ("oo", &mut self.oo),
            ("vv", &mut self.vv),
            ("vsv", &mut self.vsv),
            ("vwv", &mut self.vwv),
            ("k_sum", &mut self.k_sum),
            ("v_sum", &mut self.v_sum),
            ("vsv_weight", &mut self.vsv_weight),
            ("vwv_weight", &mut self.vwv_weight),
        ]
    }
}

/// All that a moments file holds of one layer.
#[derive(Clone, Debug)]
pub struct LayerRecord {
    pub sums: Sums,
    /// See [`super::accumulate::output_metric`].
    pub wo: Vec<f64>,
    pub sample: Sample,
    pub holdout: HoldoutRows,
}

impl LayerRecord {
    fn merged(shards: &[Moments], i: usize) -> Result<Self> {
        let mut merged = Self {
            sums: Sums::zero(shards[0].meta.dims(i)),
            wo: shards[0].file.f64(&format!("layers.{i}.wo"))?,
            sample: Sample::default(),
            holdout: HoldoutRows::default(),
        };
        for shard in shards {
            let sums = &mut merged.sums;
            sums.tokens += shard.meta.calibration.tokens;
            for (name, into) in sums.named_mut() {
                let values = shard.file.f64(&format!("layers.{i}.{name}"))?;
                for (sum, x) in into.iter_mut().zip(values) {
                    *sum += x;
                }
            }
            let sample = shard.layer_sample(i)?;
            merged.sample.rows += sample.rows;
            merged.sample.q.extend(sample.q);
            merged.sample.k.extend(sample.k);
            merged.sample.v.extend(sample.v);
            merged.sample.o.extend(sample.o);
            let holdout = shard.holdout(i)?;
            merged.holdout.extend(&holdout.q, &holdout.k, &holdout.v);
        }
        Ok(merged)
    }

    /// The tensors of layer `i`.
    pub(super) fn parts(&self, i: usize) -> Parts<'_> {
        let sums = &self.sums;
        let Dims {
            heads,
            kv_heads,
            head_dim: d,
        } = sums.dims;
        let mut parts = Parts::new();
        for (name, rank) in SUMS {
            let values = match name {
                "kk" => &sums.kk,
                "k_sum" => &sums.k_sum,
                "oo" => &sums.oo,
                "qq" => &sums.qq,
                "vsv" => &sums.vsv,
                "vsv_weight" => &sums.vsv_weight,
                "vv" => &sums.vv,
                "v_sum" => &sums.v_sum,
                "vwv" => &sums.vwv,
                "vwv_weight" => &sums.vwv_weight,
                _ => &self.wo,
            };
            let part = Part::new(Dtype::F64, &[kv_heads, d, d][..=rank], values);
            parts.insert(format!("layers.{i}.{name}"), part);
        }
        let (sample, holdout) = (&self.sample, &self.holdout);
        for (name, heads, sample, holdout) in [
            ("q", heads, &sample.q, Some(&holdout.q)),
            ("k", kv_heads, &sample.k, Some(&holdout.k)),
            ("v", kv_heads, &sample.v, Some(&holdout.v)),
            ("o", heads, &sample.o, None),
        ] {
            let part = Part::new(Dtype::F32, &[sample.len() / (heads * d), heads, d], sample);
            parts.insert(format!("layers.{i}.sample.{name}"), part);
            if let Some(holdout) = holdout {
                let shape = [holdout.len() / (heads * d), heads, d];
                parts.insert(
                    format!("layers.{i}.holdout.{name}"),
                    Part::new(Dtype::BF16, &shape, holdout),
                );
            }
        }
        parts
    }
}

/// Writes a moments file of `layers`, all of `meta.model`'s; `content_sha256` is filled in.
pub fn write(path: &Path, meta: &Meta, prompt_lens: &[u32], layers: &[LayerRecord]) -> Result<()> {
    let mut parts = Parts::new();
    for (i, layer) in layers.iter().enumerate() {
        parts.extend(layer.parts(i));
    }
    write_parts(path, meta, prompt_lens, parts)
}

/// As [`write`], of the tensors of all layers.
pub(super) fn write_parts<'a>(
    path: &Path,
    meta: &Meta,
    prompt_lens: &'a [u32],
    mut parts: Parts<'a>,
) -> Result<()> {
    let part = Part::new(Dtype::U32, &[prompt_lens.len()], prompt_lens);
    parts.insert(PROMPT_LENS.to_owned(), part);
    let meta = |content_sha256| Meta {
        content_sha256,
        ..meta.clone()
    };
    container::write(path, KEY, meta, &parts)
}

/// Writes the moments of the same model over the tokens of all `shards` to `path`. Sums and counts add exactly;
/// samples and held-out sequences are joined. Only `vwv` differs from one run over all tokens: each shard weighed its
/// values by its own `qq`.
///
/// # Errors
/// Fewer than two shards, shards of different models, tokenizers or dtypes, and the same tokens twice.
pub fn merge(shards: &[Moments], path: &Path) -> Result<()> {
    let [first, rest @ ..] = shards else {
        return Err(Error::invalid("merge", "no moments files are given"));
    };
    if rest.is_empty() {
        return Err(Error::invalid("merge", "takes at least two moments files"));
    }
    for shard in shards {
        shard.verify()?;
    }
    let mut meta = first.meta.clone();
    let mut token_ids = vec![first.meta.calibration.token_ids_sha256.clone()];
    for shard in rest {
        let (a, b) = (&first.meta, &shard.meta);
        let refuse = |problem: String| {
            let (first, other) = (first.path().display(), shard.path().display());
            Err(Error::invalid(format!("{first} and {other}"), problem))
        };
        for (field, same) in [
            (
                "models",
                a.model.weights_fingerprint == b.model.weights_fingerprint
                    && a.model.config_sha256 == b.model.config_sha256,
            ),
            (
                "layers or heads",
                (0..a.model.layers.max(b.model.layers))
                    .all(|i| i < a.model.layers && i < b.model.layers && a.dims(i) == b.dims(i)),
            ),
            (
                "tokenizers",
                a.calibration.tokenizer_sha256 == b.calibration.tokenizer_sha256,
            ),
            ("dtypes", a.calibration.dtype == b.calibration.dtype),
            (
                "versions of the computation",
                a.tool.algorithm == b.tool.algorithm,
            ),
        ] {
            if !same {
                return refuse(format!("come from different {field}"));
            }
        }
        if token_ids.contains(&b.calibration.token_ids_sha256) {
            return refuse("hold moments of the same tokens, which would count twice".to_owned());
        }
        token_ids.push(b.calibration.token_ids_sha256.clone());
        let sum = &mut meta.calibration;
        sum.tokens += b.calibration.tokens;
        sum.prompts += b.calibration.prompts;
        sum.seq_len = sum.seq_len.max(b.calibration.seq_len);
        meta.holdout_tokens += b.holdout_tokens;
        meta.sample_rows += b.sample_rows;
    }
    meta.calibration.token_ids_sha256 = sha256_bytes(token_ids.join("\n").as_bytes());
    env!("CARGO_PKG_VERSION").clone_into(&mut meta.tool.version);

    let layers = (0..first.layers())
        .map(|i| LayerRecord::merged(shards, i))
        .collect::<Result<Vec<_>>>()?;
    let mut prompt_lens = Vec::new();
    for shard in shards {
        prompt_lens.extend(shard.file.u32(PROMPT_LENS)?);
    }
    write(path, &meta, &prompt_lens, &layers)
}

/// Some tokens of the calibration: row-major (rows, heads, d), with kv_heads for k and v.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    pub rows: usize,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub o: Vec<f32>,
}

/// Whole sequences that entered no moment: row-major (tokens, heads, d), with kv_heads for k and v, values rounded to
/// bf16. Prompts, laid end to end, never attend to each other.
#[derive(Clone, Debug)]
pub struct Holdout {
    pub prompt_lens: Vec<usize>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

impl Holdout {
    pub fn tokens(&self) -> usize {
        self.prompt_lens.iter().sum()
    }
}

/// An open moments file; layers are read when asked for.
pub struct Moments {
    file: Container,
    meta: Meta,
}

/// The F64 sums of a layer and whether their items are (d, d), (d) or scalars.
const SUMS: [(&str, usize); 11] = [
    ("kk", 2),
    ("k_sum", 1),
    ("oo", 2),
    ("qq", 2),
    ("vsv", 2),
    ("vsv_weight", 0),
    ("vv", 2),
    ("v_sum", 1),
    ("vwv", 2),
    ("vwv_weight", 0),
    ("wo", 2),
];

/// The tensors of a layer whose rows are tokens.
const ROWS: [&str; 7] = [
    "holdout.k",
    "holdout.q",
    "holdout.v",
    "sample.k",
    "sample.o",
    "sample.q",
    "sample.v",
];

/// Lengths of the held-out prompts, the same for all layers.
const PROMPT_LENS: &str = "holdout.prompt_lens";

/// Heads and channels beyond any model: keeps sizes of hostile files from overflowing.
const LARGEST: usize = 1 << 20;

#[derive(Deserialize)]
struct Version {
    schema: u32,
}

impl Moments {
    /// Whether `path` is a safetensors file whose header has the key of moments files, sound or not.
    pub fn recognise(path: &Path) -> Result<bool> {
        use std::io::Read;
        let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
        let mut start = Vec::new();
        // The metadata stands first in the header.
        file.take(1 << 16)
            .read_to_end(&mut start)
            .map_err(Error::io("read", path))?;
        let key = format!("\"{KEY}\"").into_bytes();
        Ok(start.windows(key.len()).any(|window| window == key))
    }

    /// Opens a file and checks its header: version, names, dtypes and shapes. Values are checked as they are read,
    /// the content hash by [`Self::verify`].
    pub fn open(path: &Path) -> Result<Self> {
        let file = Container::open(path, KEY)?;
        let place = || format!("{}: metadata `{KEY}`", path.display());
        let Version { schema } =
            serde_json::from_str(file.json()).map_err(|e| Error::invalid(place(), e))?;
        if schema == 0 || schema > SCHEMA {
            return Err(Error::invalid(
                place(),
                format!("`schema` is {schema}, not one of the {SCHEMA} known here"),
            )
            .hint("use a newer `oscar`"));
        }
        let meta: Meta =
            serde_json::from_str(file.json()).map_err(|e| Error::invalid(place(), e))?;
        meta.check()
            .map_err(|problem| Error::invalid(place(), problem))?;
        let moments = Self { file, meta };
        moments.check_tensors()?;
        Ok(moments)
    }

    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Number of layers; ids run from 0.
    pub fn layers(&self) -> usize {
        self.meta.model.layers
    }

    /// The means and the sample of layer `i`.
    pub fn layer(&self, i: usize) -> Result<LayerMoments> {
        if i >= self.layers() {
            return Err(Error::invalid(
                self.path().display(),
                format!("has no layer {i}, only {}", self.layers()),
            ));
        }
        let dims = self.meta.dims(i);
        let d = dims.head_dim;
        let tokens = self.meta.calibration.tokens as f64;
        let queries = tokens * dims.group() as f64;
        let read = |name: &str| self.file.f64(&format!("layers.{i}.{name}"));
        let matrices = |name: &str, counts: &dyn Fn(usize) -> f64| -> Result<Vec<DMatrix<f64>>> {
            let sums = read(name)?;
            let means = sums.chunks_exact(d * d).enumerate();
            Ok(means
                .map(|(head, sum)| DMatrix::from_row_slice(d, d, sum) / counts(head))
                .collect())
        };
        let vectors = |name: &str| -> Result<Vec<DVector<f64>>> {
            let sums = read(name)?;
            let means = sums.chunks_exact(d);
            Ok(means
                .map(|sum| DVector::from_row_slice(sum) / tokens)
                .collect())
        };
        let vv = matrices("vv", &|_| tokens)?;
        // Where all weights are zero (a head without energy) no token counts more than another.
        let weighted = |name: &str| -> Result<Vec<DMatrix<f64>>> {
            let weights = read(&format!("{name}_weight"))?;
            let mut means = matrices(name, &|head| weights[head])?;
            for ((mean, plain), &weight) in means.iter_mut().zip(&vv).zip(&weights) {
                if weight <= 0.0 {
                    mean.copy_from(plain);
                }
            }
            Ok(means)
        };
        Ok(LayerMoments {
            layer: i,
            tokens: self.meta.calibration.tokens,
            qq: matrices("qq", &|_| queries)?,
            kk: matrices("kk", &|_| tokens)?,
            oo: matrices("oo", &|_| queries)?,
            vsv: weighted("vsv")?,
            vwv: weighted("vwv")?,
            vv,
            k_mean: vectors("k_sum")?,
            v_mean: vectors("v_sum")?,
            wo: matrices("wo", &|_| 1.0)?,
            sample: self.layer_sample(i)?,
        })
    }

    fn layer_sample(&self, i: usize) -> Result<Sample> {
        let read = |name: &str| self.file.f32(&format!("layers.{i}.sample.{name}"));
        Ok(Sample {
            rows: self.meta.sample_rows,
            q: read("q")?,
            k: read("k")?,
            v: read("v")?,
            o: read("o")?,
        })
    }

    /// The held-out sequences of layer `i`.
    pub fn holdout(&self, i: usize) -> Result<Holdout> {
        let read = |name: &str| self.file.bf16(&format!("layers.{i}.holdout.{name}"));
        Ok(Holdout {
            prompt_lens: self.prompt_lens()?,
            q: read("q")?,
            k: read("k")?,
            v: read("v")?,
        })
    }

    /// Checks everything that [`Self::open`] leaves out: every value and the content hash.
    pub fn verify(&self) -> Result<()> {
        let found = self.file.content_sha256()?;
        let declared = &self.meta.content_sha256;
        if found != *declared {
            return Err(Error::invalid(
                self.path().display(),
                format!("content hash is {found}, but its metadata declares {declared}"),
            )
            .hint("the file was changed or damaged after it was written; collect it again"));
        }
        for i in 0..self.layers() {
            let layer = self.layer(i)?;
            self.holdout(i)?;
            for (name, moment) in [
                ("qq", &layer.qq),
                ("kk", &layer.kk),
                ("oo", &layer.oo),
                ("vv", &layer.vv),
                ("vsv", &layer.vsv),
                ("vwv", &layer.vwv),
                ("wo", &layer.wo),
            ] {
                for (head, matrix) in moment.iter().enumerate() {
                    let tolerance = 1e-9 * matrix.amax();
                    let name = format!("layers.{i}.{name}");
                    if (matrix - matrix.transpose()).amax() > tolerance {
                        return Err(self
                            .file
                            .wrong(&name, format!("is not symmetric in KV head {head}")));
                    }
                    if matrix.diagonal().min() < 0.0 {
                        return Err(self
                            .file
                            .wrong(&name, format!("has a negative diagonal in KV head {head}")));
                    }
                }
            }
        }
        Ok(())
    }

    fn prompt_lens(&self) -> Result<Vec<usize>> {
        let lens = self.file.u32(PROMPT_LENS)?;
        let total: u64 = lens.iter().map(|&n| u64::from(n)).sum();
        let tokens = self.meta.holdout_tokens as u64;
        if total != tokens || lens.contains(&0) {
            let problem = format!("must be positive and sum to {tokens}, but sums to {total}");
            return Err(self.file.wrong(PROMPT_LENS, problem));
        }
        Ok(lens.into_iter().map(|n| n as usize).collect())
    }

    fn check_tensors(&self) -> Result<()> {
        let found = self.file.names().len();
        let tensors = SUMS.len() + ROWS.len();
        let declared = self.layers() * tensors + 1;
        if found != declared {
            let layers = self.layers();
            return Err(Error::invalid(
                self.path().display(),
                format!("holds {found} tensors, not the {declared} of {layers} layers"),
            ));
        }
        // As many names as expected, and all expected ones there: none is unknown.
        for i in 0..self.layers() {
            for (name, dtype, shape) in self.meta.layer_tensors(i) {
                self.file
                    .expect(&format!("layers.{i}.{name}"), dtype, &shape)?;
            }
        }
        self.prompt_lens()?;
        Ok(())
    }
}

impl Meta {
    /// Names (after `layers.{i}.`), dtypes and shapes of the tensors of layer `i`.
    pub(super) fn layer_tensors(
        &self,
        i: usize,
    ) -> impl Iterator<Item = (&'static str, Dtype, Vec<usize>)> {
        let Dims {
            heads,
            kv_heads,
            head_dim: d,
        } = self.dims(i);
        let sums = SUMS.iter().map(move |&(name, rank)| {
            let shape = [kv_heads, d, d][..=rank].to_vec();
            (name, Dtype::F64, shape)
        });
        let rows = ROWS.iter().map(move |&name| {
            let heads = if name.ends_with(['q', 'o']) {
                heads
            } else {
                kv_heads
            };
            if name.starts_with("sample") {
                (name, Dtype::F32, vec![self.sample_rows, heads, d])
            } else {
                (name, Dtype::BF16, vec![self.holdout_tokens, heads, d])
            }
        });
        sums.chain(rows)
    }

    fn check(&self) -> Result<(), String> {
        let ModelInfo {
            heads,
            kv_heads,
            head_dim,
            layers,
            ..
        } = &self.model;
        for (name, values) in [
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
        ] {
            if values.len() != *layers {
                let found = values.len();
                return Err(format!("`model.{name}` lists {found} layers, not {layers}"));
            }
            if let Some(value) = values.iter().find(|&&x| x == 0 || x > LARGEST) {
                return Err(format!("`model.{name}` has {value}"));
            }
        }
        if let Some(i) = (0..*layers).find(|&i| heads[i] % kv_heads[i] != 0) {
            let (heads, kv_heads) = (heads[i], kv_heads[i]);
            return Err(format!(
                "{heads} heads of layer {i} cannot share {kv_heads} KV heads"
            ));
        }
        if *layers == 0 {
            return Err("`model.layers` is 0".to_owned());
        }
        if self.calibration.tokens == 0 {
            return Err("`calibration.tokens` is 0".to_owned());
        }
        Ok(())
    }
}
