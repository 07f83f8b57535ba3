use std::ops::Range;

use super::exp;
use crate::linalg::{Op, View, matmul};
use crate::{Error, Result};

/// A share of attention below this is none: its reciprocal must not overflow.
const NO_MASS: f32 = 1e-30;

/// Rows of scores that stand in cache while they are weighed.
const BLOCK_ROWS: usize = 64;

/// Attention of chosen queries of one KV head's group in one prompt, against ever new quantizations of its keys and
/// values: what depends on the exact keys and values alone is computed once.
///
/// Works on the calling thread: spread heads over threads. Positions in ascending order are fastest.
pub struct Probe<'a> {
    q: &'a [f32],
    v: &'a [f32],
    head_dim: usize,
    group: usize,
    tokens: usize,
    positions: &'a [usize],
    sink: usize,
    recent: usize,
    /// (positions · group, tokens): log₂e · q·k/√head_dim.
    scores: Vec<f32>,
    /// (positions · group): log₂ Σ 2^score over the tokens that the query sees.
    log_sum: Vec<f32>,
    /// (positions · group): the probability of all tokens in the exact windows, and
    window_mass: Vec<f32>,
    /// (positions · group, head_dim) what they add to the output.
    window_o: Vec<f32>,
    /// (positions · group, head_dim)
    o: Vec<f32>,
    /// Σ(s − s̄)² of [`ProbeError::logits`], in the scores' base.
    spread: f64,
    metric: Option<&'a [f32]>,
}

/// Relative squared errors that a quantized cache makes. 0 where there is nothing to get wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProbeError {
    /// Σ(s − ŝ)² / Σ(s − s̄)² over the queries and the tokens they read quantized; s̄ is a query's mean over these
    /// tokens. The denominator is centered since softmax ignores a shift; the numerator is not, since tokens read
    /// exactly do not share the shift of those read quantized.
    pub logits: f64,
    /// Σ‖(o − ô)·L‖² / Σ‖o·L‖² over the queries, with L the metric's factor, or the identity.
    pub output: f64,
}

impl<'a> Probe<'a> {
    /// `q` (positions, group, head_dim): the group's query heads at `positions` (counted from 0 in the prompt);
    /// `k` and `v` (tokens, head_dim): one KV head of that prompt. `sink` and `recent` as in
    /// [`windowed`](super::windowed).
    ///
    /// # Errors
    /// Where slices do not fit each other, or a position lies past the tokens.
    pub fn new(
        q: &'a [f32],
        k: &[f32],
        v: &'a [f32],
        head_dim: usize,
        positions: &'a [usize],
        sink: usize,
        recent: usize,
    ) -> Result<Self> {
        let d = head_dim.max(1);
        let tokens = k.len() / d;
        let group = q.len() / (d * positions.len().max(1));
        if head_dim == 0
            || k.len() != tokens * d
            || v.len() != k.len()
            || q.len() != positions.len() * group * d
            || positions.iter().any(|&i| i >= tokens)
        {
            return Err(Error::invalid(
                "attention probe",
                format!(
                    "{} query, {} key and {} value elements at {} positions do not fit head_dim {head_dim}",
                    q.len(),
                    k.len(),
                    v.len(),
                    positions.len(),
                ),
            ));
        }
        let rows = positions.len() * group;
        let mut probe = Self {
            q,
            v,
            head_dim,
            group,
            tokens,
            positions,
            sink,
            recent,
            scores: vec![0.0; rows * tokens],
            log_sum: vec![0.0; rows],
            window_mass: vec![0.0; rows],
            window_o: vec![0.0; q.len()],
            o: vec![0.0; q.len()],
            spread: 0.0,
            metric: None,
        };
        let mut scores = std::mem::take(&mut probe.scores);
        probe.score(0..rows, k, 0..tokens, &mut scores);
        probe.scores = scores;

        let mut p = probe.scores.clone();
        for row in 0..rows {
            let position = positions[row / group];
            let history = probe.history(position);
            let p = &mut p[row * tokens..][..tokens];
            let (seen, future) = p.split_at_mut(position + 1);
            future.fill(0.0);
            let quantized = &seen[history.start.min(position + 1)..history.end.min(position + 1)];
            let sum: f64 = quantized.iter().map(|&s| f64::from(s)).sum();
            let mean = sum / quantized.len() as f64;
            probe.spread += quantized
                .iter()
                .map(|&s| (f64::from(s) - mean).powi(2))
                .sum::<f64>();
            let (max, sum) = exp::weigh(seen, f32::NEG_INFINITY);
            probe.log_sum[row] = max + sum.log2();
            for p in seen.iter_mut() {
                *p /= sum;
            }
            probe.window_mass[row] = seen[..history.start.min(seen.len())].iter().sum::<f32>()
                + seen[history.end.min(seen.len())..].iter().sum::<f32>();
        }
        let values = View::contiguous(v, tokens, d);
        matmul(
            Op::Nn,
            View::contiguous(&p, rows, tokens),
            values,
            &mut probe.o,
            d,
            false,
            1.0,
            0.0,
        );
        for row in 0..rows {
            p[row * tokens..][probe.history(positions[row / group])].fill(0.0);
        }
        matmul(
            Op::Nn,
            View::contiguous(&p, rows, tokens),
            values,
            &mut probe.window_o,
            d,
            false,
            1.0,
            0.0,
        );
        Ok(probe)
    }

