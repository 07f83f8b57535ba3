use candle_core::{DType, Tensor};
use candle_nn::ops::softmax_last_dim;

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
        if q.device().is_cpu() {
            return Ok(kv::attention::tensor::causal(q, k, v, prompt_lens, false)?.0);
        }
        on_device(q, k, v, prompt_lens)
    }
}

/// Query rows that see their scores at once.
const BLOCK_ROWS: usize = 256;

/// Any device, by candle's operations: blocks of query rows, so that no tensor holds all scores.
fn on_device(q: &Tensor, k: &Tensor, v: &Tensor, prompt_lens: &[usize]) -> Result<Tensor> {
    let (_, heads, head_dim) = q.dims3()?;
    let (_, kv_heads, _) = k.dims3()?;
    let group = heads / kv_heads;
    let scale = 1.0 / (head_dim as f64).sqrt();
    let f32_heads = |x: &Tensor, start: usize, len: usize| -> Result<Tensor> {
        let rows = x.narrow(0, start, len)?.to_dtype(DType::F32)?;
        Ok(rows.transpose(0, 1)?.contiguous()?)
    };
    let mut blocks = Vec::new();
    let mut prompt = 0;
    for &len in prompt_lens {
        let keys = f32_heads(k, prompt, len)?;
        let values = f32_heads(v, prompt, len)?;
        for first in (0..len).step_by(BLOCK_ROWS) {
            let rows = BLOCK_ROWS.min(len - first);
            let seen = first + rows;
            let mask: Vec<f32> = (first..seen)
                .flat_map(|t| (0..seen).map(move |j| if j > t { f32::NEG_INFINITY } else { 0.0 }))
                .collect();
            let mask =
                Tensor::from_vec(mask, (1, rows, seen), q.device())?.repeat((1, group, 1))?;
            // A group's query heads stand below each other, so that they share their KV head's product.
            let q =
                f32_heads(q, prompt + first, rows)?.reshape((kv_heads, group * rows, head_dim))?;
            let keys = keys.narrow(1, 0, seen)?.contiguous()?;
            let values = values.narrow(1, 0, seen)?.contiguous()?;
            let scores = (q.matmul(&keys.t()?)? * scale)?.broadcast_add(&mask)?;
            let o = softmax_last_dim(&scores)?
                .matmul(&values)?
                .reshape((heads, rows, head_dim))?;
            blocks.push(o.transpose(0, 1)?.contiguous()?);
        }
        prompt += len;
    }
    Ok(Tensor::cat(&blocks, 0)?.to_dtype(q.dtype())?)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn candle_operations_equal_the_cpu_attention() {
        let random = |heads| Tensor::randn(0f32, 1.0, (310, heads, 16), &Device::Cpu).unwrap();
        let (q, k, v) = (random(6), random(2), random(2));
        let prompts = [7, 300, 3];
        let a = on_device(&q, &k, &v, &prompts).unwrap();
        let b = FullAttention.attend(0, &q, &k, &v, &prompts).unwrap();
        let difference = (a - b).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f32>().unwrap() < 1e-5);
    }
}
