//! Layer-streamed collection of moments, and fitting of zoo entries from them.

pub mod accumulate;
mod container;
pub mod moments;

/// Shape of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Dims {
    /// Query heads that read one KV head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}
