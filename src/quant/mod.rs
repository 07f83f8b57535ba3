//! The INT2 codec: clip, round, pack, and count the bits.
//!
//! ```text
//! rows (n, d) ──clip──▶ scale, zero (bf16, one of each a group) ──round──▶ codes (n, d) ──pack──▶ bytes (n, d/4)
//! ```
//!
//! [`Codec`] is what the cache runs. [`lloyd_max`], [`kivi`] and [`turboquant`] are what it is measured against.

mod bits;
mod codec;
mod feedback;
pub mod kivi;
pub mod lloyd_max;
mod packing;
mod real;
pub mod turboquant;

pub use bits::{bits_per_element, with_windows};
pub use codec::{Codec, Encoded};
pub use feedback::{DAMPING, feedback_matrix, row_major};
pub use packing::Packed;
pub use real::Real;
