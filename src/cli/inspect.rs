//! `oscar inspect`: what an entry or a moments file holds.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::Result;
use nalgebra::DMatrix;
use serde::Serialize;

use super::Outcome;
use super::common::{Format, is_moments, print, print_json};
use crate::calib::moments::{LayerMoments, Meta, Moments};
use crate::rotation::eigen;
use crate::rotation::spectrum::{condition, effective_rank, flatness};
use crate::zoo::{Calibration, Entry, ImportedFile, Metadata, ModelInfo, Side, SideName};

/// Show where an entry or a moments file comes from and what it holds.
///
/// Of an entry: provenance, geometry, clip ratios, exponents, and the spectra that its bases came from. Of a moments
/// file: provenance, the spectra of its moments, how unevenly channels matter (flatness: 1 is even, 1/head_dim is one
/// channel alone), and how far keys lie from zero (offset: share of their energy that is in the mean).
#[derive(clap::Args, Debug)]
pub struct Args {
    /// An entry's folder or its rotations.safetensors, or a moments file
    path: PathBuf,

    /// Only these layers
    #[arg(short, long, value_name = "LAYER", value_delimiter = ',')]
    layer: Vec<usize>,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

#[derive(Serialize)]
struct EntryView<'a> {
    metadata: &'a Metadata,
    layers: Vec<EntryLayer>,
}

#[derive(Serialize)]
struct EntryLayer {
    layer: usize,
    head_dim: usize,
    k: SideView,
    v: SideView,
}

#[derive(Serialize)]
struct SideView {
    clip: Vec<f32>,
    exponent: Vec<f32>,
    output_error: Vec<f32>,
    centered: bool,
    feedback: bool,
    orthogonal: bool,
    condition: Vec<f64>,
    effective_rank: Vec<f64>,
}

#[derive(Serialize)]
struct MomentsView<'a> {
    meta: &'a Meta,
    layers: Vec<MomentsLayer>,
}

#[derive(Serialize)]
struct MomentsLayer {
    layer: usize,
    qq: Vec<MomentView>,
    kk: Vec<MomentView>,
    oo: Vec<MomentView>,
    vv: Vec<MomentView>,
    /// Share of the keys' energy that lies in their mean, per KV head.
    k_offset: Vec<f64>,
    v_offset: Vec<f64>,
}

#[derive(Serialize)]
struct MomentView {
    condition: f64,
    effective_rank: f64,
    flatness: f64,
}

pub fn run(args: &Args) -> Result<Outcome> {
    if is_moments(&args.path)? {
        moments(args)?;
    } else {
        entry(args)?;
    }
    Ok(Outcome::Fine)
}

fn wanted(args: &Args, layer: usize) -> bool {
    args.layer.is_empty() || args.layer.contains(&layer)
}

fn check_layers(args: &Args, known: impl Fn(usize) -> bool) -> Result<()> {
    if let Some(absent) = args.layer.iter().find(|layer| !known(**layer)) {
        return Err(
            crate::Error::invalid(args.path.display(), format!("has no layer {absent}")).into(),
        );
    }
    Ok(())
}

// ---- entries -------------------------------------------------------------------------------------------------------

fn entry(args: &Args) -> Result<()> {
    let entry = Entry::open(&args.path)?;
    check_layers(args, |layer| entry.layers.contains_key(&layer))?;
    let layers: Vec<EntryLayer> = entry
        .layers
        .iter()
        .filter(|(layer, _)| wanted(args, **layer))
        .map(|(&layer, found)| EntryLayer {
            layer,
            head_dim: found.head_dim,
            k: side_view(&entry.metadata, layer, SideName::K, &found.k),
            v: side_view(&entry.metadata, layer, SideName::V, &found.v),
        })
        .collect();
    let view = EntryView {
        metadata: &entry.metadata,
        layers,
    };
    match args.format {
        Format::Json => print_json(&view),
        Format::Text => print(&entry_text(&view)),
    }
}

fn side_view(metadata: &Metadata, layer: usize, name: SideName, side: &Side) -> SideView {
    let fit = metadata.fit.as_ref().and_then(|fit| match name {
        SideName::K => fit.k.get(&layer),
        SideName::V => fit.v.get(&layer),
    });
    let spectra: Vec<Vec<f64>> = side
        .spectrum
        .iter()
        .flatten()
        .map(|spectrum| spectrum.iter().copied().map(f64::from).collect())
        .collect();
    SideView {
        clip: side.clip.clone(),
        exponent: fit.map(|fit| fit.exponent.clone()).unwrap_or_default(),
        output_error: fit.map(|fit| fit.output_error.clone()).unwrap_or_default(),
        centered: side.mean.is_some(),
        feedback: side.feedback.is_some(),
        orthogonal: side.dual.is_none(),
        condition: spectra.iter().map(|spectrum| condition(spectrum)).collect(),
        effective_rank: spectra
            .iter()
            .map(|spectrum| effective_rank(spectrum))
            .collect(),
    }
}

