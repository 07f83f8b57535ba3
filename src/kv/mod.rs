//! The key-value cache: attention over it, and how it lies in memory.

pub mod attention;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod page;
