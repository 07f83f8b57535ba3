//! Choosing clip ratios and exponents by what attention's output makes of them on held-out prompts.

use std::ops::Range;

use super::Transform;
use crate::Result;
use crate::kv::attention::Probe;
use crate::linalg::{Op, View, matmul};
use crate::zoo::SideName;

/// How much the part of the error that all queries share counts. Rounding errors of different layers and heads are
/// independent and add up in power, shared ones in amplitude: over a network of some tens of layers they weigh that
/// much more.
const COHERENT: f64 = 20.0;

/// One KV head's rows of one held-out prompt, and the queries that stand for all of them.
#[derive(Clone, Debug)]
pub struct HeldOut {
    pub head_dim: usize,
    /// Query heads that read the KV head.
    pub group: usize,
    /// Sampled positions in the prompt, ascending.
    pub positions: Vec<usize>,
    /// (positions, group, head_dim)
    pub q: Vec<f32>,
    /// (tokens, head_dim)
    pub k: Vec<f32>,
    /// (tokens, head_dim)
    pub v: Vec<f32>,
    /// Tokens read exactly at the prompt's start,
    pub sink: usize,
    /// and before a query, itself included.
    pub recent: usize,
}

impl HeldOut {
    pub fn tokens(&self) -> usize {
        self.k.len() / self.head_dim.max(1)
    }

    /// Tokens that the query at `position` reads quantized.
    pub fn history(&self, position: usize) -> Range<usize> {
        self.sink..(position + 1).saturating_sub(self.recent).max(self.sink)
    }

    /// Every `step`-th query.
    #[must_use]
    pub fn thinned(&self, step: usize) -> Self {
        let width = self.group * self.head_dim;
        let step = step.max(1);
        // From the middle of each stretch.
        let rows = || (step / 2..self.positions.len()).step_by(step);
        Self {
            positions: rows().map(|i| self.positions[i]).collect(),
            q: rows()
                .flat_map(|i| self.q[i * width..(i + 1) * width].iter().copied())
                .collect(),
            ..self.clone()
        }
    }
}

/// Measures transforms of one KV head on its held-out prompts.
pub struct Objective<'a> {
    prompts: Vec<(&'a HeldOut, Probe<'a>)>,
    /// L (d, d) with L·Lᵀ = W_Oᵀ·W_O of a query head.
    factor: &'a [f32],
}

/// Squared errors of attention's output after W_O, summed over queries.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OutputError {
    pub squared: f64,
    /// The part of `squared` that is the same vector for all queries of a head.
    pub coherent: f64,
    /// Σ‖o·W_O‖² of the exact output.
    pub energy: f64,
}

impl OutputError {
    /// Root mean square, relative to the output.
    pub fn relative(&self) -> f64 {
        (self.squared / self.energy.max(f64::MIN_POSITIVE)).sqrt()
    }

    /// What the search makes least.
    pub fn score(&self) -> f64 {
        (self.squared + COHERENT * self.coherent) / self.energy.max(f64::MIN_POSITIVE)
    }
}

impl std::ops::Add for OutputError {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            squared: self.squared + other.squared,
            coherent: self.coherent + other.coherent,
            energy: self.energy + other.energy,
        }
    }
}

impl<'a> Objective<'a> {
    /// # Errors
    /// Where the rows of a prompt do not fit each other.
    pub fn new(prompts: &'a [HeldOut], factor: &'a [f32]) -> Result<Self> {
        let prompts = prompts
            .iter()
            .filter(|prompt| !prompt.positions.is_empty())
            .map(|prompt| {
                let HeldOut {
                    head_dim,
                    positions,
                    q,
                    k,
                    v,
                    ..
                } = prompt;
                let probe = Probe::new(q, k, v, *head_dim, positions, prompt.sink, prompt.recent)?;
                Ok((prompt, probe))
            })
            .collect::<Result<_>>()?;
        Ok(Self { prompts, factor })
    }

