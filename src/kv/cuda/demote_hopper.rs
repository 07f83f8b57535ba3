//! Prefill's demotion on Hopper: `kernels/demote_hopper.cu`.
#![allow(unsafe_code)]

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr,
    LaunchConfig, PushKernelArg,
};
use half::bf16;

use super::super::page::Arrangement;
use super::params::{PoolShape, Rows, SideParams, no_memory};
use crate::Result;
use crate::cuda::{allow_shared_memory, compute_capability, function, refused};

/// Larger ranks take the plain kernel.
const MAX_RANK: i32 = 16;

fn has_kernels(device: &CudaDevice, shape: PoolShape) -> Result<bool> {
    let layout = shape.layout;
    Ok(layout.arrangement == Arrangement::Mma
        && matches!(layout.head_dim, 64 | 128)
        && compute_capability(device)? == 90)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounding {
    Nearest,
    Feedback,
}

impl Rounding {
    fn of(side: &SideParams) -> Self {
        if side.feedback.is_some() {
            Self::Feedback
        } else {
            Self::Nearest
        }
    }

    fn warps(self) -> usize {
        match self {
            Self::Nearest => 16,
            Self::Feedback => 8,
        }
    }

    fn shared_bytes(self, d: usize) -> usize {
        let matrix = 2 * d * d + 4 * d;
        let row = 2 * d + 16;
        matrix
            + self.warps() * 32 * row
            + match self {
                Self::Nearest => 0,
                // Near and far parts of F, and a warp's `Scratch`.
                Self::Feedback => {
                    d / 16 * 1024
                        + d / 16 * (d / 8) * 256
                        + self.warps() * 32 * (80 + d + 16 + 48 + 16)
                }
            }
    }
}

/// An entry's parameters as these kernels read them: the comments of `Args` in the source.
pub(super) struct FusedParams {
    shape: PoolShape,
    rounding: [Rounding; 2],
    /// (layers): the largest rank of keys and of values.
    largest_rank: Vec<[i32; 2]>,
    matrix: CudaSlice<bf16>,
    bias: CudaSlice<f32>,
    pushes: Option<CudaSlice<bf16>>,
    pushes_near: Option<CudaSlice<f32>>,
}

/// One layer of them.
pub(super) struct FusedLayer<'a> {
    rounding: [Rounding; 2],
    largest_rank: [i32; 2],
    matrix: CudaView<'a, bf16>,
    bias: CudaView<'a, f32>,
    pushes: Option<CudaView<'a, bf16>>,
    pushes_near: Option<CudaView<'a, f32>>,
    ranks: CudaView<'a, i32>,
}

impl FusedParams {
    /// `encode` is [layers][2][kv_heads][d out][d in], `bias` and `ranks` are in the same order.
    pub(super) fn new(
        device: &CudaDevice,
        shape: PoolShape,
        encode: &[bf16],
        bias: &[f32],
        ranks: &[i32],
        sides: &[SideParams; 2],
    ) -> Result<Option<Self>> {
        if !has_kernels(device, shape)? {
            return Ok(None);
        }
        let (d, heads) = (shape.layout.head_dim, shape.kv_heads);
        let rounding = [Rounding::of(&sides[0]), Rounding::of(&sides[1])];
        let (mut matrix, mut columns_bias) = (vec![], vec![]);
        let (mut pushes, mut pushes_near) = (vec![], vec![]);
        let any_feedback = rounding.contains(&Rounding::Feedback);
        for layer in 0..shape.layers {
            for (s, side) in sides.iter().enumerate() {
                let columns = columns(d, s == 0 && rounding[s] == Rounding::Nearest);
                for head in 0..heads {
                    let unit = (layer * 2 + s) * heads + head;
                    matrix.extend(core_matrices(
                        &encode[unit * d * d..(unit + 1) * d * d],
                        &columns,
                        d,
                    ));
                    columns_bias.extend(columns.iter().map(|&c| bias[unit * d + c]));
                    if any_feedback {
                        let at = layer * heads + head;
                        let f = side.feedback.map(|f| &f[at * d * d..(at + 1) * d * d]);
                        pushes.extend(fragments(f, d));
                        pushes_near.extend(near(f, d));
                    }
                }
            }
        }
        let stream = device.cuda_stream();
        let largest_rank = ranks
            .chunks_exact(2 * heads)
            .map(|layer| {
                [&layer[..heads], &layer[heads..]]
                    .map(|side| side.iter().copied().max().unwrap_or(1))
            })
            .collect();
        Ok(Some(Self {
            shape,
            rounding,
            largest_rank,
            matrix: stream.clone_htod(&matrix).map_err(no_memory)?,
            bias: stream.clone_htod(&columns_bias).map_err(no_memory)?,
            pushes: (!pushes.is_empty())
                .then(|| stream.clone_htod(&pushes).map_err(no_memory))
                .transpose()?,
            pushes_near: (!pushes_near.is_empty())
                .then(|| stream.clone_htod(&pushes_near).map_err(no_memory))
                .transpose()?,
        }))
    }

