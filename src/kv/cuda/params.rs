#![allow(unsafe_code)]

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DeviceRepr, DriverError,
};
use half::bf16;

use super::super::page::{Arrangement, PageLayout};
use super::demote_hopper::{FusedLayer, FusedParams};
use crate::{Error, Result};

/// What a pool's pages hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolShape {
    pub layout: PageLayout,
    pub layers: usize,
    pub kv_heads: usize,
}

/// [`PageLayout`] as kernels take it: `kernels/page.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernelLayout {
    head_dim: i32,
    group: i32,
    mma: i32,
}

// SAFETY: three ints, as in the kernels' struct.
unsafe impl DeviceRepr for KernelLayout {}

impl PoolShape {
    pub(super) fn kernel_layout(&self) -> KernelLayout {
        KernelLayout {
            head_dim: self.layout.head_dim as i32,
            group: self.layout.group as i32,
            mma: i32::from(self.layout.arrangement == Arrangement::Mma),
        }
    }

    /// Numbers of a token: of all KV heads, one side.
    pub(super) fn row(&self) -> usize {
        self.kv_heads * self.layout.head_dim
    }

    /// Pages a layer, in a pool of pages of `page_bytes` each.
    pub(super) fn pages(&self, pool_bytes: usize, page_bytes: usize) -> Result<usize> {
        let one = self.layers * self.kv_heads * page_bytes;
        if one == 0 || !pool_bytes.is_multiple_of(one) {
            return Err(Error::invalid(
                "cache pool",
                format!(
                    "{pool_bytes} bytes are no whole number of pages of {one} bytes in all layers"
                ),
            ));
        }
        Ok(pool_bytes / one)
    }

    /// One layer of such a pool.
    pub(super) fn layer_mut<'a>(
        &self,
        pool: &'a mut CudaSlice<u8>,
        page_bytes: usize,
        layer: usize,
    ) -> Result<CudaViewMut<'a, u8>> {
        let bytes = self.pages(pool.len(), page_bytes)? * self.kv_heads * page_bytes;
        if layer >= self.layers {
            return Err(Error::invalid(
                "cache pool",
                format!("there is no layer {layer} among {}", self.layers),
            ));
        }
        Ok(pool.slice_mut(layer * bytes..(layer + 1) * bytes))
    }
}

/// Keys or values of some tokens on the device: channel c of head h of token t stands at t·stride + h·d + c, where
/// `stride` is a multiple of 8 (rows are read 16 bytes at a time).
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub data: &'a CudaView<'a, bf16>,
    pub stride: usize,
}

impl Rows<'_> {
    pub(super) fn check(&self, tokens: usize, row: usize) -> Result<()> {
        let needed = tokens.saturating_sub(1) * self.stride + if tokens > 0 { row } else { 0 };
        if self.data.len() < needed || self.stride < row || !self.stride.is_multiple_of(8) {
            return Err(Error::invalid(
                "rows on the GPU",
                format!(
                    "{} numbers in strides of {} are no {tokens} rows of {row}",
                    self.data.len(),
                    self.stride
                ),
            ));
        }
        Ok(())
    }
}

/// What one side of every layer and KV head needs to be written. Row-major, f32.
#[derive(Clone, Copy)]
pub struct SideParams<'a> {
    /// A (layers, kv_heads, d, d): x' = (x − mean)·A.
    pub encode: &'a [f32],
    /// (layers, kv_heads, d); none: zero.
    pub mean: Option<&'a [f32]>,
    /// F (layers, kv_heads, d, d), as in [`Codec`](crate::quant::Codec); none: nearest rounding.
    pub feedback: Option<&'a [f32]>,
    /// k (layers, kv_heads): the clip threshold of a row is its k-th largest magnitude; 1 clips none.
    pub ranks: &'a [usize],
}

/// An entry on the device: A and F rounded to bf16, −mean·A of that rounded A in f32.
///
/// Scores are best kept exact by giving queries the inverse of the rounded A: see [`EntryParams::rounded`].
pub struct EntryParams {
    pub(super) shape: PoolShape,
    /// [layers][2][kv_heads][d out][d in].
    encode: CudaSlice<bf16>,
    /// [layers][2][kv_heads][d].
    bias: CudaSlice<f32>,
    /// Of keys and values: [layers][kv_heads][d j][d i].
    feedback: [Option<CudaSlice<bf16>>; 2],
    /// [layers][2][kv_heads].
    ranks: CudaSlice<i32>,
    fused: Option<FusedParams>,
}

