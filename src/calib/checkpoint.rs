//! The work folder of a run, `<output>.partial/`: what a killed run leaves behind, and how it goes on.
//!
//! | file | content |
//! |---|---|
//! | `state.json` | the inputs of the run: the metadata of the file to come, without its hash |
//! | `layer-<i>.safetensors` | a finished layer, its tensors named as in the moments file |
//! | `hidden.safetensors` | the hidden states of all sequences in front of some layer |
//! | `moments.safetensors` | the output, before it is moved into place |
//! | `lock` | held by the process at work |
//!
//! Files appear whole, and each carries the hash of its run and of its content: a piece that does not fit counts as
//! absent, and is computed again.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::container::{self, Container, Part, Parts};
use super::moments::{LayerRecord, Meta, Moments, write_parts};
use crate::files::{canonical_json, read_text, sha256_bytes, write_atomic};
use crate::{Error, Result};

const KEY: &str = "oscar_checkpoint";
/// The inputs of the run, in the work folder.
const STATE: &str = "state.json";
const FRESH: &str = "`--fresh` starts over";

/// The metadata of a checkpoint file.
#[derive(Serialize, Deserialize)]
struct Piece {
    /// SHA-256 of [`STATE`].
    run: String,
    /// The finished layer, or the layer that the hidden states go into.
    layer: usize,
    content_sha256: String,
}

fn folder(output: &Path) -> PathBuf {
    let mut folder = output.as_os_str().to_owned();
    folder.push(".partial");
    folder.into()
}

/// Whether `output` is there, complete, of a run with the inputs `meta`. Writes nothing.
///
/// # Errors
/// The output or its work folder belongs to other inputs and `fresh` is not set.
pub(super) fn is_complete(output: &Path, meta: &Meta, fresh: bool) -> Result<bool> {
    let run = canonical_json(meta)?;
    if output.exists() {
        let there = Moments::open(output).map_err(|e| {
            Error::invalid(
                output.display(),
                format!("exists, and is not a moments file to go on with: {e}"),
            )
            .hint("choose another output, or remove it")
        })?;
        if !fresh {
            let blank = Meta {
                content_sha256: String::new(),
                ..there.meta().clone()
            };
            compare(output, &canonical_json(&blank)?, &run)?;
            there.verify()?;
            return Ok(true);
        }
    }
    let state = folder(output).join(STATE);
    if !fresh && state.exists() {
        compare(&state, &read_text(&state)?, &run)?;
    }
    Ok(false)
}

/// The locked work folder of one run.
pub(super) struct Workspace {
    output: PathBuf,
    folder: PathBuf,
    meta: Meta,
    run: String,
    // Unlocks when dropped.
    _lock: File,
}

impl Workspace {
    /// Locks the work folder of `output` for a run with the inputs `meta` (its content hash is empty). `None`: the
    /// output is there already, complete and of the same inputs.
    ///
    /// # Errors
    /// Another process works there; the output or the folder belongs to other inputs and `fresh` is not set.
    pub fn open(output: &Path, meta: &Meta, fresh: bool) -> Result<Option<Self>> {
        let folder = folder(output);
        let lock = lock(&folder)?;
        let run = canonical_json(meta)?;
        let workspace = Self {
            output: output.to_owned(),
            run: sha256_bytes(run.as_bytes()),
            meta: meta.clone(),
            _lock: lock,
            folder,
        };
        match workspace.begin(&run, fresh) {
            Ok(true) => {
                workspace.remove()?;
                Ok(None)
            }
            Ok(false) => Ok(Some(workspace)),
            Err(error) => {
                // A refusal leaves no empty folder behind.
                if !workspace.path(STATE).exists() {
                    workspace.remove()?;
                }
                Err(error)
            }
        }
    }