    /// Nothing to measure on.
    pub fn is_empty(&self) -> bool {
        self.prompts.is_empty()
    }

    /// The error where `side` goes through `transform` and the other side stays exact.
    ///
    /// # Errors
    /// Where the transform is of another head_dim.
    pub fn error(&self, side: SideName, transform: &Transform) -> Result<OutputError> {
        self.error_of(side, &|rows| transform.roundtrip(rows))
    }

    /// The error where `side` is read back through `store` (rows in, as many rows out).
    ///
    /// # Errors
    /// What `store` returns.
    pub fn error_of(
        &self,
        side: SideName,
        store: &dyn Fn(&[f32]) -> Result<Vec<f32>>,
    ) -> Result<OutputError> {
        let mut total = OutputError::default();
        for (prompt, probe) in &self.prompts {
            let output = match side {
                SideName::K => probe.output(Some(&store(&prompt.k)?), None)?,
                SideName::V => probe.output(None, Some(&store(&prompt.v)?))?,
            };
            total = total + self.compare(prompt, probe.o(), &output);
        }
        Ok(total)
    }

    fn compare(&self, prompt: &HeldOut, exact: &[f32], output: &[f32]) -> OutputError {
        let (d, group) = (prompt.head_dim, prompt.group);
        let rows = exact.len() / d;
        let after_projection = |rows_in: &[f32]| {
            let mut out = vec![0.0; rows * d];
            let (rows_in, factor) = (
                View::contiguous(rows_in, rows, d),
                View::contiguous(self.factor, d, d),
            );
            matmul(Op::Nn, rows_in, factor, &mut out, d, false, 1.0, 0.0);
            out
        };
        let square = |x: f32| f64::from(x) * f64::from(x);
        let difference: Vec<f32> = output.iter().zip(exact).map(|(a, b)| a - b).collect();
        let difference = after_projection(&difference);
        let squared: f64 = difference.iter().copied().map(square).sum();
        let energy = after_projection(exact).into_iter().map(square).sum();

        let n = (rows / group) as f64;
        let mut sums = vec![0.0f64; group * d];
        for row in difference.chunks_exact(group * d) {
            for (sum, &x) in sums.iter_mut().zip(row) {
                *sum += f64::from(x);
            }
        }
        // ‖Σδ‖²/n holds Σ‖δ‖²/n even where errors share nothing.
        let shared = sums.iter().map(|x| x * x).sum::<f64>() / n;
        let coherent = if n > 1.0 {
            ((shared - squared / n) * n / (n - 1.0)).max(0.0)
        } else {
            0.0
        };
        OutputError {
            squared,
            coherent,
            energy,
        }
    }
}

/// Values of one setting: `coarse` ones, all tried, and the step to try to either side of the best of them.
#[derive(Clone, Debug)]
pub struct Axis {
    pub coarse: Vec<f64>,
    pub fine: f64,
    pub bounds: (f64, f64),
}

impl Axis {
    /// A setting that is given.
    pub fn fixed(value: f64) -> Self {
        Self {
            coarse: vec![value],
            fine: 0.0,
            bounds: (value, value),
        }
    }
}

/// The best point that [`search`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    pub clip: f64,
    pub exponent: f64,
    pub error: OutputError,
}

