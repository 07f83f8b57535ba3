//! The command line: one file a subcommand, from arguments to library calls.

mod against;
mod bench;
mod calibrate;
mod card;
mod check;
mod collect;
mod common;
mod devices;
mod diff;
mod entry_recipe;
mod export;
mod fit;
mod generate;
mod import;
mod inspect;
mod progress;
#[cfg(feature = "hub")]
mod publish;
#[cfg(feature = "hub")]
mod pull;
pub mod recipe;
mod report;
mod shell;
mod validate;
mod verify;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::interrupt;

/// Calibrate 2-bit KV caches that keep a model's answers.
///
/// Runs a model over calibration prompts one layer at a time, fits rotations, clips and feedback matrices for its
/// keys and values, writes them as a zoo entry, and measures what an INT2 cache with that entry costs.
#[derive(Parser, Debug)]
#[command(
    name = "oscar",
    version,
    propagate_version = true,
    arg_required_else_help = true
)]
#[command(
    after_help = "Exit codes: 0 fine, 1 a check failed (a threshold, a damaged entry), 2 bad usage, input or environment."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,

    /// TOML file of arguments, under a table a command; flags win
    ///
    /// `[calibrate]`, `[bench.decode]`, … hold the long flags of their command: text in quotes, numbers, true for
    /// switches, lists for flags that repeat; and positional arguments by the name that help shows, in lower case. What
    /// the command line gives too, or excludes, is left out, and what neither gives has its default. Paths are as on the
    /// command line: relative to the working directory.
    ///
    /// A switch that a recipe turns on stays on.
    ///
    /// `calibrate` takes an entry's folder, too, and repeats its calibration: inputs that are not the recorded ones are an
    /// error. ENTRY/recipe.toml takes its settings only.
    #[arg(
        long,
        global = true,
        value_name = "FILE|ENTRY",
        help_heading = "Recipe",
        display_order = 1000
    )]
    recipe: Option<PathBuf>,
}

#[derive(Subcommand, Debug)]
enum Command {
    Calibrate(calibrate::Args),
    Collect(collect::Args),
    Fit(fit::Args),
    Validate(validate::Args),
    Generate(generate::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Report(report::Args),
    Card(card::Args),
    Diff(diff::Args),
    Check(check::Args),
    Import(import::Args),
    Export(export::Args),
    #[cfg(feature = "hub")]
    Publish(publish::Args),
    #[cfg(feature = "hub")]
    Pull(pull::Args),
    Devices(devices::Args),
    Bench(bench::Args),
    Completions(shell::CompletionsArgs),
    Man(shell::ManArgs),
}

/// How a command ended, where it ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything asked for was done, and every check held.
    Fine,
    /// A check failed: a threshold was passed, an entry is damaged.
    CheckFailed,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Fine => Self::SUCCESS,
            Outcome::CheckFailed => Self::from(1),
        }
    }
}

/// Parses a command line, program name first, and runs it.
///
/// # Errors
/// What goes wrong; [`clap::Error`] where the command line cannot be parsed, or asks for help.
pub fn run(words: impl IntoIterator<Item = OsString>) -> Result<Outcome> {
    let (cli, given) = recipe::parse(&words.into_iter().collect::<Vec<_>>())?;
    // The first Ctrl-C ends the run between two steps, the second at once. Where no handler can be set, all do.
    let _ = ctrlc::set_handler(|| {
        if interrupt::request() {
            std::process::exit(2);
        }
    });
    match &cli.command {
        Command::Calibrate(args) => calibrate::run(args, &given),
        Command::Collect(args) => collect::run(args),
        Command::Fit(args) => fit::run(args, &given),
        Command::Validate(args) => validate::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Report(args) => report::run(args),
        Command::Card(args) => card::run(args),
        Command::Diff(args) => diff::run(args),
        Command::Check(args) => check::run(args),
        Command::Import(args) => import::run(args),
        Command::Export(args) => export::run(args),
        #[cfg(feature = "hub")]
        Command::Publish(args) => publish::run(args),
        #[cfg(feature = "hub")]
        Command::Pull(args) => pull::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Completions(args) => shell::completions(args),
        Command::Man(args) => shell::man(args),
    }
}

/// What went wrong, and its causes where they say more. Names come from files: their control characters are escaped.
pub fn message(error: &anyhow::Error) -> String {
    let mut message = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if message.is_empty() {
            message = cause;
        } else if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message.chars().fold(String::new(), |mut shown, c| {
        if c.is_control() && c != '\n' {
            shown.extend(c.escape_debug());
        } else {
            shown.push(c);
        }
        shown
    })
}

/// Whether the reader of standard output went away (`oscar inspect … | head`), which is no failure.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
