//! Entries from rotations that other tools fitted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value as Json;

use super::orthogonal::Carried;
use super::sglang_pt::{Checkpoint, CheckpointLayer};
use crate::zoo::verify::{IMPORTED_TOLERANCE, distance_from_orthogonal};
use crate::zoo::{
    Calibration, Entry, Fit, Imported as Provenance, ImportedFile, KMoment, Layer, Metadata,
    Method, ModelInfo, Quantizer, Rounding, SCHEMA, Scope, Side, SideName, Tool, VMoment, Windows,
};
use crate::{Error, Result, files, linalg};

/// Clip ratios, windows and group of OSCAR's released launch scripts.
const K_CLIP: f32 = 0.96;
const V_CLIP: f32 = 0.92;
const WINDOWS: Windows = Windows {
    sink_tokens: 64,
    recent_tokens: 256,
};
const GROUP: usize = 128;

/// An entry larger than this is of no model; one small file can ask for it by sharing a matrix.
const MAX_ENTRY_BYTES: usize = 4 << 30;

/// What files of rotations leave unsaid. `None`: as the file carries it, where an entry of ours was exported, else what
/// OSCAR's released launch scripts use.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// The model, whole; the next five fields are not read then.
    pub model: Option<ModelInfo>,
    pub model_id: Option<String>,
    pub architecture: Option<String>,
    /// Layers of the model, with and without rotations.
    pub layers: Option<usize>,
    pub heads: Option<usize>,
    pub kv_heads: Option<usize>,
    pub group: Option<usize>,
    pub k_clip: Option<f32>,
    pub v_clip: Option<f32>,
    pub sink_tokens: Option<usize>,
    pub recent_tokens: Option<usize>,
}

/// What [`import`] made.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    pub entry: Entry,
    /// What a person should know about the files; in order of layers.
    pub warnings: Vec<String>,
}

/// One side as its file has it.
struct Source {
    place: String,
    checkpoint: Checkpoint,
    file: ImportedFile,
}

/// Makes an entry of OSCAR's `.pt` files (one of keys, one of values), or of a `.safetensors` file of orthogonal
/// rotations, which holds both.
///
/// # Errors
/// All of [`Checkpoint::read`]; sides that are missing, given twice or of other layers, head dims or scope; matrices that
/// are not orthogonal within 5e-3; a model that is not known well enough, or that the rotations do not fit.
pub fn import(paths: &[PathBuf], options: &ImportOptions) -> Result<Imported> {
    let (mut k, mut v) = (None, None);
    for path in paths {
        for (side, source) in sources(path)? {
            let slot = match side {
                SideName::K => &mut k,
                SideName::V => &mut v,
            };
            if let Some(Source { place, .. }) = slot {
                return Err(Error::invalid(
                    path.display(),
                    format!("holds rotations of {}, as does `{place}`", long(side)),
                )
                .hint("give one file of keys and one of values"));
            }
            *slot = Some(source);
        }
    }
    let missing = |side, there: Option<&Source>| {
        let place = there.map_or("FILES", |source| &source.place);
        Error::invalid(place, format!("no file of {} beside it", long(side))).hint(format!(
            "give both files of a model, such as `k_rotation_….pt v_rotation_….pt`; `oscar import` takes them for {side} \
             by their `objective` or name"
        ))
    };
    match (k, v) {
        (Some(k), Some(v)) => combine(k, v, options),
        (Some(k), None) => Err(missing(SideName::V, Some(&k))),
        (None, v) => Err(missing(SideName::K, v.as_ref())),
    }
}

fn long(side: SideName) -> &'static str {
    match side {
        SideName::K => "keys",
        SideName::V => "values",
    }
}

