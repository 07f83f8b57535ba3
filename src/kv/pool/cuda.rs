//! Pages in GPU memory. A step uploads its tables once, for all layers; a layer launches kernels and waits for nothing.
#![allow(unsafe_code)]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, CudaView};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Shape as TensorShape, Storage, Tensor};
use half::bf16;
use nalgebra::DMatrix;

use super::{
    GpuPages, Moves, PageCounts, PageId, PageKind, PoolShape, StepSequence, Store, Transforms,
};
use crate::kv::attention::Dims;
use crate::kv::cuda::append::Append;
use crate::kv::cuda::decode::{Decode, LayerPages, Output, Shape, arrangement};
use crate::kv::cuda::demote::Demote;
use crate::kv::cuda::prefill::{Cached, Prefill};
use crate::kv::cuda::transform::HeadTransform;
use crate::kv::cuda::{EntryParams, PoolShape as KernelShape, Rows, SideParams, Tables};
use crate::kv::page::{Arrangement, PAGE_TOKENS, PageLayout, Side};
use crate::rotation::Transform;
use crate::{Error, Result};

/// Sequences of a step, at most.
const MAX_BATCH: usize = 256;

pub struct CudaStore {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    dims: Dims,
    layers: usize,
    layout: PageLayout,
    /// [layers][pages][KV heads][page]
    bf16: CudaSlice<u8>,
    int2: CudaSlice<u8>,
    entry: Option<OnDevice>,
    append: Append,
    demote: Demote,
    prefill: Prefill,
    decode: Decode,
    transform: HeadTransform,
    step: Step,
}

/// An entry's tensors where they are used.
struct OnDevice {
    params: EntryParams,
    /// By layer: (KV heads, d, d) and the mean of values (KV heads, 1, d), f32.
    layers: Vec<Duals>,
}

struct Duals {
    query: Tensor,
    decode: Tensor,
    mean: Option<Tensor>,
}

/// The tables of the step that is under way.
struct Step {
    history: Table,
    history_pages: Table,
    windows: Table,
    /// Tokens in them, the step's own counted,
    window_tokens: Table,
    /// and not counted.
    window_tokens_before: Table,
    /// page · 64 + slot of every token.
    places: Table,
    /// New tokens of every sequence.
    new_tokens: Vec<usize>,
    cached: Vec<bool>,
}

/// Numbers on the device, in memory that grows when it must.
struct Table {
    memory: CudaSlice<i32>,
    len: usize,
}

impl Table {
    fn new(stream: &Arc<CudaStream>, capacity: usize) -> Result<Self> {
        Ok(Self {
            memory: stream.alloc_zeros(capacity.max(1)).w()?,
            len: 0,
        })
    }

    fn fill(&mut self, stream: &Arc<CudaStream>, numbers: &[i32]) -> Result<()> {
        if numbers.len() > self.memory.len() {
            self.memory = stream.alloc_zeros(numbers.len().next_power_of_two()).w()?;
        }
        self.len = numbers.len();
        if !numbers.is_empty() {
            let mut view = self.memory.slice_mut(0..numbers.len());
            stream.memcpy_htod(numbers, &mut view).w()?;
        }
        Ok(())
    }

    fn view(&self) -> CudaView<'_, i32> {
        self.memory.slice(0..self.len)
    }
}

impl CudaStore {
    /// Also returns what a person should know about the kernels that run, where they are not the fast ones.
    ///
    /// # Errors
    /// Too little memory, in bytes; a shape that no kernel takes.
    pub fn new(
        device: &CudaDevice,
        shape: &PoolShape,
        capacity: PageCounts,
    ) -> Result<(Self, Option<String>)> {
        let group = shape
            .transforms
            .as_ref()
            .map_or(shape.dims.head_dim, |t| t.group());
        let (kind, warning) = arrangement(device, shape.dims.head_dim, group, shape.dims.group())?;
        Ok((Self::arranged(device, shape, capacity, kind)?, warning))
    }

