//! What an entry's matrices still say of the moments they came from.
//!
//! encode = X·H·P, so X = encode·Pᵀ·Hᵀ is known. For orthogonal transforms X = U, eigenvectors of a moment with
//! eigenvalues Λ; for `balanced` ones X = s·M^½·U·Λ^(−p) with an unknown scale s. Either gives back the moment M itself,
//! up to scale, and with it what an error in each of the model's own channels costs.

use nalgebra::DMatrix;

use crate::rotation::{bit_reversal, hadamard};
use crate::zoo::{Entry, SideName};

/// One transform of one side of a layer, taken apart.
#[derive(Clone, Debug)]
pub struct Basis {
    /// (d, d): column j is the direction in the model's channels that belongs to `spectrum[j]`; any length, any sign.
    pub directions: DMatrix<f64>,
    /// (d), descending.
    pub spectrum: Vec<f64>,
    /// M (d, d), up to scale. `None` where the exponent of `balanced` is not recorded.
    pub moment: Option<DMatrix<f64>>,
}

impl Basis {
    /// Of transform `unit` (a KV head, or 0 in scope `layer`). `None` where it was made without data.
    pub fn of(entry: &Entry, layer: usize, side: SideName, unit: usize) -> Option<Self> {
        let parts = entry.layers.get(&layer)?;
        let d = parts.head_dim;
        let found = match side {
            SideName::K => &parts.k,
            SideName::V => &parts.v,
        };
        let encode = found.encode.get(unit)?;
        let spectrum: Vec<f64> = found
            .spectrum
            .as_ref()?
            .get(unit)?
            .iter()
            .map(|x| f64::from(*x))
            .collect();
        if encode.len() != d * d || spectrum.len() != d {
            return None;
        }
        let encode = DMatrix::from_row_slice(d, d, encode).map(f64::from);
        let mut mixed = DMatrix::zeros(d, d);
        for (from, to) in bit_reversal::columns(d).into_iter().enumerate() {
            mixed.set_column(to, &encode.column(from));
        }
        let ascending = mixed * hadamard::matrix(d).transpose();
        let order: Vec<usize> = (0..d).rev().collect();
        let directions = ascending.select_columns(&order);

        let power = if found.dual.is_some() {
            let fit = entry.metadata.fit.as_ref();
            let fitted = fit.and_then(|fit| match side {
                SideName::K => fit.k.get(&layer),
                SideName::V => fit.v.get(&layer),
            });
            fitted
                .and_then(|fitted| fitted.exponent.get(unit))
                .map(|p| 2.0 * f64::from(*p))
        } else {
            Some(1.0)
        };
        let moment = power.map(|power| {
            let mut weighted = directions.clone();
            for (mut column, x) in weighted.column_iter_mut().zip(&spectrum) {
                column *= x.max(0.0).powf(power);
            }
            weighted * directions.transpose()
        });
        Some(Self {
            directions,
            spectrum,
            moment,
        })
    }

    /// What an error in each of the model's own channels costs (d): the diagonal of M, scaled to mean 1.
    pub fn importance(&self) -> Option<Vec<f64>> {
        let diagonal = self.moment.as_ref()?.diagonal();
        let mean = diagonal.mean().max(f64::MIN_POSITIVE);
        Some(diagonal.iter().map(|x| x / mean).collect())
    }

    /// Orthonormal columns (d, rank) that span the leading directions.
    pub fn leading(&self, rank: usize) -> DMatrix<f64> {
        let rank = rank.min(self.directions.ncols());
        self.directions.columns(0, rank).into_owned().qr().q()
    }
}

