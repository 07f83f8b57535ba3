//! What an entry makes of keys, values, queries and outputs on their way into the cache and out of it.

use std::collections::BTreeMap;

use crate::kv::attention::Dims;
use crate::kv::page::Side;
use crate::quant::Codec;
use crate::rotation::Transform;
use crate::zoo::{self, Entry, Layer, Quantizer};
use crate::{Error, Result};

/// An entry's transforms of all layers and KV heads.
#[derive(Clone, Debug)]
pub struct Transforms {
    id: String,
    layers_of_model: usize,
    /// Of every layer: heads, KV heads, head_dim.
    shapes: Vec<(usize, usize, usize)>,
    /// By layer, then KV head: of keys and of values.
    layers: BTreeMap<usize, Vec<[Transform; 2]>>,
    bits: u32,
    group: usize,
}

impl Transforms {
    /// # Errors
    /// Where the entry's codec is unknown, or a layer's tensors do not fit each other.
    pub fn new(entry: &Entry) -> Result<Self> {
        let info = &entry.metadata.model;
        let Quantizer {
            bits, group, codec, ..
        } = &entry.metadata.quantizer;
        if codec != "uniform" || !(1..=8).contains(bits) {
            return Err(Error::invalid(
                format!("entry of `{}`", info.id),
                format!("this version knows no codec `{codec}` of {bits} bits"),
            ));
        }
        let layer = |(&index, layer): (&usize, &Layer)| {
            let kv_heads = info.kv_heads.get(index);
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
        let shapes = info.heads.iter().zip(&info.kv_heads).zip(&info.head_dim);
        Ok(Self {
            id: info.id.clone(),
            layers_of_model: info.layers,
            shapes: shapes.map(|((&h, &kv), &d)| (h, kv, d)).collect(),
            layers: entry.layers.iter().map(layer).collect::<Result<_>>()?,
            bits: *bits,
            group: *group,
        })
    }

    /// Refuses another geometry than that of a model of `layers` layers of shape `dims`, and codes that do not take
    /// two bits.
    pub fn check(&self, layers: usize, dims: Dims) -> Result<()> {
        let place = format!("entry of `{}`", self.id);
        if self.bits != 2 {
            return Err(Error::invalid(
                place,
                format!("its codes take {} bits, and the cache holds 2", self.bits),
            )
            .hint("`oscar validate --cache simulated` measures other codes"));
        }
        let model = (dims.heads, dims.kv_heads, dims.head_dim);
        let problem = if self.layers_of_model != layers {
            let ours = self.layers_of_model;
            format!("its {ours} layers do not fit those of the model, {layers}")
        } else if let Some(ours) = self.shapes.iter().find(|&&ours| ours != model) {
            format!(
                "heads, KV heads and head_dim {ours:?} do not fit those of the model, {model:?}"
            )
        } else if let Some(layer) =
            (0..layers).find(|layer| self.layer(*layer).len() != dims.kv_heads)
        {
            format!("has no layer {layer}")
        } else {
            return Ok(());
        };
        Err(Error::invalid(place, problem).hint("use an entry that was calibrated on this model"))
    }

    /// Of one layer: of keys and of values, by KV head; none where the entry lacks the layer.
    pub fn layer(&self, layer: usize) -> &[[Transform; 2]] {
        self.layers.get(&layer).map_or(&[], Vec::as_slice)
    }

    /// Bits of a code.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Channels that share a scale and a zero.
    pub fn group(&self) -> usize {
        self.group
    }

    /// All matrices and means.
    pub fn bytes(&self) -> usize {
        let sides = self.layers.values().flatten().flatten();
        let floats = sides.map(|side| {
            let feedback = side.codec().feedback.as_ref().map_or(0, Vec::len);
            side.encode().len() + side.back().len() + side.mean().map_or(0, <[f32]>::len) + feedback
        });
        floats.sum::<usize>() * size_of::<f32>()
    }
}
