//! Decoder-only language models, one layer at a time.

mod attention;
mod sequence;

pub use attention::Attention;
pub use sequence::PackedSequence;
