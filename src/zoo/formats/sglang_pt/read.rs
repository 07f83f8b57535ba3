//! From the bytes of a `.pt` file to matrices.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;

use half::{bf16, f16};
use serde_json::Value as Json;

use super::pickle::{Dtype, Id, Pickle, Tensor, Value};
use super::zip::Archive;
use crate::{Error, Result};

/// No model has more layers, nor KV heads a layer, nor channels a head.
const MAX_LAYERS: usize = 4096;
const MAX_HEADS: usize = 1024;
const MAX_HEAD_DIM: usize = 4096;
/// A provenance dict goes no deeper; one that holds itself would have no end.
const MAX_DEPTH: usize = 16;
/// What a value of provenance costs once it is JSON.
const JSON_BYTES: usize = 128;

/// Rotations of one side, keys or values, as their file has them.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// 1: one matrix a layer, 2: one a KV head. `None`: not said.
    pub format_version: Option<i64>,
    /// `qqt_r_h_pbr`, `sst_r_h_pbr` or `hadamard` in released files.
    pub objective: Option<String>,
    pub layers: BTreeMap<usize, CheckpointLayer>,
    /// The file's `calibration` dict. Numbers that JSON lacks (NaN, infinity) and tensors are texts.
    pub calibration: Option<Json>,
    /// Views of storages, each read once however many layers share it.
    pub(crate) blocks: Vec<Vec<f32>>,
}

/// Indices of the checkpoint's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointLayer {
    pub head_dim: usize,
    /// The file has a dimension for KV heads.
    pub per_head: bool,
    /// (d, d) each: one, or one a KV head.
    pub(crate) rotations: Vec<usize>,
    /// (d) each, ascending.
    pub(crate) eigenvalues: Option<Vec<usize>>,
}

impl Checkpoint {
    /// Reads a file of `torch.save`; `place` names it in errors.
    ///
    /// The zip's directory and the pickle are walked first, and what they say is checked against the size of the
    /// file, before any tensor is read: what this takes stays below twice the size of the file and a mebibyte.
    ///
    /// # Errors
    /// Anything in the pickle but tensors and plain containers; archives that are cut short, compressed or of another
    /// byte order; dtypes other than f32, f64, f16 and bf16; views beyond their storage; matrices that are not square;
    /// stacks of which the file does not say whether they are layers or heads; NaN and infinity.
    pub fn read(place: &str, bytes: &[u8]) -> Result<Self> {
        let archive = Archive::open(place, bytes)?;
        let suffix = "/data.pkl";
        let Some(root) = archive.names().find_map(|name| name.strip_suffix(suffix)) else {
            return Err(Error::invalid(
                place,
                "no file of `torch.save`: it holds no `data.pkl`",
            ));
        };
        if let Some(order) = archive.get(&format!("{root}/byteorder"))?
            && order != b"little"
        {
            return Err(Error::invalid(
                place,
                format!("its byte order is `{}`, not `little`", order.escape_ascii()),
            )
            .hint("load it with PyTorch on a little-endian machine and save it again"));
        }
        let pickle = archive.get(&format!("{root}{suffix}"))?.unwrap_or_default();
        let reader = Reader {
            place,
            pickle: Pickle::read(place, pickle, bytes.len())?,
            archive,
            root,
            storages: BTreeMap::new(),
            views: BTreeMap::new(),
            blocks: Vec::new(),
            // Half-precision numbers double in size.
            room_bytes: 2 * bytes.len(),
        };
        reader.checkpoint()
    }
}

/// One view of a storage: key, offset, shape and strides.
type View<'a> = (&'a str, usize, [usize; 4]);

struct Reader<'a> {
    place: &'a str,
    archive: Archive<'a>,
    root: &'a str,
    pickle: Pickle<'a>,
    storages: BTreeMap<&'a str, (Dtype, &'a [u8])>,
    views: BTreeMap<View<'a>, usize>,
    blocks: Vec<Vec<f32>>,
    room_bytes: usize,
}

/// What the pickle says of a layer.
struct Said<'a> {
    rotation: Tensor<'a>,
    eigenvalues: Option<Tensor<'a>>,
}