fn sources(path: &Path) -> Result<Vec<(SideName, Source)>> {
    let place = path.display().to_string();
    if path.is_dir() {
        return Err(Error::invalid(place, "is a folder")
            .hint("name the two files in it, of keys and of values"));
    }
    let bytes = files::read(path)?;
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let sha256 = files::sha256_bytes(&bytes);
    let source = |checkpoint: Checkpoint| Source {
        file: ImportedFile {
            name: name.clone(),
            sha256: sha256.clone(),
            format_version: checkpoint.format_version,
            objective: checkpoint.objective.clone(),
            calibration: checkpoint.calibration.clone(),
        },
        place: place.clone(),
        checkpoint,
    };
    if path
        .extension()
        .is_some_and(|extension| extension == "safetensors")
    {
        let [k, v] = read_safetensors(&place, &bytes)?;
        return Ok(vec![(SideName::K, source(k)), (SideName::V, source(v))]);
    }
    let source = source(Checkpoint::read(&place, &bytes)?);
    let by_objective = match source.checkpoint.objective.as_deref() {
        Some(objective) if objective.starts_with("qqt") => Some(SideName::K),
        Some(objective) if objective.starts_with("sst") => Some(SideName::V),
        _ => None,
    };
    let by_name = name
        .split(['_', '-', '.'])
        .zip(name.split(['_', '-', '.']).skip(1))
        .find_map(|pair| match pair {
            ("k" | "K", "rotation") => Some(SideName::K),
            ("v" | "V", "rotation") => Some(SideName::V),
            _ => None,
        });
    let side = match (by_objective, by_name) {
        (Some(a), Some(b)) if a != b => {
            return Err(Error::invalid(
                place,
                format!(
                    "is of {} by its name, and of {} by its `objective`",
                    long(b),
                    long(a)
                ),
            )
            .hint("the two files may have been swapped: give each its own name again"));
        }
        (Some(side), _) | (None, Some(side)) => side,
        (None, None) => {
            return Err(Error::invalid(
                place,
                "does not say whether its rotations are of keys or of values",
            )
            .hint("name it `k_rotation….pt` or `v_rotation….pt`"));
        }
    };
    Ok(vec![(side, source)])
}

fn combine(k: Source, v: Source, options: &ImportOptions) -> Result<Imported> {
    let carried = carried(&k)?;
    if carried != self::carried(&v)? {
        return Err(Error::invalid(
            &v.place,
            format!("was not exported together with `{}`", k.place),
        )
        .hint("give the two files of one export"));
    }
    let carried: Option<Carried> = match &carried {
        None => None,
        Some(json) => Some(serde_json::from_str(json).map_err(|e| {
            Error::invalid(
                &k.place,
                format!("its `oscar_kv` provenance cannot be read: {e}"),
            )
        })?),
    };

    for (have, lack) in [(&k, &v), (&v, &k)] {
        let missing = have
            .checkpoint
            .layers
            .keys()
            .find(|id| !lack.checkpoint.layers.contains_key(id));
        if let Some(id) = missing {
            return Err(Error::invalid(
                &lack.place,
                format!("has no layer {id}, which `{}` has", have.place),
            )
            .hint("give two files of one calibration"));
        }
    }
    let scope = scope(&k, &v)?;
    if let Some(Carried { metadata, .. }) = &carried {
        let model = &metadata.model;
        let lists = [&model.heads, &model.kv_heads, &model.head_dim];
        if metadata.schema > SCHEMA
            || metadata.scope != scope
            || lists.iter().any(|list| list.len() != model.layers)
        {
            return Err(Error::invalid(
                &k.place,
                "its `oscar_kv` provenance does not fit its rotations",
            )
            .hint("export the entry again, with this version of `oscar`"));
        }
    }
    for (id, layer) in &k.checkpoint.layers {
        let d = layer.head_dim;
        let other = v
            .checkpoint
            .layers
            .get(id)
            .map_or(0, |layer| layer.head_dim);
        if other != d {
            return Err(Error::invalid(
                format!("{}: layer {id}", v.place),
                format!(
                    "has head_dim {other}, and its keys in `{}` have {d}",
                    k.place
                ),
            )
            .hint("give two files of one calibration"));
        }
        if !d.is_multiple_of(4) {
            return Err(Error::invalid(
                format!("{}: layer {id}", k.place),
                format!(
                    "head_dim {d} is not divisible by 4: 2-bit codes are packed four to a byte"
                ),
            ));
        }
    }
    let mut warnings = Vec::new();
    let model = model(&k, carried.as_ref(), scope, options)?;
    fits(&k, &model, scope, options.model.is_some(), &mut warnings)?;
    fits(&v, &model, scope, options.model.is_some(), &mut Vec::new())?;
    orthogonal(&k)?;
    orthogonal(&v)?;

    let clip =
        |said: Option<f32>, carried: Option<f32>, default| said.or(carried).unwrap_or(default);
    let k_clip = clip(options.k_clip, carried.as_ref().map(|c| c.k_clip), K_CLIP);
    let v_clip = clip(options.v_clip, carried.as_ref().map(|c| c.v_clip), V_CLIP);
    for (flag, clip) in [("--k-clip", k_clip), ("--v-clip", v_clip)] {
        if !(clip > 0.0 && clip <= 1.0) {
            return Err(Error::invalid(
                flag,
                "a clip ratio lies in (0, 1]; 1 clips nothing",
            ));
        }
    }
    let metadata = match carried {
        Some(carried) => carried.metadata,
        None => foreign(&k, &v, scope, model.clone(), &mut warnings),
    };
    let windows = Windows {
        sink_tokens: options.sink_tokens.unwrap_or(metadata.windows.sink_tokens),
        recent_tokens: options
            .recent_tokens
            .unwrap_or(metadata.windows.recent_tokens),
    };
    windows.check()?;
    let group = options.group.unwrap_or(metadata.quantizer.group);
    if group == 0 || model.head_dim.iter().any(|d| !d.is_multiple_of(group)) {
        return Err(Error::invalid(
            "--group",
            format!("{group} does not divide head_dim"),
        ));
    }
    let metadata = Metadata {
        quantizer: Quantizer {
            group,
            ..metadata.quantizer
        },
        windows,
        model,
        ..metadata
    };
    let layers = layers(k.checkpoint, k_clip, v.checkpoint, v_clip)?;
    Ok(Imported {
        entry: Entry { metadata, layers },
        warnings,
    })
}

