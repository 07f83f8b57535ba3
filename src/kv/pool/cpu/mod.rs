//! Pages in CPU memory: the definition that kernels are tested against, and a fast path of its own.

mod rows;
mod softmax;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

pub use rows::{Page, width};
pub use softmax::{Partial, Queries, Scratch, attend};

use super::{Moves, PageCounts, PageId, PageKind, PoolShape, StepSequence, Store, Transforms};
use crate::kv::attention::{Dims, exp::exp2};
use crate::kv::page::{PAGE_TOKENS, PageLayout, Side};
use crate::rotation::Transform;
use crate::{Error, Result};

/// History pages of one task, where few rows of queries read them.
const TASK_PAGES: usize = 16;
/// Rows of queries of one task.
const TASK_ROWS: usize = 192;

/// Pages of one layer: [pages][KV heads][page].
struct Layer {
    bf16: Vec<u16>,
    int2: Vec<u8>,
}

pub struct CpuStore {
    layout: PageLayout,
    dims: Dims,
    layers: Vec<Layer>,
    transforms: Option<Arc<Transforms>>,
    step: Vec<StepSequence>,
}

impl CpuStore {
    /// Memory is taken as pages are written.
    ///
    /// # Errors
    /// More than the machine can address.
    pub fn new(shape: &PoolShape, layout: PageLayout, capacity: PageCounts) -> Result<Self> {
        let heads = shape.dims.kv_heads;
        let (bf16, int2) = (
            capacity.bf16 * heads * layout.bf16_bytes() / 2,
            capacity.int2 * heads * layout.int2_bytes(),
        );
        let layer = || {
            let mut layer = Layer {
                bf16: Vec::new(),
                int2: Vec::new(),
            };
            let taken = layer.bf16.try_reserve_exact(bf16).is_ok()
                && layer.int2.try_reserve_exact(int2).is_ok();
            if !taken {
                return Err(Error::invalid(
                    "cache pool",
                    format!("the system refuses {} bytes a layer", 2 * bf16 + int2),
                )
                .hint("make the pool smaller"));
            }
            // Zeroed memory of the system is not touched before it is written.
            layer.bf16 = vec![0; bf16];
            layer.int2 = vec![0; int2];
            Ok(layer)
        };
        Ok(Self {
            layout,
            dims: shape.dims,
            layers: (0..shape.layers).map(|_| layer()).collect::<Result<_>>()?,
            transforms: shape.transforms.clone(),
            step: Vec::new(),
        })
    }

    /// Numbers of a BF16 page of one KV head, and bytes of an INT2 one.
    fn page_sizes(&self) -> (usize, usize) {
        (self.layout.bf16_bytes() / 2, self.layout.int2_bytes())
    }

