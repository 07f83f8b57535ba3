//! What tells two entries of one model apart, in terms of what they do.
//!
//! Elements of two matrices may all differ where only an eigenvector's sign did. So subspaces are compared by their
//! principal angles, and transforms by how evenly they spread what matters.

use nalgebra::DMatrix;
use serde::Serialize;

use super::basis::{Basis, principal_cosines};
use super::methods::{EvalMethod, Side};
use crate::calib::{Moments, predict};
use crate::linalg::parallel;
use crate::rotation::spectrum::flatness;
use crate::zoo::{Entry, Metadata, SideName};
use crate::{Error, Result};

/// Ranks that subspaces are compared at, as shares of head_dim.
const RANKS: [usize; 4] = [16, 8, 4, 2];

/// Two entries, the first of which is the older one where that matters.
#[derive(Clone, Debug, Serialize)]
pub struct Diff {
    /// Whether the tensors are the same, byte for byte.
    pub same_tensors: bool,
    /// Settings and provenance that differ.
    pub changes: Vec<Change>,
    /// One item a layer, side and KV head.
    pub heads: Vec<HeadDiff>,
}

/// A setting that differs.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Change {
    pub what: String,
    pub a: String,
    pub b: String,
}

/// What differs for one KV head's keys or values.
#[derive(Clone, Debug, Serialize)]
pub struct HeadDiff {
    pub layer: usize,
    pub side: &'static str,
    pub kv_head: usize,
    /// Of the leading directions, by rank; empty where an entry was made without data.
    pub subspaces: Vec<Subspace>,
    /// Flatness of channel importance behind either transform, in the metric of the moments, or of entry a where there
    /// are none: 1 where every encoded channel matters alike.
    pub flatness: Option<[f64; 2]>,
    pub clip: [f64; 2],
    /// Relative error of attention's output on the moments' held-out prompts, with this side alone quantized.
    pub predicted: Option<[f64; 2]>,
}

/// How far two subspaces of one rank lie apart.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Subspace {
    pub rank: usize,
    /// Largest principal angle, in degrees: 0 for the same subspace.
    pub angle_degrees: f64,
    /// Mean squared cosine of the principal angles: 1 for the same subspace, about rank / head_dim for unrelated ones.
    pub overlap: f64,
}

/// Compares two entries; with `moments`, by what both would do on their held-out prompts, too.
///
/// # Errors
/// Entries of different shape, named; moments of another shape.
pub fn diff(a: &Entry, b: &Entry, moments: Option<&Moments>) -> Result<Diff> {
    check_shapes(a, b)?;
    if let Some(moments) = moments {
        check_moments(a, moments)?;
    }
    let stores = moments
        .map(|_| {
            Ok::<_, Error>([
                EvalMethod::from_entry("a", a)?,
                EvalMethod::from_entry("b", b)?,
            ])
        })
        .transpose()?;
    let layers: Vec<usize> = a.layers.keys().copied().collect();
    let heads = parallel(layers.len(), |i| {
        layer_diff(a, b, layers[i], moments.zip(stores.as_ref()))
    })
    .into_iter()
    .collect::<Result<Vec<_>>>()?;
    Ok(Diff {
        same_tensors: a.layers == b.layers,
        changes: changes(&a.metadata, &b.metadata)?,
        heads: heads.into_iter().flatten().collect(),
    })
}

/// Refuses entries that hold other layers, heads or channels.
///
/// # Errors
/// Names the first difference.
pub fn check_shapes(a: &Entry, b: &Entry) -> Result<()> {
    let differ = |what: String| {
        Err(Error::invalid("entries of different shape", what)
            .hint("compare entries of one model; `oscar inspect` shows their geometry"))
    };
    let (ids_a, ids_b): (Vec<_>, Vec<_>) = (a.layers.keys().collect(), b.layers.keys().collect());
    if ids_a.len() != ids_b.len() {
        return differ(format!("{} layers against {}", ids_a.len(), ids_b.len()));
    }
    if let Some((x, y)) = ids_a.iter().zip(&ids_b).find(|(x, y)| x != y) {
        return differ(format!("one has layer {x} where the other has layer {y}"));
    }
    for (&layer, parts) in &a.layers {
        let kv_heads = |entry: &Entry| entry.metadata.model.kv_heads.get(layer).copied();
        let (x, y) = (kv_heads(a).unwrap_or(0), kv_heads(b).unwrap_or(0));
        if x != y {
            return differ(format!("layer {layer}: {x} KV heads against {y}"));
        }
        let d = b.layers.get(&layer).map_or(0, |parts| parts.head_dim);
        if parts.head_dim != d {
            return differ(format!(
                "layer {layer}: head_dim {} against {d}",
                parts.head_dim
            ));
        }
    }
    Ok(())
}

fn check_moments(entry: &Entry, moments: &Moments) -> Result<()> {
    let model = &moments.meta().model;
    for (&layer, parts) in &entry.layers {
        let kv_heads = entry.metadata.model.kv_heads.get(layer);
        if model.head_dim.get(layer) != Some(&parts.head_dim)
            || model.kv_heads.get(layer) != kv_heads
        {
            return Err(Error::invalid(
                moments.path().display(),
                format!("layer {layer} has another shape than the entries'"),
            )
            .hint("give the moments of the entries' model"));
        }
    }
    Ok(())
}

