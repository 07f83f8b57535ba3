//! Transforms of keys and values toward what attention reads.
//!
//! Row vectors throughout: a key `k` (1, d) is encoded as `k · encode`, a query as `q · query`, and
//! `encode · queryᵀ = I` keeps every logit. All of it is f64. Matrices hold no NaN and no infinity, or the
//! function that makes them says why not.

pub mod balanced;
pub mod bit_reversal;
pub mod eigen;
pub mod hadamard;
pub mod oscar;
pub mod search;
mod sensitivity;
mod served;
pub mod spectrum;

pub use balanced::{Balanced, balanced};
pub use oscar::{Rotation, oscar};
pub use search::HeldOut;
pub use sensitivity::Sensitivity;
pub use served::Transform;
