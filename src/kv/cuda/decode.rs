//! Decode attention on an NVIDIA GPU: one query token a sequence over its BF16 windows and INT2 history.
//!
//! ```text
//! plan (once a step) ── runs of slots, one a block ──▶ run (once a layer) ──▶ output, log-sum-exp
//! ```
//!
//! Two kernels do it. `kernels/int2_decode.cu` is for Hopper and pages arranged for tensor cores
//! ([`Arrangement::Mma`]); `kernels/decode_rows.cu` is its plain twin, for everything else ([`Arrangement::Rows`]).
//! Both only launch: nothing is allocated, copied or waited for in a step, so that a step can be one CUDA graph.
//! Everything is in the cache's encoded space; scores are scaled by 1/sqrt(head_dim).
//!
//! The fast kernel's scores are exact to 2⁻¹⁶ of the largest |q| of a head: outputs agree with f64 arithmetic within
//! 5e-3 (bf16 rounding of the output included) as long as no |score| passes about 200.
#![allow(unsafe_code)]

use std::sync::Arc;

use candle_core::CudaDevice;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtrMut, LaunchConfig,
    PushKernelArg,
};
use half::bf16;

use super::Tables;
use crate::kv::page::{Arrangement, PAGE_TOKENS, PageLayout};
use crate::{Error, Result, cuda};

/// Sequences of one batch, at most: the plan's shared memory holds 16 bytes of each.
const MAX_BATCH: usize = 2048;

/// What is to be attended to.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layout: PageLayout,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    pub kv_heads: usize,
    /// Sequences of one step, at most.
    pub max_batch: usize,
}

/// One layer's pages; ids of the tables count pages here.
pub struct LayerPages<'a> {
    /// (pages, kv_heads, [`PageLayout::int2_bytes`])
    pub int2: CudaView<'a, u8>,
    /// (pages, kv_heads, [`PageLayout::bf16_bytes`])
    pub bf16: CudaView<'a, u8>,
}

/// Where results go. Those of a sequence without tokens stay as they are.
pub struct Output<'a> {
    /// Encoded attention output, (batch, heads, head_dim).
    pub values: CudaViewMut<'a, bf16>,
    /// Natural logarithm of the sum of exponentiated scores, (batch, heads).
    pub lse: CudaViewMut<'a, f32>,
    /// The output before it is rounded, for comparisons.
    pub exact: Option<CudaViewMut<'a, f32>>,
}

/// A variant of the fast kernel; the `KERNEL` lines of `kernels/int2_decode.cu` are the same list.
struct Variant {
    name: &'static str,
    head_dim: usize,
    /// Query heads of a KV head, at most.
    heads: usize,
    /// Slots of a row of its ring.
    slots: usize,
    /// Warps that share a slot.
    sharing: usize,
    /// What a BF16 tile and an INT2 part cost, in units of the plan.
    tile: i32,
    part: i32,
}

#[rustfmt::skip]
const VARIANTS: &[Variant] = &[
    Variant { name: "int2_decode_d64_h4", head_dim: 64, heads: 4, slots: 8, sharing: 1, tile: 1, part: 1 },
    Variant { name: "int2_decode_d64_h8", head_dim: 64, heads: 8, slots: 12, sharing: 1, tile: 1, part: 1 },
    Variant { name: "int2_decode_d64_h16", head_dim: 64, heads: 16, slots: 8, sharing: 1, tile: 1, part: 2 },
    Variant { name: "int2_decode_d128_h4", head_dim: 128, heads: 4, slots: 8, sharing: 1, tile: 1, part: 1 },
    Variant { name: "int2_decode_d128_h8", head_dim: 128, heads: 8, slots: 8, sharing: 1, tile: 1, part: 1 },
    Variant { name: "int2_decode_d128_h12", head_dim: 128, heads: 12, slots: 8, sharing: 1, tile: 1, part: 2 },
    Variant { name: "int2_decode_d128_h16", head_dim: 128, heads: 16, slots: 8, sharing: 1, tile: 1, part: 2 },
    Variant { name: "int2_decode_d256_h4", head_dim: 256, heads: 4, slots: 8, sharing: 1, tile: 2, part: 1 },
    Variant { name: "int2_decode_d256_h8", head_dim: 256, heads: 8, slots: 6, sharing: 2, tile: 2, part: 1 },
    Variant { name: "int2_decode_d256_h16", head_dim: 256, heads: 16, slots: 4, sharing: 2, tile: 2, part: 2 },
];

