//! Inner loops of a decoder layer on f32 slices, written so that they vectorise where `pulp` dispatches them to a
//! wide instruction set.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::kv::attention::exp::exp2;
use crate::linalg::{Op, View, few_rows, matmul};

/// Rows of a decode step that are multiplied by weights as they stream by; more are a matrix product.
const FEW_ROWS: usize = 64;
/// Outputs of one task then.
const TASK_OUTPUTS: usize = 32;

/// A matrix (out, in) as in checkpoints, and its bias.
#[derive(Clone, Copy)]
pub(super) struct Linear<'a> {
    pub weight: &'a [f32],
    pub inputs: usize,
    pub bias: Option<&'a [f32]>,
    /// Whether few rows are spread over threads by outputs: in a decode step, where there is but one block of rows.
    pub decoding: bool,
}

impl Linear<'_> {
    fn outputs(&self) -> usize {
        self.weight.len() / self.inputs
    }

    /// y = x·Wᵀ + b for rows of x.
    pub fn forward(&self, x: &[f32], y: &mut [f32]) {
        self.run(x, y, false);
    }

    /// y += x·Wᵀ + b for rows of x.
    pub fn add_to(&self, x: &[f32], y: &mut [f32]) {
        self.run(x, y, true);
    }

    fn run(&self, x: &[f32], y: &mut [f32], accumulate: bool) {
        let (inputs, outputs) = (self.inputs, self.outputs());
        let rows = x.len() / inputs;
        if self.decoding && rows <= FEW_ROWS {
            self.stream_weights(x, y, accumulate);
        } else {
            let x = View::contiguous(x, rows, inputs);
            let w = View::contiguous(self.weight, outputs, inputs);
            matmul(Op::Nt, x, w, y, outputs, accumulate, 1.0, 1.0);
        }
        if let Some(bias) = self.bias {
            for row in y.chunks_exact_mut(outputs) {
                for (y, b) in row.iter_mut().zip(bias) {
                    *y += b;
                }
            }
        }
    }
}

impl Linear<'_> {
    fn stream_weights(&self, x: &[f32], y: &mut [f32], accumulate: bool) {
        let (inputs, outputs) = (self.inputs, self.outputs());
        let rows = x.len() / inputs;
        let parts: Vec<Vec<f32>> = self
            .weight
            .par_chunks(TASK_OUTPUTS * inputs)
            .map(|weight| {
                let mut y = vec![0.0; rows * (weight.len() / inputs)];
                Arch::new().dispatch(StreamWeights(x, weight, inputs, &mut y));
                y
            })
            .collect();
        for (i, part) in parts.iter().enumerate() {
            let wide = part.len() / rows;
            for (y, part) in y.chunks_exact_mut(outputs).zip(part.chunks_exact(wide)) {
                let y = &mut y[i * TASK_OUTPUTS..][..wide];
                for (y, &x) in y.iter_mut().zip(part) {
                    *y = if accumulate { *y + x } else { x };
                }
            }
        }
    }
}

/// x (rows, inputs), weights (outputs, inputs), inputs, y (rows, outputs).
struct StreamWeights<'a>(&'a [f32], &'a [f32], usize, &'a mut [f32]);

impl WithSimd for StreamWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self(x, weight, inputs, y) = self;
        let (rows, outputs) = (x.len() / inputs, weight.len() / inputs);
        for first in (0..rows).step_by(4) {
            let (x, y) = (&x[first * inputs..], &mut y[first * outputs..]);
            match rows - first {
                1 => few_rows::<S, 1>(simd, x, weight, inputs, y, outputs),
                2 => few_rows::<S, 2>(simd, x, weight, inputs, y, outputs),
                3 => few_rows::<S, 3>(simd, x, weight, inputs, y, outputs),
                _ => few_rows::<S, 4>(simd, x, weight, inputs, y, outputs),
            }
        }
    }
}

/// y = x / sqrt(mean(x²) + eps) · weight for rows as long as `weight`.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    Arch::new().dispatch(Normalise(x, Norm { weight, eps }, y));
}

/// One token's heads: norm where the family has one, then RoPE with that position's cosines and sines
/// (head_dim/2 each).
pub(super) fn norm_and_turn(
    x: &[f32],
    norm: Option<Norm>,
    cos: &[f32],
    sin: &[f32],
    y: &mut [f32],
) {
    match norm {
        Some(norm) => Arch::new().dispatch(Normalise(x, norm, y)),
        None => y.copy_from_slice(x),
    }
    Arch::new().dispatch(Turn(y, cos, sin));
}

/// y = silu(gate) · up, where each row of `gate_up` is a gate of `width` followed by an up of `width`.
pub(super) fn silu_times(gate_up: &[f32], width: usize, y: &mut [f32]) {
    Arch::new().dispatch(SiluTimes(gate_up, width, y));
}

/// Whether there is no NaN and no infinity.
pub(super) fn finite(values: &[f32]) -> bool {
    // The largest exponent marks both; a maximum over integers needs no branch.
    Arch::new().dispatch(LargestExponent(values)) < INFINITE_EXPONENT
}

const INFINITE_EXPONENT: u32 = 0x7f80_0000;

/// An RMS norm.
#[derive(Clone, Copy)]
pub(super) struct Norm<'a> {
    pub weight: &'a [f32],
    pub eps: f32,
}

// Structs, since a closure handed to `dispatch` is not inlined there, and would be compiled for the oldest machine.

struct Normalise<'a>(&'a [f32], Norm<'a>, &'a mut [f32]);

impl WithSimd for Normalise<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self(x, Norm { weight, eps }, y) = self;
        let n = weight.len();
        for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
            let scale = 1.0 / (sum_of_squares(x) / n as f32 + eps).sqrt();
            for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                *y = x * scale * w;
            }
        }
    }
}

#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>()
}

struct Turn<'a>(&'a mut [f32], &'a [f32], &'a [f32]);

impl WithSimd for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self(x, cos, sin) = self;
        let half = cos.len();
        for head in x.chunks_exact_mut(2 * half) {
            let (a, b) = head.split_at_mut(half);
            for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
    }
}

struct SiluTimes<'a>(&'a [f32], usize, &'a mut [f32]);

impl WithSimd for SiluTimes<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self(gate_up, width, y) = self;
        for (gate_up, y) in gate_up
            .chunks_exact(2 * width)
            .zip(y.chunks_exact_mut(width))
        {
            let (gate, up) = gate_up.split_at(width);
            for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
                *y = g / (1.0 + exp2(-std::f32::consts::LOG2_E * g)) * u;
            }
        }
    }
}

struct LargestExponent<'a>(&'a [f32]);

impl WithSimd for LargestExponent<'_> {
    type Output = u32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> u32 {
        let exponents = self.0.iter().map(|x| x.to_bits() & INFINITE_EXPONENT);
        exponents.fold(0, u32::max)
    }
}

#[cfg(test)]
mod tests {
    use super::finite;

    #[test]
    fn finite_sees_every_element() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in 0..40 {
                let mut values = vec![f32::MAX; 40];
                assert!(finite(&values));
                values[at] = bad;
                assert!(!finite(&values));
            }
        }
    }
}
