//! The `oscar` command: parse, run, map errors to exit codes.

use std::process::ExitCode;

use oscar_kv::cli;

fn main() -> ExitCode {
    match cli::run(std::env::args_os()) {
        Ok(outcome) => outcome.into(),
        Err(error) if cli::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => match error.downcast::<clap::Error>() {
            Ok(usage) => usage.exit(),
            Err(error) => {
                eprintln!("error: {}", cli::message(&error));
                ExitCode::from(2)
            }
        },
    }
}
