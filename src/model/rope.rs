//! Rotary position embedding.

use std::f64::consts::TAU;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Error, Result};

/// Rotary position embedding over the whole head, in half-split order: channel i turns with channel i + head_dim/2.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// How inverse frequencies differ from θ^(−2i/head_dim).
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Positions divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, a smooth ramp between, high frequencies as they are.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
    /// Each inverse frequency divided by its own factor (`rope_freqs` of a GGUF file), head_dim/2 of them.
    Factors(Vec<f32>),
}

impl Rope {
    pub(super) fn check(&self, place: &str, head_dim: usize) -> Result<()> {
        let sane = |x: f64| x.is_finite() && x > 0.0;
        let fine = match &self.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => sane(*factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                sane(*factor)
                    && sane(*low_freq_factor)
                    && sane(*high_freq_factor)
                    && low_freq_factor < high_freq_factor
                    && *original_max_position_embeddings > 0
            }
            RopeScaling::Factors(factors) => {
                factors.len() == head_dim / 2 && factors.iter().all(|&x| sane(f64::from(x)))
            }
        };
        if !sane(self.theta) || self.theta <= 1.0 {
            return Err(Error::invalid(
                place,
                format!("RoPE base {} is not a number above 1", self.theta),
            ));
        }
        if !fine {
            return Err(Error::invalid(
                place,
                format!("RoPE scaling {:?} makes no sense", self.scaling),
            ));
        }
        Ok(())
    }

    /// Radians a position turns channel pair i, head_dim/2 of them.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|i| {
                let plain = self.theta.powf(-(2.0 * i as f64) / head_dim as f64);
                let scaled = match &self.scaling {
                    RopeScaling::None => plain,
                    RopeScaling::Linear { factor } => plain / factor,
                    RopeScaling::Factors(factors) => plain / f64::from(factors[i]),
                    RopeScaling::Llama3 {
                        factor,
                        low_freq_factor,
                        high_freq_factor,
                        original_max_position_embeddings,
                    } => {
                        let turns = *original_max_position_embeddings as f64 * plain / TAU;
                        let ramp = ((turns - low_freq_factor)
                            / (high_freq_factor - low_freq_factor))
                            .clamp(0.0, 1.0);
                        (1.0 - ramp) * plain / factor + ramp * plain
                    }
                };
                scaled as f32
            })
            .collect()
    }
}

/// Cosines and sines of the first positions, row-major (positions, head_dim/2), in f32.
#[derive(Debug)]
pub(super) struct Table {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

/// Grows with the longest prompt seen, and is shared by all layers.
#[derive(Debug)]
pub(super) struct Tables {
    inverse_frequencies: Vec<f32>,
    table: Mutex<Arc<Table>>,
}

impl Tables {
    pub fn new(rope: &Rope, head_dim: usize) -> Self {
        Self {
            inverse_frequencies: rope.inverse_frequencies(head_dim),
            table: Mutex::new(Arc::new(Table {
                cos: Vec::new(),
                sin: Vec::new(),
            })),
        }
    }

    /// A table of at least `positions` positions.
    pub fn upto(&self, positions: usize) -> Arc<Table> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.cos.len() < positions * self.inverse_frequencies.len() {
            // Position times frequency in f32, as every serving engine has it.
            // More of them than asked for: a sequence that is generated asks for one more every time.
            let angles = (0..positions.next_power_of_two())
                .flat_map(|t| self.inverse_frequencies.iter().map(move |f| t as f32 * f));
            let (sin, cos) = angles.map(f32::sin_cos).unzip();
            *table = Arc::new(Table { cos, sin });
        }
        Arc::clone(&table)
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // equal to the bit
mod tests {
    use super::*;

    fn frequencies(scaling: RopeScaling) -> Vec<f32> {
        Rope {
            theta: 10_000.0,
            scaling,
        }
        .inverse_frequencies(64)
    }

    #[test]
    fn linear_scaling_divides_positions() {
        let plain = frequencies(RopeScaling::None);
        assert_eq!((plain[0], plain.len()), (1.0, 32));
        let linear = frequencies(RopeScaling::Linear { factor: 4.0 });
        assert!(plain.iter().zip(&linear).all(|(p, l)| p / 4.0 == *l));
    }

    #[test]
    fn llama3_scaling_leaves_fast_turns_and_slows_slow_ones() {
        let plain = frequencies(RopeScaling::None);
        let scaled = frequencies(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        });
        for (p, s) in plain.iter().zip(&scaled) {
            let wavelength = std::f32::consts::TAU / p;
            if wavelength < 8192.0 / 4.0 {
                assert_eq!(p, s);
            } else if wavelength > 8192.0 {
                assert_eq!(p / 8.0, *s);
            } else {
                assert!(p / 8.0 < *s && s < p);
            }
        }
    }

    #[test]
    fn tables_grow_and_keep_their_values() {
        let rope = Rope {
            theta: 10_000.0,
            scaling: RopeScaling::None,
        };
        let tables = Tables::new(&rope, 4);
        let short = tables.upto(4);
        let long = tables.upto(5);
        assert_eq!(long.cos[..8], short.cos);
        assert_eq!(long.sin[8], 4f32.sin());
        assert!(Arc::ptr_eq(&long, &tables.upto(2)));
    }
}
