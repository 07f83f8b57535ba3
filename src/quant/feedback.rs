use nalgebra::{Cholesky, DMatrix};

use super::Real;
use crate::{Error, Result};

/// Relative damping of the error metric before it is inverted.
pub const DAMPING: f64 = 0.01;

/// F (d, d), strictly upper triangular: where channel i is rounded with error e, channel j > i moves by −e·F_ij.
///
/// `c` (d, d) is the metric of the error in the encoded space (δ·c·δᵀ is what matters): A⁻¹·qq·A⁻ᵀ for keys. With
/// (c + 0.01·tr(c)/d·I)⁻¹ = UᵀU, U upper triangular, F is U with each row divided by its diagonal: the sweep GPTQ
/// makes over weights (Frantar et al. 2022, equation 3 and section 4).
///
/// # Errors
/// [`Error::Numeric`] where `c` is not square, holds NaN, has no energy, or is not positive definite after damping.
pub fn feedback_matrix(c: &DMatrix<f64>) -> Result<DMatrix<f64>> {
    let fail = |problem: String| Error::numeric("feedback matrix", problem);
    let d = c.nrows();
    if d == 0 || c.ncols() != d {
        return Err(fail(format!("a {:?} metric is not square", c.shape())));
    }
    let energy = c.trace() / d as f64;
    if !energy.is_finite() || energy < f64::MIN_POSITIVE {
        return Err(fail(format!(
            "the metric has no usable energy (trace {:e})",
            c.trace()
        )));
    }
    let damped = (c + c.transpose()) / (2.0 * energy) + DMatrix::identity(d, d) * DAMPING;
    let factor = Cholesky::new(damped)
        .and_then(|x| Cholesky::new(x.inverse()))
        .ok_or_else(|| fail("the damped metric is not positive definite".into()))?
        .unpack();
    let f = DMatrix::from_fn(d, d, |i, j| {
        if j > i {
            factor[(j, i)] / factor[(i, i)]
        } else {
            0.0
        }
    });
    if f.iter().all(|x| x.is_finite()) {
        Ok(f)
    } else {
        Err(fail("entries are not finite".into()))
    }
}

/// The entries row by row, as [`Codec::feedback`](super::Codec::feedback) wants them.
pub fn row_major<T: Real>(x: &DMatrix<f64>) -> Vec<T> {
    x.transpose().iter().map(|&x| T::from_f64(x)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diagonal_metric_needs_no_feedback() {
        let f = feedback_matrix(&DMatrix::from_diagonal(&vec![3.0, 1.0, 0.0].into())).unwrap();
        assert_eq!(f, DMatrix::zeros(3, 3));
    }

    /// The error pushed on is the one that makes the rest of the quadratic form least: −C_rr⁻¹·C_ri per unit.
    #[test]
    fn two_channels_by_hand() {
        let c = DMatrix::from_row_slice(2, 2, &[2.0, 1.0, 1.0, 2.0]);
        let f = feedback_matrix(&c).unwrap();
        assert!((f[(0, 1)] + 1.0 / 2.02).abs() < 1e-12, "{f}");
        assert!(f[(1, 0)] == 0.0 && f[(0, 0)] == 0.0);
    }

    #[test]
    fn rank_one_passes_and_rubbish_is_refused() {
        let f = feedback_matrix(&DMatrix::from_element(64, 64, 5.0)).unwrap();
        assert!(f.iter().all(|x| x.is_finite()));
        assert!(feedback_matrix(&DMatrix::zeros(4, 4)).is_err());
        assert!(feedback_matrix(&DMatrix::from_element(4, 4, f64::NAN)).is_err());
        let indefinite = DMatrix::from_row_slice(2, 2, &[1.0, 5.0, 5.0, 1.0]);
        assert!(feedback_matrix(&indefinite).is_err());
        assert!(feedback_matrix(&DMatrix::identity(2, 3)).is_err());
    }
}
