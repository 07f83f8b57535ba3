//! [`Accumulator`](super::accumulate::Accumulator) in candle's operations, for tensors on any device: what it adds up
//! stays there until the layer ends.
//!
//! Products are f32, never TF32, over blocks of tokens that do not depend on anything but the sequence; blocks are added
//! up in f64, in order. So the sums have the same bits from run to run on one kind of GPU, and agree with those of the
//! CPU to about 1e-6 of their norm.

use candle_core::{D, DType, Device, Tensor};

use super::accumulate::{HoldoutRows, check_finite};
use super::moments::{Sample, Sums};
use crate::kv::attention::Dims;
use crate::{Error, Result};

/// Tokens whose products are added up in f32: enough blocks for all of a GPU, few enough to add up.
const BLOCK_TOKENS: usize = 256;

/// Adds up one layer, sequence by sequence.
pub struct TensorAccumulator {
    dims: Dims,
    tokens: usize,
    sample_rows: Vec<usize>,
    sample: Sample,
    sums: Totals,
    // The second pass weighs all values by the final `qq`.
    kept: Vec<(Tensor, Tensor)>,
}

/// Sums in f64 on the device, flat; none before the first sequence.
#[derive(Default)]
struct Totals {
    qq: Option<Tensor>,
    kk: Option<Tensor>,
    oo: Option<Tensor>,
    vv: Option<Tensor>,
    vsv: Option<Tensor>,
    vwv: Option<Tensor>,
    k_sum: Option<Tensor>,
    v_sum: Option<Tensor>,
    vsv_weight: Option<Tensor>,
    vwv_weight: Option<Tensor>,
}

impl TensorAccumulator {
    /// Of no tokens yet. `sample_rows`: ascending indices of the tokens to keep.
    pub fn new(dims: Dims, sample_rows: Vec<usize>) -> Self {
        Self {
            dims,
            tokens: 0,
            sample_rows,
            sample: Sample::default(),
            sums: Totals::default(),
            kept: Vec::new(),
        }
    }

    /// Adds one packed sequence: q and o (tokens, heads, d), k and v (tokens, kv_heads, d), and `key_weights`
    /// (tokens, kv_heads) = Σ over the group's queries of S², all f32 and on one device. `layer` names the place in
    /// errors.
    ///
    /// # Errors
    /// NaN or infinity in any of them, after which the sums are void; shapes that do not fit; a device that fails.
    pub fn observe(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        key_weights: &Tensor,
    ) -> Result<()> {
        check(layer, self.dims, q, k, v, o)?;
        let kv_heads = self.dims.kv_heads;
        let sums = &mut self.sums;
        add(&mut sums.qq, gram(q, kv_heads)?)?;
        add(&mut sums.oo, gram(o, kv_heads)?)?;
        add(&mut sums.kk, gram(k, kv_heads)?)?;
        add(&mut sums.vv, gram(v, kv_heads)?)?;
        add(&mut sums.vsv, gram(&weighed(v, key_weights)?, kv_heads)?)?;
        add(&mut sums.k_sum, total(k)?)?;
        add(&mut sums.v_sum, total(v)?)?;
        add(&mut sums.vsv_weight, total(key_weights)?)?;

        let first = self.tokens;
        let tokens = k.dim(0)?;
        self.tokens += tokens;
        self.kept.push((k.clone(), v.clone()));
        let within = |row: usize| self.sample_rows.partition_point(|&r| r < row);
        let rows = &self.sample_rows[within(first)..within(first + tokens)];
        if !rows.is_empty() {
            let rows: Vec<u32> = rows.iter().map(|&row| (row - first) as u32).collect();
            let sample = &mut self.sample;
            sample.rows += rows.len();
            let rows = Tensor::new(rows, q.device())?;
            for (into, x) in [
                (&mut sample.q, q),
                (&mut sample.k, k),
                (&mut sample.v, v),
                (&mut sample.o, o),
            ] {
                let x = x.index_select(&rows, 0)?.flatten_all()?;
                into.extend(x.to_vec1::<f32>()?);
            }
        }
        Ok(())
    }

    /// The second pass, which weighs every value by its key under the final `qq`: the sums and the sampled rows.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn finish(mut self) -> Result<(Sums, Sample)> {
        let Dims {
            kv_heads,
            head_dim: d,
            ..
        } = self.dims;
        let mut out = Sums::zero(self.dims);
        out.tokens = self.tokens;
        let Some(qq) = &self.sums.qq else {
            return Ok((out, self.sample));
        };
        let qq = qq.to_dtype(DType::F32)?.reshape((kv_heads, d, d))?;
        for (k, v) in std::mem::take(&mut self.kept) {
            let keys = k.transpose(0, 1)?.contiguous()?;
            // qq is positive semi-definite: what lies below 0 is rounding.
            let weights = (keys.matmul(&qq)? * keys)?.sum(D::Minus1)?.relu()?;
            let weights = weights.t()?.contiguous()?;
            add(&mut self.sums.vwv, gram(&weighed(&v, &weights)?, kv_heads)?)?;
            add(&mut self.sums.vwv_weight, total(&weights)?)?;
        }
        for (into, sum) in [
            (&mut out.qq, &self.sums.qq),
            (&mut out.kk, &self.sums.kk),
            (&mut out.oo, &self.sums.oo),
            (&mut out.vv, &self.sums.vv),
            (&mut out.vsv, &self.sums.vsv),
            (&mut out.vwv, &self.sums.vwv),
        ] {
            read(sum.as_ref(), into)?;
            symmetric(into, d);
        }
        for (into, sum) in [
            (&mut out.k_sum, &self.sums.k_sum),
            (&mut out.v_sum, &self.sums.v_sum),
            (&mut out.vsv_weight, &self.sums.vsv_weight),
            (&mut out.vwv_weight, &self.sums.vwv_weight),
        ] {
            read(sum.as_ref(), into)?;
        }
        Ok((out, self.sample))
    }
}

