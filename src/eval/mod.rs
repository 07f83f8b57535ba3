//! Teacher-forced evaluation of quantized caches against full precision.

mod basis;
pub mod diff;
mod methods;
pub mod metrics;
mod real;
mod report;
mod simulate;
mod thresholds;
pub mod tolerances;
mod validate;

pub use basis::{Basis, principal_cosines};
pub use methods::{Cache, EvalMethod, Side, check_entry};
pub use report::{
    LayerError, LayerMethodError, METRICS, MethodScore, Provenance, ReferenceScore, Report,
    significant, tokens,
};
pub use thresholds::{KlRatio, Thresholds};
pub use validate::{EvalOptions, Step, validate};
