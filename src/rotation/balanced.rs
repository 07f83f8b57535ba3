//! A transform of keys that need not be orthogonal: q·k = (q·A⁻ᵀ)(k·A)ᵀ for any invertible A.

use nalgebra::DMatrix;

use super::{bit_reversal, eigen, hadamard};
use crate::{Error, Result};

/// Largest |encode·queryᵀ − I| that passes.
const INVERSE: f64 = 1e-8;

/// Eigenvalues of M^½·Σ·M^½ below this share of their mean are rounding: they are raised to it.
const FLOOR: f64 = 1e-12;

/// Keys go in as (k − mean) · `encode`, queries as q · `query`.
#[derive(Clone, Debug)]
pub struct Balanced {
    /// A (d, d).
    pub encode: DMatrix<f64>,
    /// A⁻ᵀ (d, d).
    pub query: DMatrix<f64>,
    /// Λ (d), the eigenvalues of M^½·Σ·M^½, descending.
    pub spectrum: Vec<f64>,
}

/// A = M^½ · U · Λ^(−p) · H · P with M^½·Σ·M^½ = U·Λ·Uᵀ, scaled so that tr(AᵀΣA) = tr(Σ).
///
/// `m` (d, d) is the sensitivity of the logits (`qq`), `s` (d, d) the covariance of the centered keys. p = ¼ makes
/// tr(A⁻¹MA⁻ᵀ)·tr(AᵀΣA) least, the noise's gain times its range; feedback rounding likes p near 0.4; p = ½ whitens.
/// Both matrices get the loading of [`eigen::LOADING`] first.
///
/// # Errors
/// [`Error::Numeric`] where shapes differ, either matrix has no energy or holds NaN, or the inverse is not one to
/// within 1e-8.
pub fn balanced(m: &DMatrix<f64>, s: &DMatrix<f64>, p: f64) -> Result<Balanced> {
    let fail = |problem: String| Error::numeric("balanced transform", problem);
    let d = m.nrows();
    if m.shape() != s.shape() || d != m.ncols() {
        return Err(fail(format!(
            "a {:?} sensitivity does not fit a {:?} covariance",
            m.shape(),
            s.shape()
        )));
    }
    if !p.is_finite() {
        return Err(fail(format!("exponent {p}")));
    }
    let named = |name: &str, error: Error| match error {
        Error::Numeric { problem, .. } => fail(format!("{name}: {problem}")),
        other => other,
    };
    let loaded =
        |x: &DMatrix<f64>| (x + x.transpose()) / 2.0 + DMatrix::identity(d, d) * eigen::loading(x);

    let eigen::Eigen { values, vectors } =
        eigen::symmetric(&loaded(m)).map_err(|e| named("query moment", e))?;
    let power = |exponent: f64| {
        scaled_columns(&vectors, |i| values[i].powf(exponent)) * vectors.transpose()
    };
    let (root, inverse_root) = (power(0.5), power(-0.5));

    let s = loaded(s);
    let product =
        eigen::symmetric(&(&root * &s * &root)).map_err(|e| named("key covariance", e))?;
    let floor = FLOOR * product.values.iter().sum::<f64>() / d as f64;
    let lambda: Vec<f64> = product.values.iter().map(|x| x.max(floor)).collect();

    let mix = hadamard::matrix(d);
    let side = |root: &DMatrix<f64>, exponent: f64| {
        let basis = scaled_columns(&product.vectors, |i| lambda[i].powf(exponent));
        bit_reversal::apply(&(root * basis * &mix))
    };
    let (mut encode, mut query) = (side(&root, -p), side(&inverse_root, p));
    let scale = (s.trace() / (encode.tr_mul(&s) * &encode).trace()).sqrt();
    encode *= scale;
    query /= scale;

    let off = eigen::deviation_from_identity(&(&encode * query.transpose()));
    // Written so that NaN fails.
    if !(off < INVERSE) {
        return Err(fail(format!(
            "encode · queryᵀ is off the identity by {off:e}"
        )));
    }
    let mut spectrum = lambda;
    spectrum.reverse();
    Ok(Balanced {
        encode,
        query,
        spectrum,
    })
}

/// Column i of `x` times `factor(i)`.
fn scaled_columns(x: &DMatrix<f64>, factor: impl Fn(usize) -> f64) -> DMatrix<f64> {
    let mut scaled = x.clone();
    for (i, mut column) in scaled.column_iter_mut().enumerate() {
        column *= factor(i);
    }
    scaled
}
