//! Zoo entries: schema, safetensors I/O, verification.

mod entry;
mod schema;
mod verify;

pub use entry::{Entry, FILE, Head, Layer, Side, SideName};
pub use schema::{
    Calibration, Fit, FitSide, KMoment, Metadata, Method, ModelInfo, Quantizer, Rounding, SCHEMA,
    Scope, Tool, VMoment, Windows,
};
pub use verify::{Check, verify};