    /// Whether the output is complete; else the folder stands ready.
    fn begin(&self, run: &str, fresh: bool) -> Result<bool> {
        if is_complete(&self.output, &self.meta, fresh)? {
            return Ok(true);
        }
        let state = self.path(STATE);
        if fresh {
            self.clear()?;
        }
        if !state.exists() {
            write_atomic(&state, |out| out.write_all(run.as_bytes()))?;
        }
        Ok(false)
    }

    /// Which layers are finished and whole, and the damaged ones among those that are not.
    pub fn finished_layers(&self) -> (Vec<bool>, Vec<usize>) {
        let mut damaged = Vec::new();
        let finished = (0..self.meta.model.layers)
            .map(|i| {
                let path = self.layer_path(i);
                let whole = self.read(&path).is_some_and(|(at, _)| at == i);
                if !whole && path.exists() {
                    damaged.push(i);
                }
                whole
            })
            .collect();
        (finished, damaged)
    }

    /// Commits layer `i`.
    pub fn write_layer(&self, i: usize, layer: &LayerRecord) -> Result<()> {
        self.write(&self.layer_path(i), i, &layer.parts(i))
    }

    /// The latest hidden states: the layer that they go into, and one tensor (tokens, hidden) a sequence.
    pub fn hidden(&self, device: &Device) -> Result<Option<(usize, Vec<Tensor>)>> {
        let Some((layer, file)) = self.read(&self.path("hidden.safetensors")) else {
            return Ok(None);
        };
        let hidden = (0..file.names().len()).map(|i| {
            let name = hidden_name(i);
            let info = file.info(&name)?;
            let dtype = DType::try_from(info.dtype)?;
            Ok(Tensor::from_raw_buffer(
                file.bytes(&name)?,
                dtype,
                &info.shape,
                device,
            )?)
        });
        Ok(Some((layer, hidden.collect::<Result<_>>()?)))
    }

    /// Keeps the hidden states that go into `layer`.
    pub fn write_hidden(&self, layer: usize, hidden: &[Tensor]) -> Result<()> {
        let raw = hidden.iter().map(raw_values).collect::<Result<Vec<_>>>()?;
        let parts = raw
            .iter()
            .zip(hidden)
            .enumerate()
            .map(|(i, ((dtype, bytes), tensor))| {
                (hidden_name(i), Part::new(*dtype, tensor.dims(), bytes))
            });
        self.write(&self.path("hidden.safetensors"), layer, &parts.collect())
    }

