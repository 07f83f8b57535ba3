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
    if off.is_nan() || off >= ORTHOGONALITY || values.iter().any(|x| !x.is_finite()) {
        return Err(fail(format!(
            "the basis is off orthonormal by {off:e} (at most {ORTHOGONALITY:e} passes)"
        )));
    }
    Ok(Eigen { values, vectors })
}

/// max |UᵀU − I| of a square matrix; NaN where it holds one.
pub fn orthogonality_error(u: &DMatrix<f64>) -> f64 {
    // Not `tr_mul`, which multiplies column by column.
    deviation_from_identity(&(u.transpose() * u))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::turboquant::random_orthogonal;

    fn with_spectrum(values: &[f64], seed: u64) -> DMatrix<f64> {
        let u = random_orthogonal(values.len(), seed);
        &u * DMatrix::from_diagonal(&values.to_vec().into()) * u.transpose()
    }

    fn assert_decomposes(c: &DMatrix<f64>) {
        let Eigen { values, vectors } = symmetric(c).unwrap();
        assert!(values.is_sorted());
        let back = &vectors * DMatrix::from_diagonal(&values.into()) * vectors.transpose();
        assert!((back - c).amax() < 1e-10 * c.amax());
        for column in vectors.column_iter() {
            assert!(column[column.iamax()] > 0.0);
        }
    }

    #[test]
    fn moments_of_any_scale_decompose() {
        for scale in [1e-200, 1e-20, 1.0, 1e20, 1e200] {
            let values: Vec<f64> = (0..32).map(|i| scale * 0.7f64.powi(i)).collect();
            assert_decomposes(&with_spectrum(&values, 1));
        }
    }

    #[test]
    fn degenerate_moments_decompose() {
        assert_decomposes(&DMatrix::identity(64, 64));
        assert_decomposes(&DMatrix::from_element(128, 128, 3.0));
        assert_decomposes(&DMatrix::from_element(1, 1, 2.0));
        for dead in [1, 64, 100, 127] {
            let live = with_spectrum(&vec![2.0; 128 - dead], 2);
            let mut c = DMatrix::zeros(128, 128);
            c.view_mut((0, 0), live.shape()).copy_from(&live);
            assert_decomposes(&c);
            let scattered: Vec<usize> = (0..128).map(|i| i * 37 % 128).collect();
            assert_decomposes(&c.select_columns(&scattered).select_rows(&scattered));
        }
    }

    #[test]
    fn unusable_moments_are_refused() {
        let mut c = DMatrix::identity(4, 4);
        c[(1, 2)] = f64::NAN;
        assert!(
            symmetric(&c)
                .unwrap_err()
                .to_string()
                .contains("(1, 2) is NaN")
        );
        let no_energy = symmetric(&DMatrix::zeros(4, 4)).unwrap_err();
        assert!(no_energy.to_string().contains("no energy"));
        assert!(symmetric(&DMatrix::zeros(0, 0)).is_err());
        assert!(symmetric(&DMatrix::identity(3, 4)).is_err());
    }
}