/// The JSON that an export of ours leaves in its files.
fn carried(source: &Source) -> Result<Option<&str>> {
    match source
        .checkpoint
        .calibration
        .as_ref()
        .and_then(|dict| dict.get("oscar_kv"))
    {
        None => Ok(None),
        Some(Json::String(json)) => Ok(Some(json)),
        Some(_) => Err(Error::invalid(
            &source.place,
            "its `oscar_kv` provenance is no text",
        )),
    }
}

fn scope(k: &Source, v: &Source) -> Result<Scope> {
    let mut found: Option<(bool, &str, usize)> = None;
    for source in [k, v] {
        for (&id, layer) in &source.checkpoint.layers {
            match found {
                None => found = Some((layer.per_head, &source.place, id)),
                Some((per_head, place, first)) if per_head != layer.per_head => {
                    return Err(Error::invalid(
                        format!("{}: layer {id}", source.place),
                        format!("and layer {first} of `{place}` differ: one has a matrix a KV head, the other one alone"),
                    )
                    .hint("give two files of one format version"));
                }
                Some(_) => {}
            }
        }
    }
    Ok(if found.is_some_and(|(per_head, ..)| per_head) {
        Scope::Head
    } else {
        Scope::Layer
    })
}

/// The model that rotations belong to: as given, as carried, or pieced together.
fn model(
    k: &Source,
    carried: Option<&Carried>,
    scope: Scope,
    options: &ImportOptions,
) -> Result<ModelInfo> {
    if let Some(model) = &options.model {
        return Ok(model.clone());
    }
    if let Some(Carried { metadata, .. }) = carried {
        let mut model = metadata.model.clone();
        model.id = options.model_id.clone().unwrap_or(model.id);
        return Ok(model);
    }
    let calibration = k.checkpoint.calibration.as_ref();
    let said = |name: &str| calibration.and_then(|dict| dict.get(name)?.as_str());
    let id = options.model_id.clone().or_else(|| {
        // A path on another machine is no name.
        said("model_path")
            .filter(|path| path.split('/').count() == 2 && !path.starts_with(['/', '.']))
            .map(str::to_owned)
    });
    let first = k.checkpoint.layers.values().next();
    let kv_heads = match scope {
        Scope::Head => first.map(|layer| layer.rotations.len()),
        Scope::Layer => options.kv_heads,
    };
    let (Some(id), Some(heads), Some(kv_heads)) = (id, options.heads, kv_heads) else {
        return Err(Error::invalid(&k.place, "does not say which model its rotations are for")
            .hint("give --model MODEL (its headers are read), or --model-id NAME --heads N --kv-heads N"));
    };
    let last = k.checkpoint.layers.keys().next_back().copied().unwrap_or(0);
    let layers = options.layers.unwrap_or(last + 1);
    if layers > MAX_MODEL_LAYERS {
        return Err(Error::invalid(
            "--layers",
            format!("{layers} layers are those of no model"),
        ));
    }
    let d = first.map_or(0, |layer| layer.head_dim);
    let head_dim = (0..layers)
        .map(|id| {
            k.checkpoint
                .layers
                .get(&id)
                .map_or(d, |layer| layer.head_dim)
        })
        .collect();
    Ok(ModelInfo {
        id,
        revision: said("model_revision").map(str::to_owned),
        architecture: options
            .architecture
            .clone()
            .unwrap_or_else(|| "unknown".to_owned()),
        config_sha256: String::new(),
        weights_fingerprint: String::new(),
        layers,
        heads: vec![heads; layers],
        kv_heads: vec![kv_heads; layers],
        head_dim,
    })
}

