//! Attention of a few rows of queries over pages, softmax in one pass.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::rows::{Page, unpack, width};
use crate::kv::attention::exp;
use crate::kv::page::{PAGE_TOKENS, PageLayout, Side};
use crate::linalg::{Op, View, few_rows, matmul};

/// Rows that are multiplied a page at a time, from registers; more are a matrix product over
const FEW_ROWS: usize = 8;
/// pages at a time.
const CHUNK_PAGES: usize = 8;

/// Softmax under way: what rows of queries have seen of some pages.
#[derive(Clone, Debug)]
pub struct Partial {
    /// (rows): the largest score, in base 2.
    pub max: Vec<f32>,
    /// (rows): Σ 2^(score − max).
    pub sum: Vec<f32>,
    /// (rows, width): Σ 2^(score − max) · v.
    pub o: Vec<f32>,
}

/// Rows of queries, `group` of them a token, and how many of the pages' tokens they see.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// (rows, width), times log2(e)/√head_dim.
    pub q: &'a [f32],
    pub group: usize,
    /// Tokens that the first query token sees; every later one sees one more.
    pub seen: usize,
}

impl Queries<'_> {
    /// How many of `tokens` row `row` sees.
    #[inline(always)]
    fn sees(&self, row: usize, tokens: &Range<usize>) -> usize {
        let seen = self.seen.saturating_add(row / self.group);
        seen.clamp(tokens.start, tokens.end) - tokens.start
    }
}

/// Memory that tasks of one thread share.
#[derive(Default)]
pub struct Scratch {
    rows: Vec<f32>,
    p: Vec<f32>,
}

pub fn attend(
    queries: Queries,
    pages: &[Page],
    layout: &PageLayout,
    scratch: &mut Scratch,
) -> Partial {
    let width = width(layout.head_dim);
    let rows = queries.q.len() / width;
    let mut partial = Partial {
        max: vec![f32::NEG_INFINITY; rows],
        sum: vec![0.0; rows],
        o: vec![0.0; rows * width],
    };
    let at_once = if rows > FEW_ROWS { CHUNK_PAGES } else { 1 };
    let tokens = at_once * PAGE_TOKENS;
    scratch.rows.resize(tokens * width, 0.0);
    scratch.p.resize(rows * tokens, 0.0);
    if rows <= FEW_ROWS {
        Arch::new().dispatch(Few {
            queries,
            pages,
            layout,
            scratch,
            partial: &mut partial,
        });
        return partial;
    }
    let q = View::contiguous(queries.q, rows, width);
    let mut start = 0;
    for pages in pages.chunks(CHUNK_PAGES) {
        let n = unpack(pages, layout, Side::K, &mut scratch.rows);
        let keys = View::contiguous(&scratch.rows, n, width);
        let p = &mut scratch.p[..rows * n];
        matmul(Op::Nt, q, keys, p, n, false, 1.0, 0.0);
        Arch::new().dispatch(Weigh {
            queries,
            tokens: start..start + n,
            p,
            partial: &mut partial,
        });
        unpack(pages, layout, Side::V, &mut scratch.rows);
        let values = View::contiguous(&scratch.rows, n, width);
        let p = View::contiguous(p, rows, n);
        matmul(Op::Nn, p, values, &mut partial.o, width, true, 1.0, 1.0);
        start += n;
    }
    partial
}

/// Scores (rows, tokens) into probabilities relative to the rows' maxima so far, 0 where a row does not see a token;
/// rescales what the rows have summed up before.
struct Weigh<'a> {
    queries: Queries<'a>,
    tokens: Range<usize>,
    p: &'a mut [f32],
    partial: &'a mut Partial,
}