impl<'a> Reader<'a> {
    fn checkpoint(mut self) -> Result<Checkpoint> {
        let Value::Dict(root) = self.pickle.root() else {
            return Err(match self.pickle.root() {
                Value::Tensor(tensor) => self.ambiguous(tensor),
                _ => self.bad("is no dict with `layers`, as rotation files are"),
            });
        };
        let text = |name: &str| match self.pickle.field(root, name) {
            Some(Value::Text(text)) => Ok(Some((*text).to_owned())),
            Some(Value::None) | None => Ok(None),
            Some(_) => Err(self.bad(format!("has a `{name}` that is no text"))),
        };
        let objective = text("objective")?;
        let grouping = text("source_grouping")?;
        let per_head = match grouping.as_deref() {
            Some("layer") => Some(false),
            Some("per_kv_head") => Some(true),
            None => None,
            Some(other) => {
                return Err(self
                    .bad(format!(
                        "has `source_grouping` `{other}`, which is not known"
                    ))
                    .hint("`layer` and `per_kv_head` are"));
            }
        };
        let format_version = match self.pickle.field(root, "format_version") {
            Some(Value::Int(version @ 1..=2)) => Some(*version),
            Some(Value::None) | None => None,
            Some(other) => {
                let shown = match other {
                    Value::Int(version) => version.to_string(),
                    _ => "not a number".to_owned(),
                };
                return Err(self.bad(format!(
                    "has `format_version` {shown}, and 1 and 2 are known"
                )));
            }
        };
        let calibration = root.iter().rev().find_map(|(key, value)| {
            let named = matches!(self.pickle.get(*key), Value::Text("calibration"));
            (named && matches!(self.pickle.get(*value), Value::Dict(_))).then_some(*value)
        });
        let layers = match self.pickle.field(root, "layers") {
            Some(Value::Dict(layers)) => self.layers(layers)?,
            Some(Value::Tensor(stack)) => self.stack(stack, per_head)?,
            _ => match self.pickle.field(root, "rotation") {
                Some(Value::Tensor(stack)) => self.stack(stack, per_head)?,
                _ => return Err(self.bad("has no `layers`, a dict by layer")),
            },
        };
        if layers.is_empty() {
            return Err(self.bad("holds no layer"));
        }
        let mut out = BTreeMap::new();
        for (id, said) in layers {
            let layer = self.layer(id, &said, per_head)?;
            out.insert(id, layer);
        }
        let calibration = calibration.map(|id| self.json(id, 0)).transpose()?;
        Ok(Checkpoint {
            format_version,
            objective,
            layers: out,
            calibration,
            blocks: self.blocks,
        })
    }