const MAX_MODEL_LAYERS: usize = 4096;

/// Layers, head dims and KV heads are those of the model.
fn fits(
    source: &Source,
    model: &ModelInfo,
    scope: Scope,
    every_layer: bool,
    warnings: &mut Vec<String>,
) -> Result<()> {
    for (&id, layer) in &source.checkpoint.layers {
        let wrong = |problem: String| {
            Error::invalid(format!("{}: layer {id}", source.place), problem)
                .hint("give the model that the rotations were calibrated on")
        };
        let (Some(&d), Some(&kv_heads)) = (model.head_dim.get(id), model.kv_heads.get(id)) else {
            return Err(wrong(format!("`{}` has {} layers", model.id, model.layers)));
        };
        if layer.head_dim != d {
            return Err(wrong(format!(
                "has head_dim {}, and `{}` has {d}",
                layer.head_dim, model.id
            )));
        }
        if scope == Scope::Head && layer.rotations.len() != kv_heads {
            return Err(wrong(format!(
                "has matrices for {} KV heads, and `{}` has {kv_heads}",
                layer.rotations.len(),
                model.id
            )));
        }
    }
    let absent: Vec<usize> = (0..model.layers)
        .filter(|id| !source.checkpoint.layers.contains_key(id))
        .collect();
    match absent.first() {
        Some(first) if every_layer => Err(Error::invalid(
            &source.place,
            format!(
                "has no layer {first} ({} of {} layers are missing)",
                absent.len(),
                model.layers
            ),
        )
        .hint("every layer of this model has a cache: get the whole file")),
        Some(_) => {
            warnings.push(format!(
                "{} of the model's {} layers have no rotation: {absent:?}",
                absent.len(),
                model.layers
            ));
            Ok(())
        }
        None => Ok(()),
    }
}

/// Every matrix of a file is orthogonal, or as good as.
fn orthogonal(source: &Source) -> Result<()> {
    let mut first_use = BTreeMap::new();
    for (&id, layer) in &source.checkpoint.layers {
        for (head, &block) in layer.rotations.iter().enumerate() {
            first_use.entry(block).or_insert((id, head, layer));
        }
    }
    let uses: Vec<_> = first_use.into_iter().collect();
    let off = linalg::parallel(uses.len(), |i| {
        let (block, (.., layer)) = uses[i];
        distance_from_orthogonal(&source.checkpoint.blocks[block], layer.head_dim)
    });
    for ((_, (id, head, layer)), off) in uses.iter().zip(off) {
        if off.is_nan() || off > IMPORTED_TOLERANCE {
            let head = if layer.per_head {
                format!(", KV head {head}")
            } else {
                String::new()
            };
            return Err(Error::invalid(
                format!("{}: layer {id}{head}", source.place),
                format!("its rotation is not orthogonal: R·Rᵀ is {off:.2e} away from I, and {IMPORTED_TOLERANCE:.0e} is the most"),
            )
            .hint("servers apply it to queries and keys alike, so scores would change: calibrate again (`oscar calibrate`)"));
        }
    }
    Ok(())
}