    /// Measures output errors through L (group, head_dim, head_dim; row-major), one matrix a query head with
    /// L·Lᵀ = W_Oᵀ·W_O of that head, so that ‖(o − ô)·L‖ is the error after the output projection.
    ///
    /// # Errors
    /// Where `factors` does not hold one matrix a query head of the group.
    pub fn with_metric(mut self, factors: &'a [f32]) -> Result<Self> {
        if factors.len() != self.group * self.head_dim * self.head_dim {
            return Err(Error::invalid(
                "attention probe",
                format!(
                    "a metric of {} elements does not fit {} query heads of head_dim {}",
                    factors.len(),
                    self.group,
                    self.head_dim
                ),
            ));
        }
        self.metric = Some(factors);
        Ok(self)
    }

    /// Exact outputs, (positions, group, head_dim).
    pub fn o(&self) -> &[f32] {
        &self.o
    }

    /// Outputs (positions, group, head_dim) where tokens between the windows are read from `k_hat` and `v_hat`
    /// (tokens, head_dim); `None`: exactly.
    ///
    /// # Errors
    /// Where a slice does not have the keys' length.
    pub fn output(&self, k_hat: Option<&[f32]>, v_hat: Option<&[f32]>) -> Result<Vec<f32>> {
        Ok(self.quantized(k_hat, v_hat)?.0)
    }

    /// Errors against exact attention; `None`: that side is exact. One product of (queries, tokens, head_dim) a call,
    /// and one more where keys are quantized.
    ///
    /// # Errors
    /// Where a slice does not have the keys' length.
    pub fn error(&self, k_hat: Option<&[f32]>, v_hat: Option<&[f32]>) -> Result<ProbeError> {
        let (o_hat, logits) = self.quantized(k_hat, v_hat)?;
        let difference: Vec<f32> = self.o.iter().zip(&o_hat).map(|(a, b)| a - b).collect();
        Ok(ProbeError {
            logits,
            output: ratio(self.energy(&difference), self.energy(&self.o)),
        })
    }

