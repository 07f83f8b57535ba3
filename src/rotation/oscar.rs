//! The paper's rotation.

use nalgebra::DMatrix;

use super::{bit_reversal, eigen, hadamard};
use crate::Result;

/// An orthogonal transform: encode = query = decodeᵀ = `matrix`.
#[derive(Clone, Debug)]
pub struct Rotation {
    /// R (d, d): x' = x · R.
    pub matrix: DMatrix<f64>,
    /// Eigenvalues (d) of the moment that R came from, descending.
    pub spectrum: Vec<f64>,
}

/// R = U · H · P for a moment `c` (d, d): U its eigenvectors by ascending eigenvalue, H [`hadamard::matrix`], P
/// [`bit_reversal::columns`]. For keys `c` is `qq`, for values `oo` (or `vwv`, as in the released files).
///
/// diag(Rᵀ·c·R) is flat, tr(c)/d everywhere, where H has entries ±1/√d: every channel matters the same.
///
/// # Errors
/// Those of [`eigen::symmetric`].
pub fn oscar(c: &DMatrix<f64>) -> Result<Rotation> {
    let eigen::Eigen {
        mut values,
        vectors,
    } = eigen::symmetric(c)?;
    values.reverse();
    Ok(Rotation {
        matrix: bit_reversal::apply(&(vectors * hadamard::matrix(c.nrows()))),
        spectrum: values,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::turboquant::random_orthogonal;

    #[test]
    fn importance_is_flat() {
        for d in [16, 64, 80, 96, 192] {
            let u = random_orthogonal(d, 3);
            let values = DMatrix::from_fn(
                d,
                d,
                |i, j| {
                    if i == j { 0.9f64.powi(i as i32) } else { 0.0 }
                },
            );
            let c = &u * values * u.transpose();
            let Rotation { matrix, spectrum } = oscar(&c).unwrap();
            let importance = (matrix.tr_mul(&c) * &matrix).diagonal();
            let flat = c.trace() / d as f64;
            assert!(importance.iter().all(|x| (x / flat - 1.0).abs() < 1e-9));
            assert!((spectrum[0] - 1.0).abs() < 1e-9 && spectrum[d - 1] < spectrum[0]);
        }
    }
}
