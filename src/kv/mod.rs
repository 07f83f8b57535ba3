//! The key-value cache: attention over it, and how it lies in memory.

pub mod attention;
pub mod page;
