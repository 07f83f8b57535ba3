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
    let scale = (s.trace() / (&s * &encode).dot(&encode)).sqrt();
    encode *= scale;
    query /= scale;

    let off = eigen::deviation_from_identity(&(&encode * query.transpose()));
    if off.is_nan() || off >= INVERSE {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::turboquant::random_orthogonal;

    fn covariance(d: usize, decay: f64, seed: u64) -> DMatrix<f64> {
        let u = random_orthogonal(d, seed);
        let values = DMatrix::from_fn(d, d, |i, j| if i == j { decay.powi(i as i32) } else { 0.0 });
        &u * values * u.transpose()
    }

    fn assert_inverse(m: &DMatrix<f64>, s: &DMatrix<f64>, p: f64) {
        let got = balanced(m, s, p).unwrap();
        let product = &got.encode * got.query.transpose();
        let off = (product - DMatrix::identity(m.nrows(), m.nrows())).amax();
        assert!(off < INVERSE, "{off:e}");
        assert!(got.spectrum.iter().rev().is_sorted());
        assert!(got.encode.iter().chain(&got.query).all(|x| x.is_finite()));
    }

    #[test]
    fn a_quarter_makes_noise_times_range_least() {
        let (m, s) = (covariance(32, 0.8, 1), covariance(32, 0.7, 2));
        let product = |encode: &DMatrix<f64>, query: &DMatrix<f64>| {
            (query.tr_mul(&m) * query).trace() * (encode.tr_mul(&s) * encode).trace()
        };
        let at = |p| {
            let got = balanced(&m, &s, p).unwrap();
            let kept = (got.encode.tr_mul(&s) * &got.encode).trace() / s.trace();
            assert!((kept - 1.0).abs() < 1e-2, "{kept}");
            product(&got.encode, &got.query)
        };
        let best = at(0.25);
        for p in [0.0, 0.2, 0.24, 0.26, 0.3, 0.5] {
            assert!(best < at(p), "{p}");
        }
        let identity = DMatrix::identity(32, 32);
        assert!(best < product(&identity, &identity));
    }

    #[test]
    fn degenerate_moments_still_invert() {
        let d = 64;
        let full = covariance(d, 0.9, 1);
        let rank_one = DMatrix::from_fn(d, d, |i, j| ((i + 1) * (j + 1)) as f64);
        let mut dead = full.clone();
        dead.row_mut(7).fill(0.0);
        dead.column_mut(7).fill(0.0);
        for p in [0.2, 0.25, 0.4, 0.5] {
            for (m, s) in [
                (&full, &rank_one),
                (&rank_one, &full),
                (&rank_one, &rank_one),
                (&dead, &full),
                (&full, &dead),
                (&dead, &dead),
            ] {
                assert_inverse(m, s, p);
            }
        }
        for d in [80, 96, 112] {
            assert_inverse(&covariance(d, 0.9, 3), &covariance(d, 0.8, 4), 0.4);
        }
    }

    #[test]
    fn unusable_moments_are_refused_by_name() {
        let (good, none) = (DMatrix::identity(8, 8), DMatrix::zeros(8, 8));
        let message = |m, s| balanced(m, s, 0.4).unwrap_err().to_string();
        assert!(message(&none, &good).contains("query moment: the matrix has no energy"));
        assert!(message(&good, &none).contains("key covariance: the matrix has no energy"));
        assert!(message(&good, &DMatrix::identity(4, 4)).contains("does not fit"));
        assert!(balanced(&good, &good, f64::NAN).is_err());
    }
}
