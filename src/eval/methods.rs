//! What is evaluated: ways of storing a cache in few bits.

use std::collections::BTreeMap;

use nalgebra::DMatrix;

use crate::model::Model;
use crate::quant::{self, Codec, kivi, turboquant};
use crate::rotation::{Transform, hadamard};
use crate::zoo::{self, Entry, Layer, Quantizer};
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
            cache: Box::new(Served::new(entry)?),
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
        })
    }

    /// `kivi`: keys per channel in groups of 128 tokens, values per token, 2 bits.
    pub fn kivi(head_dim: usize) -> Self {
        Self {
            name: "kivi".to_owned(),
            cache: Box::new(Kivi { head_dim }),
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
        })
    }
}

struct Served {
    bits: u32,
    group: usize,
    /// By layer, then KV head: of keys and of values.
    layers: BTreeMap<usize, Vec<[Transform; 2]>>,
}

impl Served {
    fn new(entry: &Entry) -> Result<Self> {
        let Quantizer {
            bits, group, codec, ..
        } = &entry.metadata.quantizer;
        if codec != "uniform" || !(1..=8).contains(bits) {
            return Err(Error::invalid(
                format!("entry of `{}`", entry.metadata.model.id),
                format!("this version knows no codec `{codec}` of {bits} bits"),
            ));
        }
        let layer = |(&index, layer): (&usize, &Layer)| {
            let kv_heads = entry.metadata.model.kv_heads.get(index);
            let heads = (0..kv_heads.copied().unwrap_or(0))
                .map(|head| {
                    let transform = |side: Side, part: &zoo::Side| {
                        let place = || format!("layer {index} {side}, KV head {head}");
                        let part = part
                            .for_head(head)
                            .ok_or_else(|| Error::invalid(place(), "has no transform"))?;
                        let codec = Codec {
                            head_dim: layer.head_dim,
                            levels: 1 << bits,
                            group: *group,
                            clip: f64::from(part.clip),
                            feedback: part.feedback.map(<[f32]>::to_vec),
                        };
                        Transform::new(
                            part.encode.to_vec(),
                            part.back(side, layer.head_dim),
                            part.mean.map(<[f32]>::to_vec),
                            codec,
                        )
                    };
                    Ok([transform(Side::K, &layer.k)?, transform(Side::V, &layer.v)?])
                })
                .collect::<Result<_>>()?;
            Ok((index, heads))
        };
        Ok(Self {
            bits: *bits,
            group: *group,
            layers: entry.layers.iter().map(layer).collect::<Result<_>>()?,
        })
    }
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
        let [k, v] = self
            .layers
            .get(&layer)
            .and_then(|heads| heads.get(kv_head))
            .ok_or_else(|| {
                Error::invalid(
                    format!("layer {layer}, KV head {kv_head}"),
                    "the entry has no transform for it",
                )
            })?;
        match side {
            Side::K => k.roundtrip(rows),
            Side::V => v.roundtrip(rows),
        }
    }

    fn bits_per_element(&self, context_tokens: usize, sink: usize, recent: usize) -> f64 {
        quant::bits_per_element(
            f64::from(self.bits),
            self.group,
            context_tokens,
            sink,
            recent,
        )
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
    let mismatch = |what: &str, entry: &dyn std::fmt::Debug, model: usize| {
        Error::invalid(
            format!("entry of `{}`", ours.id),
            format!("{what} {entry:?} do not fit those of the model, {model}"),
        )
        .hint("validate an entry with the model it was calibrated on")
    };
    if ours.layers != layers {
        return Err(mismatch("layers", &ours.layers, layers));
    }
    for (what, list, expected) in [
        ("heads", &ours.heads, config.num_attention_heads),
        ("KV heads", &ours.kv_heads, config.num_key_value_heads),
        ("head_dim", &ours.head_dim, config.head_dim),
    ] {
        if list.len() != layers || list.iter().any(|&n| n != expected) {
            return Err(mismatch(what, list, expected));
        }
    }
    if let Some(layer) = (0..layers).find(|layer| !entry.layers.contains_key(layer)) {
        return Err(Error::invalid(
            format!("entry of `{}`", ours.id),
            format!("has no layer {layer}"),
        ));
    }
    let mut differences = Vec::new();
    if ours.weights_fingerprint != model.weights_fingerprint()? {
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
