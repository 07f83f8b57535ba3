//! Everything an entry promises, checked from its bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::entry::{self, Entry, Layer, Side, SideName};
use super::schema::{Metadata, Scope};
use crate::linalg::{Op, View, matmul};
use crate::{Result, files, linalg};

/// Largest entry of |encode·queryᵀ − I| that storage in f32 explains.
const INVERSE_TOLERANCE: f64 = 1e-3;

/// The same of rotations that other tools wrote, some in half precision.
pub(super) const IMPORTED_TOLERANCE: f64 = 5e-3;

/// Enough problems of one kind to see what is wrong.
const PROBLEMS: usize = 20;

/// One promise of the format, and where an entry breaks it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What holds where it passes.
    pub name: &'static str,
    /// Each names layer, side and tensor, 20 at most; empty where the promise is kept.
    pub problems: Vec<String>,
}

impl Check {
    pub fn passed(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Checks the entry at `path` (its folder or file): header and schema, tensor names, types and shapes, completeness,
/// finite values, encode against its inverse, feedback, clip ratios, content hash. Checks that an earlier failure
/// leaves nothing to work on are not in the list.
///
/// # Errors
/// Only where the file cannot be read.
pub fn verify(path: &Path) -> Result<Vec<Check>> {
    Ok(examine(path)?.1)
}

/// As [`verify`], with the entry where its structure can be read.
///
/// # Errors
/// Only where the file cannot be read.
pub fn examine(path: &Path) -> Result<(Option<Entry>, Vec<Check>)> {
    let file = entry::file_of(path);
    let bytes = files::read(&file)?;
    Ok(read(&bytes))
}

/// The entry where its structure can be read, and all checks that could be made.
pub(super) fn read(bytes: &[u8]) -> (Option<Entry>, Vec<Check>) {
    checks(bytes, true)
}

/// The first broken promise of an entry's bytes. Takes the memory of a layer at a time, not of the entry.
pub(super) fn first_problem(bytes: &[u8]) -> Option<String> {
    let (_, checks) = checks(bytes, false);
    checks.into_iter().flat_map(|check| check.problems).next()
}

/// The entry where it is to be kept and can be, and all checks that could be made.
fn checks(bytes: &[u8], keep: bool) -> (Option<Entry>, Vec<Check>) {
    let mut checks = Vec::new();
    let mut check = |name, mut problems: Vec<String>| {
        if problems.len() > PROBLEMS {
            let more = problems.len() - PROBLEMS + 1;
            problems.truncate(PROBLEMS - 1);
            problems.push(format!("and {more} more"));
        }
        let passed = problems.is_empty();
        checks.push(Check { name, problems });
        passed
    };
    let parsed = entry::metadata(bytes).and_then(|metadata| {
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        Ok((metadata, tensors))
    });
    let (metadata, tensors) = match parsed {
        Ok(parsed) => parsed,
        Err(problem) => {
            check("header and schema", vec![problem]);
            return (None, checks);
        }
    };
    check("header and schema", vec![]);
    let tensors: BTreeMap<String, TensorView> = tensors.tensors().into_iter().collect();

    let hash = entry::content_sha256(
        tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor.shape(), tensor.data().into())),
    );
    let claimed = &metadata.content_sha256;
    let differs = (hash != *claimed).then(|| {
        format!("the tensors' hash is {hash}, the metadata's `content_sha256` is `{claimed}`")
    });

    if !check("geometry", geometry(&metadata))
        || !check(
            "tensor names, types and shapes",
            structure(&metadata, &tensors),
        )
    {
        check("content hash", differs.into_iter().collect());
        return (None, checks);
    }
    let tolerance = if metadata.imported.is_some() {
        IMPORTED_TOLERANCE
    } else {
        INVERSE_TOLERANCE
    };
    let ids: BTreeSet<usize> = tensors
        .keys()
        .filter_map(|name| Some(parse(name)?.layer))
        .collect();
    let ids: Vec<usize> = ids.into_iter().collect();
    let read = linalg::parallel(ids.len(), |i| {
        let (layer, missing) = layer(ids[i], &metadata, &tensors);
        let found = if missing.is_empty() {
            Found::of(ids[i], &layer, tolerance)
        } else {
            Found {
                missing,
                ..Found::default()
            }
        };
        (found, keep.then_some(layer))
    });
    let mut found = Found::default();
    if ids.is_empty() {
        found.missing.push("no layer at all".to_owned());
    }
    let mut layers = BTreeMap::new();
    for (id, (problems, layer)) in ids.into_iter().zip(read) {
        found.append(problems);
        layers.extend(layer.map(|layer| (id, layer)));
    }
    let complete = check("every layer, both sides", found.missing);
    if complete {
        let finite = check("finite values", found.not_finite);
        check("clip ratios in (0, 1]", found.clip);
        if finite {
            check("encode and its inverse", found.inverse);
            check("feedback strictly upper triangular", found.feedback);
        }
    }
    check("content hash", differs.into_iter().collect());
    (
        (complete && keep).then_some(Entry { metadata, layers }),
        checks,
    )
}