    /// With pages of one arrangement, for tests.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn arranged(
        device: &CudaDevice,
        shape: &PoolShape,
        capacity: PageCounts,
        arrangement: Arrangement,
    ) -> Result<Self> {
        let layout = shape.layout(arrangement)?;
        let stream = device.cuda_stream();
        let pages = shape.layers * shape.dims.kv_heads;
        // A pool that demotes nothing has no INT2 page, and kernels a pointer all the same.
        let capacity = PageCounts {
            bf16: capacity.bf16.max(1),
            int2: capacity.int2.max(1),
        };
        let bf16_bytes = capacity.bf16 * pages * layout.bf16_bytes();
        let int2_bytes = capacity.int2 * pages * layout.int2_bytes();
        let needed = bf16_bytes + int2_bytes;
        let (free, _) = stream.context().mem_get_info().w()?;
        let out_of_memory = || {
            Error::invalid(
                "cache pool",
                format!("out of GPU memory: the pages take {needed} bytes, and {free} are free"),
            )
            .hint("allow less with --kv-memory, or give a shorter prompt or fewer --max-tokens")
        };
        if needed > free {
            return Err(out_of_memory());
        }
        let kernel_shape = KernelShape {
            layout,
            layers: shape.layers,
            kv_heads: shape.dims.kv_heads,
        };
        let entry = shape
            .transforms
            .as_ref()
            .map(|transforms| OnDevice::new(device, kernel_shape, transforms, shape.dims))
            .transpose()?;
        let table = |capacity| Table::new(&stream, capacity);
        let columns = |pages: usize| MAX_BATCH.min(4) * pages;
        Ok(Self {
            append: Append::new(device, kernel_shape)?,
            demote: Demote::new(device, kernel_shape)?,
            prefill: Prefill::new(device, kernel_shape, shape.dims.heads)?,
            decode: Decode::new(
                device,
                Shape {
                    layout,
                    heads: shape.dims.heads,
                    kv_heads: shape.dims.kv_heads,
                    max_batch: MAX_BATCH,
                },
            )?,
            transform: HeadTransform::new(device, shape.dims.kv_heads, shape.dims.head_dim)?,
            bf16: stream
                .alloc_zeros(bf16_bytes)
                .map_err(|_| out_of_memory())?,
            int2: stream
                .alloc_zeros(int2_bytes)
                .map_err(|_| out_of_memory())?,
            entry,
            step: Step {
                history: table(columns(capacity.int2))?,
                history_pages: table(MAX_BATCH)?,
                windows: table(columns(capacity.bf16))?,
                window_tokens: table(MAX_BATCH)?,
                window_tokens_before: table(MAX_BATCH)?,
                places: table(MAX_BATCH.max(4096))?,
                new_tokens: Vec::new(),
                cached: Vec::new(),
            },
            device: device.clone(),
            stream,
            dims: shape.dims,
            layers: shape.layers,
            layout,
        })
    }

    fn demote(&mut self, demotions: &[(PageId, PageId)]) -> Result<()> {
        let Some(entry) = &self.entry else {
            return Ok(());
        };
        if demotions.is_empty() {
            return Ok(());
        }
        let moves: Vec<i32> = demotions
            .iter()
            .flat_map(|&(from, to)| [from as i32, to as i32])
            .collect();
        let moves = self.stream.clone_htod(&moves).w()?;
        self.demote
            .demote_pages(&entry.params, &moves.slice(..), &self.bf16, &mut self.int2)
    }

    /// Rows (tokens, heads, d) times their KV head's matrix, plus its row, in f32; bf16 in and out.
    fn times(&self, x: &Tensor, matrix: &Tensor, row: Option<&Tensor>) -> Result<Tensor> {
        let (tokens, heads, d) = x.dims3()?;
        if tokens > MAX_BATCH {
            return Ok(times(x, matrix, row)?.to_dtype(DType::BF16)?.contiguous()?);
        }
        // SAFETY: the kernel writes every row.
        let mut out = unsafe { self.device.alloc::<bf16>(tokens * heads * d) }?;
        let mut run = |x: &CudaView<bf16>, matrix: &CudaView<f32>, row: Option<&CudaView<f32>>| {
            self.transform
                .run(x, heads, matrix, row, &mut out.slice_mut(..))
        };
        on_gpu(x, |x| {
            on_gpu(matrix, |matrix| match row {
                Some(row) => on_gpu(row, |row| run(x, matrix, Some(row))),
                None => run(x, matrix, None),
            })
        })?;
        Ok(tensor(out, (tokens, heads, d), &self.device))
    }

    /// One token a sequence: q' (tokens, heads, d) over everything that is cached, its own token included.
    fn decode_step(&mut self, layer: usize, q: &Tensor) -> Result<Tensor> {
        let (tokens, heads, d) = q.dims3()?;
        let tables = self.step.tables(&self.step.window_tokens);
        let pages = layer_pages(&self.int2, &self.bf16, self.layers, layer);
        // SAFETY: the kernel writes every row, since every sequence has a token.
        let mut values = unsafe { self.device.alloc::<bf16>(tokens * heads * d) }?;
        // SAFETY: as above.
        let mut lse = unsafe { self.device.alloc::<f32>(tokens * heads) }?;
        on_gpu(q, |q| {
            let mut output = Output {
                values: values.slice_mut(..),
                lse: lse.slice_mut(..),
                exact: None,
            };
            self.decode.run(&tables, &pages, q, &mut output)
        })?;
        Ok(tensor(values, (tokens, heads, d), &self.device))
    }

    /// Several tokens of some sequence: each sequence's tokens over what was cached before, and over each other.
    fn prefill_step(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (tokens, heads, d) = q.dims3()?;
        let row = self.dims.kv_heads * d;
        let params = self.entry.as_ref().map(|entry| &entry.params);
        // SAFETY: `encode` writes every row of both.
        let mut k_rows = unsafe { self.device.alloc::<bf16>(tokens * row) }?;
        // SAFETY: as above.
        let mut v_rows = unsafe { self.device.alloc::<bf16>(tokens * row) }?;
        on_gpu(k, |k| {
            on_gpu(v, |v| {
                self.append.encode(
                    params,
                    layer,
                    Rows {
                        data: k,
                        stride: row,
                    },
                    Rows {
                        data: v,
                        stride: row,
                    },
                    &mut k_rows.slice_mut(..),
                    &mut v_rows.slice_mut(..),
                )
            })
        })?;
        // SAFETY: every sequence's rows are written below.
        let mut out = unsafe { self.device.alloc::<bf16>(tokens * heads * d) }?;
        let step = &self.step;
        let tables = step.tables(&step.window_tokens_before);
        let pages = layer_pages(&self.int2, &self.bf16, self.layers, layer);
        on_gpu(q, |q| {
            let mut first = 0;
            for (sequence, &new) in step.new_tokens.iter().enumerate() {
                let cached = step.cached[sequence].then_some(Cached {
                    pages: &pages,
                    tables: &tables,
                    sequence,
                });
                let last = first + new;
                self.prefill.attend(
                    &q.slice(first * heads * d..last * heads * d),
                    &k_rows.slice(first * row..last * row),
                    &v_rows.slice(first * row..last * row),
                    cached,
                    &mut out.slice_mut(first * heads * d..last * heads * d),
                )?;
                first = last;
            }
            Ok(())
        })?;
        Ok(tensor(out, (tokens, heads, d), &self.device))
    }
}

