//! `oscar collect`: a model and prompts into a moments file.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::Outcome;
use super::common::{CalibrationDataArgs, Format, ModelArgs, print, print_json};
use super::progress::Meter;
use crate::calib::collect::DEFAULT_SAMPLE_ROWS;
use crate::calib::{CollectOptions, collect, plan};
use crate::data::{Corpus, Tokenizer};
use crate::model::Model;

/// Run a model over prompts, one layer at a time, and keep the moments of its queries, keys, values and outputs.
///
/// Memory is one layer and the hidden states, whatever the model's size. Every finished layer is kept: after Ctrl-C,
/// a crash or kill -9 the same command goes on where it stopped, and ends with the same bytes.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    data: CalibrationDataArgs,

    /// The moments file to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,

    #[command(flatten)]
    run: RunArgs,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

/// How to collect; shared with `oscar calibrate`.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Run")]
pub struct RunArgs {
    /// Tokens whose q, k, v and o are kept for inspection
    #[arg(long, value_name = "TOKENS", default_value_t = DEFAULT_SAMPLE_ROWS)]
    sample_rows: usize,

    /// Start over instead of going on with what an earlier run left
    #[arg(long)]
    fresh: bool,

    /// Only check what is given, and say what the run will take
    #[arg(long)]
    pub dry_run: bool,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let model = args.model.open()?;
    let tokenizer = Tokenizer::load(&model)?;
    let corpus = args.data.read(&model, &tokenizer)?;
    if args.run.dry_run {
        let prompts = (&tokenizer, &corpus);
        return dry_run(&model, prompts, &args.run, &args.out, args.format);
    }
    let path = moments(&model, &tokenizer, &corpus, &args.run, &args.out)?;
    match args.format {
        Format::Text => print(&format!("moments in {}", path.display()))?,
        Format::Json => print_json(&serde_json::json!({ "moments": path.display().to_string() }))?,
    }
    Ok(Outcome::Fine)
}

/// Collects into `out`; shared with `oscar calibrate`.
pub fn moments(
    model: &Model,
    tokenizer: &Tokenizer,
    corpus: &Corpus,
    run: &RunArgs,
    out: &Path,
) -> Result<PathBuf> {
    let options = options(run, out, tokenizer.sha256());
    Ok(collect(model, corpus, &options, &mut Meter::new())?.path)
}

/// Prints what a run would take; shared with `oscar calibrate`.
pub fn dry_run(
    model: &Model,
    (tokenizer, corpus): (&Tokenizer, &Corpus),
    run: &RunArgs,
    out: &Path,
    format: Format,
) -> Result<Outcome> {
    let plan = plan(model, corpus, &options(run, out, tokenizer.sha256()))?;
    match format {
        Format::Text => print(&plan.to_string())?,
        Format::Json => print_json(&plan)?,
    }
    Ok(Outcome::Fine)
}

fn options(run: &RunArgs, out: &Path, tokenizer_sha256: &str) -> CollectOptions {
    CollectOptions {
        sample_rows: run.sample_rows,
        fresh: run.fresh,
        ..CollectOptions::new(out, tokenizer_sha256)
    }
}