fn layer_diff(
    a: &Entry,
    b: &Entry,
    layer: usize,
    measured: Option<(&Moments, &[EvalMethod; 2])>,
) -> Result<Vec<HeadDiff>> {
    let kv_heads = a.metadata.model.kv_heads.get(layer).copied().unwrap_or(0);
    let found = measured
        .map(|(moments, _)| moments.layer(layer))
        .transpose()?;
    let predicted = measured
        .map(|(moments, stores)| {
            let of = |store: &EvalMethod| {
                predict::output_errors(moments, layer, a.metadata.windows, &|head, side, rows| {
                    store.cache.roundtrip(layer, head, side, rows)
                })
            };
            Ok::<_, Error>([of(&stores[0])?, of(&stores[1])?])
        })
        .transpose()?;
    let mut out = Vec::new();
    for (i, side) in SideName::ALL.into_iter().enumerate() {
        for head in 0..kv_heads {
            let (Some(one), Some(other)) = (
                Head::of(a, layer, side, head),
                Head::of(b, layer, side, head),
            ) else {
                continue;
            };
            let metric = match (&found, side) {
                (Some(moments), Side::K) => Some(moments.qq[head].clone()),
                (Some(moments), Side::V) => Some(moments.wo[head].clone()),
                (None, _) => one.basis.as_ref().and_then(|basis| basis.moment.clone()),
            };
            let even = |head: &Head| {
                metric.as_ref().map(|m| {
                    let importance = (&head.back * m * head.back.transpose()).diagonal();
                    flatness(importance.as_slice())
                })
            };
            let error = |which: usize| {
                let errors = &predicted.as_ref()?[which];
                Some(errors.get(head)?.as_ref()?[i].relative())
            };
            out.push(HeadDiff {
                layer,
                side: side.as_str(),
                kv_head: head,
                subspaces: one
                    .basis
                    .as_ref()
                    .zip(other.basis.as_ref())
                    .map_or_else(Vec::new, |(a, b)| subspaces(a, b)),
                flatness: even(&one).zip(even(&other)).map(|(a, b)| [a, b]),
                clip: [one.clip, other.clip],
                predicted: error(0).zip(error(1)).map(|(a, b)| [a, b]),
            });
        }
    }
    Ok(out)
}

struct Head {
    /// (d, d): x = x' · back.
    back: DMatrix<f64>,
    clip: f64,
    basis: Option<Basis>,
}

impl Head {
    fn of(entry: &Entry, layer: usize, side: SideName, head: usize) -> Option<Self> {
        let parts = entry.layers.get(&layer)?;
        let found = match side {
            SideName::K => &parts.k,
            SideName::V => &parts.v,
        };
        let unit = if found.encode.len() == 1 { 0 } else { head };
        let d = parts.head_dim;
        let own = found.for_head(head)?;
        Some(Self {
            back: DMatrix::from_row_slice(d, d, &own.back(side, d)).map(f64::from),
            clip: f64::from(own.clip),
            basis: Basis::of(entry, layer, side, unit),
        })
    }
}

fn subspaces(a: &Basis, b: &Basis) -> Vec<Subspace> {
    let d = a.spectrum.len();
    let mut ranks: Vec<usize> = RANKS.iter().map(|share| (d / share).max(1)).collect();
    ranks.dedup();
    ranks
        .into_iter()
        .map(|rank| {
            let cosines = principal_cosines(&a.leading(rank), &b.leading(rank));
            let least = cosines.last().copied().unwrap_or(1.0);
            Subspace {
                rank,
                // acos loses all digits near 0 degrees, where f32 matrices end up.
                angle_degrees: if least > 1.0 - 1e-9 {
                    0.0
                } else {
                    least.acos().to_degrees()
                },
                overlap: cosines.iter().map(|c| c * c).sum::<f64>() / rank as f64,
            }
        })
        .collect()
}

/// Fields of the metadata that differ, by their names in the file; what follows from the tensors is left out.
fn changes(a: &Metadata, b: &Metadata) -> Result<Vec<Change>> {
    let flat = |metadata: &Metadata| -> Result<Vec<(String, String)>> {
        let value = serde_json::to_value(metadata).map_err(|e| Error::invalid("metadata", e))?;
        let mut out = Vec::new();
        flatten("", &value, &mut out);
        Ok(out)
    };
    let (a, b) = (flat(a)?, flat(b)?);
    let find = |list: &[(String, String)], key: &str| {
        list.iter()
            .find(|(k, _)| k == key)
            .map_or_else(|| "–".to_owned(), |(_, v)| v.clone())
    };
    let mut keys: Vec<&String> = a.iter().chain(&b).map(|(k, _)| k).collect();
    keys.sort();
    keys.dedup();
    Ok(keys
        .into_iter()
        .map(|key| Change {
            what: key.clone(),
            a: find(&a, key),
            b: find(&b, key),
        })
        .filter(|change| change.a != change.b)
        .collect())
}

fn flatten(prefix: &str, value: &serde_json::Value, out: &mut Vec<(String, String)>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                let name = if prefix.is_empty() {
                    key.clone()
                } else {
                    format!("{prefix}.{key}")
                };
                // Per layer: what was fitted, not how.
                if name != "fit.k" && name != "fit.v" {
                    flatten(&name, value, out);
                }
            }
        }
        serde_json::Value::String(text) => out.push((prefix.to_owned(), text.clone())),
        serde_json::Value::Null => {}
        other => out.push((prefix.to_owned(), other.to_string())),
    }
}