    /// None where a rank is too large.
    pub(super) fn layer<'a>(
        &'a self,
        layer: usize,
        ranks: CudaView<'a, i32>,
    ) -> Option<FusedLayer<'a>> {
        let largest_rank = self.largest_rank[layer];
        let (d, units) = (self.shape.layout.head_dim, 2 * self.shape.kv_heads);
        let part = |each: usize| layer * units * each..(layer + 1) * units * each;
        (largest_rank[0].max(largest_rank[1]) <= MAX_RANK).then(|| FusedLayer {
            rounding: self.rounding,
            largest_rank,
            matrix: self.matrix.slice(part(d * d)),
            bias: self.bias.slice(part(d)),
            pushes: self
                .pushes
                .as_ref()
                .map(|x| x.slice(part(d / 16 * (d / 8) * 128))),
            pushes_near: self.pushes_near.as_ref().map(|x| x.slice(part(d * 16))),
            ranks,
        })
    }
}

/// The channel of each column: for nearest keys, such that the sums of a thread are neighbours in the page.
fn columns(d: usize, nearest_keys: bool) -> Vec<usize> {
    (0..d)
        .map(|n| {
            if nearest_keys {
                n % 8 / 2 * (d / 4) + n / 8 * 2 + n % 2
            } else {
                n
            }
        })
        .collect()
}

/// [d/8 k][d/8 n][8 n][8 k] of A transposed.
fn core_matrices(encode: &[bf16], columns: &[usize], d: usize) -> Vec<bf16> {
    (0..d * d)
        .map(|i| {
            let (k, n) = (i / (8 * d) * 8 + i % 8, i / 64 % (d / 8) * 8 + i / 8 % 8);
            encode[columns[n] * d + k]
        })
        .collect()
}

/// −F as the second operands of m16n8k16: [d/16 blocks of k][d/8 n][32 lanes][2][2].
fn fragments(f: Option<&[f32]>, d: usize) -> Vec<bf16> {
    let tiles = d / 8;
    (0..d / 16 * tiles * 128)
        .map(|i| {
            let (half, register, lane) = (i % 2, i / 2 % 2, i / 4 % 32);
            let (n, block) = (i / 128 % tiles, i / 128 / tiles);
            let row = 16 * block + 2 * (lane % 4) + 8 * register + half;
            bf16::from_f32(f.map_or(0.0, |f| -f[row * d + 8 * n + lane / 4]))
        })
        .collect()
}

/// The diagonal blocks of F: [d/16][16][16].
fn near(f: Option<&[f32]>, d: usize) -> Vec<f32> {
    (0..d * 16)
        .map(|i| {
            let start = i / 256 * 16;
            f.map_or(0.0, |f| f[(start + i / 16 % 16) * d + start + i % 16])
        })
        .collect()
}

/// `Args` of the source.
#[repr(C)]
#[derive(Clone, Copy)]
struct Args {
    k: u64,
    v: u64,
    matrix: u64,
    bias: u64,
    pushes: u64,
    pushes_near: u64,
    ranks: u64,
    pages: u64,
    pool: u64,
    k_stride: i32,
    v_stride: i32,
    tokens: i32,
    kv_heads: i32,
    first_unit: i32,
    units: i32,
}

// SAFETY: pointers and ints, in the order of the kernels' struct.
unsafe impl DeviceRepr for Args {}

/// The kernels of one shape.
pub(super) struct Fused {
    device: CudaDevice,
    shape: PoolShape,
    processors: usize,
    /// Nearest, feedback; each for ranks up to 8 and up to 16.
    kernels: [[CudaFunction; 2]; 2],
}

