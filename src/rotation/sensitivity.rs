use nalgebra::{DMatrix, DVector};

use super::HeldOut;
use crate::linalg::{self, Op, View, matmul};

/// Moments over the tokens that queries read quantized, each weighted by how much attention's output feels its error.
///
/// With S = softmax(q·kᵀ/√d) and ‖·‖ through W_O, moving the logit of query i and key j by ε moves output i by
/// ε·S_ij·‖v_j − o_i‖. So a query counts with Σ_j S_ij²‖v_j − o_i‖², a key with Σ_i of the same. Moving v_j moves
/// output i by S_ij times as much: a value counts with Σ_i S_ij². Sums run over the pairs between the exact windows:
/// sinks, whose keys and values are like no others, and the recent tokens are never quantized.
#[derive(Clone, Debug)]
pub struct Sensitivity {
    /// (d, d): mean of qᵀq.
    pub queries: DMatrix<f64>,
    /// (d, d), centered.
    pub keys: DMatrix<f64>,
    pub key_mean: DVector<f64>,
    /// (d, d), centered.
    pub values: DMatrix<f64>,
    pub value_mean: DVector<f64>,
}

/// Rows of scores that stand in cache together.
const BLOCK_ROWS: usize = 96;

impl Sensitivity {
    /// Of one KV head; `factor` (d, d), row-major, is L with L·Lᵀ = W_Oᵀ·W_O of a query head. `k_shift` and `v_shift`
    /// (d) are near the means: second moments are taken about them, so that a large mean does not drown the spread.
    /// `None` where no query reads a token between the windows, or none matters.
    pub fn of(
        prompts: &[HeldOut],
        factor: &[f32],
        k_shift: &[f32],
        v_shift: &[f32],
    ) -> Option<Self> {
        let d = k_shift.len();
        let mut queries = Weighted::new(d);
        let (mut keys, mut values) = (Weighted::new(d), Weighted::new(d));
        for prompt in prompts {
            let weights = Weights::of(prompt, factor);
            queries.add(&prompt.q, &weights.queries, &vec![0.0; d]);
            keys.add(&prompt.k, &weights.keys, k_shift);
            values.add(&prompt.v, &weights.values, v_shift);
        }
        let (queries, _) = queries.moment()?;
        let (keys, key_mean) = keys.centered(k_shift)?;
        let (values, value_mean) = values.centered(v_shift)?;
        Some(Self {
            queries,
            keys,
            key_mean,
            values,
            value_mean,
        })
    }
}

/// Of the rows of one prompt.
struct Weights {
    /// (positions · group)
    queries: Vec<f64>,
    /// (tokens)
    keys: Vec<f64>,
    /// (tokens)
    values: Vec<f64>,
}

impl Weights {
    fn of(prompt: &HeldOut, factor: &[f32]) -> Self {
        let d = prompt.head_dim;
        let (tokens, rows) = (prompt.tokens(), prompt.positions.len() * prompt.group);
        let mut weights = Self {
            queries: vec![0.0; rows],
            keys: vec![0.0; tokens],
            values: vec![0.0; tokens],
        };
        let factor = View::contiguous(factor, d, d);
        let square = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
        let mut v = vec![0.0; tokens * d];
        let rows_of_v = View::contiguous(&prompt.v, tokens, d);
        matmul(Op::Nn, rows_of_v, factor, &mut v, d, false, 1.0, 0.0);
        let v_norm: Vec<f32> = v.chunks_exact(d).map(square).collect();

        let mut p = vec![0.0; BLOCK_ROWS * tokens];
        let mut cross = vec![0.0; BLOCK_ROWS * tokens];
        let (mut o, mut o_out) = (vec![0.0; BLOCK_ROWS * d], vec![0.0; BLOCK_ROWS * d]);
        for start in (0..rows).step_by(BLOCK_ROWS) {
            let n = BLOCK_ROWS.min(rows - start);
            let seen = |row: usize| prompt.positions[(start + row) / prompt.group] + 1;
            let width = (0..n).map(seen).max().unwrap_or(0);
            let q = View::contiguous(&prompt.q[start * d..(start + n) * d], n, d);
            let k = View::contiguous(&prompt.k, width, d);
            let scale = 1.0 / (d as f32).sqrt();
            matmul(Op::Nt, q, k, &mut p, width, false, scale, 0.0);
            for (row, p) in p.chunks_exact_mut(width).take(n).enumerate() {
                let (seen, future) = p.split_at_mut(seen(row));
                softmax(seen);
                future.fill(0.0);
            }
            let rows_of_p = View::contiguous(&p, n, width);
            let rows_of_v = View::contiguous(&prompt.v, width, d);
            matmul(Op::Nn, rows_of_p, rows_of_v, &mut o, d, false, 1.0, 0.0);
            matmul(
                Op::Nn,
                View::contiguous(&o, n, d),
                factor,
                &mut o_out,
                d,
                false,
                1.0,
                0.0,
            );
            let outputs = View::contiguous(&o_out, n, d);
            let v = View::contiguous(&v, width, d);
            matmul(Op::Nt, outputs, v, &mut cross, width, false, 1.0, 0.0);
            for row in 0..n {
                let o_norm = square(&o_out[row * d..(row + 1) * d]);
                let history = prompt.history(prompt.positions[(start + row) / prompt.group]);
                let mut sum = 0.0;
                for j in history {
                    let squared = p[row * width + j] * p[row * width + j];
                    let distance = v_norm[j] - 2.0 * cross[row * width + j] + o_norm;
                    let felt = f64::from(squared * distance.max(0.0));
                    sum += felt;
                    weights.keys[j] += felt;
                    weights.values[j] += f64::from(squared);
                }
                weights.queries[start + row] = sum;
            }
        }
        weights
    }
}

