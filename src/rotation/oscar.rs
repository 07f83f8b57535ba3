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
