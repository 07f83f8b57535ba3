//! Offline calibration of rotations for 2-bit KV caches.
//!
//! ```text
//!  prompts ──data──▶ token ids ──model (one layer at a time)──▶ q, k, v, o ──calib──▶ moments
//!                                                                                      │
//!               eval ──▶ KL, perplexity, top-1 ◀──kv──quant◀──zoo entry◀──rotation◀────┘
//! ```
//!
//! Modules stand in the order in which data flows, and import only those below them.

pub mod calib;
pub mod cli;
pub mod data;
pub mod eval;
pub mod kv;
pub mod model;
pub mod quant;
pub mod rotation;
pub mod zoo;

mod error;
pub mod files;
pub mod interrupt;
pub mod linalg;

pub use error::{Error, Result};
