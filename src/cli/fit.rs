//! `oscar fit`: a moments file into a zoo entry.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ValueEnum;
use toml::Table;

use super::common::{Format, print, print_json};
use super::recipe::Given;
use super::{Outcome, entry_recipe};
use crate::calib::Moments;
use crate::calib::fit::{FitOptions, Fitted, fit};
use crate::report::card;
use crate::zoo::{Entry, Method, Rounding, Scope, VMoment, Windows};

/// Fit a zoo entry to moments, in seconds and without the model.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The file that `oscar collect` wrote
    moments: PathBuf,

    #[command(flatten)]
    fit: FitArgs,

    #[command(flatten)]
    place: PlaceArgs,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

/// What to fit; shared with `oscar calibrate`.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Fit")]
pub struct FitArgs {
    /// How keys and values are transformed before rounding
    #[arg(long, value_enum, default_value = "balanced")]
    method: MethodArg,

    /// One transform a KV head, or one a layer as today's OSCAR servers load
    #[arg(long, value_enum, default_value = "head")]
    scope: ScopeArg,

    /// Push each channel's rounding error into the channels after it, or round plainly
    #[arg(long, value_enum, default_value = "feedback")]
    rounding: RoundingArg,

    /// Subtract the mean key and value before encoding; on for `balanced`, off for others where not given
    #[arg(long, value_enum, value_name = "WHETHER")]
    center: Option<Switch>,

    /// Moment whose eigenvectors rotate values; `oo` for `oscar` where not given
    #[arg(long, value_enum, value_name = "MOMENT")]
    v_moment: Option<VMomentArg>,

    /// Channels that share a scale and a zero; head_dim where not given
    #[arg(long, value_name = "CHANNELS")]
    group: Option<usize>,

    /// Clip ratio of keys in (0, 1], 1 for none; searched per layer and head where not given
    #[arg(long, value_name = "RATIO")]
    k_clip: Option<f64>,

    /// Clip ratio of values in (0, 1], 1 for none; searched per layer and head where not given
    #[arg(long, value_name = "RATIO")]
    v_clip: Option<f64>,

    /// Exponent p of `balanced`, keys and values; searched per layer and head where not given
    #[arg(short, long, value_name = "EXPONENT")]
    p: Option<f64>,

    /// Tokens at the start of a sequence that stay in full precision
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    sink: usize,

    /// Latest tokens that stay in full precision
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    recent: usize,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum MethodArg {
    /// Range against sensitivity: A = M^½·U·Λ^(−p)·H·P, queries by A⁻ᵀ
    Balanced,
    /// The paper: eigenvectors of what attention reads, then Hadamard and bit reversal
    Oscar,
    /// Hadamard alone, made without data
    Hadamard,
    /// No transform
    Identity,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ScopeArg {
    Head,
    Layer,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoundingArg {
    Feedback,
    Nearest,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum VMomentArg {
    /// Of attention's outputs, which equals VᵀSᵀSV
    Oo,
    /// Of values, weighted by Σ S² of their token
    Vsv,
    /// Of values, weighted by k·qq·kᵀ, as the released OSCAR tool does
    Vwv,
    /// Of values
    Vv,
}

impl FitArgs {
    pub fn options(&self) -> FitOptions {
        FitOptions {
            method: match self.method {
                MethodArg::Balanced => Method::Balanced,
                MethodArg::Oscar => Method::Oscar,
                MethodArg::Hadamard => Method::Hadamard,
                MethodArg::Identity => Method::Identity,
            },
            scope: match self.scope {
                ScopeArg::Head => Scope::Head,
                ScopeArg::Layer => Scope::Layer,
            },
            rounding: match self.rounding {
                RoundingArg::Feedback => Rounding::Feedback,
                RoundingArg::Nearest => Rounding::Nearest,
            },
            center: self.center.map(|switch| matches!(switch, Switch::On)),
            v_moment: self.v_moment.map(|moment| match moment {
                VMomentArg::Oo => VMoment::Oo,
                VMomentArg::Vsv => VMoment::Vsv,
                VMomentArg::Vwv => VMoment::Vwv,
                VMomentArg::Vv => VMoment::Vv,
            }),
            group: self.group,
            k_clip: self.k_clip,
            v_clip: self.v_clip,
            exponent: self.p,
            windows: Windows {
                sink_tokens: self.sink,
                recent_tokens: self.recent,
            },
        }
    }
}

/// Where the entry goes; shared with `oscar calibrate`.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Output")]
pub struct PlaceArgs {
    /// Folder of the entry; ZOO/<org>__<model>/<method> where not given
    #[arg(short, long, value_name = "DIR", conflicts_with = "zoo")]
    out: Option<PathBuf>,

    /// The zoo that the entry is put into where no --out is given
    #[arg(long, value_name = "DIR", default_value = "zoo")]
    zoo: PathBuf,

    /// Replace an entry of another model
    #[arg(long)]
    pub force: bool,
}

impl PlaceArgs {
    /// `--out`, or the place in the zoo of an entry for `model_id`.
    pub fn folder(&self, model_id: &str, fit: &FitArgs) -> PathBuf {
        self.out.clone().unwrap_or_else(|| {
            let tag = fit.options().method.as_str();
            self.zoo.join(model_id.replace('/', "__")).join(tag)
        })
    }
}

pub fn run(args: &Args, given: &Given) -> Result<Outcome> {
    let moments = Moments::open(&args.moments)?;
    let folder = args.place.folder(&moments.meta().model.id, &args.fit);
    Entry::check_folder(&folder)?;
    let mut settings = given.values.clone();
    settings.extend(entry_recipe::of_moments(&moments));
    let fitted = write(&moments, &args.fit, &args.place, &folder, &settings)?;
    let (entry, moments) = (folder.display(), moments.path().display());
    match args.format {
        Format::Text => print(&format!("entry    {entry}\nmoments  {moments}"))?,
        Format::Json => print_json(&serde_json::json!({
            "entry": entry.to_string(),
            "moments": moments.to_string(),
            "warnings": fitted.warnings,
        }))?,
    }
    Ok(Outcome::Fine)
}

/// Fits and writes an entry with its recipe, `settings`, and its card; shared with `oscar calibrate`.
pub fn write(
    moments: &Moments,
    fit_args: &FitArgs,
    place: &PlaceArgs,
    folder: &Path,
    settings: &Table,
) -> Result<Fitted> {
    let fitted = fit(moments, &fit_args.options())?;
    for warning in &fitted.warnings {
        eprintln!("warning: {warning}");
    }
    // A new fit of the same model is under the old one's license.
    let license = card::stated_license(folder).filter(|_| !place.force);
    fitted.entry.write(folder, place.force)?;
    entry_recipe::write(folder, &fitted.entry, settings)?;
    card::write(folder, license.as_deref())?;
    Ok(fitted)
}
