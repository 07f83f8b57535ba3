//! `oscar bench synthesize`: a checkpoint of random weights.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use indicatif::BinaryBytes;

use crate::cli::Outcome;
use crate::cli::common::print;
use crate::model::synthetic;

/// Write a checkpoint of random weights for a config.json: bf16 shards with outlier channels, and a byte tokenizer.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The config.json whose shape to take
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,

    /// The folder to write
    #[arg(short, long, value_name = "FOLDER")]
    out: PathBuf,

    /// The same seed gives the same bytes
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let begin = Instant::now();
    let bytes = synthetic::write(&args.config, &args.out, args.seed)?;
    let seconds = begin.elapsed().as_secs_f64();
    print(&format!(
        "{} of weights in {}, {seconds:.1} s",
        BinaryBytes(bytes),
        args.out.display()
    ))?;
    Ok(Outcome::Fine)
}
