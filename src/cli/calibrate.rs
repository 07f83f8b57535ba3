//! `oscar calibrate`: collect, then fit.

use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Result;
use toml::Table;

use super::common::{
    CalibrationDataArgs, Format, ModelArgs, moments_beside, print, print_json, same_place,
};
use super::recipe::{self, Given, Recipe};
use super::{Outcome, collect, entry_recipe, fit};
use crate::Error;
use crate::calib::Moments;
use crate::calib::fit::Fitted;
use crate::data::{Corpus, Tokenizer};
use crate::model::Model;
use crate::zoo::{self, Entry};

/// Calibrate a model: run it over prompts and fit a zoo entry, in one go (collect, then fit).
///
/// Goes on where an earlier run stopped. The moments stay, so that `oscar fit` can try other methods in seconds and
/// `oscar validate` can compare with them. Its settings are kept in recipe.toml of the entry: `--recipe ENTRY` repeats
/// the run, and refuses other weights, another tokenizer and other calibration tokens.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    pub data: CalibrationDataArgs,

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

impl Args {
    /// The arguments of a recipe and their values, for the model at `locator`, with prompts from `data` where any are
    /// given.
    pub fn of_recipe(recipe: &Recipe, locator: &str, data: &[PathBuf]) -> Result<(Self, Table)> {
        let mut words: Vec<OsString> = vec![format!("--model={locator}").into()];
        for path in data {
            words.extend(["--data".into(), path.into()]);
        }
        recipe::arguments(recipe, entry_recipe::COMMAND, words)
    }
}

pub fn run(args: &Args, given: &Given) -> Result<Outcome> {
    let model = args.model.open()?;
    let folder = args.place.folder(model.id(), &args.fit);
    let moments = args
        .moments
        .clone()
        .unwrap_or_else(|| moments_beside(&folder));
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
    let repeated = match &given.entry {
        Some(path) => Some(Repeated::open(path)?),
        None => None,
    };
    if let Some(repeated) = &repeated {
        repeated.check_place(&folder)?;
        repeated.check_model(&model)?;
    }
    if args.place.force {
        Entry::check_folder(&folder)?;
    } else {
        Entry::check_place(&folder, model.id(), &model.weights_fingerprint()?)?;
    }
    let tokenizer = Tokenizer::load(&model)?;
    let corpus = args.data.read(&model, &tokenizer)?;
    if let Some(repeated) = &repeated {
        repeated.check_tokens(&corpus, &tokenizer, &given.flags)?;
    }
    let prompts = (&tokenizer, &corpus);
    if args.run.dry_run {
        return collect::dry_run(&model, prompts, &args.run, &moments, args.format);
    }
    let fitted = make(&model, prompts, args, &given.values, &moments, &folder)?;
    let same = match &repeated {
        Some(repeated) => Some(repeated.is_repeated_by(&Entry::open(&folder)?)),
        None => None,
    };
    match args.format {
        Format::Text => {
            let mut text = format!(
                "entry    {}\nmoments  {}",
                folder.display(),
                moments.display()
            );
            if let (Some(true), Some(repeated)) = (same, &repeated) {
                let _ = write!(
                    text,
                    "\nrepeats  {}, byte for byte",
                    repeated.path.display()
                );
            }
            print(&text)?;
        }
        Format::Json => print_json(&serde_json::json!({
            "entry": folder.display().to_string(),
            "moments": moments.display().to_string(),
            "warnings": fitted.warnings,
            "same_tensors": same,
        }))?,
    }
    Ok(Outcome::Fine)
}

/// Collects into `moments` and fits the entry in `folder`, whose recipe is `settings`; shared with `oscar check`.
pub fn make(
    model: &Model,
    (tokenizer, corpus): (&Tokenizer, &Corpus),
    args: &Args,
    settings: &Table,
    moments: &Path,
    folder: &Path,
) -> Result<Fitted> {
    let moments = collect::moments(model, tokenizer, corpus, &args.run, moments)?;
    let mut settings = settings.clone();
    let locator = entry_recipe::pinned(args.model.locator(), model);
    settings.insert("model".to_owned(), locator.into());
    let moments = Moments::open(&moments)?;
    fit::write(&moments, &args.fit, &args.place, folder, &settings)
}

