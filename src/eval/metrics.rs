//! Divergence of two models' next-token distributions, from their logits.
//!
//! With a = logits − max and Z = Σ exp(a), of the reference (r) and of a method (m):
//! KL(r ‖ m) = Σ exp(a_r)·(a_r − a_m) / Z_r + ln Z_m − ln Z_r, in nats. Sums are f64.

use rayon::prelude::*;

/// What is kept of a block of reference logits: one row a position.
#[derive(Debug)]
pub struct Reference<'a> {
    logits: &'a [f32],
    vocab: usize,
    rows: Vec<Softmax>,
    /// exp(logit − max), unnormalised, (positions, vocab).
    weights: Vec<f32>,
}

#[derive(Clone, Copy, Debug)]
struct Softmax {
    max: f32,
    argmax: usize,
    sum: f64,
}

/// One position's agreement with the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Position {
    /// KL(reference ‖ method), nats.
    pub kl: f64,
    /// −ln p(target), nats.
    pub nll: f64,
    /// Whether the likeliest token is the reference's (the lowest id wins a tie).
    pub top1: bool,
}

impl<'a> Reference<'a> {
    /// `logits` (positions, vocab). None where one is not finite.
    pub fn new(logits: &'a [f32], vocab: usize) -> Option<Self> {
        let mut weights = vec![0.0; logits.len()];
        let rows = logits
            .par_chunks_exact(vocab)
            .zip(weights.par_chunks_exact_mut(vocab))
            .map(|(row, weights)| {
                let (argmax, max) = argmax(row)?;
                let mut sum = 0.0;
                for (weight, &logit) in weights.iter_mut().zip(row) {
                    let exp = f64::from(logit - max).exp();
                    sum += exp;
                    *weight = exp as f32;
                }
                Some(Softmax { max, argmax, sum })
            })
            .collect::<Option<Vec<_>>>()?;
        Some(Self {
            logits,
            vocab,
            rows,
            weights,
        })
    }

    /// −ln p(target) of every position, nats. `targets` (positions) below vocab.
    pub fn nll(&self, targets: &[u32]) -> Vec<f64> {
        self.rows
            .iter()
            .zip(self.logits.chunks_exact(self.vocab))
            .zip(targets)
            .map(|((row, logits), &target)| {
                row.sum.ln() - f64::from(logits[target as usize] - row.max)
            })
            .collect()
    }

    /// `logits` (positions, vocab) of a method at the same positions. None where one is not finite.
    pub fn compare(&self, logits: &[f32], targets: &[u32]) -> Option<Vec<Position>> {
        logits
            .par_chunks_exact(self.vocab)
            .zip(self.logits.par_chunks_exact(self.vocab))
            .zip(self.weights.par_chunks_exact(self.vocab))
            .zip(&self.rows)
            .zip(targets)
            .map(|((((row, reference), weights), softmax), &target)| {
                let (argmax, max) = argmax(row)?;
                let (mut sum, mut cross) = (0.0, 0.0);
                for ((&logit, &reference), &weight) in row.iter().zip(reference).zip(weights) {
                    let a = f64::from(logit - max);
                    sum += a.exp();
                    cross += f64::from(weight) * (f64::from(reference - softmax.max) - a);
                }
                Some(Position {
                    kl: cross / softmax.sum + sum.ln() - softmax.sum.ln(),
                    nll: sum.ln() - f64::from(row[target as usize] - max),
                    top1: argmax == softmax.argmax,
                })
            })
            .collect()
    }
}

/// None where an entry is not finite (or there is none).
fn argmax(row: &[f32]) -> Option<(usize, f32)> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // A sum of finite f32 in f64 is finite; NaN and infinities carry through, which `max` ignores.
    let finite = row.iter().map(|&x| f64::from(x)).sum::<f64>().is_finite();
    let argmax = row.iter().position(|&x| x >= max)?;
    finite.then_some((argmax, max))
}

/// Sums over windows, added in order.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    nll: f64,
    top1: usize,
    positions: usize,
    /// Mean KL of each window, and its positions.
    windows: Vec<(f64, usize)>,
}