/// Problems by kind, in order of layers, K before V.
#[derive(Default)]
struct Found {
    missing: Vec<String>,
    not_finite: Vec<String>,
    clip: Vec<String>,
    inverse: Vec<String>,
    feedback: Vec<String>,
}

impl Found {
    /// Of a layer that is complete.
    fn of(id: usize, layer: &Layer, tolerance: f64) -> Self {
        let mut found = Self::default();
        let d = layer.head_dim;
        for (name, side) in [(SideName::K, &layer.k), (SideName::V, &layer.v)] {
            let place = |problem| format!("layer {id} {name}: {problem}");
            found
                .not_finite
                .extend(not_finite(d, name, side).into_iter().map(place));
            found.clip.extend(clip(side).into_iter().map(place));
            found
                .inverse
                .extend(inverse(d, name, side, tolerance).into_iter().map(place));
            found
                .feedback
                .extend(feedback(d, side).into_iter().map(place));
        }
        found
    }

    fn append(&mut self, mut other: Self) {
        self.missing.append(&mut other.missing);
        self.not_finite.append(&mut other.not_finite);
        self.clip.append(&mut other.clip);
        self.inverse.append(&mut other.inverse);
        self.feedback.append(&mut other.feedback);
    }
}

/// The metadata agrees with itself.
fn geometry(metadata: &Metadata) -> Vec<String> {
    let model = &metadata.model;
    let mut problems = Vec::new();
    for (name, list) in [
        ("heads", &model.heads),
        ("kv_heads", &model.kv_heads),
        ("head_dim", &model.head_dim),
    ] {
        if list.len() != model.layers {
            problems.push(format!(
                "metadata: `model.{name}` has {} items for {} layers",
                list.len(),
                model.layers
            ));
        }
        if list.contains(&0) {
            problems.push(format!("metadata: `model.{name}` holds 0"));
        }
    }
    if !problems.is_empty() {
        return problems;
    }
    for (layer, (&heads, &kv_heads)) in model.heads.iter().zip(&model.kv_heads).enumerate() {
        if !heads.is_multiple_of(kv_heads) {
            problems.push(format!(
                "metadata: layer {layer} has {heads} heads, no multiple of its {kv_heads} KV heads"
            ));
        }
    }
    let group = metadata.quantizer.group;
    for (layer, &d) in model.head_dim.iter().enumerate() {
        if group == 0 || !d.is_multiple_of(group) {
            problems.push(format!(
                "metadata: `quantizer.group` {group} does not divide layer {layer}'s head_dim {d}"
            ));
        }
    }
    problems
}

struct Name {
    layer: usize,
    part: Part,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Encode,
    Dual,
    Mean,
    Clip,
    Feedback,
    Spectrum,
}

fn parse(name: &str) -> Option<Name> {
    let mut words = name.split('.');
    if words.next() != Some("layers") {
        return None;
    }
    let number = words.next()?;
    let layer: usize = number.parse().ok()?;
    let side = match words.next()? {
        "k" => SideName::K,
        "v" => SideName::V,
        _ => return None,
    };
    let part = match words.next()? {
        "encode" => Part::Encode,
        "mean" => Part::Mean,
        "clip" => Part::Clip,
        "feedback" => Part::Feedback,
        "spectrum" => Part::Spectrum,
        dual if dual == side.dual() => Part::Dual,
        _ => return None,
    };
    // `layers.01` would be a second name of layer 1.
    (words.next().is_none() && number == layer.to_string()).then_some(Name { layer, part })
}

/// Names, types and shapes of the tensors that are there.
fn structure(metadata: &Metadata, tensors: &BTreeMap<String, TensorView>) -> Vec<String> {
    let model = &metadata.model;
    let mut problems = Vec::new();
    for (name, tensor) in tensors {
        let Some(parsed) = parse(name) else {
            problems.push(format!("tensor `{name}`: unknown name"));
            continue;
        };
        let geometry = model
            .head_dim
            .get(parsed.layer)
            .zip(model.kv_heads.get(parsed.layer));
        let Some((&d, &kv_heads)) = geometry else {
            problems.push(format!(
                "tensor `{name}`: the model has {} layers",
                model.layers
            ));
            continue;
        };
        let transforms = match metadata.scope {
            Scope::Head => kv_heads,
            Scope::Layer => 1,
        };
        let shape = match parsed.part {
            Part::Encode | Part::Dual | Part::Feedback => vec![transforms, d, d],
            Part::Mean => vec![kv_heads, d],
            Part::Clip => vec![transforms],
            Part::Spectrum => vec![transforms, d],
        };
        if tensor.dtype() != Dtype::F32 {
            problems.push(format!("tensor `{name}`: {:?}, not F32", tensor.dtype()));
        } else if tensor.shape() != shape {
            problems.push(format!(
                "tensor `{name}`: shape {:?}, not {shape:?}",
                tensor.shape()
            ));
        }
    }
    problems
}