    /// Outputs and the logits' relative error. With w = 2^(ŝ − log_sum) over the quantized tokens and the windows'
    /// share of exact attention, ô = (window_o + Σ w·v̂) / (window_mass + Σ w); both sums are scaled by a power of two
    /// that keeps w below 1.
    fn quantized(&self, k_hat: Option<&[f32]>, v_hat: Option<&[f32]>) -> Result<(Vec<f32>, f64)> {
        let d = self.head_dim;
        if [k_hat, v_hat]
            .iter()
            .flatten()
            .any(|x| x.len() != self.v.len())
        {
            return Err(Error::invalid(
                "attention probe",
                format!(
                    "decoded keys and values must have {} elements, as the exact ones",
                    self.v.len()
                ),
            ));
        }
        let mut o = self.window_o.clone();
        let mut error = 0.0;
        let mut buffer = vec![0.0; BLOCK_ROWS * self.tokens];
        let rows = self.positions.len() * self.group;
        for start in (0..rows).step_by(BLOCK_ROWS) {
            let block = start..(start + BLOCK_ROWS).min(rows);
            let histories = block
                .clone()
                .map(|row| self.history(self.positions[row / self.group]));
            let columns = self.sink..histories.clone().map(|h| h.end).max().unwrap_or(self.sink);
            if columns.is_empty() {
                continue;
            }
            let weights = &mut buffer[..block.len() * columns.len()];
            if let Some(k_hat) = k_hat {
                self.score(block.clone(), k_hat, columns.clone(), weights);
            }
            let mut scales = [(0.0, 0.0); BLOCK_ROWS];
            for ((row, history), (w, scale)) in block
                .clone()
                .zip(histories)
                .zip(weights.chunks_exact_mut(columns.len()).zip(&mut scales))
            {
                let scores = &self.scores[row * self.tokens..][history];
                let (w, unseen) = w.split_at_mut(scores.len());
                unseen.fill(0.0);
                if k_hat.is_some() {
                    error += squared_distance(w, scores);
                } else {
                    w.copy_from_slice(scores);
                }
                let log_sum = self.log_sum[row];
                // Scaled by the largest term that is left: quantized tokens may lose all of their weight, and the
                // windows may never have had any.
                let mass = self.window_mass[row];
                let (start, seen) = if mass > NO_MASS {
                    (log_sum + mass.log2(), true)
                } else {
                    (f32::NEG_INFINITY, false)
                };
                let (max, sum) = exp::weigh(w, start);
                let window = if seen { (log_sum - max).exp2() } else { 0.0 };
                *scale = (window, 1.0 / (window * mass + sum));
            }
            let o = &mut o[block.start * d..block.end * d];
            for (o, (window, _)) in o.chunks_exact_mut(d).zip(scales) {
                for o in o.iter_mut() {
                    *o *= window;
                }
            }
            let values = &v_hat.unwrap_or(self.v)[columns.start * d..columns.end * d];
            matmul(
                Op::Nn,
                View::contiguous(weights, block.len(), columns.len()),
                View::contiguous(values, columns.len(), d),
                o,
                d,
                true,
                1.0,
                1.0,
            );
            for (o, (_, norm)) in o.chunks_exact_mut(d).zip(scales) {
                for o in o.iter_mut() {
                    *o *= norm;
                }
            }
        }
        Ok((o, ratio(error, self.spread)))
    }

    /// Tokens that a query at position `i` reads quantized.
    fn history(&self, i: usize) -> Range<usize> {
        let start = self.sink.min(self.tokens);
        start..(i + 1).saturating_sub(self.recent).max(start)
    }

    fn score(&self, rows: Range<usize>, keys: &[f32], columns: Range<usize>, scores: &mut [f32]) {
        let d = self.head_dim;
        matmul(
            Op::Nt,
            View::contiguous(&self.q[rows.start * d..rows.end * d], rows.len(), d),
            View::contiguous(&keys[columns.start * d..columns.end * d], columns.len(), d),
            scores,
            columns.len(),
            false,
            std::f32::consts::LOG2_E / (d as f32).sqrt(),
            0.0,
        );
    }