/// Cosines of the principal angles between two subspaces, each given by orthonormal columns; largest first.
pub fn principal_cosines(a: &DMatrix<f64>, b: &DMatrix<f64>) -> Vec<f64> {
    let mut cosines: Vec<f64> = a
        .tr_mul(b)
        .singular_values()
        .iter()
        .map(|x| x.clamp(0.0, 1.0))
        .collect();
    cosines.sort_by(|x, y| y.total_cmp(x));
    cosines
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::quant::row_major;
    use crate::quant::turboquant::random_orthogonal;
    use crate::rotation::{balanced, oscar};
    use crate::zoo::{Fit, FitSide, Layer, Metadata, Rounding, Side};

    fn moment(d: usize, seed: u64) -> DMatrix<f64> {
        let u = random_orthogonal(d, seed);
        let values = DMatrix::from_fn(
            d,
            d,
            |i, j| {
                if i == j { 0.7f64.powi(i as i32) } else { 0.0 }
            },
        );
        &u * values * u.transpose()
    }

    fn diagonal(m: &DMatrix<f64>) -> Vec<f64> {
        let mean = m.trace() / m.nrows() as f64;
        m.diagonal().iter().map(|x| x / mean).collect()
    }

    /// One layer, one KV head, no transform.
    fn plain(d: usize) -> Entry {
        let identity = row_major(&DMatrix::<f64>::identity(d, d));
        let side = || Side {
            encode: vec![identity.clone()],
            clip: vec![1.0],
            ..Side::default()
        };
        let fitted = || BTreeMap::from([(0, FitSide::default())]);
        let metadata = serde_json::json!({
            "schema": 1, "method": "oscar", "scope": "head", "k_moment": "qq", "v_moment": "oo",
            "quantizer": { "bits": 2, "group": d, "codec": "uniform", "scale_dtype": "bfloat16" },
            "windows": { "sink": 4, "recent": 8 },
            "model": {
                "id": "toy", "architecture": "llama", "config_sha256": "", "weights_fingerprint": "", "layers": 1,
                "heads": [1], "kv_heads": [1], "head_dim": [d]
            },
            "calibration": {
                "tokens": 1, "prompts": 1, "seq_len": 1, "token_ids_sha256": "", "tokenizer_sha256": "", "seed": 0,
                "dtype": "f32", "device": "cpu"
            },
            "tool": { "name": "oscar-kv", "version": "0", "algorithm": 1 },
        });
        let mut metadata: Metadata = serde_json::from_value(metadata).unwrap();
        metadata.fit = Some(Fit {
            k_rounding: Rounding::Nearest,
            v_rounding: Rounding::Nearest,
            k_centered: false,
            v_centered: false,
            k: fitted(),
            v: fitted(),
        });
        let layer = Layer {
            head_dim: d,
            k: side(),
            v: side(),
        };
        Entry {
            metadata,
            layers: BTreeMap::from([(0, layer)]),
        }
    }

    fn entry(encode: &DMatrix<f64>, dual: Option<&DMatrix<f64>>, spectrum: &[f64]) -> Entry {
        let mut entry = plain(encode.nrows());
        let side = &mut entry.layers.get_mut(&0).unwrap().k;
        side.encode = vec![row_major(encode)];
        side.dual = dual.map(|dual| vec![row_major(dual)]);
        side.spectrum = Some(vec![spectrum.iter().map(|x| *x as f32).collect()]);
        entry
    }

    #[test]
    fn moments_come_back_from_either_kind_of_transform() {
        for d in [16, 24] {
            let (m, s) = (moment(d, 1), moment(d, 2));
            let r = oscar(&m).unwrap();
            let got = Basis::of(&entry(&r.matrix, None, &r.spectrum), 0, SideName::K, 0).unwrap();
            for (a, b) in got.importance().unwrap().iter().zip(diagonal(&m)) {
                assert!((a - b).abs() < 1e-3, "{a} {b}");
            }
            let b = balanced(&m, &s, 0.25).unwrap();
            let mut with_exponent = entry(&b.encode, Some(&b.query), &b.spectrum);
            let fit = with_exponent.metadata.fit.as_mut().unwrap();
            fit.k.get_mut(&0).unwrap().exponent = vec![0.25];
            let got = Basis::of(&with_exponent, 0, SideName::K, 0).unwrap();
            for (a, b) in got.importance().unwrap().iter().zip(diagonal(&m)) {
                assert!((a - b).abs() < 2e-2, "{a} {b}");
            }
        }
    }

    #[test]
    fn signs_and_rotations_within_a_subspace_are_no_difference() {
        let m = moment(16, 3);
        let r = oscar(&m).unwrap();
        let a = Basis::of(&entry(&r.matrix, None, &r.spectrum), 0, SideName::K, 0).unwrap();
        let mut flipped = a.clone();
        flipped.directions.column_mut(0).neg_mut();
        flipped.directions.swap_columns(1, 2);
        let cosines = principal_cosines(&a.leading(4), &flipped.leading(4));
        assert!(
            cosines.iter().all(|c| (c - 1.0).abs() < 1e-9),
            "{cosines:?}"
        );
        flipped.directions.swap_columns(0, 15);
        let cosines = principal_cosines(&a.leading(4), &flipped.leading(4));
        assert!(cosines[3] < 1e-6, "{cosines:?}");
    }
}