fn entry_text(view: &EntryView) -> String {
    let m = view.metadata;
    let centered = |centered| if centered { ", centered" } else { "" };
    let mut rows = vec![
        ("method", format!("{}, scope {}", m.method, m.scope)),
        (
            "moments",
            format!(
                "keys {}, values {}",
                m.k_moment.map_or("none", |moment| moment.as_str()),
                m.v_moment.map_or("none", |moment| moment.as_str())
            ),
        ),
    ];
    if let Some(fit) = &m.fit {
        rows.push((
            "fit",
            format!(
                "keys {} rounding{}, values {} rounding{}",
                fit.k_rounding,
                centered(fit.k_centered),
                fit.v_rounding,
                centered(fit.v_centered)
            ),
        ));
    }
    rows.extend([
        (
            "quantizer",
            format!(
                "{} bits, {}, groups of {}, scales in {}",
                m.quantizer.bits, m.quantizer.codec, m.quantizer.group, m.quantizer.scale_dtype
            ),
        ),
        (
            "windows",
            format!(
                "{} sink and {} recent tokens in full precision",
                m.windows.sink_tokens, m.windows.recent_tokens
            ),
        ),
    ]);
    rows.extend(provenance(&m.model, &m.calibration));
    if let Some(imported) = &m.imported {
        let file = |file: &ImportedFile| match &file.objective {
            Some(objective) => format!("{} ({objective})", file.name),
            None => file.name.clone(),
        };
        rows.push((
            "imported",
            format!("{}, {}", file(&imported.k), file(&imported.v)),
        ));
    }
    rows.extend([
        (
            "tool",
            format!(
                "{} {}, algorithm {}",
                m.tool.name, m.tool.version, m.tool.algorithm
            ),
        ),
        ("content", m.content_sha256.clone()),
    ]);
    let mut text = key_values(&rows);
    text.push('\n');
    let mut table = vec![
        [
            "layer",
            "side",
            "clip",
            "exponent",
            "output error",
            "condition",
            "effective rank",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for layer in &view.layers {
        for (name, side) in [("k", &layer.k), ("v", &layer.v)] {
            table.push(vec![
                layer.layer.to_string(),
                name.to_owned(),
                range(&side.clip, 3),
                range(&side.exponent, 2),
                range(&side.output_error, 4),
                scientific_range(&side.condition),
                range(&side.effective_rank, 1),
            ]);
        }
    }
    text.push_str(&columns(&table));
    text
}

// ---- moments -------------------------------------------------------------------------------------------------------

fn moments(args: &Args) -> Result<()> {
    let moments = Moments::open(&args.path)?;
    check_layers(args, |layer| layer < moments.layers())?;
    let layers = (0..moments.layers())
        .filter(|layer| wanted(args, *layer))
        .map(|layer| moments_layer(&moments.layer(layer)?))
        .collect::<Result<Vec<_>>>()?;
    let view = MomentsView {
        meta: moments.meta(),
        layers,
    };
    match args.format {
        Format::Json => print_json(&view),
        Format::Text => print(&moments_text(&view)),
    }
}

fn moments_layer(layer: &LayerMoments) -> Result<MomentsLayer> {
    let views = |list: &[DMatrix<f64>]| list.iter().map(moment_view).collect::<Result<Vec<_>>>();
    let offset = |means: &[nalgebra::DVector<f64>], moments: &[DMatrix<f64>]| {
        means
            .iter()
            .zip(moments)
            .map(|(mean, moment)| {
                let energy = moment.trace();
                if energy > 0.0 {
                    mean.norm_squared() / energy
                } else {
                    0.0
                }
            })
            .collect()
    };
    Ok(MomentsLayer {
        layer: layer.layer,
        qq: views(&layer.qq)?,
        kk: views(&layer.kk)?,
        oo: views(&layer.oo)?,
        vv: views(&layer.vv)?,
        k_offset: offset(&layer.k_mean, &layer.kk),
        v_offset: offset(&layer.v_mean, &layer.vv),
    })
}

fn moment_view(moment: &DMatrix<f64>) -> Result<MomentView> {
    let importance: Vec<f64> = moment.diagonal().iter().copied().collect();
    // A head that never sees energy has no spectrum, which is worth seeing rather than an error.
    let spectrum = if moment.trace() > 0.0 {
        eigen::symmetric(moment)?.values
    } else {
        vec![0.0; moment.nrows()]
    };
    Ok(MomentView {
        condition: condition(&spectrum),
        effective_rank: effective_rank(&spectrum),
        flatness: flatness(&importance),
    })
}

fn moments_text(view: &MomentsView) -> String {
    let m = view.meta;
    let mut rows = provenance(&m.model, &m.calibration);
    rows.push(("content", m.content_sha256.clone()));
    let mut text = key_values(&rows);
    text.push('\n');
    let mut table = vec![
        [
            "layer",
            "moment",
            "condition",
            "effective rank",
            "flatness",
            "offset",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for layer in &view.layers {
        for (name, moments, offset) in [
            ("qq", &layer.qq, None),
            ("kk", &layer.kk, Some(&layer.k_offset)),
            ("oo", &layer.oo, None),
            ("vv", &layer.vv, Some(&layer.v_offset)),
        ] {
            let of = |f: fn(&MomentView) -> f64| moments.iter().map(f).collect::<Vec<_>>();
            table.push(vec![
                layer.layer.to_string(),
                name.to_owned(),
                scientific_range(&of(|m| m.condition)),
                range(&of(|m| m.effective_rank), 1),
                range(&of(|m| m.flatness), 3),
                offset.map_or_else(String::new, |offset| range(offset, 3)),
            ]);
        }
    }
    text.push_str(&columns(&table));
    text
}

// ---- text ----------------------------------------------------------------------------------------------------------

/// Which model, run over what.
fn provenance(model: &ModelInfo, calibration: &Calibration) -> Vec<(&'static str, String)> {
    vec![
        ("model", named(&model.id, model.revision.as_deref())),
        (
            "geometry",
            format!(
                "{}, {} layers, {} heads, {} KV heads, head_dim {}",
                model.architecture,
                model.layers,
                spread(&model.heads),
                spread(&model.kv_heads),
                spread(&model.head_dim)
            ),
        ),
        ("weights", known(&model.weights_fingerprint)),
        ("config", known(&model.config_sha256)),
        (
            "calibration",
            if calibration.tokens == 0 {
                known("")
            } else {
                format!(
                    "{} tokens of {} prompts, sequences of up to {}, seed {}, {} on {}",
                    calibration.tokens,
                    calibration.prompts,
                    calibration.seq_len,
                    calibration.seed,
                    calibration.dtype,
                    calibration.device
                )
            },
        ),
        ("token ids", known(&calibration.token_ids_sha256)),
    ]
}

/// What imported files may leave unsaid.
fn known(text: &str) -> String {
    if text.is_empty() { "unknown" } else { text }.to_owned()
}

fn named(id: &str, revision: Option<&str>) -> String {
    match revision {
        Some(revision) if !revision.is_empty() => format!("{id} at {revision}"),
        _ => id.to_owned(),
    }
}

/// One number where all are alike, else `least..most`.
fn spread(list: &[usize]) -> String {
    match (list.iter().min(), list.iter().max()) {
        (Some(least), Some(most)) if least == most => least.to_string(),
        (Some(least), Some(most)) => format!("{least}..{most}"),
        _ => String::new(),
    }
}

fn extent<T: Copy + Into<f64>>(list: &[T]) -> Option<(f64, f64)> {
    if list.is_empty() {
        return None;
    }
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for x in list.iter().copied().map(Into::into) {
        least = least.min(x);
        most = most.max(x);
    }
    Some((least, most))
}

fn range<T: Copy + Into<f64>>(list: &[T], digits: usize) -> String {
    between(list, |x| format!("{x:.digits$}"))
}

fn scientific_range(list: &[f64]) -> String {
    between(list, |x| format!("{x:.1e}"))
}

fn between<T: Copy + Into<f64>>(list: &[T], show: impl Fn(f64) -> String) -> String {
    let Some((least, most)) = extent(list) else {
        return "-".to_owned();
    };
    let (least, most) = (show(least), show(most));
    if least == most {
        least
    } else {
        format!("{least}..{most}")
    }
}

fn key_values(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    rows.iter().fold(String::new(), |mut text, (key, value)| {
        let _ = writeln!(text, "{key:<width$}  {value}");
        text
    })
}

fn columns(table: &[Vec<String>]) -> String {
    let count = table.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..count)
        .map(|column| table.iter().map(|row| row[column].len()).max().unwrap_or(0))
        .collect();
    table.iter().fold(String::new(), |mut text, row| {
        let line: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:>width$}"))
            .collect();
        let _ = writeln!(text, "{}", line.join("  "));
        text
    })
}
