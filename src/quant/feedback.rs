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
