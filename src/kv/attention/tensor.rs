//! Attention of candle tensors of any float dtype: q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim).
//! On the CPU their f32 slices go to the blocked attention; elsewhere candle's operations compute the same in f32.

use std::ops::{Deref, Range};

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use candle_nn::ops::softmax_last_dim;

use super::{Dims, history};
use crate::{Error, Result};

/// Elements of a block's scores over all heads, where candle computes them.
const BLOCK_SCORES: usize = 1 << 26;
const BLOCK_TOKENS: usize = 256;

/// Queries of a block in a prompt of `len` tokens.
fn block_tokens(heads: usize, len: usize) -> usize {
    (BLOCK_SCORES / (heads * len).max(1)).clamp(1, BLOCK_TOKENS)
}

/// Scores that stand in memory at once where candle computes them, in prompts of up to `len` tokens.
pub(crate) fn block_scores(heads: usize, len: usize) -> usize {
    heads * len * block_tokens(heads, len)
}

/// [`causal`](super::causal): o in the dtype and on the device of `q`, and the key weights (tokens, kv_heads) where
/// asked for.
///
/// # Errors
/// Where shapes do not fit each other, or the device fails.
pub fn causal(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    prompt_lens: &[usize],
    key_weights: bool,
) -> Result<(Tensor, Option<Vec<f64>>)> {
    let dims = dims(q, &[k, v], prompt_lens)?;
    let (dtype, [q, k, v]) = (q.dtype(), floats([q, k, v])?);
    let (o, weights) = if q.device().is_cpu() {
        let [q_slice, k, v] = [&q, &k, &v].map(slice);
        let out = super::causal(&q_slice, &k, &v, dims, prompt_lens, key_weights)?;
        (
            Tensor::from_vec(out.o, q.shape(), q.device())?,
            out.key_weights,
        )
    } else {
        let (o, weights) = by_candle(&q, &k, &v, None, dims, prompt_lens, key_weights)?;
        let weights = weights.map(|weights| weights.to_dtype(DType::F64)?.flatten_all()?.to_vec1());
        (o, weights.transpose()?)
    };
    Ok((o.to_dtype(dtype)?, weights))
}

/// As [`causal`], by candle's operations on any device, so that nothing leaves it: o (tokens, heads, head_dim) and the
/// key weights (tokens, kv_heads), both in f32.
///
/// # Errors
/// Where shapes do not fit each other, or the device fails.
pub fn causal_in_place(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    prompt_lens: &[usize],
    key_weights: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let dims = dims(q, &[k, v], prompt_lens)?;
    let [q, k, v] = floats([q, k, v])?;
    by_candle(&q, &k, &v, None, dims, prompt_lens, key_weights)
}

/// [`windowed`](super::windowed): o in the dtype and on the device of `q`.
///
/// # Errors
/// Where shapes do not fit each other, or the device fails.
pub fn windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    k_hat: &Tensor,
    v_hat: &Tensor,
    prompt_lens: &[usize],
    sink: usize,
    recent: usize,
    demote_tokens: usize,
) -> Result<Tensor> {
    let dims = dims(q, &[k, v, k_hat, v_hat], prompt_lens)?;
    let (dtype, [q, k, v, k_hat, v_hat]) = (q.dtype(), floats([q, k, v, k_hat, v_hat])?);
    let o = if q.device().is_cpu() {
        let [q_slice, k, v, k_hat, v_hat] = [&q, &k, &v, &k_hat, &v_hat].map(slice);
        let o = super::windowed(
            &q_slice,
            &k,
            &v,
            &k_hat,
            &v_hat,
            dims,
            prompt_lens,
            sink,
            recent,
            demote_tokens,
        )?;
        Tensor::from_vec(o, q.shape(), q.device())?
    } else {
        let hats = Hats {
            k: &k_hat,
            v: &v_hat,
            sink,
            recent,
            demote_tokens,
        };
        by_candle(&q, &k, &v, Some(hats), dims, prompt_lens, false)?.0
    };
    Ok(o.to_dtype(dtype)?)
}