/// [`output_metric`](super::accumulate::output_metric) of W_O (hidden, heads · d) on any device.
///
/// # Errors
/// Where the device fails.
pub fn output_metric(output_projection: &Tensor, dims: Dims) -> Result<Vec<f64>> {
    let Dims {
        heads,
        kv_heads,
        head_dim: d,
    } = dims;
    let rows = output_projection.to_dtype(DType::F32)?;
    let rows = rows.reshape(((), heads, d))?;
    let mut metric = gram(&rows, kv_heads)?.to_vec1()?;
    symmetric(&mut metric, d);
    Ok(metric)
}

/// Appends one sequence to `rows`.
///
/// # Errors
/// NaN or infinity in q, k, v or o, by `layer` and place.
pub fn keep(
    rows: &mut HoldoutRows,
    layer: usize,
    dims: Dims,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    o: &Tensor,
) -> Result<()> {
    check(layer, dims, q, k, v, o)?;
    for (into, x) in [(&mut rows.q, q), (&mut rows.k, k), (&mut rows.v, v)] {
        let x = x.to_dtype(DType::BF16)?.flatten_all()?;
        into.extend(x.to_vec1::<half::bf16>()?);
    }
    Ok(())
}

fn add(sum: &mut Option<Tensor>, x: Tensor) -> Result<()> {
    *sum = Some(match sum.take() {
        Some(sum) => (sum + x)?,
        None => x,
    });
    Ok(())
}

fn read(sum: Option<&Tensor>, into: &mut Vec<f64>) -> Result<()> {
    if let Some(sum) = sum {
        *into = sum.to_vec1()?;
    }
    Ok(())
}

/// Σ over tokens and the group's heads of xᵀx: x (tokens, heads, d) in f32, the sums f64 and flat (kv_heads · d · d).
fn gram(x: &Tensor, kv_heads: usize) -> Result<Tensor> {
    let (_, heads, d) = x.dims3()?;
    let (group, x) = (heads / kv_heads, blocks(x)?);
    let x = x
        .reshape(((), BLOCK_TOKENS, kv_heads, group, d))?
        .transpose(1, 2)?
        .reshape(((), BLOCK_TOKENS * group, d))?
        .contiguous()?;
    let squares = x.t()?.matmul(&x)?;
    over_blocks(&squares.reshape(((), kv_heads * d * d))?)
}

/// Σ over the first dimension of x, in f64 and flat.
fn total(x: &Tensor) -> Result<Tensor> {
    let x = blocks(x)?.flatten_from(1)?;
    let width = x.dim(1)?;
    over_blocks(&x.reshape(((), BLOCK_TOKENS, width))?.sum(1)?)
}

/// The rows of x and as many zeros as fill the last block.
fn blocks(x: &Tensor) -> Result<Tensor> {
    let tokens = x.dim(0)?;
    let missing = tokens.next_multiple_of(BLOCK_TOKENS) - tokens;
    Ok(x.pad_with_zeros(0, 0, missing)?.contiguous()?)
}

fn over_blocks(x: &Tensor) -> Result<Tensor> {
    Ok(x.to_dtype(DType::F64)?.sum(0)?)
}

/// √w · x, so that its products are w · xᵀx and stay symmetric: x (tokens, kv_heads, d), w (tokens, kv_heads).
fn weighed(x: &Tensor, weights: &Tensor) -> Result<Tensor> {
    Ok(x.broadcast_mul(&weights.sqrt()?.unsqueeze(2)?)?)
}

/// Products of a library may add up (i, j) in another order than (j, i).
fn symmetric(matrices: &mut [f64], d: usize) {
    for matrix in matrices.chunks_exact_mut(d * d) {
        for i in 0..d {
            for j in 0..i {
                let mean = f64::midpoint(matrix[i * d + j], matrix[j * d + i]);
                matrix[i * d + j] = mean;
                matrix[j * d + i] = mean;
            }
        }
    }
}

/// One number comes back from the device, and all of them where it is NaN.
fn check(layer: usize, dims: Dims, q: &Tensor, k: &Tensor, v: &Tensor, o: &Tensor) -> Result<()> {
    // x·0 is NaN for NaN and infinity, and so is every sum over it.
    let probe = |x: &Tensor| (x * 0.0)?.flatten_from(1)?.sum(1)?.sum_all();
    let probe = (((probe(q)? + probe(k)?)? + probe(v)?)? + probe(o)?)?;
    if !probe.to_scalar::<f32>()?.is_nan() {
        return Ok(());
    }
    let floats = |x: &Tensor| x.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>();
    check_finite(
        layer,
        dims,
        &floats(q)?,
        &floats(k)?,
        &floats(v)?,
        &floats(o)?,
    )?;
    Err(Error::numeric(
        format!("layer {layer}"),
        "the GPU found a NaN or an infinity that is not in its memory",
    ))
}
