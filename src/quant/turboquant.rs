//! TurboQuant (Zandieh et al. 2025), its variant for mean squared error: random rotation, row norm, Lloyd–Max levels.

use std::f64::consts::TAU;

use half::bf16;
use nalgebra::DMatrix;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::lloyd_max::Codebook;
use super::{row_major, with_windows};
use crate::linalg::{self, Op, View};
use crate::{Error, Result};

/// One head's codec. Data-free: the rotation depends on the seed alone.
#[derive(Clone, Debug)]
pub struct TurboQuant {
    head_dim: usize,
    book: Codebook,
    /// (d, d), row-major, orthogonal.
    rotation: Vec<f32>,
}

impl TurboQuant {
    /// # Errors
    /// Where `bits` is neither 2 nor 3, or `head_dim` is 0.
    pub fn new(head_dim: usize, bits: usize, seed: u64) -> Result<Self> {
        if head_dim == 0 {
            return Err(Error::invalid("TurboQuant codec", "head_dim is 0"));
        }
        Ok(Self {
            head_dim,
            book: Codebook::new(bits)?,
            rotation: row_major(&random_orthogonal(head_dim, seed)),
        })
    }

    /// Rows (n, d) through the cache and back: rotated, divided by their norm (stored as bf16), each coordinate
    /// (close to N(0, 1/d)) set to its Lloyd–Max level.
    ///
    /// # Errors
    /// Where `rows` is not a whole number of rows.
    pub fn roundtrip(&self, rows: &[f32]) -> Result<Vec<f32>> {
        let d = self.head_dim;
        if !rows.len().is_multiple_of(d) {
            return Err(Error::invalid(
                "TurboQuant codec",
                format!("{} values are not rows of {d}", rows.len()),
            ));
        }
        let n = rows.len() / d;
        let rotation = View::contiguous(&self.rotation, d, d);
        let mut rotated = vec![0.0; rows.len()];
        linalg::matmul(
            Op::Nn,
            View::contiguous(rows, n, d),
            rotation,
            &mut rotated,
            d,
            false,
            1.0,
            0.0,
        );
        for row in rotated.chunks_exact_mut(d) {
            let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            let norm = bf16::from_f32(norm).to_f32();
            let unit = norm / (d as f32).sqrt();
            for x in row {
                *x = if unit > 0.0 {
                    self.book.level(self.book.code(*x / unit)) * unit
                } else {
                    0.0
                };
            }
        }
        let mut out = vec![0.0; rows.len()];
        linalg::matmul(
            Op::Nt,
            View::contiguous(&rotated, n, d),
            rotation,
            &mut out,
            d,
            false,
            1.0,
            0.0,
        );
        Ok(out)
    }
}

/// Bits per element: `bits` a code, one bf16 norm a row, and the exact windows.
pub fn bits_per_element(
    bits: f64,
    head_dim: usize,
    context_tokens: usize,
    sink: usize,
    recent: usize,
) -> f64 {
    with_windows(bits + 16.0 / head_dim as f64, context_tokens, sink, recent)
}

/// Q (d, d) of a Gaussian matrix's QR, its signs those of a positive diagonal of R: uniform over the orthogonal group.
pub fn random_orthogonal(d: usize, seed: u64) -> DMatrix<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let gaussian = DMatrix::from_fn(d, d, |_, _| {
        // Box and Muller; 1 − u lies in (0, 1].
        let (u, v): (f64, f64) = (rng.random(), rng.random());
        (-2.0 * (1.0 - u).ln()).sqrt() * (TAU * v).cos()
    });
    let (mut q, r) = gaussian.qr().unpack();
    for (i, mut column) in q.column_iter_mut().enumerate() {
        if r[(i, i)] < 0.0 {
            column.neg_mut();
        }
    }
    q
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_row_keeps_the_codebook_error() {
        let d = 128;
        let rows: Vec<f32> = (0..200 * d)
            .map(|i| {
                let x = ((i * 7919) % 1009) as f32 / 504.5 - 1.0;
                if i % d == 5 { 40.0 * x + 20.0 } else { x }
            })
            .collect();
        for (bits, want) in [(2, 0.117), (3, 0.0345)] {
            let back = TurboQuant::new(d, bits, 7)
                .unwrap()
                .roundtrip(&rows)
                .unwrap();
            let energy: f32 = rows.iter().map(|x| x * x).sum();
            let error: f32 = rows.iter().zip(&back).map(|(a, b)| (a - b).powi(2)).sum();
            assert!(
                (error / energy / want - 1.0).abs() < 0.15,
                "{bits}: {}",
                error / energy
            );
        }
    }

    #[test]
    fn the_seed_alone_decides_the_rotation() {
        let q = random_orthogonal(80, 3);
        assert_eq!(q, random_orthogonal(80, 3));
        assert_ne!(q, random_orthogonal(80, 4));
        assert!((q.tr_mul(&q) - DMatrix::identity(80, 80)).amax() < 1e-12);
    }

    #[test]
    fn degenerate_input() {
        let codec = TurboQuant::new(4, 2, 0).unwrap();
        assert_eq!(codec.roundtrip(&[0.0; 8]).unwrap(), [0.0; 8]);
        assert!(codec.roundtrip(&[0.0; 7]).is_err());
        assert!(TurboQuant::new(0, 2, 0).is_err());
        assert!(TurboQuant::new(4, 5, 0).is_err());
        assert!((bits_per_element(2.0, 64, 0, 0, 0) - 2.25).abs() < 1e-12);
    }
}