/// Coordinate search: the best clip ratio at the middle exponent, the best exponent at that, then both once more in
/// fine steps. Of equal scores the earlier tried wins.
pub fn search(
    clip: &Axis,
    exponent: &Axis,
    mut measure: impl FnMut(f64, f64) -> Result<OutputError>,
) -> Result<Best> {
    let middle = |axis: &Axis| axis.coarse[axis.coarse.len() / 2];
    let (c, p) = (middle(clip), middle(exponent));
    let mut best = Best {
        clip: c,
        exponent: p,
        error: measure(c, p)?,
    };
    let mut tried = vec![(c, p)];
    let mut attempt = |best: &mut Best, c: f64, p: f64| -> Result<()> {
        if tried.contains(&(c, p)) {
            return Ok(());
        }
        tried.push((c, p));
        let error = measure(c, p)?;
        if error.score() < best.error.score() {
            *best = Best {
                clip: c,
                exponent: p,
                error,
            };
        }
        Ok(())
    };
    for &c in &clip.coarse {
        attempt(&mut best, c, p)?;
    }
    let c = best.clip;
    for &p in &exponent.coarse {
        attempt(&mut best, c, p)?;
    }
    let around = |axis: &Axis, x: f64| {
        [x - axis.fine, x + axis.fine].map(|x| x.clamp(axis.bounds.0, axis.bounds.1))
    };
    let p = best.exponent;
    for c in around(clip, best.clip) {
        attempt(&mut best, c, p)?;
    }
    let c = best.clip;
    for p in around(exponent, best.exponent) {
        attempt(&mut best, c, p)?;
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::Codec;

    #[test]
    fn finds_the_bottom_of_a_bowl_off_the_grid() {
        let clip = Axis {
            coarse: vec![0.92, 0.945, 0.97],
            fine: 0.0125,
            bounds: (0.85, 1.0),
        };
        let exponent = Axis {
            coarse: vec![0.3, 0.4, 0.5],
            fine: 0.05,
            bounds: (0.2, 0.5),
        };
        let mut tried = Vec::new();
        let best = search(&clip, &exponent, |c, p| {
            assert!((0.85..=1.0).contains(&c) && (0.2..=0.5).contains(&p));
            tried.push((c, p));
            Ok(OutputError {
                squared: (c - 0.958).powi(2) + (p - 0.26).powi(2),
                coherent: 0.0,
                energy: 1.0,
            })
        });
        let best = best.unwrap();
        assert!((best.clip - 0.9575).abs() < 1e-9 && (best.exponent - 0.25).abs() < 1e-9);
        assert!(tried.len() <= 9, "{} points", tried.len());
        let mut points = 0;
        search(&Axis::fixed(0.9), &Axis::fixed(0.4), |_, _| {
            points += 1;
            Ok(OutputError::default())
        })
        .unwrap();
        assert_eq!(points, 1);
    }

    /// A value error that all tokens share reaches every output whole; one that alternates averages out and is shared
    /// by none.
    #[test]
    fn tells_shared_errors_from_independent_ones() {
        let (tokens, d) = (64, 4);
        let zero = vec![0.0; tokens * d];
        let prompt = [HeldOut {
            head_dim: d,
            group: 1,
            positions: (32..64).collect(),
            q: vec![0.0; 32 * d],
            k: zero.clone(),
            v: vec![1.0; tokens * d],
            sink: 0,
            recent: 1,
        }];
        let identity: Vec<f32> = (0..16)
            .map(|i| f32::from(u8::from(i / 4 == i % 4)))
            .collect();
        let objective = Objective::new(&prompt, &identity).unwrap();
        let exact = vec![1.0; 32 * d];
        let same: Vec<f32> = exact.iter().map(|x| x + 0.5).collect();
        let error = objective.compare(&prompt[0], &exact, &same);
        assert!((error.squared - 32.0).abs() < 1e-9 && (error.coherent - 32.0).abs() < 1e-9);
        assert!((error.energy - 128.0).abs() < 1e-9 && (error.relative() - 0.5).abs() < 1e-9);
        let turns: Vec<f32> = (0..32 * d)
            .map(|i| if i / d % 2 == 0 { 1.5 } else { 0.5 })
            .collect();
        let error = objective.compare(&prompt[0], &exact, &turns);
        assert!((error.squared - 32.0).abs() < 1e-9 && error.coherent < 1e-9);

        let codec = Codec {
            head_dim: d,
            levels: 4,
            group: d,
            clip: 1.0,
            feedback: None,
        };
        let transform = Transform::new(identity.clone(), identity.clone(), None, codec).unwrap();
        // Rows of equal values fit four levels.
        let error = objective.error(SideName::V, &transform).unwrap();
        assert!(error.relative() < 0.01, "{error:?}");
    }
}
