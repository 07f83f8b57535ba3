//! `oscar export`: a zoo entry into the files of another engine.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ValueEnum;

use super::Outcome;
use super::common::{Format, print, print_json};
use crate::zoo::formats::{Orthogonal, Target, gguf, sglang_pt};
use crate::zoo::{Entry, SideName};
use crate::{Error, files};

/// Write a zoo entry in the format of another engine.
///
/// Today's engines take one orthogonal matrix for keys and queries alike, and one clip ratio a side. Of an entry that
/// needs more, the error names the command that fits one that does not.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The entry's folder or its rotations.safetensors
    entry: PathBuf,

    /// Engine that is to read it
    #[arg(long, value_enum, value_name = "TARGET")]
    to: To,

    /// GGUF file of the model, which is copied with the rotations appended
    #[arg(long, value_name = "FILE", required_if_eq("to", "gguf"))]
    base: Option<PathBuf>,

    /// Go without what the engine lacks and accuracy alone depends on: feedback rounding, centering, clip ratios of
    /// their own
    #[arg(long)]
    lossy: bool,

    /// Folder for `sglang`, file for the others
    #[arg(short, long, value_name = "PATH", help_heading = "Output")]
    out: PathBuf,

    /// Replace files that are there
    #[arg(long, help_heading = "Output")]
    force: bool,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum To {
    /// Two .pt files for SGLang's OSCAR path, and a script that serves with them
    Sglang,
    /// A copy of a GGUF file with the rotations appended, for llama.cpp's OSCAR branch
    Gguf,
    /// One .safetensors file of rotations alone
    SafetensorsOrthogonal,
}

pub fn run(args: &Args) -> Result<Outcome> {
    if args.base.is_some() && args.to != To::Gguf {
        return Err(Error::invalid("--base", "only --to gguf copies a file").into());
    }
    let entry = Entry::open(&args.entry)?;
    let target = match args.to {
        To::Sglang => Target::Sglang,
        To::Gguf => Target::Gguf,
        To::SafetensorsOrthogonal => Target::Safetensors,
    };
    let export = Orthogonal::new(&entry, target, args.lossy)?;
    for loss in &export.losses {
        eprintln!("warning: {loss}");
    }
    let (written, hint) = match args.to {
        To::Sglang => sglang(&export, args)?,
        To::Gguf => gguf(&export, args)?,
        To::SafetensorsOrthogonal => {
            vacant(&args.out, args.force)?;
            let bytes = export.to_safetensors()?;
            files::write_atomic(&args.out, |out| out.write_all(&bytes))?;
            (vec![args.out.clone()], None)
        }
    };
    let written: Vec<String> = written
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    match args.format {
        Format::Text => {
            let mut text = String::new();
            for path in &written {
                writeln!(text, "wrote    {path}")?;
            }
            if let Some(hint) = hint {
                writeln!(text, "serve    {hint}")?;
            }
            print(&text)?;
        }
        Format::Json => print_json(&serde_json::json!({
            "files": written,
            "k_clip": export.k_clip,
            "v_clip": export.v_clip,
            "losses": export.losses,
            "serve": hint,
        }))?,
    }
    Ok(Outcome::Fine)
}

/// Refuses to replace a file.
fn vacant(path: &Path, force: bool) -> Result<()> {
    if path.is_dir() {
        return Err(Error::invalid(
            path.display(),
            "is a folder, and a file is to be written there",
        )
        .into());
    }
    if path.exists() && !force {
        return Err(Error::invalid(path.display(), "exists already")
            .hint("choose another place, or pass --force to replace it")
            .into());
    }
    Ok(())
}

type Written = (Vec<PathBuf>, Option<String>);

fn sglang(export: &Orthogonal, args: &Args) -> Result<Written> {
    let path = |side| args.out.join(sglang_pt::file_name(export, side));
    let script = args.out.join("serve.sh");
    let paths = vec![path(SideName::K), path(SideName::V), script.clone()];
    for path in &paths {
        vacant(path, args.force)?;
    }
    for side in SideName::ALL {
        files::write_atomic(&path(side), |out| sglang_pt::write(export, side, out))?;
    }
    let text = sglang_pt::serve_script(export);
    files::write_atomic(&script, |out| out.write_all(text.as_bytes()))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))
            .map_err(Error::io("make executable", &script))?;
    }
    let hint = script.display().to_string();
    Ok((paths, Some(hint)))
}

fn gguf(export: &Orthogonal, args: &Args) -> Result<Written> {
    let Some(base) = &args.base else {
        return Err(Error::invalid("--base", "--to gguf needs the GGUF file of the model").into());
    };
    if fs::canonicalize(base).ok() == fs::canonicalize(&args.out).ok() && args.out.exists() {
        return Err(Error::invalid("--out", "is the base file itself")
            .hint("give another name")
            .into());
    }
    vacant(&args.out, args.force)?;
    gguf::append(export, base, &args.out)?;
    if export.k_clip.total_cmp(&export.v_clip).is_ne() {
        eprintln!(
            "warning: llama.cpp's OSCAR branch takes one clip ratio: {} stands in for {} of keys and {} of values",
            gguf::clip(export),
            export.k_clip,
            export.v_clip
        );
    }
    let mut command = String::new();
    for (name, value) in gguf::environment(export) {
        write!(command, "{name}={value} ")?;
    }
    command.push_str("llama-server --cache-type-k q2_0 --cache-type-v q2_0 -m ");
    command.push_str(&args.out.display().to_string());
    Ok((vec![args.out.clone()], Some(command)))
}
