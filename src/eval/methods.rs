//! What is evaluated: ways of storing a cache in few bits.

use std::sync::Arc;

use half::bf16;
use nalgebra::DMatrix;

use crate::kv::pool::Transforms;
use crate::model::Model;
use crate::quant::{self, Codec, kivi, turboquant};
use crate::rotation::{Transform, hadamard};
use crate::zoo::Entry;
use crate::{Error, Result};

pub use crate::zoo::SideName as Side;

/// A lossy store of keys and values.
pub trait Cache: Send + Sync {
    /// What queries read back after `rows` were stored: (n, head_dim), consecutive tokens of one prompt and one KV
    /// head, post-RoPE, in the model's own space.
    fn roundtrip(&self, layer: usize, kv_head: usize, side: Side, rows: &[f32])
    -> Result<Vec<f32>>;

    /// Bits a cached number takes at `context_tokens`, scales and exact windows counted.
    fn bits_per_element(&self, context_tokens: usize, sink: usize, recent: usize) -> f64;
}

/// A [`Cache`] and its name in reports.
pub struct EvalMethod {
    pub name: String,
    pub cache: Box<dyn Cache>,
    /// Where the method runs in the cache that serves, and not in a simulation of it.
    pub real: Option<Arc<Transforms>>,
}

impl std::fmt::Debug for EvalMethod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EvalMethod({})", self.name)
    }
}

impl EvalMethod {
    /// A zoo entry's cache: transformed, coded, packed; unpacked, decoded, transformed back.
    ///
    /// # Errors
    /// Where the entry's codec is unknown, or a layer's tensors do not fit each other.
    pub fn from_entry(name: impl Into<String>, entry: &Entry) -> Result<Self> {
        Ok(Self {
            name: name.into(),
            cache: Box::new(Served {
                transforms: Transforms::new(entry)?,
                through_bf16: false,
            }),
            real: None,
        })
    }

    /// The same, rounding as the pages that serve do: to bf16 before tokens become codes.
    ///
    /// # Errors
    /// As [`Self::from_entry`].
    pub fn paged(name: impl Into<String>, entry: &Entry) -> Result<Self> {
        Ok(Self {
            cache: Box::new(Served {
                transforms: Transforms::new(entry)?,
                through_bf16: true,
            }),
            ..Self::from_entry(name, entry)?
        })
    }

    /// A zoo entry in the cache that serves: the model runs token by token on its pages.
    ///
    /// # Errors
    /// As [`Self::from_entry`].
    pub fn real(name: impl Into<String>, entry: &Entry) -> Result<Self> {
        Ok(Self {
            real: Some(Arc::new(Transforms::new(entry)?)),
            ..Self::from_entry(name, entry)?
        })
    }

    /// `naive`: no rotation, the row's own range, plain rounding.
    ///
    /// # Errors
    /// Where head_dim cannot be packed.
    pub fn naive(head_dim: usize) -> Result<Self> {
        Self::rotated("naive", &DMatrix::identity(head_dim, head_dim))
    }

    /// `hadamard`: [`Self::naive`] behind a Hadamard rotation (QuaRot, arXiv 2404.00456).
    ///
    /// # Errors
    /// Where head_dim cannot be packed.
    pub fn hadamard(head_dim: usize) -> Result<Self> {
        Self::rotated("hadamard", &hadamard::matrix(head_dim))
    }

    fn rotated(name: &str, rotation: &DMatrix<f64>) -> Result<Self> {
        let head_dim = rotation.nrows();
        let codec = Codec {
            head_dim,
            levels: 4,
            group: head_dim,
            clip: 1.0,
            feedback: None,
        };
        let (encode, back) = (
            quant::row_major(rotation),
            quant::row_major(&rotation.transpose()),
        );
        Ok(Self {
            name: name.to_owned(),
            cache: Box::new(Everywhere(Transform::new(encode, back, None, codec)?)),
            real: None,
        })
    }

    /// `kivi`: keys per channel in groups of 128 tokens, values per token, 2 bits.
    pub fn kivi(head_dim: usize) -> Self {
        Self {
            name: "kivi".to_owned(),
            cache: Box::new(Kivi { head_dim }),
            real: None,
        }
    }

    /// `turboquant2` or `turboquant3`: a random rotation, the row's norm, Lloyd–Max levels.
    ///
    /// # Errors
    /// Where `bits` is neither 2 nor 3.
    pub fn turboquant(head_dim: usize, bits: usize) -> Result<Self> {
        Ok(Self {
            name: format!("turboquant{bits}"),
            cache: Box::new(TurboQuant {
                head_dim,
                bits,
                codec: turboquant::TurboQuant::new(head_dim, bits, 0)?,
            }),
            real: None,
        })
    }
}

