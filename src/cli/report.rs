//! `oscar report`: an entry on one page, and its figures as files.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;

use super::Outcome;
use super::common::{Format, entry_folder, print, print_json};
use crate::Error;
use crate::files::write_atomic;
use crate::report;

/// Show an entry on one page: what it costs, where its errors lie, and what it was made from.
///
/// Writes report.html into the entry's folder: one file that needs no network. What `oscar validate` measured is in it;
/// without that, the page says what is missing and shows the rest.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The entry's folder
    entry: PathBuf,

    /// Where the page goes; report.html in the entry's folder where not given
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    out: Option<PathBuf>,

    /// Write the figures as SVG files into a folder, too
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    svg: Option<PathBuf>,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let folder = entry_folder(&args.entry)?;
    let inputs = report::Inputs::read(folder)?;
    let page = inputs.page()?;
    let out = args
        .out
        .clone()
        .unwrap_or_else(|| folder.join(report::FILE));
    let html = page.html()?;
    write_atomic(&out, |file| file.write_all(html.as_bytes()))?;

    let mut figures = Vec::new();
    if let Some(folder) = &args.svg {
        fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
        for (name, svg) in page.svgs() {
            let path = folder.join(name);
            write_atomic(&path, |file| file.write_all(svg.as_bytes()))?;
            figures.push(path.display().to_string());
        }
    }
    if !inputs.missing.is_empty() {
        eprintln!(
            "note: {} `oscar validate {} --model MODEL` measures it",
            inputs.missing,
            folder.display()
        );
    }
    let written = out.display().to_string();
    match args.format {
        Format::Text if figures.is_empty() => print(&format!("report   {written}"))?,
        Format::Text => print(&format!(
            "report   {written}\nfigures  {}",
            figures.join("\n         ")
        ))?,
        Format::Json => print_json(&serde_json::json!({
            "report": written,
            "figures": figures,
            "measured": inputs.missing.is_empty(),
        }))?,
    }
    Ok(Outcome::Fine)
}