    /// Σ‖row·L‖²
    fn energy(&self, rows: &[f32]) -> f64 {
        let d = self.head_dim;
        let sum = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        let Some(factors) = self.metric else {
            return sum(rows);
        };
        let mut out = vec![0.0; self.positions.len() * d];
        let heads = factors.chunks_exact(d * d).enumerate();
        heads
            .map(|(head, factor)| {
                let rows =
                    View::strided(&rows[head * d..], self.positions.len(), d, self.group * d);
                matmul(
                    Op::Nn,
                    rows,
                    View::contiguous(factor, d, d),
                    &mut out,
                    d,
                    false,
                    1.0,
                    0.0,
                );
                sum(&out)
            })
            .sum()
    }
}

/// Σ(a − b)², in lanes that vectorise.
fn squared_distance(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0.0; 16];
    for (a, b) in a.chunks(lanes.len()).zip(b.chunks(lanes.len())) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f64::from(a - b).powi(2);
        }
    }
    lanes.iter().sum()
}

fn ratio(error: f64, of: f64) -> f64 {
    if error == 0.0 { 0.0 } else { error / of }
}

#[cfg(test)]
#[allow(clippy::float_cmp)]
mod tests {
    use super::*;
    use crate::kv::attention::{Dims, plain, random};

    const TOKENS: usize = 150;
    const D: usize = 16;
    const GROUP: usize = 3;

    struct Case {
        q: Vec<f32>,
        k: Vec<f32>,
        v: Vec<f32>,
        k_hat: Vec<f32>,
        v_hat: Vec<f32>,
    }

    fn case() -> Case {
        let k = random(2, TOKENS * D, 1.0);
        let v = random(3, TOKENS * D, 1.0);
        let near = |x: &[f32], seed| {
            let noise = random(seed, x.len(), 0.5);
            x.iter().zip(noise).map(|(x, e)| x + e).collect()
        };
        Case {
            q: random(1, TOKENS * GROUP * D, 2.0),
            k_hat: near(&k, 4),
            v_hat: near(&v, 5),
            k,
            v,
        }
    }

    fn pick(x: &[f32], positions: &[usize]) -> Vec<f32> {
        positions
            .iter()
            .flat_map(|&i| x[i * GROUP * D..(i + 1) * GROUP * D].iter().copied())
            .collect()
    }

    #[test]
    fn outputs_are_those_of_windowed_attention() {
        let Case {
            q,
            k,
            v,
            k_hat,
            v_hat,
        } = case();
        let dims = Dims::new(GROUP, 1, D).unwrap();
        let positions = [
            0, 3, 149, 9, 20, 21, 22, 60, 61, 140, 100, 99, 98, 97, 96, 95, 94, 93, 92, 91, 90, 89,
            88,
        ];
        let chosen = pick(&q, &positions);
        for (sink, recent) in [(4, 16), (0, 0), (200, 3), (2, 500), (0, 1)] {
            let probe = Probe::new(&chosen, &k, &v, D, &positions, sink, recent).unwrap();
            let hats = [
                (None, None),
                (Some(&k_hat), None),
                (None, Some(&v_hat)),
                (Some(&k_hat), Some(&v_hat)),
            ];
            for (kh, vh) in hats {
                let (kx, vx) = (kh.unwrap_or(&k), vh.unwrap_or(&v));
                let whole = plain::windowed(&q, &k, &v, kx, vx, dims, &[TOKENS], sink, recent, 1);
                let ours = probe
                    .output(kh.map(|x| &x[..]), vh.map(|x| &x[..]))
                    .unwrap();
                for (a, b) in ours.iter().zip(pick(&whole, &positions)) {
                    assert!((a - b).abs() < 2e-5, "{a} {b} sink {sink} recent {recent}");
                }
            }
        }
    }

