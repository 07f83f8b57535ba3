//! Blocked attention on the CPU.

use super::{Causal, Dims, plain};
use crate::Result;

/// Causal attention of a packed sequence (shapes as in the module's docs), with per-token attention weights where
/// `key_weights` asks for them (method.md: the moment `vsv`).
///
/// # Errors
/// Where slices do not fit `dims` and `prompt_lens`.
pub fn causal(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dims: Dims,
    prompt_lens: &[usize],
    key_weights: bool,
) -> Result<Causal> {
    dims.tokens(q, &[k, v], prompt_lens)?;
    let mut out = plain::causal(q, k, v, dims, prompt_lens);
    if !key_weights {
        out.key_weights = None;
    }
    Ok(out)
}

/// Attention as a cache with exact windows serves it: the query at position i of its prompt reads token j exactly
/// where j < `sink` or j > i − `recent`, and through `k_hat` and `v_hat` (decoded codes, shaped as k and v)
/// elsewhere, under one softmax. Returns o (tokens, heads, head_dim).
///
/// # Errors
/// Where slices do not fit `dims` and `prompt_lens`.
pub fn windowed(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    k_hat: &[f32],
    v_hat: &[f32],
    dims: Dims,
    prompt_lens: &[usize],
    sink: usize,
    recent: usize,
) -> Result<Vec<f32>> {
    dims.tokens(q, &[k, v, k_hat, v_hat], prompt_lens)?;
    Ok(plain::windowed(
        q,
        k,
        v,
        k_hat,
        v_hat,
        dims,
        prompt_lens,
        sink,
        recent,
    ))
}
