//! Teacher-forced evaluation of quantized caches against full precision.

mod methods;
pub mod metrics;
mod real;
mod report;
mod simulate;
mod thresholds;
mod validate;

pub use methods::{Cache, EvalMethod, Side, check_entry};
pub use report::{LayerError, LayerMethodError, MethodScore, Provenance, ReferenceScore, Report};
pub use thresholds::{KlRatio, Thresholds};
pub use validate::{EvalOptions, Step, validate};