struct Served {
    transforms: Transforms,
    /// Whether encoded rows are rounded to bf16 before they become codes, as in the pages that serve.
    through_bf16: bool,
}

/// One transform for all layers, heads and sides.
struct Everywhere(Transform);

impl Cache for Everywhere {
    fn roundtrip(&self, _: usize, _: usize, _: Side, rows: &[f32]) -> Result<Vec<f32>> {
        self.0.roundtrip(rows)
    }

    fn bits_per_element(&self, context_tokens: usize, sink: usize, recent: usize) -> f64 {
        let group = self.0.codec().group;
        quant::bits_per_element(2.0, group, context_tokens, sink, recent)
    }
}

impl Cache for Served {
    fn roundtrip(
        &self,
        layer: usize,
        kv_head: usize,
        side: Side,
        rows: &[f32],
    ) -> Result<Vec<f32>> {
        let [k, v] = self.transforms.layer(layer).get(kv_head).ok_or_else(|| {
            Error::invalid(
                format!("layer {layer}, KV head {kv_head}"),
                "the entry has no transform for it",
            )
        })?;
        let transform = if side == Side::K { k } else { v };
        if !self.through_bf16 {
            return transform.roundtrip(rows);
        }
        let mut encoded = transform.forward(rows);
        for x in &mut encoded {
            *x = bf16::from_f32(*x).to_f32();
        }
        Ok(transform.backward(&transform.codec().roundtrip(&encoded)?))
    }

    fn bits_per_element(&self, context_tokens: usize, sink: usize, recent: usize) -> f64 {
        let (bits, group) = (f64::from(self.transforms.bits()), self.transforms.group());
        quant::bits_per_element(bits, group, context_tokens, sink, recent)
    }
}

struct Kivi {
    head_dim: usize,
}

impl Cache for Kivi {
    fn roundtrip(&self, _: usize, _: usize, side: Side, rows: &[f32]) -> Result<Vec<f32>> {
        match side {
            Side::K => kivi::roundtrip_keys(rows, self.head_dim, 4),
            Side::V => kivi::roundtrip_values(rows, self.head_dim, 4),
        }
    }

    fn bits_per_element(&self, context_tokens: usize, sink: usize, recent: usize) -> f64 {
        kivi::bits_per_element(2.0, self.head_dim, context_tokens, sink, recent)
    }
}

struct TurboQuant {
    head_dim: usize,
    bits: usize,
    codec: turboquant::TurboQuant,
}

impl Cache for TurboQuant {
    fn roundtrip(&self, _: usize, _: usize, _: Side, rows: &[f32]) -> Result<Vec<f32>> {
        self.codec.roundtrip(rows)
    }

    fn bits_per_element(&self, context_tokens: usize, sink: usize, recent: usize) -> f64 {
        let bits = self.bits as f64;
        turboquant::bits_per_element(bits, self.head_dim, context_tokens, sink, recent)
    }
}

/// Refuses an entry of another geometry than `model`'s; returns what else differs, for a person to weigh.
pub fn check_entry(entry: &Entry, model: &Model) -> Result<Vec<String>> {
    let (ours, config) = (&entry.metadata.model, model.config());
    let layers = config.num_hidden_layers;
    for (what, entry, expected) in [
        ("layers", &vec![ours.layers], layers),
        ("heads", &ours.heads, config.num_attention_heads),
        ("KV heads", &ours.kv_heads, config.num_key_value_heads),
        ("head_dim", &ours.head_dim, config.head_dim),
    ] {
        if let Some(other) = entry.iter().find(|&&n| n != expected) {
            return Err(Error::invalid(
                format!("entry of `{}`", ours.id),
                format!(
                    "{what} {other}, and the model `{}` has {expected}",
                    model.id()
                ),
            )
            .hint("use an entry that was calibrated on this model"));
        }
    }
    if let Some(layer) = (0..layers).find(|layer| !entry.layers.contains_key(layer)) {
        return Err(Error::invalid(
            format!("entry of `{}`", ours.id),
            format!("has no layer {layer}"),
        ));
    }
    let mut differences = Vec::new();
    if ours.weights_fingerprint.is_empty() {
        differences.push(format!(
            "the entry does not say which weights of `{}` it was calibrated on",
            ours.id
        ));
    } else if ours.weights_fingerprint != model.weights_fingerprint()? {
        differences.push(format!(
            "the entry was calibrated on other weights (`{}`) than those of `{}`",
            ours.id,
            model.id()
        ));
    } else if ours.config_sha256 != model.config_sha256() {
        differences.push(format!(
            "the entry was calibrated with another configuration of `{}`",
            ours.id
        ));
    }
    Ok(differences)
}
