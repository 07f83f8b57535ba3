//! `oscar import`: rotations that another tool fitted, into a zoo entry.

use std::path::PathBuf;

use anyhow::Result;

use super::Outcome;
use super::common::{Format, check_id, print, print_json};
use crate::model::{Model, OpenOptions};
use crate::report::card;
use crate::zoo::formats::{ImportOptions, import};

/// Make a zoo entry of rotations that another tool fitted.
///
/// Reads OSCAR's `.pt` files, one of keys and one of values, with one matrix a layer or one a KV head, and the
/// `.safetensors` files of `oscar export`. A pickle is walked and never run: anything in it but tensors and plain
/// containers is refused.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The file of keys and the file of values, in either order; or one .safetensors file
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Folder of the entry
    #[arg(short, long, value_name = "DIR", help_heading = "Output")]
    out: PathBuf,

    /// Replace an entry of another model
    #[arg(long, help_heading = "Output")]
    force: bool,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,

    /// Model of the rotations, of which headers are read: Hugging Face folder, GGUF file, or hub id `owner/name[@revision]`
    #[arg(short, long, help_heading = "Model")]
    model: Option<String>,

    /// Name of the model to record, such as `owner/name`
    #[arg(long, value_name = "ID", help_heading = "Model")]
    model_id: Option<String>,

    /// Architecture to record, where no --model is given
    #[arg(
        long,
        value_name = "NAME",
        help_heading = "Model",
        conflicts_with = "model"
    )]
    architecture: Option<String>,

    /// Layers of the model, where no --model is given and its last layers have no rotation
    #[arg(
        long,
        value_name = "N",
        help_heading = "Model",
        conflicts_with = "model"
    )]
    layers: Option<usize>,

    /// Query heads of a layer, where no --model is given
    #[arg(
        long,
        value_name = "N",
        help_heading = "Model",
        conflicts_with = "model"
    )]
    heads: Option<usize>,

    /// KV heads of a layer, where no --model is given and the files have one matrix a layer
    #[arg(
        long,
        value_name = "N",
        help_heading = "Model",
        conflicts_with = "model"
    )]
    kv_heads: Option<usize>,

    /// Channels that share a scale and a zero; 128, or head_dim where that is no multiple
    #[arg(long, value_name = "CHANNELS", help_heading = "Cache")]
    group: Option<usize>,

    /// Clip ratio of keys in (0, 1], 1 for none; the released 0.96 where the files carry none
    #[arg(long, value_name = "RATIO", help_heading = "Cache")]
    k_clip: Option<f32>,

    /// Clip ratio of values in (0, 1], 1 for none; the released 0.92 where the files carry none
    #[arg(long, value_name = "RATIO", help_heading = "Cache")]
    v_clip: Option<f32>,

    /// Tokens at the start of a sequence that stay in full precision; the released 64 where the files carry none
    #[arg(long, value_name = "TOKENS", help_heading = "Cache")]
    sink: Option<usize>,

    /// Latest tokens that stay in full precision; the released 256 where the files carry none
    #[arg(long, value_name = "TOKENS", help_heading = "Cache")]
    recent: Option<usize>,
}

pub fn run(args: &Args) -> Result<Outcome> {
    if let Some(id) = &args.model_id {
        check_id(id)?;
    }
    let model = match &args.model {
        None => None,
        Some(locator) => {
            let model = Model::open(locator, &OpenOptions::default())?;
            let model = match &args.model_id {
                Some(id) => model.with_id(id),
                None => model,
            };
            Some(crate::calib::model_info(&model)?)
        }
    };
    let imported = import(
        &args.files,
        &ImportOptions {
            model,
            model_id: args.model_id.clone(),
            architecture: args.architecture.clone(),
            layers: args.layers,
            heads: args.heads,
            kv_heads: args.kv_heads,
            group: args.group,
            k_clip: args.k_clip,
            v_clip: args.v_clip,
            sink_tokens: args.sink,
            recent_tokens: args.recent,
        },
    )?;
    for warning in &imported.warnings {
        eprintln!("warning: {warning}");
    }
    // As in a new fit: the same model is under the same license.
    let license = card::stated_license(&args.out).filter(|_| !args.force);
    imported.entry.write(&args.out, args.force)?;
    // The card is made from the file: tensors are not held twice.
    let metadata = imported.entry.metadata;
    let layers: Vec<_> = imported.entry.layers.into_keys().collect();
    card::write(&args.out, license.as_deref())?;
    match args.format {
        Format::Text => print(&format!(
            "entry    {}\nmodel    {}\nlayers   {} of {}, scope {}",
            args.out.display(),
            metadata.model.id,
            layers.len(),
            metadata.model.layers,
            metadata.scope
        ))?,
        Format::Json => print_json(&serde_json::json!({
            "entry": args.out.display().to_string(),
            "model": metadata.model.id,
            "layers": layers,
            "scope": metadata.scope,
            "warnings": imported.warnings,
        }))?,
    }
    Ok(Outcome::Fine)
}
