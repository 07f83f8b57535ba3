//! Methods that `oscar validate` compares with, by name.

use std::path::Path;

use anyhow::Result;

use crate::Error;
use crate::calib::Moments;
use crate::calib::fit::{FitOptions, fit};
use crate::eval::{EvalMethod, check_entry};
use crate::model::Model;
use crate::zoo::Entry;

const NAMES: [&str; 5] = ["naive", "hadamard", "oscar", "kivi", "turboquant"];

/// The methods that `name` stands for: one of [`NAMES`], or the folder of an entry.
pub fn methods(name: &str, model: &Model, moments: Option<&Moments>) -> Result<Vec<EvalMethod>> {
    let head_dim = model.config().head_dim;
    Ok(match name {
        "naive" => vec![EvalMethod::naive(head_dim)?],
        "hadamard" => vec![EvalMethod::hadamard(head_dim)?],
        "oscar" => {
            let Some(moments) = moments else {
                return Err(Error::invalid(
                    "--against oscar",
                    "needs the moments it is fitted from",
                )
                .hint("give --moments FILE, as `oscar collect` or `oscar calibrate` wrote it")
                .into());
            };
            vec![EvalMethod::from_entry(
                name,
                &fit(moments, &FitOptions::released())?.entry,
            )?]
        }
        "kivi" => vec![EvalMethod::kivi(head_dim)],
        "turboquant" => vec![
            EvalMethod::turboquant(head_dim, 2)?,
            EvalMethod::turboquant(head_dim, 3)?,
        ],
        path if Path::new(path).exists() => {
            let entry = Entry::open(Path::new(path))?;
            for warning in check_entry(&entry, model)? {
                eprintln!("warning: {path}: {warning}");
            }
            let name = Path::new(path)
                .file_name()
                .map_or(path.into(), |name| name.to_string_lossy());
            vec![EvalMethod::from_entry(name.into_owned(), &entry)?]
        }
        _ => {
            return Err(Error::invalid(
                format!("--against {name}"),
                "neither a method nor a folder that exists",
            )
            .hint(format!(
                "give one of {}, or an entry's folder",
                NAMES.join(", ")
            ))
            .into());
        }
    })
}