impl Step {
    fn tables<'a>(&'a self, window_tokens: &'a Table) -> Tables<'a> {
        Tables {
            history: self.history.view(),
            history_pages: self.history_pages.view(),
            windows: self.windows.view(),
            window_tokens: window_tokens.view(),
        }
    }

    fn decodes(&self) -> bool {
        self.new_tokens.iter().all(|&n| n == 1) && self.new_tokens.len() <= MAX_BATCH
    }
}

fn layer_pages<'a>(
    int2: &'a CudaSlice<u8>,
    bf16: &'a CudaSlice<u8>,
    layers: usize,
    layer: usize,
) -> LayerPages<'a> {
    let of_layer = |pool: &'a CudaSlice<u8>| {
        let bytes = pool.len() / layers;
        pool.slice(layer * bytes..(layer + 1) * bytes)
    };
    LayerPages {
        int2: of_layer(int2),
        bf16: of_layer(bf16),
    }
}

impl OnDevice {
    fn new(
        device: &CudaDevice,
        shape: KernelShape,
        transforms: &Transforms,
        dims: Dims,
    ) -> Result<Self> {
        let d = dims.head_dim;
        let all = |side: usize| {
            (0..shape.layers)
                .flat_map(move |layer| transforms.layer(layer).iter().map(move |head| &head[side]))
        };
        let side = |side: usize| {
            let encode: Vec<f32> = all(side).flat_map(Transform::encode).copied().collect();
            let mean = all(side).any(|t| t.mean().is_some()).then(|| {
                let zeros = vec![0.0; d];
                all(side)
                    .flat_map(|t| t.mean().map_or_else(|| zeros.clone(), <[f32]>::to_vec))
                    .collect::<Vec<f32>>()
            });
            let feedback = all(side).any(|t| t.codec().feedback.is_some()).then(|| {
                let zeros = vec![0.0; d * d];
                all(side)
                    .flat_map(|t| t.codec().feedback.clone().unwrap_or_else(|| zeros.clone()))
                    .collect::<Vec<f32>>()
            });
            let ranks: Vec<usize> = all(side).map(|t| t.codec().ranks()).collect();
            (encode, mean, feedback, ranks)
        };
        let (keys, values) = (side(0), side(1));
        let params = EntryParams::new(
            device,
            shape,
            SideParams {
                encode: &keys.0,
                mean: keys.1.as_deref(),
                feedback: keys.2.as_deref(),
                ranks: &keys.3,
            },
            SideParams {
                encode: &values.0,
                mean: values.1.as_deref(),
                feedback: values.2.as_deref(),
                ranks: &values.3,
            },
        )?;
        let on = Device::Cuda(device.clone());
        let layers = (0..shape.layers)
            .map(|layer| {
                let heads = transforms.layer(layer);
                let dual = |side: usize| -> Result<Tensor> {
                    let mut all = Vec::new();
                    for head in heads {
                        let inverse = inverse(head[side].encode(), d)?;
                        // Row by row: of values what undoes encode, of keys its transpose. nalgebra goes by columns.
                        let rows = if side == 0 {
                            inverse
                        } else {
                            inverse.transpose()
                        };
                        all.extend(rows.iter().map(|&x| x as f32));
                    }
                    Ok(Tensor::from_vec(all, (dims.kv_heads, d, d), &on)?)
                };
                let means: Vec<f32> = heads
                    .iter()
                    .flat_map(|head| head[1].mean().map_or_else(|| vec![0.0; d], <[f32]>::to_vec))
                    .collect();
                let centered = heads.iter().any(|head| head[1].mean().is_some());
                let mean = centered
                    .then(|| Tensor::from_vec(means, (dims.kv_heads, 1, d), &on))
                    .transpose()?;
                Ok(Duals {
                    query: dual(0)?,
                    decode: dual(1)?,
                    mean,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self { params, layers })
    }
}

/// Of the matrix as the GPU multiplies by it, rounded to bf16: scores and outputs stay exact.
fn inverse(encode: &[f32], d: usize) -> Result<DMatrix<f64>> {
    let rounded = EntryParams::rounded(encode).into_iter().map(f64::from);
    DMatrix::from_row_iterator(d, d, rounded)
        .try_inverse()
        .ok_or_else(|| Error::numeric("entry", "a transform rounded to bf16 has no inverse"))
}

/// Rows (tokens, heads, d) of every KV head's group times its matrix (KV heads, d, d), plus its row, in f32.
fn times(x: &Tensor, matrix: &Tensor, row: Option<&Tensor>) -> Result<Tensor> {
    let (tokens, heads, d) = x.dims3()?;
    let kv_heads = matrix.dim(0)?;
    let group = heads / kv_heads;
    let rows = x
        .to_dtype(DType::F32)?
        .reshape((tokens, kv_heads, group, d))?
        .permute((1, 0, 2, 3))?
        .reshape((kv_heads, tokens * group, d))?;
    let mut rows = rows.matmul(matrix)?;
    if let Some(row) = row {
        rows = rows.broadcast_add(row)?;
    }
    Ok(rows
        .reshape((kv_heads, tokens, group, d))?
        .permute((1, 0, 2, 3))?
        .reshape((tokens, heads, d))?)
}

/// Reads a contiguous tensor where it lies.
fn on_gpu<T: CudaDType, R>(x: &Tensor, read: impl FnOnce(&CudaView<T>) -> Result<R>) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cuda(cuda), Some((start, end))) => {
            read(&cuda.as_cuda_slice::<T>()?.slice(start..end))
        }
        _ => Err(candle_core::Error::Msg("expected a contiguous tensor on the GPU".into()).into()),
    }
}