/// Threads of a block that bring data: a warp does, and registers are handed over by four warps at a time.
const PRODUCERS: u32 = 128;
/// What a block of Hopper may use, and the fast kernel does.
const SHARED_BYTES: u32 = 227 << 10;
/// `sizeof(Blk)` and `sizeof(Seg)` of `kernels/int2_decode.cu`.
const BLOCK_BYTES: usize = 192;
const RUN_BYTES: usize = 48;

/// How pages should be arranged for decode attention to be fast on `device`, and where that is [`Arrangement::Rows`],
/// why.
///
/// # Errors
/// Where the driver refuses to tell the GPU's compute capability.
pub fn arrangement(
    device: &CudaDevice,
    head_dim: usize,
    group: usize,
    heads_per_kv_head: usize,
) -> Result<(Arrangement, Option<String>)> {
    let capability = cuda::compute_capability(device)?;
    let reason = if capability != 90 {
        format!(
            "the GPU's compute capability is {}.{}, not 9.0",
            capability / 10,
            capability % 10
        )
    } else if PageLayout::new(head_dim, group, Arrangement::Mma).is_err() {
        format!("head_dim {head_dim} in groups of {group} is not 64, 128 or 256 in one group")
    } else if heads_per_kv_head > 16 {
        format!("{heads_per_kv_head} query heads share a KV head, and it can do 16")
    } else {
        return Ok((Arrangement::Mma, None));
    };
    Ok((
        Arrangement::Rows,
        Some(format!("the fast decode kernel is not used: {reason}")),
    ))
}

/// Decode attention for one shape, with the buffers that a step needs. For one stream: two steps in flight must not
/// share it.
pub struct Decode {
    stream: Arc<CudaStream>,
    shape: Shape,
    engine: Engine,
}

enum Engine {
    Fast(Fast),
    Rows(Rows),
}

struct Fast {
    variant: &'static Variant,
    plan: CudaFunction,
    attend: CudaFunction,
    /// Blocks: one a multiprocessor.
    grid: usize,
    blocks: CudaSlice<u8>,
    runs: CudaSlice<u8>,
    part_o: CudaSlice<f32>,
    part_ml: CudaSlice<f32>,
    counters: CudaSlice<i32>,
}

struct Rows {
    attend: CudaFunction,
    merge: CudaFunction,
    /// Query heads that one block does.
    at_once: usize,
    multiprocessors: usize,
    part_o: CudaSlice<f32>,
    part_ml: CudaSlice<f32>,
}