impl Totals {
    /// Adds one window's positions.
    pub fn add_window(&mut self, positions: &[Position]) {
        if positions.is_empty() {
            return;
        }
        self.nll += positions.iter().map(|p| p.nll).sum::<f64>();
        self.top1 += positions.iter().filter(|p| p.top1).count();
        self.positions += positions.len();
        let kl = positions.iter().map(|p| p.kl).sum::<f64>() / positions.len() as f64;
        self.windows.push((kl, positions.len()));
    }

    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Mean KL a position, nats.
    pub fn kl(&self) -> f64 {
        let sum: f64 = self.windows.iter().map(|&(kl, n)| kl * n as f64).sum();
        sum / self.positions as f64
    }

    /// Standard error of [`Totals::kl`] from the spread between windows: tokens of one text are not independent.
    /// None for a single window.
    pub fn kl_stderr(&self) -> Option<f64> {
        let n = self.windows.len() as f64;
        if self.windows.len() < 2 {
            return None;
        }
        let mean = self.kl();
        let share = self.positions as f64 / n;
        let square: f64 = self
            .windows
            .iter()
            .map(|&(kl, positions)| ((kl - mean) * positions as f64 / share).powi(2))
            .sum();
        Some((square / (n - 1.0) / n).sqrt())
    }

    pub fn perplexity(&self) -> f64 {
        (self.nll / self.positions as f64).exp()
    }

    /// Share of positions whose likeliest token is the reference's.
    pub fn top1(&self) -> f64 {
        self.top1 as f64 / self.positions as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_definition() {
        let reference = [1.0f32, 2.0, -1.0, 0.5, 0.0, 3.0];
        let method = [0.5f32, 2.5, -1.5, 1.5, 1.0, 0.0];
        let targets = [0, 2];
        let block = Reference::new(&reference, 3).unwrap();
        let positions = block.compare(&method, &targets).unwrap();
        let softmax = |row: &[f32]| {
            let exp: Vec<f64> = row.iter().map(|&x| f64::from(x).exp()).collect();
            let sum: f64 = exp.iter().sum();
            exp.iter().map(|x| x / sum).collect::<Vec<_>>()
        };
        for (t, position) in positions.iter().enumerate() {
            let p = softmax(&reference[t * 3..t * 3 + 3]);
            let q = softmax(&method[t * 3..t * 3 + 3]);
            let kl: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
            assert!((position.kl - kl).abs() < 1e-7, "{} {kl}", position.kl);
            assert!((position.nll + q[targets[t] as usize].ln()).abs() < 1e-9);
            assert!((block.nll(&targets)[t] + p[targets[t] as usize].ln()).abs() < 1e-9);
        }
        assert!(positions[0].top1 && !positions[1].top1);
    }

    #[test]
    fn equal_logits_have_no_divergence() {
        let logits: Vec<f32> = (0..4000).map(|i| ((i * 37) % 101) as f32 * 0.3).collect();
        let block = Reference::new(&logits, 1000).unwrap();
        for position in block.compare(&logits, &[0; 4]).unwrap() {
            assert!(position.kl.abs() < 1e-15 && position.top1);
        }
    }

    #[test]
    fn refuses_what_is_not_finite() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(Reference::new(&[0.0, bad], 2).is_none());
            let good = Reference::new(&[0.0, 1.0], 2).unwrap();
            assert!(good.compare(&[0.0, bad], &[0]).is_none());
        }
    }

    #[test]
    fn windows_weigh_by_their_positions() {
        let position = |kl| Position {
            kl,
            nll: 1.0,
            top1: kl < 0.5,
        };
        let mut totals = Totals::default();
        totals.add_window(&[position(0.1), position(0.3)]);
        assert_eq!(totals.kl_stderr(), None);
        totals.add_window(&[position(1.0)]);
        assert!((totals.kl() - 1.4 / 3.0).abs() < 1e-12);
        assert!((totals.perplexity() - 1f64.exp()).abs() < 1e-12);
        assert!((totals.top1() - 2.0 / 3.0).abs() < 1e-12);
        assert!(totals.kl_stderr().unwrap() > 0.0);
    }
}
