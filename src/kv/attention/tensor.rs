//! Attention of candle tensors: f32 slices on the CPU, candle's operations on other devices.

use candle_core::{DType, Device, Tensor};

use super::Dims;
use crate::Result;

/// [`causal`](super::causal) of tensors of any float dtype: q (tokens, heads, head_dim), k and v
/// (tokens, kv_heads, head_dim). Returns o in the dtype and on the device of `q`, and the key weights
/// (tokens, kv_heads) where asked for.
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
    let dims = dims(q, k)?;
    let out = super::causal(
        &floats(q)?,
        &floats(k)?,
        &floats(v)?,
        dims,
        prompt_lens,
        key_weights,
    )?;
    let o = Tensor::from_vec(out.o, q.shape(), &Device::Cpu)?;
    Ok((
        o.to_device(q.device())?.to_dtype(q.dtype())?,
        out.key_weights,
    ))
}

/// [`windowed`](super::windowed) of tensors of any float dtype, shaped as in [`causal`].
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
) -> Result<Tensor> {
    let dims = dims(q, k)?;
    let (k_hat, v_hat) = (floats(k_hat)?, floats(v_hat)?);
    let o = super::windowed(
        &floats(q)?,
        &floats(k)?,
        &floats(v)?,
        &k_hat,
        &v_hat,
        dims,
        prompt_lens,
        sink,
        recent,
    )?;
    let o = Tensor::from_vec(o, q.shape(), &Device::Cpu)?;
    Ok(o.to_device(q.device())?.to_dtype(q.dtype())?)
}

fn dims(q: &Tensor, k: &Tensor) -> Result<Dims> {
    let (_, heads, head_dim) = q.dims3()?;
    let (_, kv_heads, _) = k.dims3()?;
    Dims::new(heads, kv_heads, head_dim)
}

fn floats(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}
