//! What a cache would do to attention's output on the held-out prompts of a moments file, without the model.

use super::fit::{factor, held_out};
use super::moments::Moments;
use crate::linalg::parallel;
use crate::rotation::search::{Objective, OutputError};
use crate::zoo::{SideName, Windows};
use crate::{Error, Result};

/// Every how manieth of the held-out queries is asked, as in the search of a fit.
const STEP: usize = 4;

/// What a cache of layer `layer` makes of a KV head's keys or values: rows (tokens, head_dim) in, rows out.
pub type Store<'a> = dyn Fn(usize, SideName, &[f32]) -> Result<Vec<f32>> + Sync + 'a;

/// Errors of attention's output after W_O, a KV head each, with keys alone and with values alone stored by `store`.
/// `None` for a head that nothing was held out for, or whose output projection is zero.
///
/// # Errors
/// Moments that cannot be read, and what `store` returns.
pub fn output_errors(
    moments: &Moments,
    layer: usize,
    windows: Windows,
    store: &Store<'_>,
) -> Result<Vec<Option<[OutputError; 2]>>> {
    let (found, holdout) = (moments.layer(layer)?, moments.holdout(layer)?);
    parallel(found.qq.len(), |head| {
        let prompts: Vec<_> = held_out(&found, &holdout, head, windows)
            .iter()
            .map(|prompt| prompt.thinned(STEP))
            .collect();
        let projection = &found.wo[head];
        if projection.iter().any(|x| !x.is_finite()) {
            return Err(Error::numeric(
                format!("layer {layer} KV head {head}"),
                "moment `wo` holds NaN or infinity",
            ));
        }
        if prompts.is_empty() || projection.trace() <= 0.0 {
            return Ok(None);
        }
        let factor = factor(projection)?;
        let objective = Objective::new(&prompts, &factor)?;
        let error = |side| objective.error_of(side, &|rows| store(head, side, rows));
        Ok(Some([error(SideName::K)?, error(SideName::V)?]))
    })
    .into_iter()
    .collect()
}