    /// `{int or text of an int: {rotation, eigenvalues?, layer_id?}}`
    fn layers(&self, layers: &[(Id, Id)]) -> Result<BTreeMap<usize, Said<'a>>> {
        if layers.len() > MAX_LAYERS {
            return Err(self.bad(format!("has {} layers", layers.len())));
        }
        let mut out = BTreeMap::new();
        for (key, value) in layers {
            let id = match self.pickle.get(*key) {
                Value::Int(id) => usize::try_from(*id).ok(),
                Value::Text(text) => text.parse().ok(),
                _ => None,
            };
            let id = id
                .filter(|id| *id < MAX_LAYERS)
                .ok_or_else(|| self.bad("has a key in `layers` that is no number of a layer"))?;
            let wrong = |problem: &str| Error::invalid(self.layer_place(id), problem);
            let Value::Dict(layer) = self.pickle.get(*value) else {
                return Err(wrong("is no dict with `rotation`"));
            };
            match self.pickle.field(layer, "layer_id") {
                None | Some(Value::None) => {}
                Some(Value::Int(said)) if usize::try_from(*said) == Ok(id) => {}
                Some(_) => return Err(wrong("says another `layer_id` than its key")),
            }
            let Some(Value::Tensor(rotation)) = self.pickle.field(layer, "rotation") else {
                return Err(wrong("has no `rotation`, a tensor"));
            };
            let eigenvalues = match self.pickle.field(layer, "eigenvalues") {
                Some(Value::Tensor(tensor)) => Some((**tensor).clone()),
                Some(Value::None) | None => None,
                Some(_) => return Err(wrong("has `eigenvalues` that are no tensor")),
            };
            let said = Said {
                rotation: (**rotation).clone(),
                eigenvalues,
            };
            match out.entry(id) {
                Slot::Vacant(slot) => slot.insert(said),
                Slot::Occupied(_) => return Err(wrong("stands twice")),
            };
        }
        Ok(out)
    }

    /// Matrices of all layers in one tensor (layers, d, d).
    fn stack(
        &self,
        stack: &Tensor<'a>,
        per_head: Option<bool>,
    ) -> Result<BTreeMap<usize, Said<'a>>> {
        let ([count, rows, columns], [step, across, down]) = (&stack.shape[..], &stack.strides[..])
        else {
            return Err(self
                .bad(format!(
                    "has a rotation of shape {:?} for all layers",
                    stack.shape
                ))
                .hint("save `layers` as a dict from layer to `{\"rotation\": …}`"));
        };
        if per_head != Some(false) || *count > MAX_LAYERS {
            return Err(self.ambiguous(stack));
        }
        (0..*count)
            .map(|layer| {
                let offset = layer
                    .checked_mul(*step)
                    .and_then(|step| step.checked_add(stack.offset));
                let rotation = Tensor {
                    storage: stack.storage,
                    offset: offset.ok_or_else(|| self.bad("has a stack beyond its storage"))?,
                    shape: vec![*rows, *columns],
                    strides: vec![*across, *down],
                };
                Ok((
                    layer,
                    Said {
                        rotation,
                        eigenvalues: None,
                    },
                ))
            })
            .collect()
    }

    fn ambiguous(&self, stack: &Tensor) -> Error {
        self.bad(format!(
            "is a bare tensor of shape {:?}, of which it does not say whether its matrices are layers or KV heads",
            stack.shape
        ))
        .hint("save a dict with `source_grouping` (`layer` or `per_kv_head`) and `layers`, by layer")
    }

    fn layer(
        &mut self,
        id: usize,
        said: &Said<'a>,
        per_head: Option<bool>,
    ) -> Result<CheckpointLayer> {
        let place = self.layer_place(id);
        let wrong = |problem: String| Error::invalid(&place, problem);
        let rotation = &said.rotation;
        let shape = &rotation.shape;
        let heads = match (shape.len(), per_head) {
            (2, Some(false) | None) => None,
            (3, Some(true)) => Some(shape[0]),
            (3, None) => {
                return Err(wrong(format!(
                    "has a rotation of shape {shape:?}, and the file does not say what its first dimension is"
                ))
                .hint("add `source_grouping: \"per_kv_head\"` to the file's dict if it is the KV heads"));
            }
            _ => {
                return Err(wrong(format!(
                    "has a rotation of shape {shape:?}, which does not fit the file's `source_grouping`"
                )));
            }
        };
        let (rows, d) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        if rows != d || d == 0 {
            return Err(wrong(format!(
                "has a rotation of shape {shape:?}, which is not square"
            )));
        }
        if !d.is_multiple_of(4) {
            return Err(wrong(format!(
                "has head_dim {d}, which is not divisible by 4: 2-bit codes are packed four to a byte"
            )));
        }
        if d > MAX_HEAD_DIM || heads.is_some_and(|heads| heads == 0 || heads > MAX_HEADS) {
            return Err(wrong(format!(
                "has a rotation of shape {shape:?}, which no model has"
            )));
        }
        let count = heads.unwrap_or(1);
        let rotations = self.parts(&place, rotation, count, heads.is_some())?;
        let eigenvalues = match &said.eigenvalues {
            None => None,
            Some(tensor) => {
                let fits = match heads {
                    None => tensor.shape == [d],
                    Some(heads) => tensor.shape == [heads, d],
                };
                if !fits {
                    return Err(wrong(format!(
                        "has eigenvalues of shape {:?} beside a rotation of shape {shape:?}",
                        tensor.shape
                    )));
                }
                Some(self.parts(&place, tensor, count, heads.is_some())?)
            }
        };
        Ok(CheckpointLayer {
            head_dim: d,
            per_head: heads.is_some(),
            rotations,
            eigenvalues,
        })
    }

    /// A tensor's blocks: itself, or its slices along the first of its dimensions.
    fn parts(
        &mut self,
        place: &str,
        tensor: &Tensor<'a>,
        count: usize,
        split: bool,
    ) -> Result<Vec<usize>> {
        if !self.pickle.charge(count * size_of::<usize>()) {
            return Err(Error::invalid(
                place,
                "has more matrices than a file of this size holds",
            ));
        }
        let first = usize::from(split);
        let step = if split { tensor.strides[0] } else { 0 };
        let mut parts = Vec::with_capacity(count);
        for i in 0..count {
            let offset = i
                .checked_mul(step)
                .and_then(|step| step.checked_add(tensor.offset));
            let offset = offset.ok_or_else(|| beyond(place))?;
            let view = View2 {
                offset,
                shape: &tensor.shape[first..],
                strides: &tensor.strides[first..],
            };
            parts.push(self.block(place, tensor, &view)?);
        }
        Ok(parts)
    }

    fn block(&mut self, place: &str, tensor: &Tensor<'a>, view: &View2) -> Result<usize> {
        let (dtype, data) = self.storage(place, tensor)?;
        let mut dims = [1, 1, 0, 0];
        dims[..view.shape.len()].copy_from_slice(view.shape);
        dims[2..2 + view.strides.len()].copy_from_slice(view.strides);
        let key = (tensor.storage.key, view.offset, dims);
        if let Some(&block) = self.views.get(&key) {
            return Ok(block);
        }
        let [rows, columns, across, down] = dims;
        let last = (rows - 1)
            .checked_mul(across)
            .zip((columns - 1).checked_mul(down))
            .and_then(|(a, b)| a.checked_add(b)?.checked_add(view.offset));
        let width = match dtype {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::Other(name) => {
                return Err(Error::invalid(place, format!("is of dtype {name}"))
                    .hint("float32, float64, float16 and bfloat16 can be read: convert it with `.float()`"));
            }
        };
        if last.is_none_or(|last| last >= data.len() / width) {
            return Err(beyond(place));
        }
        // Disjoint views fill what their storages hold; overlapping ones could ask for any amount.
        let bytes = rows * columns * size_of::<f32>();
        self.room_bytes = self.room_bytes.checked_sub(bytes).ok_or_else(|| {
            Error::invalid(
                place,
                "overlaps other tensors of the file, in more ways than sharing a matrix",
            )
            .hint("save it anew with every matrix `.clone()`d")
        })?;
        let values = match dtype {
            Dtype::F64 => gather(data, view.offset, dims, |x| f64::from_le_bytes(x) as f32),
            Dtype::F16 => gather(data, view.offset, dims, |x| f16::from_le_bytes(x).to_f32()),
            Dtype::Bf16 => gather(data, view.offset, dims, |x| bf16::from_le_bytes(x).to_f32()),
            _ => gather(data, view.offset, dims, f32::from_le_bytes),
        };
        if let Some(i) = values.iter().position(|x| !x.is_finite()) {
            return Err(Error::invalid(
                place,
                format!(
                    "holds {} at row {}, column {}",
                    values[i],
                    i / columns,
                    i % columns
                ),
            ));
        }
        let block = self.blocks.len();
        self.blocks.push(values);
        self.views.insert(key, block);
        Ok(block)
    }

    /// The bytes behind a tensor, as many as the pickle says.
    fn storage(&mut self, place: &str, tensor: &Tensor<'a>) -> Result<(Dtype, &'a [u8])> {
        let said = tensor.storage;
        if let Some(&(dtype, data)) = self.storages.get(said.key) {
            return if dtype == said.dtype {
                Ok((dtype, data))
            } else {
                Err(Error::invalid(
                    place,
                    format!("reads storage `{}` in two dtypes", said.key),
                ))
            };
        }
        let name = format!("{}/data/{}", self.root, said.key);
        let data = self.archive.get(&name)?.ok_or_else(|| {
            Error::invalid(place, format!("needs record `{name}`, which is missing"))
                .hint("fetch the file again")
        })?;
        let width = match said.dtype {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::Other(_) => 1,
        };
        let whole = said.elements.checked_mul(width).is_some_and(|bytes| {
            bytes == data.len() || matches!(said.dtype, Dtype::Other(_)) && bytes <= data.len()
        });
        if !whole {
            return Err(Error::invalid(
                place,
                format!(
                    "record `{name}` has {} bytes, not those of {} numbers in {}",
                    data.len(),
                    said.elements,
                    said.dtype.name()
                ),
            )
            .hint("fetch the file again"));
        }
        self.storages.insert(said.key, (said.dtype, data));
        Ok((said.dtype, data))
    }

    /// Provenance, for people to read.
    fn json(&mut self, id: Id, depth: usize) -> Result<Json> {
        let (text_bytes, items) = match self.pickle.get(id) {
            Value::Text(text) => (text.len(), 0),
            Value::Tuple(items) | Value::List(items) => (0, items.len()),
            Value::Dict(items) => (0, 2 * items.len()),
            _ => (0, 0),
        };
        // Lists may hold one another many times over, or themselves.
        if depth > MAX_DEPTH || !self.pickle.charge(JSON_BYTES * (1 + items) + text_bytes) {
            return Err(self.bad("has a `calibration` that is too deep or too large to keep"));
        }
        Ok(match self.pickle.get(id) {
            Value::None | Value::Global(_) | Value::Storage(_) => Json::Null,
            Value::Bool(value) => (*value).into(),
            Value::Int(n) => (*n).into(),
            Value::Float(x) => {
                serde_json::Number::from_f64(*x).map_or_else(|| x.to_string().into(), Json::Number)
            }
            Value::Text(text) => (*text).into(),
            Value::Tensor(tensor) => {
                let (dtype, shape) = (tensor.storage.dtype.name(), &tensor.shape);
                format!("{dtype} tensor of shape {shape:?}").into()
            }
            Value::Tuple(items) | Value::List(items) => {
                let items = items.clone();
                items
                    .into_iter()
                    .map(|item| self.json(item, depth + 1))
                    .collect::<Result<_>>()?
            }
            Value::Dict(items) => {
                let items = items.clone();
                let mut map = serde_json::Map::new();
                for (key, value) in items {
                    let key = match self.pickle.get(key) {
                        Value::Text(key) => (*key).to_owned(),
                        Value::Int(key) => key.to_string(),
                        _ => return Err(self.bad("has a key in `calibration` that is no text")),
                    };
                    map.insert(key, self.json(value, depth + 1)?);
                }
                Json::Object(map)
            }
        })
    }

    fn layer_place(&self, id: usize) -> String {
        format!("{}: layer {id}", self.place)
    }

    fn bad(&self, problem: impl std::fmt::Display) -> Error {
        Error::invalid(self.place, problem)
    }
}

/// A matrix or a row of numbers within a storage; all counts are of elements.
struct View2<'v> {
    offset: usize,
    shape: &'v [usize],
    strides: &'v [usize],
}

fn beyond(place: &str) -> Error {
    Error::invalid(place, "has a tensor that runs past the end of its storage")
        .hint("fetch the file again")
}

/// Rows and columns of a strided view, bounds checked before.
fn gather<const N: usize>(
    data: &[u8],
    offset: usize,
    [rows, columns, across, down]: [usize; 4],
    number: impl Fn([u8; N]) -> f32,
) -> Vec<f32> {
    let (numbers, _) = data.as_chunks::<N>();
    let mut out = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        let start = offset + row * across;
        if down == 1 {
            out.extend(numbers[start..start + columns].iter().map(|x| number(*x)));
        } else {
            out.extend((0..columns).map(|column| number(numbers[start + column * down])));
        }
    }
    out
}
