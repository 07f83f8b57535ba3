//! Pages of the cache as the CPU sees them, number by number, and inputs with outliers.
#![allow(dead_code)]

use candle_core::{CudaDevice, Device};
use half::bf16;
use nalgebra::DMatrix;
use oscar_kv::cuda;
use oscar_kv::kv::page::{PAGE_TOKENS, PageLayout, Side};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub const SIDES: [Side; 2] = [Side::K, Side::V];

pub fn gpu() -> Option<CudaDevice> {
    if cuda::count() == 0 {
        println!("skipped: no GPU");
        return None;
    }
    match cuda::open(0).unwrap() {
        Device::Cuda(device) => Some(device),
        _ => unreachable!(),
    }
}

pub struct Random(ChaCha8Rng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.0.random::<f64>() * n as f64) as usize
    }

    pub fn uniform(&mut self) -> f32 {
        self.0.random()
    }

    pub fn normal(&mut self) -> f32 {
        let (u, v): (f64, f64) = (self.0.random(), self.0.random());
        ((-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    /// Rows (n, heads, d): channels of very different spread, off centre, a few eight times larger, and rows of
    /// heavy-tailed size.
    pub fn rows(&mut self, n: usize, heads: usize, d: usize) -> Vec<bf16> {
        let channels: Vec<(f32, f32)> = (0..heads * d)
            .map(|i| {
                let outlier = if i % 29 == 3 { 8.0 } else { 1.0 };
                ((0.5 * self.normal()).exp() * outlier, self.normal())
            })
            .collect();
        let mut rows = Vec::with_capacity(n * heads * d);
        for _ in 0..n {
            let size = (0.6 * self.normal()).exp();
            for (spread, mean) in &channels {
                rows.push(bf16::from_f32(size * spread * self.normal() + mean));
            }
        }
        rows
    }

    /// (heads, d, d): well conditioned, not orthogonal.
    pub fn matrices(&mut self, heads: usize, d: usize) -> Vec<f32> {
        (0..heads * d * d)
            .map(|i| {
                let diagonal = if i % (d * d) / d == i % d { 1.0 } else { 0.0 };
                self.normal() / (d as f32).sqrt() + diagonal
            })
            .collect()
    }

    /// A metric of errors (d, d) with a spectrum over two decades.
    pub fn metric(&mut self, d: usize) -> DMatrix<f64> {
        let r = DMatrix::from_fn(d, d, |_, _| f64::from(self.normal()) / (d as f64).sqrt());
        let spectrum = DMatrix::from_diagonal(
            &(0..d)
                .map(|_| f64::from(1.2 * self.normal()).exp())
                .collect::<Vec<_>>()
                .into(),
        );
        &r * spectrum * r.transpose()
    }
}

/// Writes a number to a BF16 page.
pub fn put_number(
    page: &mut [u8],
    layout: &PageLayout,
    side: Side,
    token: usize,
    channel: usize,
    x: bf16,
) {
    let at = layout.number(side, token, channel);
    page[at..at + 2].copy_from_slice(&x.to_le_bytes());
}

pub fn number(page: &[u8], layout: &PageLayout, side: Side, token: usize, channel: usize) -> bf16 {
    let at = layout.number(side, token, channel);
    bf16::from_le_bytes([page[at], page[at + 1]])
}

/// One side of an INT2 page: codes (64, d), scales and zeros (64, groups).
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    pub codes: Vec<u8>,
    pub scale: Vec<bf16>,
    pub zero: Vec<bf16>,
}

pub fn quantized(page: &[u8], layout: &PageLayout, side: Side) -> Quantized {
    let mut out = Quantized {
        codes: vec![],
        scale: vec![],
        zero: vec![],
    };
    for token in 0..PAGE_TOKENS {
        for channel in 0..layout.head_dim {
            let (byte, shift) = layout.code(side, token, channel);
            out.codes.push(page[byte] >> shift & 3);
        }
        for group in 0..layout.groups() {
            let at = layout.scale(side, token, group);
            out.scale
                .push(bf16::from_le_bytes([page[at], page[at + 1]]));
            out.zero
                .push(bf16::from_le_bytes([page[at + 2], page[at + 3]]));
        }
    }
    out
}

/// `page` starts as zeros.
pub fn put_quantized(page: &mut [u8], layout: &PageLayout, side: Side, x: &Quantized) {
    let (d, groups) = (layout.head_dim, layout.groups());
    for token in 0..PAGE_TOKENS {
        for channel in 0..d {
            let (byte, shift) = layout.code(side, token, channel);
            page[byte] |= x.codes[token * d + channel] << shift;
        }
        for group in 0..groups {
            let at = layout.scale(side, token, group);
            page[at..at + 2].copy_from_slice(&x.scale[token * groups + group].to_le_bytes());
            page[at + 2..at + 4].copy_from_slice(&x.zero[token * groups + group].to_le_bytes());
        }
    }
}

impl Quantized {
    /// (code − zero)·scale, (64, d).
    pub fn decode(&self, group: usize) -> Vec<f32> {
        let at = |i: usize| {
            (
                self.scale[i / group].to_f32(),
                self.zero[i / group].to_f32(),
            )
        };
        self.codes
            .iter()
            .enumerate()
            .map(|(i, &code)| (f32::from(code) - at(i).1) * at(i).0)
            .collect()
    }
}