fn dims(q: &Tensor, keys_and_values: &[&Tensor], prompt_lens: &[usize]) -> Result<Dims> {
    let (tokens, heads, head_dim) = q.dims3()?;
    let (_, kv_heads, _) = keys_and_values[0].dims3()?;
    let fit = |x: &&Tensor| x.dims() == [tokens, kv_heads, head_dim];
    if !keys_and_values.iter().all(fit) || prompt_lens.iter().sum::<usize>() != tokens {
        return Err(Error::invalid(
            "attention",
            format!(
                "prompts of {} tokens, q {:?}, k and v {:?} do not fit each other",
                prompt_lens.iter().sum::<usize>(),
                q.shape(),
                keys_and_values
                    .iter()
                    .map(|x| x.shape())
                    .collect::<Vec<_>>(),
            ),
        ));
    }
    Dims::new(heads, kv_heads, head_dim)
}

fn floats<const N: usize>(tensors: [&Tensor; N]) -> Result<[Tensor; N]> {
    let floats = tensors.map(|x| x.to_dtype(DType::F32)?.contiguous());
    let floats = floats
        .into_iter()
        .collect::<candle_core::Result<Vec<_>>>()?;
    Ok(floats.try_into().expect("as many as came in"))
}

/// A contiguous f32 tensor on the CPU, read where it lies.
struct Floats<S> {
    storage: S,
    range: Range<usize>,
}

fn slice(tensor: &Tensor) -> Floats<impl Deref<Target = Storage> + '_> {
    let (storage, layout) = tensor.storage_and_layout();
    let start = layout.start_offset();
    Floats {
        storage,
        range: start..start + tensor.elem_count(),
    }
}

impl<S: Deref<Target = Storage>> Deref for Floats<S> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(floats)) => &floats[self.range.clone()],
            _ => &[],
        }
    }
}

#[derive(Clone, Copy)]
struct Hats<'a> {
    k: &'a Tensor,
    v: &'a Tensor,
    sink: usize,
    recent: usize,
    demote_tokens: usize,
}