    fn page(
        &self,
        layer: usize,
        kv_head: usize,
        kind: PageKind,
        page: PageId,
        tokens: usize,
    ) -> Page<'_> {
        let at = page as usize * self.dims.kv_heads + kv_head;
        let (bf16, int2) = self.page_sizes();
        let layer = &self.layers[layer];
        match kind {
            PageKind::Bf16 => Page::Bf16(&layer.bf16[at * bf16..][..bf16], tokens),
            PageKind::Int2 => Page::Int2(&layer.int2[at * int2..][..int2]),
        }
    }

    fn demote(&mut self, demotions: &[(PageId, PageId)]) -> Result<()> {
        let Some(transforms) = &self.transforms else {
            return Ok(());
        };
        let (layout, kv_heads) = (self.layout, self.dims.kv_heads);
        let (bf16, int2) = self.page_sizes();
        self.layers
            .par_iter_mut()
            .enumerate()
            .try_for_each(|(layer, pages)| {
                for &(from, to) in demotions {
                    for (head, sides) in transforms.layer(layer).iter().enumerate() {
                        let at = |page: PageId| page as usize * kv_heads + head;
                        let from = &pages.bf16[at(from) * bf16..][..bf16];
                        let to = &mut pages.int2[at(to) * int2..][..int2];
                        for (side, transform) in [Side::K, Side::V].into_iter().zip(sides) {
                            quantize(&layout, side, transform, from, to)?;
                        }
                    }
                }
                Ok(())
            })
    }

    /// Encodes the step's keys and values and writes them to the windows' pages.
    fn append(&mut self, layer: usize, k: &[f32], v: &[f32]) {
        let (kv_heads, d) = (self.dims.kv_heads, self.dims.head_dim);
        let tokens = k.len() / (kv_heads * d);
        let transforms = self.transforms.as_ref().map(|t| t.layer(layer));
        let encoded: Vec<[Vec<bf16>; 2]> = (0..kv_heads)
            .into_par_iter()
            .map(|head| {
                [(0, k), (1, v)].map(|(side, x)| {
                    let rows = gather(x, tokens, kv_heads, head..head + 1, d);
                    let rows = match transforms {
                        Some(transforms) => transforms[head][side].forward(&rows),
                        None => rows,
                    };
                    rows.into_iter().map(bf16::from_f32).collect()
                })
            })
            .collect();
        let (page_numbers, _) = self.page_sizes();
        let pages = &mut self.layers[layer].bf16;
        let mut token = 0;
        for sequence in &self.step {
            for at in sequence.window_tokens - sequence.new_tokens..sequence.window_tokens {
                let page = sequence.windows[at / PAGE_TOKENS] as usize;
                for (head, sides) in encoded.iter().enumerate() {
                    let page =
                        &mut pages[(page * kv_heads + head) * page_numbers..][..page_numbers];
                    for (side, rows) in [Side::K, Side::V].into_iter().zip(sides) {
                        let number = self.layout.number(side, at % PAGE_TOKENS, 0) / 2;
                        let row = &rows[token * d..][..d];
                        for (into, x) in page[number..number + d].iter_mut().zip(row) {
                            *into = x.to_bits();
                        }
                    }
                }
                token += 1;
            }
        }
    }

    fn tasks(&self) -> (Vec<Job>, Vec<Task>) {
        let group = self.dims.group();
        let (mut jobs, mut tasks) = (Vec::new(), Vec::new());
        let mut first_token = 0;
        for (index, sequence) in self.step.iter().enumerate() {
            let block = (TASK_ROWS / group).max(1);
            for start in (0..sequence.new_tokens).step_by(block) {
                let queries = start..(start + block).min(sequence.new_tokens);
                let few = queries.len() == 1;
                let history = sequence.history.len();
                let at_once = if few { TASK_PAGES } else { history.max(1) };
                for kv_head in 0..self.dims.kv_heads {
                    let first_task = tasks.len();
                    for first in (0..history).step_by(at_once) {
                        tasks.push(Task {
                            job: jobs.len(),
                            kind: PageKind::Int2,
                            pages: first..(first + at_once).min(history),
                        });
                    }
                    tasks.push(Task {
                        job: jobs.len(),
                        kind: PageKind::Bf16,
                        pages: 0..sequence.windows.len(),
                    });
                    jobs.push(Job {
                        sequence: index,
                        kv_head,
                        seen: sequence.window_tokens - sequence.new_tokens + queries.start + 1,
                        tokens: first_token + queries.start..first_token + queries.end,
                        tasks: first_task..tasks.len(),
                    });
                }
            }
            first_token += sequence.new_tokens;
        }
        (jobs, tasks)
    }

    /// A job's encoded queries (rows, width), scaled.
    fn queries(&self, layer: usize, job: &Job, q: &[f32]) -> Vec<f32> {
        let Dims {
            heads, head_dim: d, ..
        } = self.dims;
        let group = self.dims.group();
        let q = &q[job.tokens.start * heads * d..job.tokens.end * heads * d];
        let of_group = job.kv_head * group..(job.kv_head + 1) * group;
        let mut rows = gather(q, job.tokens.len(), heads, of_group, d);
        if let Some(transforms) = &self.transforms {
            rows = transforms.layer(layer)[job.kv_head][0].query(&rows);
        }
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        let width = width(d);
        let mut wide = vec![0.0; rows.len() / d * width];
        for (row, wide) in rows.chunks_exact(d).zip(wide.chunks_exact_mut(width)) {
            for (x, wide) in row.iter().zip(wide) {
                *wide = x * scale;
            }
        }
        wide
    }

    /// Output rows (rows, d) of a job.
    fn merge(&self, layer: usize, job: &Job, partials: &[Partial]) -> Vec<f32> {
        let d = self.dims.head_dim;
        let width = width(d);
        let rows = job.tokens.len() * self.dims.group();
        let mut o = vec![0.0; rows * d];
        for (row, o) in o.chunks_exact_mut(d).enumerate() {
            let max = partials.iter().map(|p| p.max[row]);
            let max = max.fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for partial in partials {
                let share = exp2(partial.max[row] - max);
                sum += partial.sum[row] * share;
                let from = &partial.o[row * width..];
                for (o, x) in o.iter_mut().zip(from) {
                    *o += x * share;
                }
            }
            for o in o {
                *o /= sum;
            }
        }
        match &self.transforms {
            Some(transforms) => transforms.layer(layer)[job.kv_head][1].backward(&o),
            None => o,
        }
    }
}

/// Queries of one sequence and one KV head's group, consecutive tokens.
struct Job {
    sequence: usize,
    kv_head: usize,
    /// Tokens of the windows that the first query sees.
    seen: usize,
    /// Among the tokens of the step.
    tokens: Range<usize>,
    tasks: Range<usize>,
}

/// Pages that one job reads.
struct Task {
    job: usize,
    kind: PageKind,
    pages: Range<usize>,
}

