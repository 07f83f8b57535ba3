//! What today's servers can express of an entry: orthogonal matrices and one clip ratio a side.

use std::collections::HashMap;
use std::fmt;

use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};

use crate::files::canonical_json;
use crate::zoo::{Entry, Metadata, Method, Rounding, Side, SideName};
use crate::{Error, Result};

/// Who is to read an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// SGLang's OSCAR path: `.pt` files.
    Sglang,
    /// The OSCAR branch of llama.cpp: tensors in a GGUF file.
    Gguf,
    /// Anything that reads safetensors.
    Safetensors,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sglang => "SGLang's OSCAR path",
            Self::Gguf => "llama.cpp's OSCAR branch",
            Self::Safetensors => "a file of orthogonal rotations",
        })
    }
}

/// An entry that a target can express: q and k take the same orthogonal matrix, o its transpose.
pub struct Orthogonal<'a> {
    entry: &'a Entry,
    /// One clip ratio for all keys: the median of the entry's.
    pub k_clip: f32,
    pub v_clip: f32,
    /// What the export is without, a sentence each; empty but for exports that were allowed to lose something.
    pub losses: Vec<String>,
    carried: String,
}

/// One layer's keys or values.
#[derive(Clone, Copy)]
pub struct OrthogonalLayer<'a> {
    pub head_dim: usize,
    pub side: &'a Side,
}

/// What a foreign format has no place for, so that an exported entry comes back as it was. Stored as canonical JSON.
#[derive(Serialize, Deserialize)]
pub(super) struct Carried {
    pub metadata: Metadata,
    pub k_clip: f32,
    pub v_clip: f32,
}

/// What a target has no place for in an entry.
pub struct Misfit {
    target: Target,
    model_id: String,
    /// Without these no entry is left; empty where the target can express it.
    pub impossible: Vec<String>,
    /// What costs accuracy alone, by name, and what going without it means.
    pub lossy: Vec<(String, String)>,
    /// The command that fits an entry that fits, as close to this one as it can be.
    pub remedy: String,
    k_clip: f32,
    v_clip: f32,
}

impl Misfit {
    /// Holds `entry` against what `target` can express.
    pub fn of(entry: &Entry, target: Target) -> Self {
        let metadata = &entry.metadata;
        let sides = || entry.layers.values().flat_map(|layer| [&layer.k, &layer.v]);
        let clips = |of: fn(&crate::zoo::Layer) -> &Side| -> Vec<f32> {
            entry
                .layers
                .values()
                .flat_map(|layer| of(layer).clip.iter().copied())
                .collect()
        };
        let (k_clips, v_clips) = (clips(|layer| &layer.k), clips(|layer| &layer.v));

        let mut impossible = Vec::new();
        if sides().any(|side| side.dual.is_some()) {
            impossible.push(
                "matrices that are not orthogonal (queries and outputs take another one than keys and values)"
                    .to_owned(),
            );
        }
        if target == Target::Gguf && sides().any(|side| side.encode.len() != 1) {
            impossible.push("one matrix a KV head (it takes one a layer)".to_owned());
        }
        let quantizer = &metadata.quantizer;
        if quantizer.bits != 2 || quantizer.codec != "uniform" {
            impossible.push(format!(
                "codec `{}` of {} bits",
                quantizer.codec, quantizer.bits
            ));
        }

        let mut lossy = Vec::new();
        if sides().any(|side| side.mean.is_some()) {
            lossy.push((
                "centering".to_owned(),
                "keys and values are not centered here, as the entry has them: scores stay right, errors grow".to_owned(),
            ));
        }
        if sides().any(|side| side.feedback.is_some()) {
            lossy.push((
                "feedback rounding, which happens as tokens are stored".to_owned(),
                "the server rounds to nearest, and the entry was fitted and measured with feedback rounding".to_owned(),
            ));
        }
        lossy.extend(
            [("k", &k_clips), ("v", &v_clips)]
                .into_iter()
                .filter_map(|(side, list)| differing(side, list)),
        );
        let (k_clip, v_clip) = (median(&k_clips), median(&v_clips));
        Self {
            target,
            model_id: metadata.model.id.clone(),
            impossible,
            lossy,
            remedy: remedy(metadata, target, k_clip, v_clip),
            k_clip,
            v_clip,
        }
    }

    fn refusal(&self) -> Error {
        let mut hint = format!("make an entry that fits: `{}`", self.remedy);
        if self.impossible.is_empty() {
            hint.push_str("; or pass --lossy to go without");
        }
        let lossy = self.lossy.iter().map(|(problem, _)| problem);
        let problems: Vec<_> = self.impossible.iter().chain(lossy).cloned().collect();
        Error::invalid(
            format!("entry of `{}`", self.model_id),
            format!("{} cannot express {}", self.target, problems.join(", nor ")),
        )
        .hint(hint)
    }
}

impl<'a> Orthogonal<'a> {
    /// Checks that `target` can express `entry`.
    ///
    /// # Errors
    /// Where it cannot: transforms that are not orthogonal, another codec, one matrix a head where the target takes one a
    /// layer; and, unless `lossy`, what costs accuracy alone: centering, feedback rounding, clip ratios that differ.
    /// The error says which command makes an entry that fits.
    pub fn new(entry: &'a Entry, target: Target, lossy: bool) -> Result<Self> {
        let misfit = Misfit::of(entry, target);
        if !misfit.impossible.is_empty() || (!misfit.lossy.is_empty() && !lossy) {
            return Err(misfit.refusal());
        }
        let Misfit { k_clip, v_clip, .. } = misfit;
        let losses: Vec<_> = misfit.lossy.into_iter().map(|(_, loss)| loss).collect();

        let mut metadata = entry.metadata.clone();
        metadata.content_sha256.clear();
        if !losses.is_empty()
            && let Some(fit) = &mut metadata.fit
        {
            (fit.k_rounding, fit.v_rounding) = (Rounding::Nearest, Rounding::Nearest);
            (fit.k_centered, fit.v_centered) = (false, false);
            for side in fit.k.values_mut().chain(fit.v.values_mut()) {
                side.output_error.clear();
            }
        }
        let carried = canonical_json(&Carried {
            metadata,
            k_clip,
            v_clip,
        })?;
        Ok(Self {
            entry,
            k_clip,
            v_clip,
            losses,
            carried,
        })
    }

