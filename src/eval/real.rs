//! The same windows through the cache that serves: a prefill of what stays exact, then token by token.

use std::sync::Arc;

use candle_core::Tensor;

use crate::data::Corpus;
use crate::kv::pool::{Pool, PoolShape, Transforms};
use crate::model::Model;
use crate::serve::{Engine, Resident};
use crate::zoo::Windows;
use crate::{Error, Result};

/// Windows that go on together, so that weights are read once for all of them.
const MAX_BATCH: usize = 64;

/// What a run over the cache tells.
pub(super) enum Told {
    /// So many more tokens went through all layers.
    Tokens(usize),
    /// Something runs more slowly than it might.
    Warning(String),
}

/// The shape of the pool, checked.
///
/// # Errors
/// An entry that does not fit, windows that are not whole pages.
pub(super) fn shape(
    model: &Model,
    transforms: &Arc<Transforms>,
    windows: Windows,
) -> Result<PoolShape> {
    let shape = PoolShape {
        layers: model.config().num_hidden_layers,
        dims: Resident::dims(model)?,
        windows,
        transforms: Some(Arc::clone(transforms)),
    };
    shape.rule()?;
    shape.page_bytes()?;
    Ok(shape)
}

/// The last layer's output (tokens, hidden) of every sequence of `corpus`, with the model's keys and values in a pool.
/// Rows of a window's last token, whose successor nobody knows, are zero.
///
/// # Errors
/// Those of [`shape`], too little memory; an interruption.
pub(super) fn serve(
    model: &Model,
    corpus: &Corpus,
    transforms: &Arc<Transforms>,
    windows: Windows,
    progress: &mut dyn FnMut(Told) -> Result<()>,
) -> Result<Vec<Tensor>> {
    let shape = shape(model, transforms, windows)?;
    let exact = windows.sink_tokens + windows.recent_tokens;
    let prompts: Vec<&[u32]> = corpus
        .sequences
        .iter()
        .flat_map(|sequence| {
            let mut rest = sequence.token_ids.as_slice();
            sequence.prompt_lens.iter().map(move |&len| {
                let (prompt, after) = rest.split_at(len);
                rest = after;
                prompt
            })
        })
        .collect();
    let longest = prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0);
    let resident = Resident::load(model)?;
    let capacity = shape.pages_for(prompts.len().min(MAX_BATCH), longest, exact)?;
    let pool = Pool::on(model.device(), shape, capacity)?;
    if let Some(warning) = pool.warning() {
        progress(Told::Warning(warning.to_owned()))?;
    }
    let mut engine = Engine::new(&resident, pool);
    let mut outputs = Vec::new();
    for prompts in prompts.chunks(MAX_BATCH) {
        outputs.extend(serve_together(&mut engine, prompts, exact, progress)?);
    }
    if let Some(warning) = engine.graph_warning() {
        progress(Told::Warning(warning))?;
    }
    let mut outputs = outputs.into_iter();
    corpus
        .sequences
        .iter()
        .map(|sequence| {
            let of_sequence: Vec<_> = outputs.by_ref().take(sequence.prompt_lens.len()).collect();
            Ok(Tensor::cat(&of_sequence, 0)?)
        })
        .collect()
}

/// (tokens, hidden) of every prompt.
fn serve_together(
    engine: &mut Engine,
    prompts: &[&[u32]],
    exact: usize,
    progress: &mut dyn FnMut(Told) -> Result<()>,
) -> Result<Vec<Tensor>> {
    let ids: Vec<_> = prompts.iter().map(|_| engine.pool.create()).collect();
    let mut outputs = vec![Vec::new(); prompts.len()];
    let mut at = 0;
    loop {
        // All that stays exact at once, and then a token a step.
        let next = if at == 0 { exact } else { at + 1 };
        let going: Vec<usize> = (0..prompts.len())
            .filter(|&i| at + 1 < prompts[i].len())
            .collect();
        if going.is_empty() {
            break;
        }
        let batch: Vec<_> = going
            .iter()
            .map(|&i| (ids[i], &prompts[i][at..next.min(prompts[i].len() - 1)]))
            .collect();
        let hidden = engine.step(&batch)?;
        let mut first = 0;
        for (&i, (_, tokens)) in going.iter().zip(&batch) {
            outputs[i].push(hidden.narrow(0, first, tokens.len())?);
            first += tokens.len();
        }
        progress(Told::Tokens(first))?;
        at = next;
    }
    for id in ids {
        engine.pool.free(id)?;
    }
    outputs
        .into_iter()
        .map(|rows| {
            let last = rows.last().ok_or_else(|| {
                Error::invalid("evaluation data", "a window holds a single token")
            })?;
            let last = last.narrow(0, 0, 1)?.zeros_like()?;
            Ok(Tensor::cat(&[&rows[..], &[last]].concat(), 0)?)
        })
        .collect()
}