/// Rows (tokens · chosen heads, d) of `x` (tokens, heads, d).
fn gather(x: &[f32], tokens: usize, heads: usize, chosen: Range<usize>, d: usize) -> Vec<f32> {
    let mut rows = Vec::with_capacity(tokens * chosen.len() * d);
    for token in x.chunks_exact(heads * d).take(tokens) {
        rows.extend_from_slice(&token[chosen.start * d..chosen.end * d]);
    }
    rows
}

/// Codes of one side of a page.
fn quantize(
    layout: &PageLayout,
    side: Side,
    transform: &Transform,
    from: &[u16],
    to: &mut [u8],
) -> Result<()> {
    let (d, groups) = (layout.head_dim, layout.groups());
    let first = layout.number(side, 0, 0) / 2;
    let rows: Vec<f32> = from[first..first + PAGE_TOKENS * d]
        .iter()
        .map(|&x| bf16::from_bits(x).to_f32())
        .collect();
    let encoded = transform.codec().encode(&rows)?;
    for (token, codes) in encoded.codes.chunks_exact(d).enumerate() {
        let (first, _) = layout.code(side, token, 0);
        for (byte, codes) in to[first..first + d / 4]
            .iter_mut()
            .zip(codes.chunks_exact(4))
        {
            *byte = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6;
        }
        for group in 0..groups {
            let at = layout.scale(side, token, group);
            let of = token * groups + group;
            to[at..at + 2].copy_from_slice(&encoded.scale[of].to_le_bytes());
            to[at + 2..at + 4].copy_from_slice(&encoded.zero[of].to_le_bytes());
        }
    }
    Ok(())
}

impl Store for CpuStore {
    fn begin(&mut self, moves: &Moves, step: Vec<StepSequence>) -> Result<()> {
        self.demote(&moves.demotions)?;
        let numbers = self.dims.kv_heads * self.page_sizes().0;
        for &(from, to) in &moves.copies {
            let (from, to) = (from as usize * numbers, to as usize * numbers);
            for layer in &mut self.layers {
                layer.bf16.copy_within(from..from + numbers, to);
            }
        }
        self.step = step;
        Ok(())
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let floats = |x: &Tensor| -> Result<Vec<f32>> {
            Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
        };
        let (dtype, shape, device) = (q.dtype(), q.dims3()?, q.device());
        let (q_rows, k, v) = (floats(q)?, floats(k)?, floats(v)?);
        self.append(layer, &k, &v);

        let (jobs, tasks) = self.tasks();
        let queries: Vec<_> = jobs
            .par_iter()
            .map(|job| self.queries(layer, job, &q_rows))
            .collect();
        let partials: Vec<_> = tasks
            .par_iter()
            .with_max_len(1)
            .map_init(Scratch::default, |scratch, task| {
                let job = &jobs[task.job];
                let sequence = &self.step[job.sequence];
                let ids = match task.kind {
                    PageKind::Bf16 => &sequence.windows,
                    PageKind::Int2 => &sequence.history,
                };
                let page = |at: usize| {
                    let left = sequence.window_tokens.saturating_sub(at * PAGE_TOKENS);
                    let tokens = left.min(PAGE_TOKENS);
                    self.page(layer, job.kv_head, task.kind, ids[at], tokens)
                };
                let pages: Vec<_> = task.pages.clone().map(page).collect();
                let seen = match task.kind {
                    PageKind::Bf16 => job.seen,
                    PageKind::Int2 => usize::MAX,
                };
                let queries = Queries {
                    q: &queries[task.job],
                    group: self.dims.group(),
                    seen,
                };
                attend(queries, &pages, &self.layout, scratch)
            })
            .collect();
        let rows: Vec<_> = jobs
            .par_iter()
            .map(|job| self.merge(layer, job, &partials[job.tasks.clone()]))
            .collect();

        let (heads, d) = (self.dims.heads, self.dims.head_dim);
        let width = self.dims.group() * d;
        let mut o = vec![0.0; q_rows.len()];
        for (job, rows) in jobs.iter().zip(&rows) {
            for (token, row) in job.tokens.clone().zip(rows.chunks_exact(width)) {
                o[token * heads * d + job.kv_head * width..][..width].copy_from_slice(row);
            }
        }
        Ok(Tensor::from_vec(o, shape, device)?.to_dtype(dtype)?)
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
        let (d, width) = (self.layout.head_dim, width(self.layout.head_dim));
        let page = self.page(layer, kv_head, kind, page, PAGE_TOKENS);
        let mut rows = vec![0.0; PAGE_TOKENS * width];
        rows::unpack(&[page], &self.layout, side, &mut rows);
        let rows = rows.chunks_exact(width).flat_map(|row| &row[..d]);
        Ok(rows.copied().collect())
    }
}
