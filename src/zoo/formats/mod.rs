//! Formats of other engines, read and written.

pub mod gguf;
mod import;
mod orthogonal;
pub mod sglang_pt;

pub use import::{ImportOptions, Imported, import};
pub use orthogonal::{Misfit, Orthogonal, OrthogonalLayer, Target};