impl EntryParams {
    /// # Errors
    /// Where a slice has not the length that `shape` asks for, a rank is not in 1..=d, or device memory runs out.
    pub fn new(
        device: &CudaDevice,
        shape: PoolShape,
        k: SideParams,
        v: SideParams,
    ) -> Result<Self> {
        check(&shape, &k, "keys")?;
        check(&shape, &v, "values")?;
        let (d, heads) = (shape.layout.head_dim, shape.layers * shape.kv_heads);
        let sides = [k, v];
        let mut encode = Vec::with_capacity(2 * heads * d * d);
        let mut bias = Vec::with_capacity(2 * heads * d);
        let mut ranks = Vec::with_capacity(2 * heads);
        for layer in 0..shape.layers {
            for side in &sides {
                for head in layer * shape.kv_heads..(layer + 1) * shape.kv_heads {
                    let a = transposed(&side.encode[head * d * d..(head + 1) * d * d], d);
                    bias.extend(minus_mean(
                        &a,
                        side.mean.map(|m| &m[head * d..(head + 1) * d]),
                        d,
                    ));
                    encode.extend(a);
                    ranks.push(side.ranks[head] as i32);
                }
            }
        }
        let stream = device.cuda_stream();
        let upload = |f: &[f32]| {
            let f: Vec<bf16> = f
                .chunks_exact(d * d)
                .flat_map(|f| transposed(f, d))
                .collect();
            stream.clone_htod(&f).map_err(no_memory)
        };
        let feedback = [
            k.feedback.map(upload).transpose()?,
            v.feedback.map(upload).transpose()?,
        ];
        let fused = FusedParams::new(device, shape, &encode, &bias, &ranks, &sides)?;
        Ok(Self {
            shape,
            encode: stream.clone_htod(&encode).map_err(no_memory)?,
            bias: stream.clone_htod(&bias).map_err(no_memory)?,
            feedback,
            ranks: stream.clone_htod(&ranks).map_err(no_memory)?,
            fused,
        })
    }

    pub(super) fn check(&self, shape: PoolShape, layer: usize) -> Result<()> {
        if self.shape != shape || layer >= shape.layers {
            let problem = format!(
                "layer {layer} of {shape:?} is not among parameters of {:?}",
                self.shape
            );
            return Err(Error::invalid("cache", problem));
        }
        Ok(())
    }

    /// For the kernels of `demote_hopper.cu`, where they can run with these.
    pub(super) fn fused(&self, layer: usize) -> Option<FusedLayer<'_>> {
        self.fused.as_ref()?.layer(layer, self.ranks_of(layer))
    }

    /// A as rows are multiplied by it.
    pub fn rounded(encode: &[f32]) -> Vec<f32> {
        encode.iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
    }

    /// [2][kv_heads][d out][d in].
    pub(super) fn encode(&self, layer: usize) -> CudaView<'_, bf16> {
        let n = 2 * self.shape.row() * self.shape.layout.head_dim;
        self.encode.slice(layer * n..(layer + 1) * n)
    }

    /// [2][kv_heads][d].
    pub(super) fn bias(&self, layer: usize) -> CudaView<'_, f32> {
        let n = 2 * self.shape.row();
        self.bias.slice(layer * n..(layer + 1) * n)
    }

    /// [layers][kv_heads][d j][d i], or where `layer` is given, its part.
    pub(super) fn feedback(&self, side: usize, layer: Option<usize>) -> Option<CudaView<'_, bf16>> {
        let n = self.shape.row() * self.shape.layout.head_dim;
        let all = self.feedback[side].as_ref()?;
        Some(layer.map_or_else(
            || all.as_view(),
            |layer| all.slice(layer * n..(layer + 1) * n),
        ))
    }

    /// [layers][2][kv_heads].
    pub(super) fn ranks(&self) -> CudaView<'_, i32> {
        self.ranks.as_view()
    }

    /// [2][kv_heads].
    pub(super) fn ranks_of(&self, layer: usize) -> CudaView<'_, i32> {
        let n = 2 * self.shape.kv_heads;
        self.ranks.slice(layer * n..(layer + 1) * n)
    }
}

fn check(shape: &PoolShape, side: &SideParams, name: &str) -> Result<()> {
    let (d, heads) = (shape.layout.head_dim, shape.layers * shape.kv_heads);
    let lengths = side.encode.len() == heads * d * d
        && side.mean.is_none_or(|x| x.len() == heads * d)
        && side.feedback.is_none_or(|x| x.len() == heads * d * d)
        && side.ranks.len() == heads;
    if !lengths {
        let problem = format!("parameters of {name} do not fit {heads} heads of {d} channels");
        return Err(Error::invalid("cache", problem));
    }
    if let Some(rank) = side.ranks.iter().find(|&&k| k == 0 || k > d) {
        let problem = format!("{name} cannot be clipped at the magnitude of rank {rank} of {d}");
        return Err(Error::invalid("cache", problem));
    }
    Ok(())
}

fn transposed(a: &[f32], d: usize) -> Vec<bf16> {
    (0..d * d)
        .map(|i| bf16::from_f32(a[i % d * d + i / d]))
        .collect()
}

/// −mean·A of A transposed.
fn minus_mean(a: &[bf16], mean: Option<&[f32]>, d: usize) -> Vec<f32> {
    let Some(mean) = mean else {
        return vec![0.0; d];
    };
    a.chunks_exact(d)
        .map(|column| {
            -column
                .iter()
                .zip(mean)
                .map(|(a, &m)| a.to_f64() * f64::from(m))
                .sum::<f64>() as f32
        })
        .collect()
}

pub(super) fn no_memory(error: DriverError) -> Error {
    crate::cuda::refused("parameters of the cache", error)
}
