//! Layer-streamed collection of moments, and fitting of zoo entries from them.

mod container;
pub mod moments;