impl WithSimd for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Partial { max, sum, o } = self.partial;
        let width = o.len() / max.len();
        let rows = self.p.chunks_exact_mut(self.tokens.len());
        for (row, (p, o)) in rows.zip(o.chunks_exact_mut(width)).enumerate() {
            let (seen, unseen) = p.split_at_mut(self.queries.sees(row, &self.tokens));
            unseen.fill(0.0);
            if seen.is_empty() {
                continue;
            }
            let largest = exp::max(seen, max[row]);
            let decay = exp::exp2(max[row] - largest);
            max[row] = largest;
            sum[row] = sum[row] * decay + exp::exp2_sum(seen, largest);
            for o in o {
                *o *= decay;
            }
        }
    }
}

struct Few<'a> {
    queries: Queries<'a>,
    pages: &'a [Page<'a>],
    layout: &'a PageLayout,
    scratch: &'a mut Scratch,
    partial: &'a mut Partial,
}

impl WithSimd for Few<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = width(self.layout.head_dim);
        let rows = self.partial.max.len();
        let mut start = 0;
        for page in self.pages {
            let n = page.tokens(width);
            let p = &mut self.scratch.p[..rows * n];
            let keys = page.rows(simd, self.layout, Side::K, &mut self.scratch.rows);
            for first in (0..rows).step_by(4) {
                let q = &self.queries.q[first * width..];
                let p = &mut p[first * n..];
                match rows - first {
                    1 => few_rows::<S, 1>(simd, q, keys, width, p, n),
                    2 => few_rows::<S, 2>(simd, q, keys, width, p, n),
                    3 => few_rows::<S, 3>(simd, q, keys, width, p, n),
                    _ => few_rows::<S, 4>(simd, q, keys, width, p, n),
                }
            }
            Weigh {
                queries: self.queries,
                tokens: start..start + n,
                p,
                partial: self.partial,
            }
            .with_simd(simd);
            let values = page.rows(simd, self.layout, Side::V, &mut self.scratch.rows);
            for first in (0..rows).step_by(4) {
                let o = &mut self.partial.o[first * width..];
                let p = &p[first * n..];
                match rows - first {
                    1 => add_values::<S, 1>(simd, p, values, width, o),
                    2 => add_values::<S, 2>(simd, p, values, width, o),
                    3 => add_values::<S, 3>(simd, p, values, width, o),
                    _ => add_values::<S, 4>(simd, p, values, width, o),
                }
            }
            start += n;
        }
    }
}

/// o (R, width) += p (R, tokens) · values (tokens, width).
#[inline(always)]
fn add_values<S: Simd, const R: usize>(
    simd: S,
    p: &[f32],
    values: &[f32],
    width: usize,
    o: &mut [f32],
) {
    let vectors = width / S::F32_LANES;
    let wide = vectors / 4 * 4;
    for first in (0..wide).step_by(4) {
        add_columns::<S, R, 4>(simd, p, values, width, first, o);
    }
    for first in wide..vectors {
        add_columns::<S, R, 1>(simd, p, values, width, first, o);
    }
}

/// [`add_values`] of C vectors of columns, whose sums stay in registers.
#[inline(always)]
fn add_columns<S: Simd, const R: usize, const C: usize>(
    simd: S,
    p: &[f32],
    values: &[f32],
    width: usize,
    first: usize,
    o: &mut [f32],
) {
    let tokens = values.len() / width;
    let p: [&[f32]; R] = std::array::from_fn(|r| &p[r * tokens..(r + 1) * tokens]);
    let mut sums = [[simd.splat_f32s(0.0); C]; R];
    for (t, value) in values.chunks_exact(width).enumerate() {
        let value = &S::as_simd_f32s(value).0[first..first + C];
        for (sums, p) in sums.iter_mut().zip(&p) {
            let p = simd.splat_f32s(p[t]);
            for (sum, &v) in sums.iter_mut().zip(value) {
                *sum = simd.mul_add_e_f32s(p, v, *sum);
            }
        }
    }
    for (sums, o) in sums.iter().zip(o.chunks_exact_mut(width)) {
        let o = &mut S::as_mut_simd_f32s(o).0[first..first + C];
        for (o, &sum) in o.iter_mut().zip(sums) {
            *o = simd.add_f32s(*o, sum);
        }
    }
}
