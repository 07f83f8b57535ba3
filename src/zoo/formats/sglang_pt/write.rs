//! The files that `torch.load(…, weights_only=True)` and SGLang's OSCAR path take.

use std::io::{self, Write};

use super::pickle;
use super::zip;
use crate::zoo::formats::Orthogonal;
use crate::zoo::{Method, Scope, SideName};

/// What SGLang's launch scripts call the file of a side.
pub fn file_name(entry: &Orthogonal, side: SideName) -> String {
    format!("{}.pt", stem(entry, side))
}

fn stem(entry: &Orthogonal, side: SideName) -> String {
    match entry.metadata().scope {
        Scope::Head => format!("{side}_rotation_perhead"),
        Scope::Layer => format!(
            "{side}_rotation_{}",
            objective(entry.metadata().method, side)
        ),
    }
}

fn objective(method: Method, side: SideName) -> &'static str {
    match (method, side) {
        (Method::Hadamard, _) => "hadamard",
        (Method::Identity, _) => "identity",
        (Method::Oscar | Method::Balanced, SideName::K) => "qqt_r_h_pbr",
        (Method::Oscar | Method::Balanced, SideName::V) => "sst_r_h_pbr",
    }
}

/// Writes one side of an entry: the same bytes for the same entry.
pub fn write(entry: &Orthogonal, side: SideName, out: &mut impl Write) -> io::Result<()> {
    let stem = stem(entry, side);
    let mut archive = zip::Writer::new(out);
    archive.record(&format!("{stem}/data.pkl"), &dictionary(entry, side))?;
    archive.record(&format!("{stem}/.format_version"), b"1")?;
    archive.record(
        &format!("{stem}/.storage_alignment"),
        zip::ALIGNMENT.to_string().as_bytes(),
    )?;
    archive.record(&format!("{stem}/byteorder"), b"little")?;
    let mut key = 0;
    for (_, layer) in entry.layers(side) {
        let tensors = [Some(layer.rotation()), layer.eigenvalues()];
        for tensor in tensors.into_iter().flatten() {
            archive.record(&format!("{stem}/data/{key}"), &tensor)?;
            key += 1;
        }
    }
    archive.record(&format!("{stem}/version"), b"3\n")?;
    archive.finish()
}

fn dictionary(entry: &Orthogonal, side: SideName) -> Vec<u8> {
    let metadata = entry.metadata();
    let per_head = metadata.scope == Scope::Head;
    let mut pickle = pickle::Writer::new();
    pickle.dict(|out| {
        out.text("format_version");
        out.int(if per_head { 2 } else { 1 });
        out.text("objective");
        out.text(objective(metadata.method, side));
        out.text("source_grouping");
        out.text(if per_head { "per_kv_head" } else { "layer" });
        out.text("layers");
        out.dict(|out| {
            let mut key = 0;
            for (id, layer) in entry.layers(side) {
                let (heads, d) = (layer.side.encode.len(), layer.head_dim);
                let heads: &[usize] = if per_head { &[heads] } else { &[] };
                out.int(id);
                out.dict(|out| {
                    out.text("layer_id");
                    out.int(id);
                    out.text("rotation");
                    out.tensor(key, &[heads, &[d, d]].concat());
                    key += 1;
                    if layer.side.spectrum.is_some() {
                        out.text("eigenvalues");
                        out.tensor(key, &[heads, &[d]].concat());
                        key += 1;
                    }
                });
            }
        });
        out.text("calibration");
        out.dict(|out| {
            let (model, calibration) = (&metadata.model, &metadata.calibration);
            let mut pair = |key: &str, text: &str| {
                out.text(key);
                out.text(text);
            };
            pair("model_path", &model.id);
            if let Some(revision) = &model.revision {
                pair("model_revision", revision);
            }
            pair("token_ids_sha256", &calibration.token_ids_sha256);
            pair("oscar_kv", entry.carried());
            for (key, n) in [
                ("tokens", calibration.tokens),
                ("prompts", calibration.prompts),
                ("seq_len", calibration.seq_len),
            ] {
                out.text(key);
                out.int(n);
            }
            // Another tool's moments are not known here.
            if metadata.imported.is_none() {
                out.text("accumulator_dtype");
                out.text("float64");
                out.text("post_rope");
                out.bool(true);
            }
        });
    });
    pickle.finish()
}
