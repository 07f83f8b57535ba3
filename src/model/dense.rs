//! Inner loops of a decoder layer on f32 slices, written so that they vectorise where `pulp` dispatches them to a
//! wide instruction set.

use pulp::Arch;

use crate::kv::attention::exp::exp2;
use crate::linalg::{Op, View, matmul};

/// A matrix (out, in) as in checkpoints, and its bias.
#[derive(Clone, Copy)]
pub(super) struct Linear<'a> {
    pub weight: &'a [f32],
    pub inputs: usize,
    pub bias: Option<&'a [f32]>,
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
        let x = View::contiguous(x, x.len() / inputs, inputs);
        let w = View::contiguous(self.weight, outputs, inputs);
        matmul(Op::Nt, x, w, y, outputs, accumulate, 1.0, 1.0);
        if let Some(bias) = self.bias {
            for row in y.chunks_exact_mut(outputs) {
                for (y, b) in row.iter_mut().zip(bias) {
                    *y += b;
                }
            }
        }
    }
}

/// y = x / sqrt(mean(x²) + eps) · weight for rows as long as `weight`.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    Arch::new().dispatch(
        #[inline(always)]
        || {
            let n = weight.len();
            for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
                let scale = inverse_rms(x, eps);
                for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                    *y = x * scale * w;
                }
            }
        },
    );
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    let sum = lanes.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

/// A head's norm of q or k, where the family has one.
#[derive(Clone, Copy)]
pub(super) struct HeadNorm<'a> {
    pub weight: &'a [f32],
    pub eps: f32,
}

/// One token's heads: norm, then RoPE with that position's cosines and sines (head_dim/2 each).
pub(super) fn norm_and_turn(
    x: &[f32],
    norm: Option<HeadNorm>,
    cos: &[f32],
    sin: &[f32],
    y: &mut [f32],
) {
    Arch::new().dispatch(
        #[inline(always)]
        || {
            let half = cos.len();
            for (x, y) in x.chunks_exact(2 * half).zip(y.chunks_exact_mut(2 * half)) {
                match norm {
                    Some(HeadNorm { weight, eps }) => {
                        let scale = inverse_rms(x, eps);
                        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                            *y = x * scale * w;
                        }
                    }
                    None => y.copy_from_slice(x),
                }
                let (a, b) = y.split_at_mut(half);
                for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                    (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
                }
            }
        },
    );
}

/// y = silu(gate) · up, where a row of `gate_up` is the gate's `y`-row followed by the up's.
pub(super) fn silu_times(gate_up: &[f32], width: usize, y: &mut [f32]) {
    Arch::new().dispatch(
        #[inline(always)]
        || {
            for (gate_up, y) in gate_up
                .chunks_exact(2 * width)
                .zip(y.chunks_exact_mut(width))
            {
                let (gate, up) = gate_up.split_at(width);
                for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
                    *y = g / (1.0 + exp2(-std::f32::consts::LOG2_E * g)) * u;
                }
            }
        },
    );
}
