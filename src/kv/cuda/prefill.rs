//! Attention of a chunk of one sequence.
#![allow(unsafe_code)]

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, CudaView, CudaViewMut, LaunchConfig, PushKernelArg,
};
use half::bf16;

use super::super::page::PAGE_TOKENS;
use super::Tables;
use super::decode::LayerPages;
use super::params::PoolShape;
use crate::cuda::{allow_shared_memory, function, refused};
use crate::{Error, Result};

/// Queries of a block, and its threads.
const ROWS: usize = 128;
const THREADS: u32 = 256;
/// Blocks among which few rows are shared out: two for each multiprocessor of a large GPU.
const SHARED_BLOCKS: usize = 264;
/// Tiles of 64 tokens that are worth a block.
const SHARE_TILES: usize = 4;
/// Half the shared memory of a Hopper multiprocessor, less what the system takes of each block.
const TWO_BLOCKS: usize = 113 << 10;
/// Channels that there is a kernel for; others run on the next larger.
const KERNELS: [usize; 7] = [64, 80, 96, 112, 128, 192, 256];

/// What is cached of the sequence that the chunk belongs to.
#[derive(Clone, Copy)]
pub struct Cached<'a> {
    pub pages: &'a LayerPages<'a>,
    pub tables: &'a Tables<'a>,
    /// Its row in the tables.
    pub sequence: usize,
}

/// What a block keeps in shared memory.
#[derive(Clone, Copy)]
struct Memory {
    /// Tiles of keys and values in bf16: two, where the next may come while one is worked on.
    buffers: usize,
    /// Whether INT2 pages come through shared memory too.
    staged: bool,
    bytes: usize,
}

impl Memory {
    /// The most that fits into `limit`, and twice into a multiprocessor of Hopper where registers allow two blocks.
    fn of(channels: usize, int2_bytes: usize, limit: usize) -> Option<Self> {
        let limit = if channels > 128 {
            limit
        } else {
            limit.min(TWO_BLOCKS)
        };
        [(2, true), (2, false), (1, false)]
            .into_iter()
            .map(|(buffers, staged)| Self {
                buffers,
                staged,
                bytes: (ROWS + buffers * 2 * PAGE_TOKENS) * (channels + 8) * 2
                    + PAGE_TOKENS * 8
                    + if staged { 2 * int2_bytes } else { 0 },
            })
            .find(|memory| memory.bytes <= limit)
    }
}

/// Flash attention over pages in place: every query of the chunk sees all that is cached, and the chunk up to its own
/// token. bf16 products, f32 sums and softmax; scores are scaled by 1/√d.
/// Cached values, and keys in several groups, are rounded to bf16 when they are decoded; keys in one group are not.
pub struct Prefill {
    device: CudaDevice,
    shape: PoolShape,
    /// Query heads that read one KV head.
    group: usize,
    kernel: CudaFunction,
    memory: Memory,
    merge: CudaFunction,
    /// What shares leave to `merge`: outputs, exponents and weights of [`SHARED_BLOCKS`].
    part_out: CudaSlice<f32>,
    part_scale: CudaSlice<f32>,
}

impl Prefill {
    /// # Errors
    /// Where `heads` is no multiple of the KV heads, or the GPU lacks the shared memory.
    pub fn new(device: &CudaDevice, shape: PoolShape, heads: usize) -> Result<Self> {
        if heads == 0 || shape.kv_heads == 0 || !heads.is_multiple_of(shape.kv_heads) {
            let problem = format!(
                "{heads} heads and {} KV heads do not fit each other",
                shape.kv_heads
            );
            return Err(Error::invalid("attention", problem));
        }
        let d = shape.layout.head_dim;
        let Some(channels) = KERNELS.into_iter().find(|&x| x >= d) else {
            return Err(Error::invalid(
                "attention",
                format!("no kernel takes a head_dim of {d}"),
            ));
        };
        let kernel = function(device, "prefill", &format!("prefill_{channels}"))?;
        let limit = allow_shared_memory(device, &kernel)?;
        let Some(memory) = Memory::of(channels, shape.layout.int2_bytes(), limit) else {
            let problem =
                format!("a head_dim of {d} takes more shared memory than the GPU's {limit} bytes");
            return Err(Error::invalid("attention", problem));
        };
        Ok(Self {
            device: device.clone(),
            shape,
            group: heads / shape.kv_heads,
            kernel,
            memory,
            merge: function(device, "prefill", "merge")?,
            part_out: device.alloc_zeros(SHARED_BLOCKS * ROWS * d)?,
            part_scale: device.alloc_zeros(SHARED_BLOCKS * ROWS * 2)?,
        })
    }

