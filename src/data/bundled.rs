//! The corpora of `calib_data/`, carried inside the binary so that an installed `oscar` needs no files beside it.

use include_dir::{Dir, include_dir};

use super::chat_template::ChatTemplate;
use super::prompts::{self, Prompt};
use crate::{Error, Result};

static CALIB_DATA: Dir = include_dir!("$CARGO_MANIFEST_DIR/calib_data");

/// Which of the two disjoint corpora.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Calibration,
    Evaluation,
}

/// All prompts of a bundled corpus, sorted by file name.
pub fn read(part: Part, template: Option<&ChatTemplate>) -> Result<Vec<Prompt>> {
    let folder = match part {
        Part::Calibration => "calibration",
        Part::Evaluation => "evaluation",
    };
    let mut files: Vec<_> = CALIB_DATA
        .get_dir(folder)
        .into_iter()
        .flat_map(Dir::files)
        .collect();
    files.sort_by_key(|file| file.path());
    let mut found = Vec::new();
    for file in files {
        let text = file.contents_utf8().ok_or_else(|| {
            Error::invalid(
                format!("bundled `{}`", file.path().display()),
                "not UTF-8 text",
            )
        })?;
        prompts::parse(file.path(), text, template, &mut found)?;
    }
    Ok(found)
}