impl Decode {
    /// Takes the kernel that the pages' arrangement calls for, see [`arrangement`]. Buffers are sized for the largest
    /// batch, whatever its lengths: about 2 KB a query head of each sequence at head_dim 128, and 1 to 8 MB besides.
    ///
    /// # Errors
    /// Where heads and KV heads do not go together, the batch is too large, or pages are arranged for a kernel that
    /// this GPU or this number of heads has not.
    pub fn new(device: &CudaDevice, shape: Shape) -> Result<Self> {
        let Shape {
            layout,
            heads,
            kv_heads,
            max_batch,
        } = shape;
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            let problem = format!("{heads} query heads cannot share {kv_heads} KV heads evenly");
            return Err(Error::invalid("decode attention", problem));
        }
        if !(1..=MAX_BATCH).contains(&max_batch) {
            let problem = format!("a batch of {max_batch} is not one of 1 to {MAX_BATCH}");
            return Err(Error::invalid("decode attention", problem));
        }
        let stream = device.cuda_stream();
        let multiprocessors = stream
            .context()
            .attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .w()?;
        let multiprocessors = multiprocessors.max(1) as usize;
        let engine = match layout.arrangement {
            Arrangement::Rows => Engine::Rows(Rows::new(device, &shape, multiprocessors)?),
            Arrangement::Mma => {
                let (best, why) =
                    arrangement(device, layout.head_dim, layout.group, heads / kv_heads)?;
                if best != Arrangement::Mma {
                    return Err(Error::invalid("decode attention", why.unwrap_or_default())
                        .hint("arrange the cache's pages as rows"));
                }
                Engine::Fast(Fast::new(device, &shape, multiprocessors)?)
            }
        };
        Ok(Self {
            stream,
            shape,
            engine,
        })
    }

    /// Whether the fast kernel is used.
    pub fn is_fast(&self) -> bool {
        matches!(self.engine, Engine::Fast(_))
    }

    /// What [`Self::run`] launches.
    pub fn kernel(&self) -> &'static str {
        match &self.engine {
            Engine::Fast(fast) => fast.variant.name,
            Engine::Rows(_) => "decode_rows",
        }
    }

    /// Queues the division of a step's work, which is the same for every layer. `tables` must stay as they are until
    /// the step's last [`Self::run`] is done.
    ///
    /// # Errors
    /// Where the tables are of no batch, or of a larger one than this was made for.
    pub fn plan(&mut self, tables: &Tables<'_>) -> Result<()> {
        let step = Step::new(&self.shape, tables)?;
        match &mut self.engine {
            Engine::Fast(fast) => fast.plan(&self.stream, &self.shape, tables, &step),
            Engine::Rows(_) => Ok(()),
        }
    }

    /// Queues attention of one layer, after [`Self::plan`] of the same `tables`. `q`: encoded queries, (batch, heads,
    /// head_dim). Page ids are looked at in debug builds only, by [`Tables::check`].
    ///
    /// # Errors
    /// Where a buffer has another size than its shape says.
    pub fn run(
        &mut self,
        tables: &Tables<'_>,
        pages: &LayerPages<'_>,
        q: &CudaView<'_, bf16>,
        output: &mut Output<'_>,
    ) -> Result<()> {
        let step = Step::new(&self.shape, tables)?;
        let (rows, d) = (step.batch * self.shape.heads, self.shape.layout.head_dim);
        for (name, is, should) in [
            ("queries", q.len(), rows * d),
            ("output", output.values.len(), rows * d),
            ("log-sum-exp", output.lse.len(), rows),
            (
                "exact output",
                output.exact.as_ref().map_or(rows * d, CudaViewMut::len),
                rows * d,
            ),
        ] {
            if is != should {
                let problem = format!("has {is} numbers, and the batch calls for {should}");
                return Err(Error::invalid(
                    format!("decode attention's {name}"),
                    problem,
                ));
            }
        }
        #[cfg(debug_assertions)]
        self.check(tables, pages)?;
        match &mut self.engine {
            Engine::Fast(fast) => fast.run(&self.stream, tables, &step, pages, q, output),
            Engine::Rows(rows) => {
                rows.run(&self.stream, &self.shape, tables, &step, pages, q, output)
            }
        }
    }

    /// In debug builds, unless a graph is being captured, where nothing may be waited for.
    #[cfg(debug_assertions)]
    fn check(&self, tables: &Tables<'_>, pages: &LayerPages<'_>) -> Result<()> {
        use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        if self.stream.capture_status().w()? != CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(());
        }
        let layout = &self.shape.layout;
        let count = |bytes: usize, page: usize| bytes / (page * self.shape.kv_heads);
        tables.check(
            &self.stream,
            count(pages.int2.len(), layout.int2_bytes()),
            count(pages.bf16.len(), layout.bf16_bytes()),
        )
    }
}

/// What kernels are told in numbers.
struct Step {
    batch: usize,
    heads: i32,
    kv_heads: i32,
    max_history: i32,
    max_windows: i32,
    /// 1/sqrt(head_dim), for powers of two.
    scale: f32,
}

impl Step {
    fn new(shape: &Shape, tables: &Tables<'_>) -> Result<Self> {
        let batch = tables.batch();
        let (max_history, max_windows) = tables.columns()?;
        if batch > shape.max_batch {
            let problem = format!("a batch of {batch} is more than {}", shape.max_batch);
            return Err(Error::invalid("decode attention", problem));
        }
        // 8 units a page of history and 32 a page of windows at most; all units of a step are counted in 31 bits.
        let units = (8 * max_history + 32 * max_windows) * batch * shape.kv_heads;
        let too_long = |_| {
            Error::invalid(
                "decode attention",
                format!("{batch} sequences of {max_history} history pages are too many"),
            )
        };
        i32::try_from(units).map_err(too_long)?;
        Ok(Self {
            batch,
            heads: shape.heads as i32,
            kv_heads: shape.kv_heads as i32,
            max_history: max_history as i32,
            max_windows: max_windows as i32,
            scale: (std::f64::consts::LOG2_E / (shape.layout.head_dim as f64).sqrt()) as f32,
        })
    }
}

