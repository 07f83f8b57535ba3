//! Decoder-only language models, one layer at a time.
//!
//! [`Model::open`] reads headers alone; [`Model::layer`] loads one layer's weights, and [`DecoderLayer::forward`]
//! runs hidden states through it, handing q, k, v to the one seam, [`Attention`].

mod attention;
mod config;
mod decoder;
mod dense;
mod gguf;
mod hub;
mod open;
mod rope;
mod sequence;
pub mod synthetic;
mod weights;

pub use attention::{Attention, FullAttention};
pub use config::Config;
#[cfg(feature = "cuda")]
pub(crate) use decoder::Turns;
pub use decoder::{Batch, DecoderLayer, LmHead};
pub use gguf::Layout as GgufLayout;
pub use open::{Model, OpenOptions, Sizes, TokenizerSource};
pub use rope::{Rope, RopeScaling};
pub use sequence::PackedSequence;
