//! Eigendecomposition of moments.

use nalgebra::{DMatrix, SymmetricEigen};

use crate::{Error, Result};

/// Relative diagonal loading: λ = `LOADING` · tr / d. Without it nalgebra can return NaN vectors, and no error,
/// where many channels are dead.
pub const LOADING: f64 = 1e-6;

/// QR sweeps allowed per dimension; real moments need about two.
const SWEEPS_PER_DIM: usize = 64;

/// Largest |UᵀU − I| that passes.
const ORTHOGONALITY: f64 = 1e-10;

/// C = U · diag(values) · Uᵀ.
#[derive(Clone, Debug)]
pub struct Eigen {
    /// Eigenvalues (d), ascending, of the matrix without the loading: a dead channel's may be a hair below 0.
    pub values: Vec<f64>,
    /// Eigenvectors (d, d), one a column, in the order of `values`. Each one's entry of largest magnitude is
    /// positive; the lowest index wins a tie.
    pub vectors: DMatrix<f64>,
}

/// λ = 1e-6 · tr(c) / d, the diagonal loading of method.md.
pub(super) fn loading(c: &DMatrix<f64>) -> f64 {
    LOADING * c.trace() / c.nrows() as f64
}

/// Eigendecomposition of the symmetric part of `c` (d, d), a moment: positive semidefinite up to rounding.
///
/// # Errors
/// [`Error::Numeric`] where `c` is empty or not square, holds NaN or infinity, has no energy (trace ≤ 0), or where
/// the iteration does not converge to an orthonormal basis.
pub fn symmetric(c: &DMatrix<f64>) -> Result<Eigen> {
    let fail = |problem: String| Error::numeric("eigendecomposition", problem);
    let d = c.nrows();
    if d == 0 || c.ncols() != d {
        return Err(fail(format!("a {d}x{} matrix is not square", c.ncols())));
    }
    if let Some(at) = c.iter().position(|x| !x.is_finite()) {
        return Err(fail(format!("entry ({}, {}) is {}", at % d, at / d, c[at])));
    }
    let energy = c.trace() / d as f64;
    if energy < f64::MIN_POSITIVE {
        return Err(fail(format!(
            "the matrix has no energy (trace {:e})",
            c.trace()
        )));
    }

    // In units of the mean eigenvalue: neither tiny nor huge moments leave the range of f64 on the way.
    let mut scaled = (c + c.transpose()) / (2.0 * energy);
    for i in 0..d {
        scaled[(i, i)] += LOADING;
    }
    let eigen = SymmetricEigen::try_new(scaled, f64::EPSILON, SWEEPS_PER_DIM * d)
        .ok_or_else(|| fail(format!("no convergence in {} sweeps", SWEEPS_PER_DIM * d)))?;

    let mut order: Vec<usize> = (0..d).collect();
    order.sort_by(|&a, &b| eigen.eigenvalues[a].total_cmp(&eigen.eigenvalues[b]));
    let values: Vec<f64> = order
        .iter()
        .map(|&i| (eigen.eigenvalues[i] - LOADING) * energy)
        .collect();
    let mut vectors = eigen.eigenvectors.select_columns(&order);
    for mut column in vectors.column_iter_mut() {
        let pivot = column.iter().fold(
            0.0_f64,
            |best, &x| if x.abs() > best.abs() { x } else { best },
        );
        if pivot < 0.0 {
            column.neg_mut();
        }
    }

    let off = orthogonality_error(&vectors);
    // Written so that NaN fails.
    if !(off < ORTHOGONALITY && values.iter().all(|x| x.is_finite())) {
        return Err(fail(format!(
            "the basis is off orthonormal by {off:e} (at most {ORTHOGONALITY:e} passes)"
        )));
    }
    Ok(Eigen { values, vectors })
}

/// max |UᵀU − I| of a square matrix; NaN where it holds one.
pub fn orthogonality_error(u: &DMatrix<f64>) -> f64 {
    deviation_from_identity(&u.tr_mul(u))
}

/// max |x − I|; NaN where `x` holds one.
pub(super) fn deviation_from_identity(x: &DMatrix<f64>) -> f64 {
    let mut worst = 0.0_f64;
    for (at, &value) in x.iter().enumerate() {
        let (row, column) = (at % x.nrows(), at / x.nrows());
        let off = (value - f64::from(u8::from(row == column))).abs();
        if off > worst || off.is_nan() {
            worst = off;
        }
        if worst.is_nan() {
            break;
        }
    }
    worst
}
