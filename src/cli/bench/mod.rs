//! `oscar bench`: what this machine makes of our programs.

mod collect;
mod synthesize;

use anyhow::Result;
use clap::Subcommand;

use super::Outcome;

/// Measure this machine, on random models of any shape.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Collect(collect::Args),
    Synthesize(synthesize::Args),
}

pub fn run(args: &Args) -> Result<Outcome> {
    match &args.command {
        Command::Collect(args) => collect::run(args),
        Command::Synthesize(args) => synthesize::run(args),
    }
}
