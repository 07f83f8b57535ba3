//! Everything an entry promises, checked from its bytes.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::entry::{self, Entry, Layer, Side, SideName};
use super::schema::{Metadata, Scope};
use crate::linalg::{Op, View, matmul};
use crate::{Error, Result};

/// Largest |encode·queryᵀ − I| entry that f32 storage explains.
const INVERSE_TOLERANCE: f64 = 2e-3;

/// One promise of the format, and where an entry breaks it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    pub name: &'static str,
    /// Each names layer, side and tensor; empty where the promise is kept.
    pub problems: Vec<String>,
}

impl Check {
    pub fn passed(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Checks the entry at `path` (its folder or file): header and schema, names, shapes and types, completeness, finite
/// values, encode against its inverse, feedback, clip ratios, content hash. Checks that an earlier failure leaves
/// nothing to work on are not in the list.
///
/// # Errors
/// Only where the file cannot be read.
pub fn verify(path: &Path) -> Result<Vec<Check>> {
    let file = entry::file_of(path);
    let bytes = fs::read(&file).map_err(Error::io("read", &file))?;
    Ok(read(&file, &bytes).1)
}

/// The entry where its structure can be read, and all checks.
pub(super) fn read(file: &Path, bytes: &[u8]) -> (Option<Entry>, Vec<Check>) {
    todo!("{file:?} {bytes:?}")
}
