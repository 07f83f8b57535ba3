//! Pages into rows of f32 that are multiplied: `width` floats a token, zeros beyond head_dim.

use half::bf16;
use pulp::{Arch, Simd, WithSimd};

use crate::kv::page::{PAGE_TOKENS, PageLayout, Side};

/// Floats of a row: whole vectors of any machine.
pub fn width(head_dim: usize) -> usize {
    head_dim.next_multiple_of(16)
}

/// One page of one KV head, in [`crate::kv::page::Arrangement::Rows`].
#[derive(Clone, Copy)]
pub enum Page<'a> {
    /// The first so many tokens of it are there.
    Bf16(&'a [u16], usize),
    Int2(&'a [u8]),
    /// (keys, values), (tokens, width) each: rows as they are, for comparison.
    F32(&'a [f32], &'a [f32]),
}

impl<'a> Page<'a> {
    pub fn tokens(&self, width: usize) -> usize {
        match self {
            Self::Bf16(_, tokens) => *tokens,
            Self::Int2(_) => PAGE_TOKENS,
            Self::F32(k, _) => k.len() / width,
        }
    }

    /// Rows (tokens, width) of `side`, where they lie or in `into`.
    #[inline(always)]
    pub fn rows<'b, S: Simd>(
        &self,
        simd: S,
        layout: &PageLayout,
        side: Side,
        into: &'b mut [f32],
    ) -> &'b [f32]
    where
        'a: 'b,
    {
        let (d, width) = (layout.head_dim, width(layout.head_dim));
        let first = if side == Side::V { PAGE_TOKENS } else { 0 };
        match *self {
            Self::Bf16(page, tokens) => {
                let into = &mut into[..tokens * width];
                let page = &page[first * d..][..tokens * d];
                for (row, into) in page.chunks_exact(d).zip(into.chunks_exact_mut(width)) {
                    bf16_row(row, &mut into[..d]);
                }
                into
            }
            Self::Int2(page) => {
                let into = &mut into[..PAGE_TOKENS * width];
                let (codes, params) = page.split_at(PAGE_TOKENS * d / 2);
                let (quarter, groups) = (d / 4, layout.groups());
                let codes = &codes[first * quarter..][..PAGE_TOKENS * quarter];
                let v = usize::from(side == Side::V);
                for ((codes, params), into) in codes
                    .chunks_exact(quarter)
                    .zip(params.chunks_exact(8 * groups))
                    .zip(into.chunks_exact_mut(width))
                {
                    let params = &params[v * 4 * groups..][..4 * groups];
                    int2_row(simd, codes, params, layout.group, &mut into[..d]);
                }
                into
            }
            Self::F32(k, v) => match side {
                Side::K => k,
                Side::V => v,
            },
        }
    }
}

#[inline(always)]
fn bf16_row(row: &[u16], into: &mut [f32]) {
    for (into, &x) in into.iter_mut().zip(row) {
        *into = f32::from_bits(u32::from(x) << 16);
    }
}

/// How far each code of a word of 16 is to be shifted.
const SHIFTS: [u32; 16] = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30];

/// A code in its low bits makes this float that much larger: quicker than a conversion, and exact.
const WHOLE: f32 = 8_388_608.0;

/// `codes` (d/4), `params` a scale and a zero of every group.
#[inline(always)]
fn int2_row<S: Simd>(simd: S, codes: &[u8], params: &[u8], group: usize, into: &mut [f32]) {
    if !group.is_multiple_of(16) {
        return int2_row_of_any_group(codes, params, group, into);
    }
    let shifts = S::as_simd_u32s(&SHIFTS).0;
    let (three, whole) = (simd.splat_u32s(3), simd.splat_f32s(WHOLE));
    let params = params.as_chunks::<4>().0;
    let groups = codes
        .chunks_exact(group / 4)
        .zip(into.chunks_exact_mut(group));
    for (&[a, b, c, d], (codes, into)) in params.iter().zip(groups) {
        let scale = simd.splat_f32s(bf16::from_le_bytes([a, b]).to_f32());
        let zero = simd.splat_f32s(bf16::from_le_bytes([c, d]).to_f32());
        let words = codes.as_chunks::<4>().0;
        for (word, into) in words.iter().zip(into.as_chunks_mut::<16>().0) {
            let word = simd.splat_u32s(u32::from_le_bytes(*word));
            for (x, &shift) in S::as_mut_simd_f32s(into).0.iter_mut().zip(shifts) {
                let code = simd.and_u32s(simd.wrapping_dyn_shr_u32s(word, shift), three);
                let code = simd.or_u32s(code, simd.transmute_u32s_f32s(whole));
                let code = simd.sub_f32s(simd.transmute_f32s_u32s(code), whole);
                *x = simd.mul_f32s(simd.sub_f32s(code, zero), scale);
            }
        }
    }
}

fn int2_row_of_any_group(codes: &[u8], params: &[u8], group: usize, into: &mut [f32]) {
    for (c, x) in into.iter_mut().enumerate() {
        let read = |at: usize| bf16::from_le_bytes([params[at], params[at + 1]]).to_f32();
        let (at, code) = (c / group * 4, codes[c / 4] >> (2 * (c % 4)) & 3);
        *x = (f32::from(code) - read(at + 2)) * read(at);
    }
}

/// Rows of several pages, one after the other; returns how many tokens.
pub fn unpack(pages: &[Page], layout: &PageLayout, side: Side, into: &mut [f32]) -> usize {
    Arch::new().dispatch(Unpack {
        pages,
        layout,
        side,
        into,
    })
}

struct Unpack<'a> {
    pages: &'a [Page<'a>],
    layout: &'a PageLayout,
    side: Side,
    into: &'a mut [f32],
}

impl WithSimd for Unpack<'_> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> usize {
        let width = width(self.layout.head_dim);
        let mut tokens = 0;
        for page in self.pages {
            let n = page.tokens(width);
            page.rows(
                simd,
                self.layout,
                self.side,
                &mut self.into[tokens * width..][..n * width],
            );
            tokens += n;
        }
        tokens
    }
}