fn softmax(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for p in row.iter_mut() {
        *p = (*p - max).exp();
        sum += *p;
    }
    for p in row {
        *p /= sum;
    }
}

/// Weighted sums of rows about a shift.
struct Weighted {
    d: usize,
    weight: f64,
    sum: Vec<f64>,
    gram: Vec<f64>,
}

impl Weighted {
    fn new(d: usize) -> Self {
        Self {
            d,
            weight: 0.0,
            sum: vec![0.0; d],
            gram: vec![0.0; d * d],
        }
    }

    fn add(&mut self, rows: &[f32], weights: &[f64], shift: &[f32]) {
        let most = weights.iter().copied().fold(0.0, f64::max);
        if most <= 0.0 {
            return;
        }
        let mut scaled = Vec::with_capacity(rows.len());
        for (row, &weight) in rows.chunks_exact(self.d).zip(weights) {
            // Rows that nothing feels add nothing.
            if weight < 1e-9 * most {
                continue;
            }
            let root = weight.sqrt() as f32;
            self.weight += weight;
            for ((sum, x), shift) in self.sum.iter_mut().zip(row).zip(shift) {
                *sum += weight * f64::from(x - shift);
                scaled.push(root * (x - shift));
            }
        }
        let rows = View::contiguous(&scaled, scaled.len() / self.d, self.d);
        linalg::add_gram(rows, &mut self.gram);
    }

    /// Mean of rowᵀ·row, and of rows, both about the shift.
    fn moment(&self) -> Option<(DMatrix<f64>, DVector<f64>)> {
        (self.weight > 0.0).then(|| {
            (
                DMatrix::from_row_slice(self.d, self.d, &self.gram) / self.weight,
                DVector::from_row_slice(&self.sum) / self.weight,
            )
        })
    }

    fn centered(&self, shift: &[f32]) -> Option<(DMatrix<f64>, DVector<f64>)> {
        let (moment, offset) = self.moment()?;
        let covariance = moment - &offset * offset.transpose();
        let shift = DVector::from_iterator(self.d, shift.iter().map(|&x| f64::from(x)));
        Some((covariance, offset + shift))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values in (−1, 1), the same on every machine.
    fn noise(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    #[test]
    fn weighs_pairs_between_the_windows_as_defined() {
        let (d, group, tokens) = (8, 2, 90);
        let positions = vec![20, 41, 60, 89];
        let prompt = HeldOut {
            head_dim: d,
            group,
            q: noise(positions.len() * group * d, 1)
                .iter()
                .map(|x| 3.0 * x)
                .collect(),
            k: noise(tokens * d, 2).iter().map(|x| 50.0 + x).collect(),
            v: noise(tokens * d, 3),
            positions,
            sink: 3,
            recent: 10,
        };
        let factor = noise(d * d, 4);
        let got = Sensitivity::of(
            std::slice::from_ref(&prompt),
            &factor,
            &[50.0; 8],
            &[0.0; 8],
        );
        let got = got.unwrap();

        let row = |x: &[f32], i: usize| {
            DVector::from_iterator(d, x[i * d..(i + 1) * d].iter().map(|&x| f64::from(x)))
        };
        let l = DMatrix::from_row_iterator(d, d, factor.iter().map(|&x| f64::from(x)));
        let zero = || (DMatrix::<f64>::zeros(d, d), DVector::<f64>::zeros(d), 0.0);
        let add = |(gram, sum, weight): &mut (_, _, f64), x: &DVector<f64>, w: f64| {
            *gram += x * x.transpose() * w;
            *sum += x * w;
            *weight += w;
        };
        let [mut queries, mut keys, mut values] = [zero(), zero(), zero()];
        for (i, &position) in prompt.positions.iter().enumerate() {
            for head in 0..group {
                let q = row(&prompt.q, i * group + head);
                let score = |j| (row(&prompt.k, j).dot(&q) / (d as f64).sqrt()).exp();
                let all: f64 = (0..=position).map(score).sum();
                let o = (0..=position).fold(DVector::zeros(d), |o, j| {
                    o + row(&prompt.v, j) * (score(j) / all)
                });
                for j in 3..=position - 10 {
                    let s = score(j) / all;
                    let v = row(&prompt.v, j);
                    let felt = s * s * (l.tr_mul(&(&v - &o))).norm_squared();
                    add(&mut queries, &q, felt);
                    add(&mut keys, &row(&prompt.k, j), felt);
                    add(&mut values, &v, s * s);
                }
            }
        }
        let close = |a: &DMatrix<f64>, b: &DMatrix<f64>| (a - b).amax() < 1e-3 * b.amax();
        let centered = |(gram, sum, weight): &(DMatrix<f64>, DVector<f64>, f64)| {
            let mean = sum / *weight;
            (gram / *weight - &mean * mean.transpose(), mean)
        };
        assert!(close(&got.queries, &(queries.0 / queries.2)));
        let (covariance, mean) = centered(&keys);
        assert!(close(&got.keys, &covariance));
        assert!((&got.key_mean - mean).amax() < 1e-3);
        let (covariance, mean) = centered(&values);
        assert!(close(&got.values, &covariance));
        assert!((&got.value_mean - mean).amax() < 1e-4);
    }

    #[test]
    fn nothing_between_the_windows_is_no_sensitivity() {
        let prompt = HeldOut {
            head_dim: 4,
            group: 1,
            positions: vec![5],
            q: noise(4, 1),
            k: noise(24, 2),
            v: noise(24, 3),
            sink: 4,
            recent: 4,
        };
        assert!(Sensitivity::of(&[prompt], &noise(16, 4), &[0.0; 4], &[0.0; 4]).is_none());
    }
}