/// The same in candle's operations: contiguous f32 tensors on any device, blocks of queries against all tokens before.
/// Products are not rounded to TF32, and no order of summation depends on timing.
fn by_candle(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    hats: Option<Hats>,
    dims: Dims,
    prompt_lens: &[usize],
    key_weights: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let Dims {
        heads,
        kv_heads,
        head_dim: d,
    } = dims;
    let group = dims.group();
    let device = q.device();
    let scale = 1.0 / (d as f64).sqrt();
    let never = Tensor::new(f32::NEG_INFINITY, device)?;
    let (mut outputs, mut weights) = (Vec::new(), Vec::new());
    let mut prompt = 0;
    for &len in prompt_lens {
        // (kv_heads, tokens, d)
        let of_prompt = |x: &Tensor| x.narrow(0, prompt, len)?.transpose(0, 1)?.contiguous();
        let (k, v) = (of_prompt(k)?, of_prompt(v)?);
        let hats = hats
            .map(|hats| Ok::<_, Error>((of_prompt(hats.k)?, of_prompt(hats.v)?, hats)))
            .transpose()?;
        let mut sums = Tensor::zeros((kv_heads, len), DType::F32, device)?;
        let rows = block_tokens(heads, len);
        for start in (0..len).step_by(rows) {
            let end = (start + rows).min(len);
            let n = end - start;
            let q = q
                .narrow(0, prompt + start, n)?
                .reshape((n, kv_heads, group, d))?;
            let q = (q.permute((1, 2, 0, 3))?.reshape((kv_heads, group * n, d))? * scale)?;
            let shape = (heads, n, end);
            let score = |k: &Tensor| q.matmul(&k.narrow(1, 0, end)?.t()?)?.reshape(shape);
            let apply = |p: &Tensor, v: &Tensor| {
                p.reshape((kv_heads, group * n, end))?
                    .matmul(&v.narrow(1, 0, end)?)
            };
            let seen = Seen::new(start, end, device)?;
            let exact = hats
                .as_ref()
                .map(|(.., h)| seen.exact(h)?.broadcast_as(shape)?.contiguous())
                .transpose()?;
            let scores = match (&exact, &hats) {
                (Some(exact), Some((k_hat, ..))) => {
                    exact.where_cond(&score(&k)?, &score(k_hat)?)?
                }
                _ => score(&k)?,
            };
            // Only the block's own tokens hide some from its queries, and a mask with strides is slow.
            let square = (heads, n, n);
            let own = scores.narrow(2, start, n)?;
            let causal = seen.causal()?.narrow(1, start, n)?.broadcast_as(square)?;
            let own = causal.where_cond(&own, &never.broadcast_as(square)?)?;
            scores.slice_set(&own, 2, start)?;
            let p = softmax_last_dim(&scores)?;
            drop(scores);
            let o = match (&exact, &hats) {
                (Some(exact), Some((_, v_hat, _))) => {
                    let zero = p.zeros_like()?;
                    let windows = apply(&exact.where_cond(&p, &zero)?, &v)?;
                    (windows + apply(&exact.where_cond(&zero, &p)?, v_hat)?)?
                }
                _ => apply(&p, &v)?,
            };
            let o = o.reshape((kv_heads, group, n, d))?.permute((2, 0, 1, 3))?;
            outputs.push(o.reshape((n, heads, d))?);
            if key_weights {
                // A product with ones adds up columns without reading them with a stride.
                let ones = Tensor::ones((kv_heads, 1, group * n), DType::F32, device)?;
                let squares = p.sqr()?.reshape((kv_heads, group * n, end))?;
                let block = ones.matmul(&squares)?.squeeze(1)?;
                sums = (sums + block.pad_with_zeros(1, 0, len - end)?)?;
            }
        }
        weights.push(sums.t()?);
        prompt += len;
    }
    if outputs.is_empty() {
        let none = Tensor::zeros((0, kv_heads), DType::F32, device)?;
        return Ok((q.clone(), key_weights.then_some(none)));
    }
    let weights = key_weights.then(|| Tensor::cat(&weights, 0)).transpose()?;
    Ok((Tensor::cat(&outputs, 0)?, weights))
}

/// Which tokens the queries of a block see; masks are (queries, tokens), 1 where they do.
struct Seen {
    /// (queries, 1)
    queries: Tensor,
    start: usize,
    end: usize,
}

impl Seen {
    fn new(start: usize, end: usize, device: &Device) -> candle_core::Result<Self> {
        Ok(Self {
            queries: Tensor::arange(start as u32, end as u32, device)?.unsqueeze(1)?,
            start,
            end,
        })
    }

    /// (1, tokens) of numbers from `first` on.
    fn tokens(&self, first: usize) -> candle_core::Result<Tensor> {
        let (first, n) = (first as u32, self.end as u32);
        Tensor::arange(first, first + n, self.queries.device())?.unsqueeze(0)
    }

    fn causal(&self) -> candle_core::Result<Tensor> {
        self.tokens(0)?.broadcast_le(&self.queries)
    }

    /// In the windows: not in the [`history`] of the query.
    fn exact(&self, hats: &Hats) -> candle_core::Result<Tensor> {
        let history = (self.start..self.end)
            .map(|i| history(i, hats.sink, hats.recent, hats.demote_tokens).end as u32);
        let history = Tensor::from_iter(history, self.queries.device())?.unsqueeze(1)?;
        // A window beyond the prompt is as long as it.
        let sinks = self.tokens(0)?.lt(hats.sink.min(self.end) as u32)?;
        sinks.broadcast_maximum(&self.tokens(0)?.broadcast_ge(&history)?)
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)]
mod tests {
    use super::*;
    use crate::kv::attention::random;

