//! `oscar completions` and `oscar man`: what a shell and a manual reader need.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;

use super::common::print_bytes;
use super::{Cli, Outcome};

/// Print the completion script of a shell.
///
/// For bash: `oscar completions bash > ~/.local/share/bash-completion/completions/oscar`.
#[derive(clap::Args, Debug)]
pub struct CompletionsArgs {
    shell: Shell,
}

/// Print the manual page, or write one for every subcommand into a folder.
#[derive(clap::Args, Debug)]
pub struct ManArgs {
    /// Write `oscar.1`, `oscar-calibrate.1`, … into this folder instead
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub fn completions(args: &CompletionsArgs) -> Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "oscar", &mut script);
    print_bytes(&script)?;
    Ok(Outcome::Fine)
}

pub fn man(args: &ManArgs) -> Result<Outcome> {
    let command = Cli::command();
    if let Some(folder) = &args.out {
        std::fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(command, folder))
            .with_context(|| format!("cannot write manual pages into `{}`", folder.display()))?;
    } else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        print_bytes(&page)?;
    }
    Ok(Outcome::Fine)
}