impl Fast {
    fn new(device: &CudaDevice, shape: &Shape, grid: usize) -> Result<Self> {
        let (d, sharing) = (shape.layout.head_dim, shape.heads / shape.kv_heads);
        let variant = VARIANTS
            .iter()
            .find(|v| v.head_dim == d && v.heads >= sharing)
            .ok_or_else(|| Error::invalid("decode attention", "no such kernel"))?;
        let attend = cuda::function(device, "int2_decode", variant.name)?;
        attend
            .set_attribute(
                CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                SHARED_BYTES as i32,
            )
            .w()?;
        let stream = device.cuda_stream();
        // Runs are numbered block + item.
        let runs = grid + shape.max_batch * shape.kv_heads;
        Ok(Self {
            variant,
            plan: cuda::function(device, "int2_decode", "int2_decode_plan")?,
            attend,
            grid,
            blocks: stream.alloc_zeros(grid * BLOCK_BYTES).w()?,
            runs: stream.alloc_zeros(runs * RUN_BYTES).w()?,
            part_o: stream.alloc_zeros(runs * variant.heads * d).w()?,
            part_ml: stream.alloc_zeros(runs * variant.heads * 2).w()?,
            counters: stream.alloc_zeros(runs).w()?,
        })
    }

    fn plan(
        &mut self,
        stream: &CudaStream,
        shape: &Shape,
        tables: &Tables<'_>,
        step: &Step,
    ) -> Result<()> {
        let (batch, grid, row) = (
            step.batch as i32,
            self.grid as i32,
            self.variant.slots as i32,
        );
        let parts = (PAGE_TOKENS / shape.layout.part_tokens()) as i32;
        let mut launch = stream.launch_builder(&self.plan);
        launch
            .arg(&tables.history_pages)
            .arg(&tables.window_tokens)
            .arg(&tables.history)
            .arg(&tables.windows)
            .arg(&mut self.blocks)
            .arg(&mut self.runs)
            .arg(&batch)
            .arg(&step.kv_heads)
            .arg(&step.max_history)
            .arg(&step.max_windows)
            .arg(&grid)
            .arg(&parts)
            .arg(&self.variant.tile)
            .arg(&self.variant.part)
            .arg(&row);
        let config = LaunchConfig {
            grid_dim: (self.grid.div_ceil(32) as u32, 1, 1),
            block_dim: (1024, 1, 1),
            shared_mem_bytes: 16 * step.batch as u32,
        };
        // SAFETY: the arguments are those of `int2_decode_plan`; it writes `grid` blocks and at most as many runs as
        // were allocated for the largest batch.
        unsafe { launch.launch(config) }.w()?;
        Ok(())
    }

    fn run(
        &mut self,
        stream: &CudaStream,
        tables: &Tables<'_>,
        step: &Step,
        pages: &LayerPages<'_>,
        q: &CudaView<'_, bf16>,
        output: &mut Output<'_>,
    ) -> Result<()> {
        let exact = output.exact.as_mut().map(|x| x.device_ptr_mut(stream));
        let exact_at = exact.as_ref().map_or(0, |(at, _)| *at);
        let mut launch = stream.launch_builder(&self.attend);
        launch
            .arg(q)
            .arg(&pages.int2)
            .arg(&pages.bf16)
            .arg(&tables.history)
            .arg(&tables.windows)
            .arg(&self.blocks)
            .arg(&self.runs)
            .arg(&mut self.part_o)
            .arg(&mut self.part_ml)
            .arg(&mut self.counters)
            .arg(&mut output.values)
            .arg(&exact_at)
            .arg(&mut output.lse)
            .arg(&step.heads)
            .arg(&step.kv_heads)
            .arg(&step.max_history)
            .arg(&step.max_windows)
            .arg(&step.scale);
        let consumers = self.variant.slots * self.variant.sharing;
        let config = LaunchConfig {
            grid_dim: (self.grid as u32, 1, 1),
            block_dim: (32 * consumers as u32 + PRODUCERS, 1, 1),
            shared_mem_bytes: SHARED_BYTES,
        };
        // SAFETY: the arguments are those of the kernel, their sizes were compared with the shape, and the plan of the
        // same tables names no other partials than those allocated; page ids are the caller's promise.
        unsafe { launch.launch(config) }.w()?;
        Ok(())
    }
}

