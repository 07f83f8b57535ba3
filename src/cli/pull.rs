//! `oscar pull`: an entry from a model hub.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;

use super::Outcome;
use super::common::{Format, print, print_json};
use super::progress::Transfer;
use crate::zoo::hub::{self, Locator, Wanted};
use crate::zoo::{self, Entry};
use crate::{Error, files};

/// Fetch an entry from Hugging Face or ModelScope.
///
/// The entry comes into the hub's cache (for Hugging Face the one that `hf` shares) and its folder is printed. The
/// hub's hashes and the entry's own are checked. With HF_HUB_OFFLINE=1 only the cache is asked.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Repository: hf:OWNER/NAME[@REVISION] or ms:OWNER/NAME[@REVISION]
    #[arg(value_name = "REPO")]
    from: Locator,

    /// Model that the entry is for, such as `owner/name`
    #[arg(short, long, value_name = "ID")]
    model: Option<String>,

    /// Which of a model's entries
    #[arg(short, long)]
    tag: Option<String>,

    /// Copy the entry's files to this folder
    #[arg(short, long, value_name = "DIR", help_heading = "Output")]
    out: Option<PathBuf>,

    /// Replace an entry of another model in --out
    #[arg(long, requires = "out", help_heading = "Output")]
    force: bool,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

pub fn run(args: &Args) -> Result<Outcome> {
    if let Some(out) = &args.out {
        Entry::check_folder(out)?;
    }
    let wanted = Wanted {
        model: args.model.clone(),
        tag: args.tag.clone(),
    };
    let transfer = Arc::new(Transfer::new());
    let watch: Arc<dyn hub::Watch> = transfer.clone();
    let pulled = hub::pull(&args.from, &wanted, &watch);
    transfer.finish();
    let pulled = pulled?;
    let folder = match &args.out {
        Some(out) => {
            copy(&pulled.folder, out, args.force)?;
            out
        }
        None => &pulled.folder,
    };
    match args.format {
        Format::Text => print(&format!(
            "entry    {}\nmodel    {}\ncommit   {}",
            folder.display(),
            pulled.model,
            pulled.commit
        ))?,
        Format::Json => print_json(&serde_json::json!({
            "entry": folder.display().to_string(),
            "model": pulled.model,
            "place": pulled.place,
            "commit": pulled.commit,
            "offline": pulled.offline,
        }))?,
    }
    Ok(Outcome::Fine)
}

/// The entry's files, and none of an older entry's.
fn copy(from: &Path, to: &Path, force: bool) -> Result<()> {
    let model = Entry::open(from)?.metadata.model;
    if !force {
        Entry::check_place(to, &model.id, &model.weights_fingerprint)?;
    }
    // Removed first: after a crash in between, an entry may lack metrics, but never have another's.
    for name in zoo::FILES.iter().filter(|name| **name != zoo::FILE) {
        let to = to.join(name);
        if to.is_file() {
            fs::remove_file(&to).map_err(Error::io("remove", &to))?;
        }
    }
    for name in zoo::FILES {
        let (from, to) = (from.join(name), to.join(name));
        if from.is_file() {
            let bytes = files::read(&from)?;
            files::write_atomic(&to, |out| out.write_all(&bytes))?;
        }
    }
    Ok(())
}
