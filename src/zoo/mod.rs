//! Zoo entries: schema, safetensors I/O, verification, and other engines' formats.

mod entry;
pub mod formats;
#[cfg(feature = "hub")]
pub mod hub;
mod schema;
mod verify;

pub use entry::{Entry, FILE, FILES, Head, Layer, RECIPE, Side, SideName};
pub use schema::{
    Calibration, Fit, FitSide, Imported, ImportedFile, KMoment, Metadata, Method, ModelInfo,
    Quantizer, Rounding, SCHEMA, Scope, Tool, VMoment, Windows,
};
pub use verify::{Check, examine, verify};
