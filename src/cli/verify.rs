//! `oscar verify`: does an entry or a moments file keep every promise of its format?

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::common::{Format, entry_folder, is_moments, print, print_json};
use super::{Outcome, entry_recipe};
use crate::calib::Moments;
use crate::zoo;

/// Check everything that an entry (or a moments file) promises.
///
/// Header and schema, tensor names, shapes and types, completeness, finite values, encode against its inverse,
/// feedback, clip ratios, content hash, and that recipe.toml says the same. Ends with 1 where a check fails.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// An entry's folder or its rotations.safetensors, or a moments file
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

#[derive(serde::Serialize)]
struct Verdict {
    path: String,
    sound: bool,
    checks: Vec<Line>,
}

#[derive(serde::Serialize)]
struct Line {
    name: String,
    problems: Vec<String>,
}

pub fn run(args: &Args) -> Result<Outcome> {
    // A path that cannot be read should not hide what the others hold.
    let (mut verdicts, mut unreadable) = (Vec::new(), None);
    for path in &args.paths {
        match checks(path) {
            Ok(checks) => verdicts.push(Verdict {
                path: path.display().to_string(),
                sound: checks.iter().all(|check| check.problems.is_empty()),
                checks,
            }),
            Err(error) => {
                unreadable.get_or_insert(error);
            }
        }
    }

    match args.format {
        _ if verdicts.is_empty() => {}
        Format::Json => print_json(&verdicts)?,
        Format::Text => {
            let mut text = String::new();
            for verdict in &verdicts {
                let word = if verdict.sound { "sound" } else { "DAMAGED" };
                writeln!(text, "{}: {word}", verdict.path)?;
                for check in &verdict.checks {
                    let mark = if check.problems.is_empty() {
                        "ok"
                    } else {
                        "FAILED"
                    };
                    writeln!(text, "  {mark:<7} {}", check.name)?;
                    for problem in &check.problems {
                        writeln!(text, "          {problem}")?;
                    }
                }
            }
            print(&text)?;
        }
    }
    if let Some(error) = unreadable {
        return Err(error);
    }
    Ok(if verdicts.iter().all(|verdict| verdict.sound) {
        Outcome::Fine
    } else {
        Outcome::CheckFailed
    })
}

fn checks(path: &Path) -> Result<Vec<Line>> {
    if is_moments(path)? {
        let problem = Moments::open(path)
            .and_then(|moments| moments.verify())
            .err();
        return Ok(vec![Line {
            name: "moments".to_owned(),
            problems: problem.iter().map(ToString::to_string).collect(),
        }]);
    }
    let (entry, checks) = zoo::examine(path)?;
    let mut lines: Vec<Line> = checks
        .into_iter()
        .map(|check| Line {
            name: check.name.to_owned(),
            problems: check.problems,
        })
        .collect();
    if let Some(entry) = entry
        && let Some(problems) = entry_recipe::problems(entry_folder(path)?, &entry)
    {
        lines.push(Line {
            name: "recipe".to_owned(),
            problems,
        });
    }
    Ok(lines)
}