fn tensor(values: CudaSlice<bf16>, shape: impl Into<TensorShape>, device: &CudaDevice) -> Tensor {
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(values, device.clone()));
    Tensor::from_storage(storage, shape, candle_core::op::BackpropOp::none(), false)
}

impl Store for CudaStore {
    fn begin(&mut self, moves: &Moves, step: Vec<StepSequence>) -> Result<()> {
        self.demote(&moves.demotions)?;
        for &(from, to) in &moves.copies {
            self.append
                .copy_page(&mut self.bf16, from as usize, to as usize, PAGE_TOKENS)?;
        }
        let most =
            |pages: fn(&StepSequence) -> usize| step.iter().map(pages).max().unwrap_or(0).max(1);
        // They grow seldom: steps whose tables are equally wide can be replayed.
        let columns = (most(|s| s.history.len()), most(|s| s.windows.len()));
        let columns = (columns.0.next_power_of_two(), columns.1.next_power_of_two());
        let padded = |pages: &[PageId], columns: usize| {
            let missing = columns - pages.len();
            let pages = pages.iter().map(|&page| page as i32);
            pages
                .chain(std::iter::repeat_n(0, missing))
                .collect::<Vec<_>>()
        };
        let table =
            |of: &dyn Fn(&StepSequence) -> Vec<i32>| step.iter().flat_map(of).collect::<Vec<i32>>();
        let stream = &self.stream;
        let tables = &mut self.step;
        tables
            .history
            .fill(stream, &table(&|s| padded(&s.history, columns.0)))?;
        tables
            .history_pages
            .fill(stream, &table(&|s| vec![s.history.len() as i32]))?;
        tables
            .windows
            .fill(stream, &table(&|s| padded(&s.windows, columns.1)))?;
        tables
            .window_tokens
            .fill(stream, &table(&|s| vec![s.window_tokens as i32]))?;
        let before = |s: &StepSequence| s.window_tokens - s.new_tokens;
        tables
            .window_tokens_before
            .fill(stream, &table(&|s| vec![before(s) as i32]))?;
        tables.places.fill(
            stream,
            &table(&|s| {
                let place = |at: usize| {
                    s.windows[at / PAGE_TOKENS] as usize * PAGE_TOKENS + at % PAGE_TOKENS
                };
                (before(s)..s.window_tokens)
                    .map(|at| place(at) as i32)
                    .collect()
            }),
        )?;
        tables.new_tokens = step.iter().map(|s| s.new_tokens).collect();
        tables.cached = step
            .iter()
            .map(|s| before(s) + s.history.len() > 0)
            .collect();
        if tables.decodes() {
            let step = &self.step;
            self.decode.plan(&step.tables(&step.window_tokens))?;
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let dtype = q.dtype();
        let rows = |x: &Tensor| x.to_dtype(DType::BF16)?.contiguous();
        let (k, v) = (rows(k)?, rows(v)?);
        let decodes = self.step.decodes();
        let q = match &self.entry {
            Some(entry) => self.times(&rows(q)?, &entry.layers[layer].query, None)?,
            None => rows(q)?,
        };
        let o = if decodes {
            None
        } else {
            Some(self.prefill_step(layer, &q, &k, &v)?)
        };
        let row = self.dims.kv_heads * self.dims.head_dim;
        let params = self.entry.as_ref().map(|entry| &entry.params);
        on_gpu(&k, |k| {
            on_gpu(&v, |v| {
                self.append.append(
                    params,
                    layer,
                    Rows {
                        data: k,
                        stride: row,
                    },
                    Rows {
                        data: v,
                        stride: row,
                    },
                    &self.step.places.view(),
                    &mut self.bf16,
                )
            })
        })?;
        let o = match o {
            Some(o) => o,
            None => self.decode_step(layer, &q)?,
        };
        let o = match &self.entry {
            Some(entry) => {
                let duals = &entry.layers[layer];
                self.times(&o, &duals.decode, duals.mean.as_ref())?
            }
            None => o,
        };
        Ok(o.to_dtype(dtype)?)
    }

    fn replay_key(&self) -> Option<u64> {
        let step = &self.step;
        if !step.decodes() {
            return None;
        }
        let tables = [
            &step.history,
            &step.windows,
            &step.window_tokens,
            &step.places,
        ];
        let mut hasher = DefaultHasher::new();
        for table in tables {
            // Memory that grew lies elsewhere.
            (table.len, table.memory.len()).hash(&mut hasher);
        }
        Some(hasher.finish())
    }

    fn gpu_pages(&mut self) -> Option<GpuPages<'_>> {
        Some(GpuPages {
            layout: self.layout,
            bf16: &mut self.bf16,
            int2: &mut self.int2,
        })
    }

