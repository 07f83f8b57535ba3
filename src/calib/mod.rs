//! Layer-streamed collection of moments, and fitting of zoo entries from them.

pub mod accumulate;
mod checkpoint;
pub mod collect;
mod container;
pub mod fit;
pub mod moments;
pub mod predict;
pub mod progress;
pub mod tensor_sums;

pub use collect::{CollectOptions, Collected, Plan, collect, model_info, plan};
pub use fit::{FitOptions, Fitted, fit};
pub use moments::Moments;
pub use progress::Progress;