    pub fn metadata(&self) -> &Metadata {
        &self.entry.metadata
    }

    pub fn layers(&self, side: SideName) -> impl Iterator<Item = (usize, OrthogonalLayer<'a>)> {
        self.entry.layers.iter().map(move |(&id, layer)| {
            let side = match side {
                SideName::K => &layer.k,
                SideName::V => &layer.v,
            };
            (
                id,
                OrthogonalLayer {
                    head_dim: layer.head_dim,
                    side,
                },
            )
        })
    }

    /// Canonical JSON of everything about the entry that is no matrix.
    pub fn carried(&self) -> &str {
        &self.carried
    }

    /// The bytes of a safetensors file: `layers.{i}.k.rotation` and `layers.{i}.v.rotation`, f32, (d, d) in scope
    /// `layer` and (H_kv, d, d) in scope `head`; `….eigenvalues`, (d) or (H_kv, d), ascending, where the entry has
    /// them; and one metadata key, `oscar`, with provenance as JSON. Rows of activations are multiplied from the left.
    pub fn to_safetensors(&self) -> Result<Vec<u8>> {
        let per_head = self.metadata().scope == crate::zoo::Scope::Head;
        let mut tensors = Vec::new();
        for name in SideName::ALL {
            for (id, layer) in self.layers(name) {
                let (heads, d) = (layer.side.encode.len(), layer.head_dim);
                let shape = |rest: &[usize]| {
                    if per_head {
                        [&[heads], rest].concat()
                    } else {
                        rest.to_vec()
                    }
                };
                let place = format!("layers.{id}.{name}");
                tensors.push((
                    format!("{place}.rotation"),
                    shape(&[d, d]),
                    layer.rotation(),
                ));
                if let Some(eigenvalues) = layer.eigenvalues() {
                    tensors.push((format!("{place}.eigenvalues"), shape(&[d]), eigenvalues));
                }
            }
        }
        let bad = |e: safetensors::SafeTensorError| Error::invalid("safetensors", e);
        let views = tensors
            .iter()
            .map(|(name, shape, data)| {
                Ok((name, TensorView::new(Dtype::F32, shape.clone(), data)?))
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(bad)?;
        let header = HashMap::from([("oscar".to_owned(), self.carried.clone())]);
        safetensors::serialize(views, Some(header)).map_err(bad)
    }
}

impl OrthogonalLayer<'_> {
    /// All its matrices, row-major, f32 little-endian.
    pub fn rotation(&self) -> Vec<u8> {
        self.side
            .encode
            .iter()
            .flatten()
            .flat_map(|x| x.to_le_bytes())
            .collect()
    }

    /// All its eigenvalues, ascending, f32 little-endian.
    pub fn eigenvalues(&self) -> Option<Vec<u8>> {
        let spectrum = self.side.spectrum.as_ref()?;
        let ascending = spectrum.iter().flat_map(|values| values.iter().rev());
        Some(ascending.flat_map(|x| x.to_le_bytes()).collect())
    }
}

/// The number with the least sum of distances from all of `list`.
fn median(list: &[f32]) -> f32 {
    let mut sorted = list.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(1.0)
}

/// Where clip ratios differ: that they do, and what their median loses.
fn differing(side: &str, list: &[f32]) -> Option<(String, String)> {
    let least = list.iter().copied().min_by(f32::total_cmp)?;
    let most = list.iter().copied().max_by(f32::total_cmp)?;
    if least.total_cmp(&most).is_eq() {
        return None;
    }
    let median = median(list);
    let away = list.iter().filter(|clip| clip.total_cmp(&median).is_ne());
    let (count, sum) = away.fold((0, 0.0), |(count, sum), clip| {
        (count + 1, sum + (clip - median).abs())
    });
    let mean = sum / count as f32;
    Some((
        format!("clip ratios of {side} that differ ({least} to {most})"),
        format!(
            "the entry's {} clip ratios of {side} are {least} to {most}; their median {median} stands in: {count} of \
             them differ from it, by {mean:.3} on average",
            list.len()
        ),
    ))
}

/// The command that fits an entry for `target`, as close to `metadata` as it can be.
fn remedy(metadata: &Metadata, target: Target, k_clip: f32, v_clip: f32) -> String {
    let method = match metadata.method {
        Method::Balanced => Method::Oscar,
        other => other,
    };
    let scope = match target {
        Target::Safetensors => metadata.scope,
        Target::Sglang | Target::Gguf => crate::zoo::Scope::Layer,
    };
    // The search of clip ratios of `balanced` is for other transforms and other rounding.
    let (k_clip, v_clip) = if metadata.method == Method::Balanced {
        (0.96, 0.92)
    } else {
        (k_clip, v_clip)
    };
    let moment = if method == Method::Oscar {
        " --v-moment vwv"
    } else {
        ""
    };
    format!(
        "oscar fit MOMENTS --method {method} --scope {scope}{moment} --rounding nearest --k-clip {k_clip} --v-clip \
         {v_clip} --group {} --sink {} --recent {} --out DIR",
        metadata.quantizer.group, metadata.windows.sink_tokens, metadata.windows.recent_tokens
    )
}
