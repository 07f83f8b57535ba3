//! The key-value cache: attention over it, how it lies in memory, and the pool that sequences share.

pub mod attention;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod page;
pub mod pool;
