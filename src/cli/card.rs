//! `oscar card`: the generated README.md of entries and zoos.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::Outcome;
use super::common::{Format, print, print_json};
use crate::report::card;
use crate::{files, zoo};

/// Write the model card of an entry, or the index of a zoo and the cards of all its entries.
///
/// A card is README.md in the entry's folder, generated from its tensors and what `oscar validate` measured: front
/// matter that hubs read, provenance, use, the measured table, limits. `calibrate`, `fit`, `import` and `validate` write it, too.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Folders of entries or zoos
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,

    /// License to state, a hub's identifier such as apache-2.0; the one stated before where not given
    #[arg(long, value_name = "ID")]
    license: Option<String>,

    /// Write nothing; end with 1 where a card is not what would be written
    #[arg(long)]
    check: bool,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

#[derive(serde::Serialize)]
struct Written {
    path: String,
    changed: bool,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let mut written = Vec::new();
    let mut put = |folder: &Path, text: String| -> Result<()> {
        let path = folder.join(card::FILE);
        let changed = !path.exists() || files::read(&path)? != text.as_bytes();
        if changed && !args.check {
            card::put(&path, &text)?;
        }
        written.push(Written {
            path: path.display().to_string(),
            changed,
        });
        Ok(())
    };
    for path in &args.paths {
        let license = args.license.as_deref();
        if path.join(zoo::FILE).is_file() {
            put(path, card::card(path, license)?)?;
            continue;
        }
        let index = card::index(path)?;
        for folder in card::entries(path)? {
            put(&folder, card::card(&folder, license)?)?;
        }
        put(path, index)?;
    }
    let stale = written.iter().any(|card| card.changed);
    match args.format {
        Format::Json => print_json(&written)?,
        Format::Text => {
            let lines: Vec<String> = written
                .iter()
                .map(|card| {
                    let word = match (card.changed, args.check) {
                        (false, _) => "same   ",
                        (true, false) => "written",
                        (true, true) => "STALE  ",
                    };
                    format!("{word}  {}", card.path)
                })
                .collect();
            print(&lines.join("\n"))?;
        }
    }
    Ok(if args.check && stale {
        Outcome::CheckFailed
    } else {
        Outcome::Fine
    })
}