/// Metadata of files that are not ours.
fn foreign(
    k: &Source,
    v: &Source,
    scope: Scope,
    model: ModelInfo,
    warnings: &mut Vec<String>,
) -> Metadata {
    let mut data_free = 0;
    for source in [k, v] {
        match source.checkpoint.objective.as_deref() {
            Some("hadamard" | "identity") => data_free += 1,
            Some(objective) if objective.starts_with("qqt") || objective.starts_with("sst") => {}
            Some(objective) => warnings.push(format!(
                "{}: objective `{objective}` is not known",
                source.place
            )),
            None => warnings.push(format!("{}: does not say its objective", source.place)),
        }
    }
    let starts = |source: &Source, with| {
        source
            .checkpoint
            .objective
            .as_deref()
            .is_some_and(|objective| objective.starts_with(with))
    };
    let number = |name: &str| {
        let found = k
            .checkpoint
            .calibration
            .as_ref()
            .and_then(|dict| dict.get(name)?.as_u64());
        found.and_then(|n| usize::try_from(n).ok()).unwrap_or(0)
    };
    let common = model.head_dim.iter().copied().fold(0, common_divisor);
    Metadata {
        schema: SCHEMA,
        method: if data_free == 2 {
            Method::Hadamard
        } else {
            Method::Oscar
        },
        scope,
        k_moment: starts(k, "qqt").then_some(KMoment::Qq),
        v_moment: starts(v, "sst").then_some(VMoment::Vwv),
        quantizer: Quantizer {
            bits: 2,
            group: if common.is_multiple_of(GROUP) {
                GROUP
            } else {
                common
            },
            codec: "uniform".to_owned(),
            scale_dtype: "bfloat16".to_owned(),
        },
        windows: WINDOWS,
        model,
        calibration: Calibration {
            tokens: number("tokens"),
            prompts: number("prompts"),
            seq_len: number("seq_len"),
            token_ids_sha256: String::new(),
            tokenizer_sha256: String::new(),
            seed: 0,
            dtype: "unknown".to_owned(),
            device: "unknown".to_owned(),
        },
        tool: Tool {
            name: env!("CARGO_PKG_NAME").to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            // Of another program's computation.
            algorithm: 0,
        },
        fit: Some(Fit {
            k_rounding: Rounding::Nearest,
            v_rounding: Rounding::Nearest,
            k_centered: false,
            v_centered: false,
            k: BTreeMap::new(),
            v: BTreeMap::new(),
        }),
        imported: Some(Provenance {
            k: k.file.clone(),
            v: v.file.clone(),
        }),
        content_sha256: String::new(),
    }
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Both sides by layer; matrices that one layer alone has are moved, shared ones copied.
fn layers(
    k: Checkpoint,
    k_clip: f32,
    v: Checkpoint,
    v_clip: f32,
) -> Result<BTreeMap<usize, Layer>> {
    let bytes: usize = [&k, &v]
        .iter()
        .flat_map(|checkpoint| checkpoint.layers.values())
        .map(|layer| {
            layer.rotations.len() * layer.head_dim * (layer.head_dim + 1) * size_of::<f32>()
        })
        .fold(0, usize::saturating_add);
    if bytes > MAX_ENTRY_BYTES {
        return Err(Error::invalid(
            "FILES",
            format!("the entry would take {bytes} bytes, more than that of any model"),
        ));
    }
    let v_sides = sides(v, v_clip);
    Ok(sides(k, k_clip)
        .into_iter()
        .zip(v_sides)
        .map(|((id, head_dim, k), (.., v))| (id, Layer { head_dim, k, v }))
        .collect())
}

/// By layer: its id, its head_dim and its side.
fn sides(checkpoint: Checkpoint, clip: f32) -> Vec<(usize, usize, Side)> {
    let Checkpoint {
        layers, mut blocks, ..
    } = checkpoint;
    let mut uses = vec![0usize; blocks.len()];
    let blocks_of = |layer: &CheckpointLayer| {
        layer
            .rotations
            .iter()
            .chain(layer.eigenvalues.iter().flatten())
            .copied()
            .collect::<Vec<_>>()
    };
    layers
        .values()
        .flat_map(blocks_of)
        .for_each(|block| uses[block] += 1);
    let mut take = |block: usize| {
        uses[block] -= 1;
        if uses[block] == 0 {
            std::mem::take(&mut blocks[block])
        } else {
            blocks[block].clone()
        }
    };
    layers
        .into_iter()
        .map(|(id, layer)| {
            let encode: Vec<_> = layer.rotations.into_iter().map(&mut take).collect();
            let spectrum = layer.eigenvalues.map(|list| {
                list.into_iter()
                    .map(|block| {
                        let mut values = take(block);
                        values.reverse();
                        values
                    })
                    .collect()
            });
            let side = Side {
                clip: vec![clip; encode.len()],
                encode,
                spectrum,
                ..Side::default()
            };
            (id, layer.head_dim, side)
        })
        .collect()
}

// ---- safetensors ---------------------------------------------------------------------------------------------------

/// Both sides of a file that [`super::Orthogonal::to_safetensors`] describes.
fn read_safetensors(place: &str, bytes: &[u8]) -> Result<[Checkpoint; 2]> {
    let bad = |problem: String| Error::invalid(place, problem);
    let text = crate::zoo::entry::header(bytes).map_err(bad)?;
    if let Some(name) = files::duplicate_key(text) {
        return Err(bad(format!("the header names `{name}` twice")));
    }
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| bad(e.to_string()))?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| bad(e.to_string()))?;
    let carried = header.metadata().as_ref().and_then(|map| map.get("oscar"));
    let empty = || Checkpoint {
        format_version: None,
        objective: None,
        layers: BTreeMap::new(),
        calibration: carried.map(|json| serde_json::json!({ "oscar_kv": json })),
        blocks: Vec::new(),
    };
    let mut out = [empty(), empty()];
    let names: BTreeMap<String, TensorView> = tensors.tensors().into_iter().collect();
    for (name, tensor) in &names {
        let place = format!("{place}: tensor `{name}`");
        let wrong = |problem: &str| Error::invalid(&place, problem);
        let words: Vec<_> = name.split('.').collect();
        let ["layers", id, side @ ("k" | "v"), "rotation"] = words[..] else {
            if matches!(words[..], ["layers", _, "k" | "v", "eigenvalues"]) {
                continue;
            }
            return Err(wrong("no name of an orthogonal rotation")
                .hint("they are `layers.{i}.k.rotation` and `layers.{i}.v.rotation`; an entry of `oscar` needs no import"));
        };
        let id = id.parse::<usize>().ok().filter(|n| n.to_string() == id);
        let id = id.ok_or_else(|| wrong("its layer is no number"))?;
        let (per_head, heads, d) = match *tensor.shape() {
            [rows, columns] if rows == columns && rows > 0 => (false, 1, rows),
            [heads, rows, columns] if rows == columns && rows > 0 && heads > 0 => {
                (true, heads, rows)
            }
            _ => return Err(wrong("is no square matrix, nor one a KV head")),
        };
        if !d.is_multiple_of(4) {
            return Err(wrong("has a head_dim that is not divisible by 4"));
        }
        let checkpoint = &mut out[usize::from(side == "v")];
        let rotations = push(checkpoint, &place, tensor, heads)?;
        let eigenvalues = match names.get(&format!("layers.{id}.{side}.eigenvalues")) {
            None => None,
            Some(values) if values.shape().iter().product::<usize>() == heads * d => {
                Some(push(checkpoint, &place, values, heads)?)
            }
            Some(_) => return Err(wrong("has eigenvalues of another size")),
        };
        checkpoint.layers.insert(
            id,
            CheckpointLayer {
                head_dim: d,
                per_head,
                rotations,
                eigenvalues,
            },
        );
    }
    if out.iter().all(|checkpoint| checkpoint.layers.is_empty()) {
        return Err(bad("holds no rotation".to_owned()));
    }
    Ok(out)
}

/// A tensor's numbers as `count` blocks.
fn push(
    checkpoint: &mut Checkpoint,
    place: &str,
    tensor: &TensorView,
    count: usize,
) -> Result<Vec<usize>> {
    if tensor.dtype() != Dtype::F32 {
        return Err(Error::invalid(
            place,
            format!("is of dtype {:?}, not F32", tensor.dtype()),
        ));
    }
    let (numbers, _) = tensor.data().as_chunks();
    let first = checkpoint.blocks.len();
    for block in numbers.chunks(numbers.len() / count) {
        let block: Vec<f32> = block.iter().map(|x| f32::from_le_bytes(*x)).collect();
        if block.iter().any(|x| !x.is_finite()) {
            return Err(Error::invalid(place, "holds NaN or infinity"));
        }
        checkpoint.blocks.push(block);
    }
    Ok((first..checkpoint.blocks.len()).collect())
}