    /// Writes the output from the finished layers, and removes the folder.
    pub fn assemble(self, prompt_lens: &[u32]) -> Result<()> {
        let layers = (0..self.meta.model.layers)
            .map(|i| Container::open(&self.layer_path(i), KEY))
            .collect::<Result<Vec<_>>>()?;
        let mut parts = Parts::new();
        for layer in &layers {
            for name in layer.names() {
                let part = layer.part(&name)?;
                parts.insert(name, part);
            }
        }
        // What a kill leaves of the last file lies in the work folder, too.
        let whole = self.path("moments.safetensors");
        write_parts(&whole, &self.meta, prompt_lens, parts)?;
        drop(layers);
        fs::rename(&whole, &self.output).map_err(Error::io("write", &self.output))?;
        self.remove()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn layer_path(&self, i: usize) -> PathBuf {
        self.path(&format!("layer-{i}.safetensors"))
    }

    fn write(&self, path: &Path, layer: usize, parts: &Parts) -> Result<()> {
        let piece = |content_sha256| Piece {
            run: self.run.clone(),
            layer,
            content_sha256,
        };
        container::write(path, KEY, piece, parts)
    }

    /// A whole piece of this run, and its layer.
    fn read(&self, path: &Path) -> Option<(usize, Container)> {
        let file = Container::open(path, KEY).ok()?;
        let piece: Piece = serde_json::from_str(file.json()).ok()?;
        let whole = piece.run == self.run && file.content_sha256().ok()? == piece.content_sha256;
        whole.then_some((piece.layer, file))
    }

    /// Removes what runs write here, and nothing else.
    fn clear(&self) -> Result<()> {
        let entries = fs::read_dir(&self.folder).map_err(Error::io("list", &self.folder))?;
        for entry in entries {
            let entry = entry.map_err(Error::io("list", &self.folder))?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let temporary = name.starts_with(".oscar-") && name.ends_with(".tmp");
            let piece = name.strip_suffix(".safetensors").is_some_and(|name| {
                name.starts_with("layer-") || name == "hidden" || name == "moments"
            });
            if temporary || piece || name == STATE {
                fs::remove_file(entry.path()).map_err(Error::io("remove", entry.path()))?;
            }
        }
        Ok(())
    }

    /// Removes the folder, unless something else lies in it.
    fn remove(&self) -> Result<()> {
        self.clear()?;
        let lock = self.path("lock");
        fs::remove_file(&lock).map_err(Error::io("remove", &lock))?;
        match fs::remove_dir(&self.folder) {
            Err(e) if e.kind() != ErrorKind::DirectoryNotEmpty => {
                Err(Error::io("remove", &self.folder)(e))
            }
            _ => Ok(()),
        }
    }
}

fn hidden_name(sequence: usize) -> String {
    format!("sequence.{sequence}")
}

/// The dtype and the little-endian bytes of a tensor.
fn raw_values(tensor: &Tensor) -> Result<(Dtype, Vec<u8>)> {
    fn bytes<T: bytemuck::NoUninit>(values: &[T]) -> Vec<u8> {
        bytemuck::cast_slice(values).to_vec()
    }
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::F32 => (Dtype::F32, bytes(&flat.to_vec1::<f32>()?)),
        DType::BF16 => (Dtype::BF16, bytes(&flat.to_vec1::<half::bf16>()?)),
        DType::F16 => (Dtype::F16, bytes(&flat.to_vec1::<half::f16>()?)),
        DType::F64 => (Dtype::F64, bytes(&flat.to_vec1::<f64>()?)),
        other => {
            return Err(Error::invalid(
                "hidden states",
                format!("dtype `{}` is not supported", other.as_str()),
            ));
        }
    })
}

/// Creates `folder` and takes its lock.
fn lock(folder: &Path) -> Result<File> {
    loop {
        fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
        let path = folder.join("lock");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        let file = match file {
            // The process that finished here just removed the folder.
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            file => file.map_err(Error::io("create", &path))?,
        };
        match file.try_lock() {
            Ok(()) if path.exists() => return Ok(file),
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(
                    Error::invalid(folder.display(), "another process is at work here")
                        .hint("wait for it, or choose another output"),
                );
            }
            // Some network file systems know no locks.
            Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path)(e)),
        }
    }
}

/// # Errors
/// Where the inputs `old`, found at `place`, are not `new`: names every field that changed.
fn compare(place: &Path, old: &str, new: &str) -> Result<()> {
    let parse = |text: &str| {
        serde_json::from_str::<Value>(text)
            .map_err(|e| Error::invalid(place.display(), format!("is damaged: {e}")).hint(FRESH))
    };
    let mut changes = Vec::new();
    list_changes("", &parse(old)?, &parse(new)?, &mut changes);
    if changes.is_empty() {
        return Ok(());
    }
    let problem = format!("belongs to other inputs; changed: {}", changes.join(", "));
    Err(Error::invalid(place.display(), problem)
        .hint(format!("{FRESH}, another output keeps both")))
}

fn list_changes(field: &str, old: &Value, new: &Value, changes: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            let added = new.keys().filter(|key| !old.contains_key(*key));
            for key in old.keys().chain(added) {
                let inner = if field.is_empty() {
                    key.clone()
                } else {
                    format!("{field}.{key}")
                };
                let get = |map: &serde_json::Map<String, Value>| {
                    map.get(key).cloned().unwrap_or(Value::Null)
                };
                list_changes(&inner, &get(old), &get(new), changes);
            }
        }
        _ if old != new => changes.push(format!("`{field}` {old} → {new}")),
        _ => {}
    }
}