    fn finish(&mut self, moves: &Moves) -> Result<()> {
        self.demote(&moves.demotions)
    }

    fn read(
        &self,
        layer: usize,
        kv_head: usize,
        side: Side,
        kind: PageKind,
        page: PageId,
    ) -> Result<Vec<f32>> {
        let (pool, bytes) = match kind {
            PageKind::Bf16 => (&self.bf16, self.layout.bf16_bytes()),
            PageKind::Int2 => (&self.int2, self.layout.int2_bytes()),
        };
        let pages = pool.len() / (bytes * self.dims.kv_heads * self.layers);
        let at = ((layer * pages + page as usize) * self.dims.kv_heads + kv_head) * bytes;
        let page = self.stream.clone_dtoh(&pool.slice(at..at + bytes)).w()?;
        self.stream.synchronize().w()?;
        let d = self.layout.head_dim;
        let number = |at: usize| bf16::from_le_bytes([page[at], page[at + 1]]).to_f32();
        let cells = (0..PAGE_TOKENS).flat_map(|token| (0..d).map(move |channel| (token, channel)));
        Ok(cells
            .map(|(token, channel)| match kind {
                PageKind::Bf16 => number(self.layout.number(side, token, channel)),
                PageKind::Int2 => {
                    let (byte, shift) = self.layout.code(side, token, channel);
                    let at = self.layout.scale(side, token, channel / self.layout.group);
                    let code = f32::from(page[byte] >> shift & 3);
                    (code - number(at + 2)) * number(at)
                }
            })
            .collect())
    }
}
