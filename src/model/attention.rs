use candle_core::Tensor;

use crate::{Result, kv};

/// The one seam of the decoder: calibration observes through it, evaluation simulates through it, serving plugs a
/// cache into it.
pub trait Attention {
    /// Attention of one packed sequence of one layer.
    ///
    /// `q` (tokens, heads, head_dim), `k` and `v` (tokens, kv_heads, head_dim), post-RoPE and post-q/k-norm,
    /// contiguous. `prompt_lens` sums to tokens: prompts never attend to each other. Scores are scaled by
    /// 1/√head_dim. Returns o (tokens, heads, head_dim) in the dtype of `q`, before the output projection.
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        prompt_lens: &[usize],
    ) -> Result<Tensor>;
}

/// Plain causal attention: the reference forward. Scores and softmax are f32 whatever the dtype.
#[derive(Clone, Copy, Debug, Default)]
pub struct FullAttention;

impl Attention for FullAttention {
    fn attend(
        &mut self,
        _layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        prompt_lens: &[usize],
    ) -> Result<Tensor> {
        Ok(kv::attention::tensor::causal(q, k, v, prompt_lens, false)?.0)
    }
}
