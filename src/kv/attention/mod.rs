//! Causal attention of one layer on f32 slices: exact, and as a quantized cache serves it.
//!
//! q is (tokens, heads, head_dim), k and v are (tokens, kv_heads, head_dim), row-major and contiguous, post-RoPE.
//! Query head h reads KV head h / (heads / kv_heads). Prompts stand end to end and never attend to each other.
//! Scores are scaled by 1/√head_dim. [`plain`] is the definition; everything else is a faster way to the same numbers.
//!
//! Results do not depend on the number of threads. NaN and infinity propagate into the outputs of queries near them.

mod cpu;
pub(crate) mod exp;
pub mod plain;
mod probe;
pub mod tensor;

pub use cpu::{causal, windowed};
pub use probe::{Probe, ProbeError};

use crate::{Error, Result};

/// Shape of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Dims {
    /// # Errors
    /// Where a number is 0 or `kv_heads` does not divide `heads`.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Result<Self> {
        if heads == 0 || kv_heads == 0 || head_dim == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::invalid(
                "attention",
                format!("{heads} heads, {kv_heads} KV heads and head_dim {head_dim} do not fit each other"),
            )
            .hint("`heads` must be a multiple of `kv_heads`, and none may be 0"));
        }
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
        })
    }

    /// Query heads that read one KV head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Tokens of a packed sequence, after checking that every slice holds just that many.
    fn tokens(
        &self,
        q: &[f32],
        keys_and_values: &[&[f32]],
        prompt_lens: &[usize],
    ) -> Result<usize> {
        let Self {
            heads,
            kv_heads,
            head_dim,
        } = Self::new(self.heads, self.kv_heads, self.head_dim)?;
        let tokens = prompt_lens
            .iter()
            .fold(0_usize, |sum, &len| sum.saturating_add(len));
        let count = |heads: usize| tokens.checked_mul(heads)?.checked_mul(head_dim);
        let fits = |x: &[f32], heads| count(heads) == Some(x.len());
        if !fits(q, heads) || !keys_and_values.iter().all(|x| fits(x, kv_heads)) {
            return Err(Error::invalid(
                "attention",
                format!(
                    "prompts of {tokens} tokens with {heads} heads, {kv_heads} KV heads and head_dim {head_dim} \
                     do not fit {} query elements and {:?} key and value elements",
                    q.len(),
                    keys_and_values.iter().map(|x| x.len()).collect::<Vec<_>>(),
                ),
            ));
        }
        Ok(tokens)
    }
}

/// The tokens that the query at position `i` of its prompt reads from the history: all after the first `sink`, but for
/// the latest, of which it reads `recent` exactly, or up to `demote_tokens` − 1 fewer, since so many leave at a time.
#[inline(always)]
pub fn history(
    i: usize,
    sink: usize,
    recent: usize,
    demote_tokens: usize,
) -> std::ops::Range<usize> {
    let left = (i + 1).saturating_sub(sink.saturating_add(recent));
    let end = sink + left.next_multiple_of(demote_tokens.max(1));
    sink..end.min((i + 1).max(sink))
}

/// What [`causal`] returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Causal {
    /// (tokens, heads, head_dim)
    pub o: Vec<f32>,
    /// (tokens, kv_heads): Σ over the group's query heads and all queries of S², S = the probability that the query
    /// gives this token. Where asked for.
    pub key_weights: Option<Vec<f64>>,
}

/// Normal numbers of deviation `scale`, the same for the same seed.
#[cfg(test)]
fn random(seed: u64, n: usize, scale: f32) -> Vec<f32> {
    use rand::{RngExt, SeedableRng};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let uniforms = |_| (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0;
    (0..n).map(uniforms).map(|x| x * scale).collect()
}