impl Rows {
    fn new(device: &CudaDevice, shape: &Shape, multiprocessors: usize) -> Result<Self> {
        let sharing = shape.heads / shape.kv_heads;
        let at_once = sharing.next_power_of_two().min(16);
        let stream = device.cuda_stream();
        // See `splits`: rounded up, they add at most one for each of these rows.
        let parts = (4 * multiprocessors + shape.max_batch * shape.kv_heads) * sharing;
        Ok(Self {
            attend: cuda::function(device, "decode_rows", &format!("decode_rows_g{at_once}"))?,
            merge: cuda::function(device, "decode_rows", "decode_rows_merge")?,
            at_once,
            multiprocessors,
            part_o: stream.alloc_zeros(parts * shape.layout.head_dim).w()?,
            part_ml: stream.alloc_zeros(parts * 2).w()?,
        })
    }

    /// Blocks that share a sequence's KV head: as many as keep all multiprocessors busy.
    fn splits(&self, shape: &Shape, batch: usize) -> usize {
        (4 * self.multiprocessors).div_ceil(batch * shape.kv_heads)
    }

    fn run(
        &mut self,
        stream: &CudaStream,
        shape: &Shape,
        tables: &Tables<'_>,
        step: &Step,
        pages: &LayerPages<'_>,
        q: &CudaView<'_, bf16>,
        output: &mut Output<'_>,
    ) -> Result<()> {
        let d = shape.layout.head_dim;
        let (head_dim, group) = (d as i32, shape.layout.group as i32);
        let splits = self.splits(shape, step.batch);
        let splits_arg = splits as i32;
        let mut launch = stream.launch_builder(&self.attend);
        launch
            .arg(q)
            .arg(&pages.int2)
            .arg(&pages.bf16)
            .arg(&tables.history)
            .arg(&tables.history_pages)
            .arg(&tables.windows)
            .arg(&tables.window_tokens)
            .arg(&mut self.part_o)
            .arg(&mut self.part_ml)
            .arg(&step.heads)
            .arg(&step.kv_heads)
            .arg(&head_dim)
            .arg(&group)
            .arg(&step.max_history)
            .arg(&step.max_windows)
            .arg(&splits_arg)
            .arg(&step.scale);
        let lanes = (d / 8).next_power_of_two();
        let floats = self.at_once * d + 256 / lanes * (2 + d);
        let head_blocks = (shape.heads / shape.kv_heads).div_ceil(self.at_once);
        let config = LaunchConfig {
            grid_dim: (
                splits as u32,
                (shape.kv_heads * head_blocks) as u32,
                step.batch as u32,
            ),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 4 * floats as u32,
        };
        // SAFETY: the arguments are those of the kernel, their sizes were compared with the shape, and the partials
        // are allocated for these splits; page ids are the caller's promise.
        unsafe { launch.launch(config) }.w()?;

        let exact = output.exact.as_mut().map(|x| x.device_ptr_mut(stream));
        let exact_at = exact.as_ref().map_or(0, |(at, _)| *at);
        let mut launch = stream.launch_builder(&self.merge);
        launch
            .arg(&self.part_o)
            .arg(&self.part_ml)
            .arg(&mut output.values)
            .arg(&exact_at)
            .arg(&mut output.lse)
            .arg(&step.heads)
            .arg(&head_dim)
            .arg(&splits_arg);
        let config = LaunchConfig {
            grid_dim: (shape.heads as u32, step.batch as u32, 1),
            block_dim: (d as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: as above; a block writes one row of `head_dim` outputs.
        unsafe { launch.launch(config) }.w()?;
        Ok(())
    }
}