    /// q and `out` (n, heads, d), k and v (n, kv_heads, d): the chunk's own, all encoded. Without `cached` this is plain
    /// causal attention. One call at a time may be in flight: calls share memory for their parts.
    ///
    /// # Errors
    /// Where lengths do not fit, or the launch is refused.
    pub fn attend(
        &self,
        q: &CudaView<bf16>,
        k: &CudaView<bf16>,
        v: &CudaView<bf16>,
        cached: Option<Cached>,
        out: &mut CudaViewMut<bf16>,
    ) -> Result<()> {
        let row = self.shape.row();
        let tokens = k.len() / row;
        let queries = tokens * row * self.group;
        if k.len() != tokens * row
            || v.len() != k.len()
            || q.len() != queries
            || out.len() != queries
        {
            return Err(Error::invalid(
                "attention",
                format!(
                    "q, k, v and output of {}, {}, {} and {} numbers do not fit {} heads over {} KV heads of {}",
                    q.len(),
                    k.len(),
                    v.len(),
                    out.len(),
                    self.group * self.shape.kv_heads,
                    self.shape.kv_heads,
                    self.shape.layout.head_dim
                ),
            ));
        }
        if tokens == 0 {
            return Ok(());
        }
        let null = 0u64;
        let (columns, sequence) = match &cached {
            Some(cached) => (self.columns(cached)?, cached.sequence as i32),
            None => ((0, 0), 0),
        };
        let (history_columns, window_columns) = (columns.0 as i32, columns.1 as i32);
        let layout = self.shape.kernel_layout();
        let (n, heads, group) = (tokens as i32, self.shape.kv_heads as i32, self.group as i32);
        let scale = 1.0 / (self.shape.layout.head_dim as f32).sqrt();
        let stream = self.device.cuda_stream();
        let mut launch = stream.launch_builder(&self.kernel);
        launch.arg(q).arg(k).arg(v).arg(&mut *out);
        launch.arg(&self.part_out).arg(&self.part_scale);
        if let Some(Cached { pages, tables, .. }) = &cached {
            launch.arg(&pages.int2).arg(&pages.bf16);
            launch.arg(&tables.history).arg(&tables.history_pages);
            launch.arg(&tables.windows).arg(&tables.window_tokens);
        } else {
            for _ in 0..6 {
                launch.arg(&null);
            }
        }
        launch
            .arg(&sequence)
            .arg(&history_columns)
            .arg(&window_columns);
        let (buffers, staged) = (self.memory.buffers as i32, i32::from(self.memory.staged));
        launch.arg(&layout).arg(&n).arg(&heads).arg(&group);
        launch.arg(&buffers).arg(&staged).arg(&scale);
        let rows = tokens * self.group;
        let blocks = rows.div_ceil(ROWS) * self.shape.kv_heads;
        let tiles = columns.0 + columns.1 + tokens.div_ceil(PAGE_TOKENS);
        let shares = (SHARED_BLOCKS / blocks).min(tiles / SHARE_TILES).max(1);
        let config = LaunchConfig {
            grid_dim: (
                rows.div_ceil(ROWS) as u32,
                self.shape.kv_heads as u32,
                shares as u32,
            ),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: self.memory.bytes as u32,
        };
        // SAFETY: the arguments are those of the kernel, whose lengths were checked above; page numbers and counts in
        // the tables are the caller's.
        unsafe { launch.launch(config) }.map_err(|e| refused("prefill", e))?;
        if shares == 1 {
            return Ok(());
        }
        let (shares, padded) = (shares as i32, rows.next_multiple_of(ROWS) as i32);
        let (kernel_rows, d) = (rows as i32, self.shape.layout.head_dim as i32);
        let mut launch = stream.launch_builder(&self.merge);
        launch.arg(&self.part_out).arg(&self.part_scale).arg(out);
        launch.arg(&shares).arg(&padded).arg(&kernel_rows);
        launch.arg(&heads).arg(&group).arg(&d);
        let config = LaunchConfig {
            grid_dim: (rows.div_ceil(8) as u32, self.shape.kv_heads as u32, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the arguments are those of the kernel; the launch before it wrote the parts of all rows.
        unsafe { launch.launch(config) }.map_err(|e| refused("merge", e))?;
        Ok(())
    }

    /// Of the tables.
    fn columns(&self, cached: &Cached) -> Result<(usize, usize)> {
        let columns = cached.tables.columns()?;
        let (layout, heads) = (self.shape.layout, self.shape.kv_heads);
        let sound = cached.sequence < cached.tables.batch()
            && cached
                .pages
                .int2
                .len()
                .is_multiple_of(heads * layout.int2_bytes())
            && cached
                .pages
                .bf16
                .len()
                .is_multiple_of(heads * layout.bf16_bytes());
        if sound {
            return Ok(columns);
        }
        Err(Error::invalid(
            "attention",
            format!(
                "sequence {} of {} does not fit pages of {} and {} bytes",
                cached.sequence,
                cached.tables.batch(),
                cached.pages.int2.len(),
                cached.pages.bf16.len()
            ),
        ))
    }
}