/// Of the largest number of a tensor: what f32 and another order of sums explain.
const ROUNDING: f64 = 1e-4;

/// What takes other tokens from the same files.
const CHOOSE_TOKENS: [&str; 6] = [
    "chat-template",
    "holdout",
    "overlong",
    "seed",
    "seq-len",
    "tokens",
];

/// The entry whose calibration is to be repeated.
struct Repeated {
    path: PathBuf,
    entry: Entry,
}

impl Repeated {
    fn open(path: &Path) -> Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            entry: Entry::open(path)?,
        })
    }

    /// What was measured of an entry should outlive an attempt to repeat it.
    fn check_place(&self, folder: &Path) -> Result<()> {
        if same_place(&self.path, folder) {
            return Err(Error::invalid(
                "--recipe",
                format!("`{}` would be replaced by its repeat", self.path.display()),
            )
            .hint("give another folder with --out, or another zoo with --zoo")
            .into());
        }
        Ok(())
    }

    fn check_model(&self, model: &Model) -> Result<()> {
        let of = &self.entry.metadata.model;
        self.check(
            "other weights",
            &of.weights_fingerprint,
            &model.weights_fingerprint()?,
            "say with --model where those are",
        )?;
        self.check(
            "another configuration",
            &of.config_sha256,
            model.config_sha256(),
            "say with --model where that is",
        )
    }

    fn check_tokens(&self, corpus: &Corpus, tokenizer: &Tokenizer, flags: &[String]) -> Result<()> {
        let of = &self.entry.metadata.calibration;
        self.check(
            "another tokenizer",
            &of.tokenizer_sha256,
            tokenizer.sha256(),
            "say with --model where that is",
        )?;
        let choosing: Vec<_> = flags
            .iter()
            .filter(|flag| CHOOSE_TOKENS.contains(&flag.as_str()))
            .map(|flag| format!("--{flag}"))
            .collect();
        let step = if choosing.is_empty() {
            "say with --data where those are".to_owned()
        } else {
            format!(
                "leave out {}, for what the entry was made with",
                choosing.join(" and ")
            )
        };
        self.check(
            "other calibration tokens",
            &of.token_ids_sha256,
            &corpus.token_ids_sha256,
            &step,
        )
    }

    fn check(&self, what: &str, recorded: &str, now: &str, step: &str) -> Result<()> {
        if recorded == now {
            return Ok(());
        }
        let path = self.path.display();
        let settings = self.path.join(zoo::RECIPE);
        let hint = if settings.exists() {
            format!(
                "{step}; for the settings alone, give --recipe {}",
                settings.display()
            )
        } else {
            step.to_owned()
        };
        Err(Error::invalid(
            format!("--recipe {path}"),
            format!("{what} than it was made with ({now}, not {recorded}): no repeat of it"),
        )
        .hint(hint)
        .into())
    }

    /// Whether `entry` has the same tensors; warns where it has not.
    fn is_repeated_by(&self, entry: &Entry) -> bool {
        let (then, now) = (&self.entry.metadata, &entry.metadata);
        if then.content_sha256 == now.content_sha256 {
            return true;
        }
        let arithmetic = |m: &zoo::Metadata| {
            let c = &m.calibration;
            format!(
                "{} on {} by algorithm {}",
                c.dtype, c.device, m.tool.algorithm
            )
        };
        let path = self.path.display();
        match self.entry.distance(entry) {
            Some(apart) if apart < ROUNDING => eprintln!(
                "warning: the tensors are those of `{path}` but for rounding, as on another machine: numbers differ by at \
                 most {apart:.1e} of the largest in their tensor"
            ),
            _ if arithmetic(then) != arithmetic(now) => eprintln!(
                "warning: the tensors are not those of `{path}`: it was made in {}, this in {}; `oscar diff` says what \
                 that changes",
                arithmetic(then),
                arithmetic(now)
            ),
            _ => eprintln!(
                "warning: the tensors are not those of `{path}`: a flag changed its settings, or this is another version; \
                 `oscar diff` says what that changes"
            ),
        }
        false
    }
}
