//! Orthonormal matrices that spread every input channel evenly over all output channels.

use std::f64::consts::PI;

use nalgebra::DMatrix;

/// Hadamard matrices that Paley's first construction gives (order q + 1, q prime, q ≡ 3 mod 4), and that no
/// Kronecker product of smaller ones reaches.
const PALEY_ORDERS: [usize; 2] = [12, 20];

/// H (d, d), HᵀH = I.
///
/// * d = 2ᵃ: the Walsh–Hadamard matrix in Sylvester's order, symmetric, all entries ±1/√d.
/// * d = 2ᵃ·12 or 2ᵃ·20 (48, 80, 96, 160, 192 …): Walsh ⊗ Paley, all entries ±1/√d.
/// * else, d = 2ᵃ·m with m odd (112 = 16·7 …): Walsh ⊗ the orthonormal DCT-II of order m, entries at most √2/√d in magnitude.
pub fn matrix(d: usize) -> DMatrix<f64> {
    if d == 0 {
        return DMatrix::zeros(0, 0);
    }
    for order in PALEY_ORDERS {
        if d.is_multiple_of(order) && (d / order).is_power_of_two() {
            return walsh(d / order).kronecker(&paley(order));
        }
    }
    let walsh_order = 1 << d.trailing_zeros();
    walsh(walsh_order).kronecker(&dct(d / walsh_order))
}

/// Entry (i, j) = (−1)^popcount(i & j) / √d.
fn walsh(d: usize) -> DMatrix<f64> {
    let unit = 1.0 / (d as f64).sqrt();
    DMatrix::from_fn(d, d, |i, j| {
        if (i & j).count_ones().is_multiple_of(2) {
            unit
        } else {
            -unit
        }
    })
}

/// I + S with S = [[0, 1ᵀ], [−1, χ(i − j)]], χ the quadratic character modulo `order` − 1.
fn paley(order: usize) -> DMatrix<f64> {
    let q = order - 1;
    let residues: Vec<usize> = (1..q).map(|x| x * x % q).collect();
    let unit = 1.0 / (order as f64).sqrt();
    DMatrix::from_fn(order, order, |i, j| {
        let positive = i == j || i == 0 || j != 0 && residues.contains(&((i + q - j) % q));
        if positive { unit } else { -unit }
    })
}

/// Column 0 is constant; row i, column j: √(2/m) · cos(π (2i + 1) j / 2m).
fn dct(m: usize) -> DMatrix<f64> {
    DMatrix::from_fn(m, m, |i, j| {
        let phase = PI * ((2 * i + 1) * j) as f64 / (2 * m) as f64;
        let norm = if j == 0 { 1.0 } else { 2.0 } / m as f64;
        norm.sqrt() * phase.cos()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rotation::eigen::orthogonality_error;

    #[test]
    fn orthonormal_at_any_size_and_flat_where_promised() {
        for d in 1..=256 {
            assert!(orthogonality_error(&matrix(d)) < 1e-12, "{d}");
        }
        for d in [1, 2, 64, 128, 256, 12, 24, 48, 96, 192, 20, 40, 80, 160] {
            let unit = 1.0 / (d as f64).sqrt();
            assert!(
                matrix(d).iter().all(|x| (x.abs() - unit).abs() < 1e-12),
                "{d}"
            );
        }
        let most = (2.0 / 112.0_f64).sqrt() + 1e-12;
        assert!(matrix(112).iter().all(|x| x.abs() <= most));
    }
}
