//! A whole decode step: all layers of a model over a long cache, and the next token's logits.

use std::time::Instant;

use candle_core::Tensor;
use candle_core::cuda_backend::cudarc::driver::Profiler;
use serde::Serialize;

use super::random::Random;
use super::{Stopwatch, driver, percentile};
use crate::Result;
use crate::serve::Engine;

/// Tokens that enter the cache at once while it is filled.
const CHUNK: usize = 4096;
const WARM_UP: usize = 4;

/// What [`step`] measured.
#[derive(Clone, Debug, Serialize)]
pub struct StepTimes {
    /// Tokens before the first step.
    pub context: usize,
    /// From token to token: embedding, layers, head, and the likeliest token back on the host.
    pub ms_median: f64,
    pub ms_p10: f64,
    pub ms_p90: f64,
    pub steps: usize,
    /// That the sequence holds, sink, history and recent.
    pub cache_bytes: usize,
    /// Whether the layers were one CUDA graph.
    pub graph: bool,
    /// The graph alone on the device, between two events, its median; with a cold L2.
    pub graph_ms: Option<f64>,
    /// Why not, where they should have been.
    pub graph_warning: Option<String>,
}

/// Pages that a sequence of `context` tokens and the measured steps need must be in the engine's pool. A profiler that
/// waits to be told to begin sees the last step, where kernels are launched one by one.
///
/// # Errors
/// Out of pages; a pool that is not on a GPU; those of the steps.
pub fn step(mut engine: Engine, context: usize, steps: usize, graph: bool) -> Result<StepTimes> {
    let sequence = engine.pool.create();
    // Nobody reads what the text would have been: the pages are taken, and filled with random numbers.
    for start in (0..context).step_by(CHUNK) {
        engine
            .pool
            .begin(&[(sequence, CHUNK.min(context - start))])?;
        engine.pool.finish()?;
    }
    let device = engine.resident().model().device().as_cuda_device()?.clone();
    let random = Random::new(&device)?;
    if let Some(pages) = engine.pool.gpu_pages() {
        random.codes(pages.int2, pages.layout)?;
        random.numbers(&mut pages.bf16.slice_mut(..), 1.0)?;
    }
    if !graph {
        engine = engine.without_graphs();
    }
    let mut token = 1;
    let mut times = Vec::new();
    let last = WARM_UP + steps.max(1) - 1;
    for step in 0..=last {
        let _seen = (step == last && !graph)
            .then(Profiler::new)
            .transpose()
            .map_err(driver)?;
        let start = Instant::now();
        let hidden = engine.step(&[(sequence, &[token])])?;
        let logits: Tensor = engine.logits(&hidden)?;
        token = logits.argmax(1)?.to_vec1::<u32>()?[0];
        if step >= WARM_UP {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    times.sort_by(f64::total_cmp);
    let graph_ms = if engine.replay_again()? {
        let mut watch = Stopwatch::new(&device)?;
        let timed = watch.time(steps, 0, &mut || engine.replay_again().map(|_| ()))?;
        Some(timed.us_median / 1e3)
    } else {
        None
    };
    let graph_warning = engine.graph_warning();
    Ok(StepTimes {
        context,
        ms_median: percentile(&times, 0.5),
        ms_p10: percentile(&times, 0.1),
        ms_p90: percentile(&times, 0.9),
        steps: times.len(),
        cache_bytes: engine.pool.sequence_bytes(sequence)?,
        graph: graph && graph_warning.is_none(),
        graph_ms,
        graph_warning,
    })
}
