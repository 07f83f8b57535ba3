//! Rotations in a GGUF file, for the OSCAR branch of llama.cpp.
//!
//! The tensors `blk.{i}.attn_k_rot.weight` and `blk.{i}.attn_v_rot.weight`, f32 (d, d), are appended to a copy of a
//! model's file; all else passes through byte for byte. They are stored transposed: ggml's `mul_mat` takes the dot
//! products of rows, and so gives k · R. The llama architecture interleaves the two halves of every head of q and k
//! for its own RoPE: there the rows of the keys' R are interleaved alike.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use super::Orthogonal;
use crate::model::GgufLayout;
use crate::zoo::SideName;
use crate::{Error, Result, files};

/// ggml's number for f32.
const F32: u32 = 0;
/// Counts of tensors and keys stand after magic and version.
const COUNTS: u64 = 8;

/// Writes to `out` the file at `base` with the rotations of `entry`, whole or not at all; returns how many tensors it
/// appended.
///
/// # Errors
/// A base of another geometry, one that holds rotations already, or one that cannot be read.
pub fn append(entry: &Orthogonal, base: &Path, out: &Path) -> Result<usize> {
    let layout = GgufLayout::read(base)?;
    check(entry, base, &layout)?;
    let mut infos = Vec::new();
    let mut tensors = Vec::new();
    let mut offset = (layout.data_end - layout.data_start).next_multiple_of(layout.alignment);
    for (id, _) in entry.layers(SideName::K) {
        for side in SideName::ALL {
            let name = tensor_name(id, side);
            let d = layout.head_dim as u64;
            infos.extend((name.len() as u64).to_le_bytes());
            infos.extend(name.as_bytes());
            infos.extend(2u32.to_le_bytes());
            infos.extend(d.to_le_bytes());
            infos.extend(d.to_le_bytes());
            infos.extend(F32.to_le_bytes());
            infos.extend((offset as u64).to_le_bytes());
            offset += (layout.head_dim * layout.head_dim * size_of::<f32>())
                .next_multiple_of(layout.alignment);
            tensors.push((id, side));
        }
    }
    let mut source = File::open(base).map_err(Error::io("open", base))?;
    files::write_atomic(out, |out| {
        let mut head = [0; COUNTS as usize + 16];
        source.read_exact(&mut head)?;
        let count = (layout.tensors.len() + tensors.len()) as u64;
        head[COUNTS as usize..COUNTS as usize + 8].copy_from_slice(&count.to_le_bytes());
        out.write_all(&head)?;
        copy(&mut source, head.len()..layout.infos_end, out)?;
        out.write_all(&infos)?;
        pad(out, layout.infos_end + infos.len(), layout.alignment)?;
        copy(&mut source, layout.data_start..layout.data_end, out)?;
        pad(out, layout.data_end - layout.data_start, layout.alignment)?;
        for (id, name) in &tensors {
            let layer = entry.layers(*name).find(|(layer, _)| layer == id);
            let matrix = layer.and_then(|(_, layer)| layer.side.encode.first());
            let matrix = matrix.ok_or_else(|| io::Error::other("a layer without a matrix"))?;
            let interleaved = layout.interleaved && *name == SideName::K;
            let bytes = stored(matrix, layout.head_dim, interleaved);
            out.write_all(&bytes)?;
            pad(out, bytes.len(), layout.alignment)?;
        }
        Ok(())
    })?;
    Ok(tensors.len())
}

/// The name of a rotation in the file.
pub fn tensor_name(layer: usize, side: SideName) -> String {
    format!("blk.{layer}.attn_{side}_rot.weight")
}

/// What the OSCAR branch reads at run time, as environment: the file has no place for it. Clips are one number there.
pub fn environment(entry: &Orthogonal) -> Vec<(&'static str, String)> {
    let windows = &entry.metadata().windows;
    vec![
        ("LLAMA_KV_NO_HADAMARD", "1".to_owned()),
        ("LLAMA_KV_CLIP_RATIO", clip(entry).to_string()),
        ("LLAMA_KV_HP_SINK", windows.sink_tokens.to_string()),
        ("LLAMA_KV_HP_RECENT", windows.recent_tokens.to_string()),
    ]
}

/// One clip ratio for keys and values: halfway, where theirs differ.
pub fn clip(entry: &Orthogonal) -> f32 {
    // To four digits: halves of decimal fractions are short, their sums in binary are not.
    ((entry.k_clip + entry.v_clip) * 5000.0).round() / 10000.0
}

fn check(entry: &Orthogonal, base: &Path, layout: &GgufLayout) -> Result<()> {
    let bad = |problem: String| Error::invalid(base.display(), problem);
    for (id, layer) in entry.layers(SideName::K) {
        if id >= layout.layers || layer.head_dim != layout.head_dim {
            return Err(bad(format!(
                "has {} layers of head_dim {}, and the entry of `{}` has layer {id} of head_dim {}",
                layout.layers,
                layout.head_dim,
                entry.metadata().model.id,
                layer.head_dim
            ))
            .hint("give the GGUF file of the model that the entry was calibrated on"));
        }
    }
    let model = &entry.metadata().model;
    if model.layers != layout.layers || model.kv_heads.iter().any(|&heads| heads != layout.kv_heads)
    {
        return Err(bad(format!(
            "has {} layers of {} KV heads, and `{}`, the entry's model, has {} of {:?}",
            layout.layers, layout.kv_heads, model.id, model.layers, model.kv_heads
        ))
        .hint("give the GGUF file of the model that the entry was calibrated on"));
    }
    if let Some(name) = layout
        .tensors
        .iter()
        .find(|name| name.ends_with("_rot.weight"))
    {
        return Err(bad(format!("holds rotations already (`{name}`)"))
            .hint("give the file that they were appended to"));
    }
    let end = layout.data_start
        + (layout.data_end - layout.data_start).next_multiple_of(layout.alignment);
    if layout.file_bytes > end {
        return Err(bad(format!(
            "has {} bytes after its last tensor",
            layout.file_bytes - end
        ))
        .hint("fetch the file again"));
    }
    Ok(())
}

/// Rᵀ, its rows interleaved before where keys are, f32 little-endian.
fn stored(rotation: &[f32], d: usize, interleaved: bool) -> Vec<u8> {
    let row = |i: usize| {
        if interleaved {
            i / 2 + i % 2 * (d / 2)
        } else {
            i
        }
    };
    let mut bytes = Vec::with_capacity(size_of_val(rotation));
    for column in 0..d {
        for i in 0..d {
            bytes.extend(rotation[row(i) * d + column].to_le_bytes());
        }
    }
    bytes
}

fn copy(source: &mut File, range: std::ops::Range<usize>, out: &mut impl Write) -> io::Result<()> {
    source.seek(SeekFrom::Start(range.start as u64))?;
    let bytes = range.len() as u64;
    if io::copy(&mut Read::by_ref(source).take(bytes), out)? == bytes {
        Ok(())
    } else {
        Err(io::Error::other("the base file was cut short meanwhile"))
    }
}

/// Zeros up to the next multiple of `alignment` after `written` bytes.
fn pad(out: &mut impl Write, written: usize, alignment: usize) -> io::Result<()> {
    let missing = written.next_multiple_of(alignment) - written;
    io::copy(&mut io::repeat(0).take(missing as u64), out).map(|_| ())
}
