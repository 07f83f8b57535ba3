//! The definition, in f64 and no speed: the twin that the blocked attention is tested against.

use super::{Causal, Dims};

/// See [`super::causal`].
///
/// # Panics
/// Where slices do not fit `dims` and `prompt_lens`.
pub fn causal(q: &[f32], k: &[f32], v: &[f32], dims: Dims, prompt_lens: &[usize]) -> Causal {
    attend(q, k, v, k, v, dims, prompt_lens, 0, 0, 1)
}

/// See [`super::windowed`].
///
/// # Panics
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
    demote_tokens: usize,
) -> Vec<f32> {
    attend(
        q,
        k,
        v,
        k_hat,
        v_hat,
        dims,
        prompt_lens,
        sink,
        recent,
        demote_tokens,
    )
    .o
}

fn attend(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    k_hat: &[f32],
    v_hat: &[f32],
    dims: Dims,
    prompt_lens: &[usize],
    sink: usize,
    recent: usize,
    demote_tokens: usize,
) -> Causal {
    let d = dims.head_dim;
    let mut o = vec![0.0; q.len()];
    let mut weights = vec![0.0; k.len() / d];
    let mut start = 0;
    for &len in prompt_lens {
        for (i, h) in (0..len).flat_map(|i| (0..dims.heads).map(move |h| (i, h))) {
            let query = ((start + i) * dims.heads + h) * d;
            let key = |j: usize| (start + j) * dims.kv_heads + h / dims.group();
            // Tokens leave `recent`, so many at a time, whenever it holds more than it may.
            let mut left = sink;
            while i + 1 > left + recent {
                left += demote_tokens;
            }
            let exact = |j: usize| j < sink || j >= left;
            let scores = (0..=i).map(|j| {
                let keys = &(if exact(j) { k } else { k_hat })[key(j) * d..][..d];
                dot(&q[query..query + d], keys) / (d as f64).sqrt()
            });
            for (j, s) in softmax(scores.collect()).into_iter().enumerate() {
                let values = &(if exact(j) { v } else { v_hat })[key(j) * d..][..d];
                for (o, &v) in o[query..query + d].iter_mut().zip(values) {
                    *o += s * f64::from(v);
                }
                weights[key(j)] += s * s;
            }
        }
        start += len;
    }
    Causal {
        o: o.into_iter().map(|x| x as f32).collect(),
        key_weights: Some(weights),
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(&a, &b)| f64::from(a) * f64::from(b))
        .sum()
}

fn softmax(scores: Vec<f64>) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let p: Vec<f64> = scores.into_iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = p.iter().sum();
    p.into_iter().map(|p| p / sum).collect()
}