    #[test]
    fn errors_are_those_of_their_formulas() {
        let Case {
            q,
            k,
            v,
            k_hat,
            v_hat,
        } = case();
        let (sink, recent) = (4, 16);
        let positions = [10, 70, 149];
        let chosen = pick(&q, &positions);
        let factors = random(9, GROUP * D * D, 1.0);
        let probe = Probe::new(&chosen, &k, &v, D, &positions, sink, recent).unwrap();
        let (mut error, mut spread) = (0.0, 0.0);
        for (row, q) in chosen.chunks_exact(D).enumerate() {
            let dot = |keys: &[f32], j: usize| -> f64 {
                let key = &keys[j * D..(j + 1) * D];
                q.iter()
                    .zip(key)
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum()
            };
            let seen = sink..(positions[row / GROUP] + 1)
                .saturating_sub(recent)
                .max(sink);
            let mean = seen.clone().map(|j| dot(&k, j)).sum::<f64>() / seen.len() as f64;
            for j in seen {
                error += (dot(&k, j) - dot(&k_hat, j)).powi(2);
                spread += (dot(&k, j) - mean).powi(2);
            }
        }
        let measured = probe.error(Some(&k_hat), Some(&v_hat)).unwrap();
        assert!((measured.logits / (error / spread) - 1.0).abs() < 1e-5);

        let o_hat = probe.output(Some(&k_hat), Some(&v_hat)).unwrap();
        let energy = |rows: &dyn Fn(usize) -> f32| -> f64 {
            (0..positions.len() * GROUP)
                .flat_map(|row| (0..D).map(move |c| (row, c)))
                .map(|(row, c)| {
                    let factor = &factors[row % GROUP * D * D..];
                    let x: f32 = (0..D).map(|i| rows(row * D + i) * factor[i * D + c]).sum();
                    f64::from(x).powi(2)
                })
                .sum()
        };
        let expected = energy(&|i| probe.o()[i] - o_hat[i]) / energy(&|i| probe.o()[i]);
        let plain = probe.error(Some(&k_hat), Some(&v_hat)).unwrap().output;
        let measured = probe
            .with_metric(&factors)
            .unwrap()
            .error(Some(&k_hat), Some(&v_hat))
            .unwrap();
        assert!((measured.output / expected - 1.0).abs() < 1e-5);
        assert!(
            (measured.output / plain - 1.0).abs() > 1e-3,
            "the metric must matter"
        );
    }

    #[test]
    fn exact_caches_make_no_error() {
        let Case { q, k, v, .. } = case();
        let positions = [5, 80];
        let chosen = pick(&q, &positions);
        let probe = Probe::new(&chosen, &k, &v, D, &positions, 2, 8).unwrap();
        let error = probe.error(Some(&k), Some(&v)).unwrap();
        assert_eq!(error.logits, 0.0);
        assert!(error.output < 1e-10, "{}", error.output);
    }

    /// Keys so large that one token in the history takes all attention, and quantization takes all of that away.
    #[test]
    fn weight_that_is_lost_leaves_numbers() {
        let Case { q, k, v, .. } = case();
        let positions = [80, 120];
        let chosen = pick(&q, &positions);
        let large: Vec<f32> = k.iter().map(|x| x * 3000.0).collect();
        let turned: Vec<f32> = large.iter().map(|x| -x).collect();
        let probe = Probe::new(&chosen, &large, &v, D, &positions, 2, 8).unwrap();
        for k_hat in [&turned, &k, &large] {
            let output = probe.output(Some(k_hat), None).unwrap();
            assert!(output.iter().all(|x| x.is_finite()));
            let error = probe.error(Some(k_hat), None).unwrap();
            assert!(error.output.is_finite(), "{error:?}");
        }
    }

    #[test]
    fn mismatched_slices_are_refused() {
        let Case { q, k, v, .. } = case();
        assert!(Probe::new(&q[..D], &k, &v, D, &[TOKENS], 0, 0).is_err());
        assert!(Probe::new(&q[..D], &k, &v[D..], D, &[0], 0, 0).is_err());
        assert!(Probe::new(&q[..=D], &k, &v, D, &[0], 0, 0).is_err());
        assert!(Probe::new(&q[..D], &k, &v, 0, &[0], 0, 0).is_err());
        let probe = Probe::new(&q[..D], &k, &v, D, &[0], 0, 0).unwrap();
        assert!(probe.error(Some(&k[1..]), None).is_err());
        assert!(probe.with_metric(&k[..5]).is_err());
    }
}