impl Fused {
    /// None for other shapes and other GPUs.
    pub(super) fn new(device: &CudaDevice, shape: PoolShape) -> Result<Option<Self>> {
        if !has_kernels(device, shape)? {
            return Ok(None);
        }
        let d = shape.layout.head_dim;
        let kernel = |rounding: Rounding, rank: usize| -> Result<CudaFunction> {
            let name = match rounding {
                Rounding::Nearest => format!("nearest_{d}_{rank}"),
                Rounding::Feedback => format!("feedback_{d}_{rank}"),
            };
            let kernel = function(device, "demote_hopper", &name)?;
            allow_shared_memory(device, &kernel)?;
            Ok(kernel)
        };
        let processors = device
            .cuda_stream()
            .context()
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(|e| refused("multiprocessors", e))?;
        let both = |rounding| Ok::<_, crate::Error>([kernel(rounding, 8)?, kernel(rounding, 16)?]);
        Ok(Some(Self {
            device: device.clone(),
            shape,
            processors: processors as usize,
            kernels: [both(Rounding::Nearest)?, both(Rounding::Feedback)?],
        }))
    }

    /// Keys and values in one launch, unless they want different kernels.
    pub(super) fn demote_rows(
        &self,
        params: &FusedLayer,
        k: Rows,
        v: Rows,
        pages: &CudaView<i32>,
        pool: &mut CudaViewMut<u8>,
    ) -> Result<()> {
        let kinds = [0, 1].map(|side| (params.rounding[side], params.largest_rank[side] > 8));
        if kinds[0] == kinds[1] {
            return self.launch(kinds[0], params, (0, 2), k, v, pages, pool);
        }
        self.launch(kinds[0], params, (0, 1), k, v, pages, pool)?;
        self.launch(kinds[1], params, (1, 1), k, v, pages, pool)
    }

    fn launch(
        &self,
        (rounding, large_rank): (Rounding, bool),
        params: &FusedLayer,
        (first_side, sides): (usize, usize),
        k: Rows,
        v: Rows,
        pages: &CudaView<i32>,
        pool: &mut CudaViewMut<u8>,
    ) -> Result<()> {
        let (d, heads) = (self.shape.layout.head_dim, self.shape.kv_heads);
        let units = sides * heads;
        let shares = (self.processors / units)
            .min((2 * pages.len()).div_ceil(rounding.warps()))
            .max(1);
        let stream = self.device.cuda_stream();
        // The guards order this launch after what wrote the arguments on other streams; they are dropped after it.
        let (k_at, _k) = k.data.device_ptr(&stream);
        let (v_at, _v) = v.data.device_ptr(&stream);
        let (matrix, _matrix) = params.matrix.device_ptr(&stream);
        let (bias, _bias) = params.bias.device_ptr(&stream);
        let pushes = params.pushes.as_ref().map(|x| x.device_ptr(&stream));
        let pushes_near = params.pushes_near.as_ref().map(|x| x.device_ptr(&stream));
        let (ranks, _ranks) = params.ranks.device_ptr(&stream);
        let (pages_at, _pages) = pages.device_ptr(&stream);
        let (pool, _pool) = pool.device_ptr_mut(&stream);
        let args = Args {
            k: k_at,
            v: v_at,
            matrix,
            bias,
            pushes: pushes.as_ref().map_or(0, |x| x.0),
            pushes_near: pushes_near.as_ref().map_or(0, |x| x.0),
            ranks,
            pages: pages_at,
            pool,
            k_stride: k.stride as i32,
            v_stride: v.stride as i32,
            tokens: (pages.len() * super::super::page::PAGE_TOKENS) as i32,
            kv_heads: heads as i32,
            first_unit: (first_side * heads) as i32,
            units: units as i32,
        };
        let config = LaunchConfig {
            grid_dim: ((shares * units) as u32, 1, 1),
            block_dim: (32 * rounding.warps() as u32, 1, 1),
            shared_mem_bytes: rounding.shared_bytes(d) as u32,
        };
        let kernel =
            &self.kernels[usize::from(rounding == Rounding::Feedback)][usize::from(large_rank)];
        let mut launch = stream.launch_builder(kernel);
        launch.arg(&args);
        // SAFETY: the argument is the kernel's; the caller counted rows, and page numbers are its own caller's.
        unsafe { launch.launch(config) }.map_err(|e| refused("demote_hopper", e))?;
        Ok(())
    }
}
