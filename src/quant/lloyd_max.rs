//! Levels for standard normal values with the least mean squared error (Max 1960, table I).

use half::bf16;

use crate::{Error, Result};

/// Levels symmetric about 0, and the thresholds halfway between neighbours.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Codebook {
    /// Positive thresholds, ascending; 0 and the negatives are thresholds as well.
    thresholds: &'static [f32],
    /// Positive levels, ascending; the negatives are levels as well.
    centroids: &'static [f32],
}

const TWO_BITS: Codebook = Codebook {
    thresholds: &[0.9816],
    centroids: &[0.4528, 1.5104],
};

const THREE_BITS: Codebook = Codebook {
    thresholds: &[0.5006, 1.0500, 1.7480],
    centroids: &[0.2451, 0.7560, 1.3440, 2.1520],
};

impl Codebook {
    /// # Errors
    /// Where `bits` is neither 2 nor 3.
    pub fn new(bits: usize) -> Result<Self> {
        match bits {
            2 => Ok(TWO_BITS),
            3 => Ok(THREE_BITS),
            _ => Err(Error::invalid(
                "lloyd-max codebook",
                format!("{bits} bits (2 and 3 are tabulated)"),
            )),
        }
    }

    /// Code of a standardised value, ascending with it: 0 to 2^bits − 1.
    pub fn code(self, x: f32) -> u8 {
        let rank = self.thresholds.iter().filter(|&&t| x.abs() >= t).count();
        let half = self.centroids.len();
        (if x < 0.0 {
            half - 1 - rank
        } else {
            half + rank
        }) as u8
    }

    /// The level of a code; codes past the last one read as the last.
    pub fn level(self, code: u8) -> f32 {
        let (code, half) = (usize::from(code), self.centroids.len());
        if code < half {
            -self.centroids[half - 1 - code]
        } else {
            self.centroids[(code - half).min(half - 1)]
        }
    }
}

/// Rows (n, d) through a Lloyd–Max codec and back: per group of `group` channels standardised by mean and deviation
/// (both stored as bf16, so bits are those of [`bits_per_element`](super::bits_per_element)), then the nearest level.
///
/// # Errors
/// Where `bits` is neither 2 nor 3, or `rows` are no whole groups.
pub fn roundtrip(rows: &[f32], group: usize, bits: usize) -> Result<Vec<f32>> {
    let book = Codebook::new(bits)?;
    if group == 0 || !rows.len().is_multiple_of(group) {
        return Err(Error::invalid(
            "lloyd-max codec",
            format!("{} values are not groups of {group}", rows.len()),
        ));
    }
    let mut out = Vec::with_capacity(rows.len());
    for x in rows.chunks_exact(group) {
        let mean = x.iter().sum::<f32>() / group as f32;
        let mean = bf16::from_f32(mean).to_f32();
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / group as f32;
        let deviation = bf16::from_f32(variance.sqrt().max(1e-8)).to_f32();
        out.extend(
            x.iter()
                .map(|x| book.level(book.code((x - mean) / deviation)) * deviation + mean),
        );
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::turboquant::random_orthogonal;

    /// Max 1960: a normal value's mean squared error is 0.1175 at four levels and 0.03454 at eight.
    #[test]
    fn error_on_normal_values_is_that_of_the_table() {
        let d = 256;
        let rows: Vec<f32> = random_orthogonal(d, 1)
            .iter()
            .map(|&x| (x * 16.0) as f32)
            .collect();
        for (bits, want) in [(2, 0.1175), (3, 0.03454)] {
            let back = roundtrip(&rows, d, bits).unwrap();
            let error = rows
                .iter()
                .zip(&back)
                .map(|(a, b)| (a - b).powi(2))
                .sum::<f32>()
                / rows.len() as f32;
            assert!((error / want - 1.0).abs() < 0.05, "{bits} bits: {error}");
        }
        assert!(roundtrip(&rows, d, 4).is_err());
        assert!(roundtrip(&rows, 7, 2).is_err());
    }

    #[test]
    fn codes_ascend() {
        let book = Codebook::new(2).unwrap();
        let codes = [-3.0, -0.98, -0.1, 0.0, 0.98, 0.99].map(|x| book.code(x));
        assert_eq!(codes, [0, 1, 1, 2, 2, 3]);
        assert_eq!(
            [0, 1, 2, 3, 200].map(|code| (book.level(code) * 1e4).round() as i32),
            [-15104, -4528, 4528, 15104, 15104]
        );
    }
}