    fn tensor(seed: u64, heads: usize) -> Tensor {
        Tensor::from_vec(
            random(seed, 330 * heads * 16, 1.0),
            (330, heads, 16),
            &Device::Cpu,
        )
        .unwrap()
    }

    fn apart(a: &Tensor, b: &Tensor) -> f32 {
        let difference =
            (a.to_dtype(DType::F32).unwrap() - b.to_dtype(DType::F32).unwrap()).unwrap();
        difference
            .abs()
            .unwrap()
            .max_all()
            .unwrap()
            .to_scalar()
            .unwrap()
    }

    #[test]
    fn candle_operations_compute_the_same() {
        let q = tensor(1, 6);
        let [k, v, k_hat, v_hat] = [2, 3, 4, 5].map(|seed| tensor(seed, 2));
        let (dims, prompt_lens) = (Dims::new(6, 2, 16).unwrap(), [29, 1, 300]);
        let (o, weights) = causal(&q, &k, &v, &prompt_lens, true).unwrap();
        let (other, other_weights) = by_candle(&q, &k, &v, None, dims, &prompt_lens, true).unwrap();
        assert!(apart(&o, &other) < 1e-5);
        let other_weights = other_weights.unwrap().flatten_all().unwrap();
        let other_weights = other_weights.to_vec1::<f32>().unwrap().into_iter();
        for (a, b) in weights.unwrap().iter().zip(other_weights.map(f64::from)) {
            assert!((a - b).abs() < 1e-5 * b.max(1.0));
        }
        for (sink, recent, demote_tokens) in
            [(4, 16, 1), (4, 32, 8), (0, 0, 1), (500, 1, 1), (0, 500, 1)]
        {
            let o = windowed(
                &q,
                &k,
                &v,
                &k_hat,
                &v_hat,
                &prompt_lens,
                sink,
                recent,
                demote_tokens,
            )
            .unwrap();
            let hats = Hats {
                k: &k_hat,
                v: &v_hat,
                sink,
                recent,
                demote_tokens,
            };
            let (other, _) = by_candle(&q, &k, &v, Some(hats), dims, &prompt_lens, false).unwrap();
            assert!(apart(&o, &other) < 1e-5);
        }
    }

    #[test]
    fn strided_and_half_precision_tensors_are_read() {
        let (q, k, v) = (tensor(1, 4), tensor(2, 2), tensor(3, 2));
        let (o, _) = causal(&q, &k, &v, &[330], false).unwrap();
        let strided = k
            .transpose(0, 1)
            .unwrap()
            .contiguous()
            .unwrap()
            .transpose(0, 1)
            .unwrap();
        let joined = Tensor::cat(&[&v, &k], 0).unwrap();
        let offset = joined.narrow(0, 330, 330).unwrap();
        for k in [strided, offset] {
            assert_eq!(
                apart(&o, &causal(&q, &k, &v, &[330], false).unwrap().0),
                0.0
            );
        }
        let [q, k, v] = [q, k, v].map(|x| x.to_dtype(DType::BF16).unwrap());
        let (half, _) = causal(&q, &k, &v, &[330], false).unwrap();
        assert_eq!(half.dtype(), DType::BF16);
        assert!(apart(&o, &half) < 0.05);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let (q, k) = (tensor(1, 4), tensor(2, 2));
        assert!(causal(&q, &k, &k, &[300], false).is_err());
        assert!(causal(&q, &tensor(2, 3), &tensor(2, 3), &[330], false).is_err());
        assert!(causal(&q, &k, &k.transpose(0, 1).unwrap(), &[330], false).is_err());
        assert!(windowed(&q, &k, &k, &k, &q, &[330], 0, 0, 1).is_err());
    }
}