/// A layer of tensors that [`structure`] found right, and what it lacks.
fn layer(
    layer: usize,
    metadata: &Metadata,
    tensors: &BTreeMap<String, TensorView>,
) -> (Layer, Vec<String>) {
    let mut missing = Vec::new();
    let [mut k, mut v] = [Side::default(), Side::default()];
    for (name, side) in [(SideName::K, &mut k), (SideName::V, &mut v)] {
        let mut need = |part: &str, value: Option<Vec<Vec<f32>>>| {
            value.unwrap_or_else(|| {
                missing.push(format!(
                    "layer {layer} {name}: no tensor `layers.{layer}.{name}.{part}`"
                ));
                Vec::new()
            })
        };
        let get = |part: &str| {
            tensors
                .get(&format!("layers.{layer}.{name}.{part}"))
                .map(unpack)
        };
        side.encode = need("encode", get("encode"));
        side.clip = need("clip", get("clip")).into_iter().flatten().collect();
        side.dual = get(name.dual());
        side.mean = get("mean");
        side.feedback = get("feedback");
        side.spectrum = get("spectrum");
    }
    let head_dim = metadata.model.head_dim.get(layer).copied().unwrap_or(0);
    (Layer { head_dim, k, v }, missing)
}

/// Splits a tensor along its first axis.
fn unpack(tensor: &TensorView) -> Vec<Vec<f32>> {
    let count = tensor.shape().first().copied().unwrap_or(0).max(1);
    let (values, _) = tensor.data().as_chunks();
    let each = (values.len() / count).max(1);
    let part = |part: &[[u8; 4]]| part.iter().map(|x| f32::from_le_bytes(*x)).collect();
    values.chunks(each).map(part).collect()
}

fn not_finite(d: usize, name: SideName, side: &Side) -> Vec<String> {
    let clip: Vec<_> = side.clip.iter().map(|&x| vec![x]).collect();
    let mut problems = Vec::new();
    for (part, list) in [
        ("encode", Some(&side.encode)),
        (name.dual(), side.dual.as_ref()),
        ("mean", side.mean.as_ref()),
        ("clip", Some(&clip)),
        ("feedback", side.feedback.as_ref()),
        ("spectrum", side.spectrum.as_ref()),
    ] {
        for (head, values) in list.into_iter().flatten().enumerate() {
            if let Some(i) = values.iter().position(|x| !x.is_finite()) {
                let (row, column, value) = (i / d, i % d, values[i]);
                problems.push(format!(
                    "`{part}` of head {head} holds {value} at row {row}, column {column}"
                ));
            }
        }
    }
    problems
}

fn clip(side: &Side) -> Vec<String> {
    let bad = |(head, &clip): (usize, &f32)| {
        (!(clip > 0.0 && clip <= 1.0))
            .then(|| format!("`clip` of head {head} is {clip}, outside (0, 1]"))
    };
    side.clip.iter().enumerate().filter_map(bad).collect()
}

fn inverse(d: usize, name: SideName, side: &Side, tolerance: f64) -> Vec<String> {
    let mut problems = Vec::new();
    for (head, encode) in side.encode.iter().enumerate() {
        let dual = side.dual.as_ref().and_then(|list| list.get(head));
        let (op, what) = match (name, dual) {
            (SideName::K, Some(_)) => (Op::Nt, "encode·queryᵀ"),
            (SideName::V, Some(_)) => (Op::Nn, "encode·decode"),
            (_, None) => (Op::Nt, "encode is taken for orthogonal, but encode·encodeᵀ"),
        };
        let off = distance_from_identity(op, encode, dual.unwrap_or(encode), d);
        if off.is_nan() || off > tolerance {
            problems.push(format!("{what} of head {head} is {off:.2e} away from I"));
        }
    }
    problems
}

/// Largest entry of |R·Rᵀ − I| of a matrix (d, d), in f64; NaN where it holds one.
pub(super) fn distance_from_orthogonal(rotation: &[f32], d: usize) -> f64 {
    distance_from_identity(Op::Nt, rotation, rotation, d)
}

/// Largest entry of |a·b − I|, in f64.
fn distance_from_identity(op: Op, a: &[f32], b: &[f32], d: usize) -> f64 {
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (a, b) = (wide(a), wide(b));
    let mut product = vec![0.0; d * d];
    let view = |x| View::contiguous(x, d, d);
    matmul(op, view(&a), view(&b), &mut product, d, false, 1.0, 0.0);
    product.iter().enumerate().fold(0.0, |most: f64, (i, &x)| {
        let off = (x - f64::from(u8::from(i / d == i % d))).abs();
        // NaN must win.
        if off > most || off.is_nan() {
            off
        } else {
            most
        }
    })
}

fn feedback(d: usize, side: &Side) -> Vec<String> {
    let mut problems = Vec::new();
    for (head, matrix) in side.feedback.iter().flatten().enumerate() {
        if let Some(i) = (0..d * d).find(|i| i % d <= i / d && matrix[*i] != 0.0) {
            problems.push(format!(
                "`feedback` of head {head} is not strictly upper triangular: {} at row {}, column {}",
                matrix[i],
                i / d,
                i % d
            ));
        }
    }
    problems
}
