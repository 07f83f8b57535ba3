//! The `oscar` command: parse, run, map errors to exit codes.

use std::process::ExitCode;

use clap::Parser;
use oscar_kv::cli::{self, Cli};

fn main() -> ExitCode {
    match cli::run(&Cli::parse()) {
        Ok(outcome) => outcome.into(),
        Err(error) if cli::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", cli::message(&error));
            ExitCode::from(2)
        }
    }
}
