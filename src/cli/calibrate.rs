//! `oscar calibrate`: collect, then fit.

use std::path::PathBuf;

use anyhow::Result;

use super::Outcome;
use super::common::{CalibrationDataArgs, Format, ModelArgs, moments_beside};
use super::{collect, fit};
use crate::Error;
use crate::calib::Moments;
use crate::zoo::Entry;

/// Calibrate a model: run it over prompts and fit a zoo entry, in one go (collect, then fit).
///
/// Goes on where an earlier run stopped. The moments stay, so that `oscar fit` can try other methods in seconds and
/// `oscar validate` can compare with them.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    data: CalibrationDataArgs,

    #[command(flatten)]
    run: collect::RunArgs,

    #[command(flatten)]
    fit: fit::FitArgs,

    #[command(flatten)]
    place: fit::PlaceArgs,

    /// The moments file; beside the entry where not given
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    moments: Option<PathBuf>,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let model = args.model.open()?;
    let folder = args.place.folder(model.id(), &args.fit);
    let moments = args
        .moments
        .clone()
        .unwrap_or_else(|| moments_beside(&folder));
    if args.run.dry_run {
        return collect::dry_run(&model, &args.data, &args.run, &moments, args.format);
    }
    // Bad options should not wait for the end of a long collection.
    args.fit.options().check(&[model.config().head_dim])?;
    if moments.parent() == Some(&folder) {
        return Err(Error::invalid(
            "--moments",
            format!("`{}` lies inside the entry's folder", moments.display()),
        )
        .hint("an entry is published as it is; keep its moments elsewhere")
        .into());
    }
    if !args.place.force {
        Entry::check_place(&folder, model.id(), &model.weights_fingerprint()?)?;
    }
    let moments = collect::moments(&model, &args.data, &args.run, &moments)?;
    fit::write(
        &Moments::open(&moments)?,
        &args.fit,
        &args.place,
        &folder,
        args.format,
    )
}
