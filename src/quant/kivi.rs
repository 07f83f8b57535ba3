//! KIVI (Liu et al. 2024): keys quantized per channel along the tokens, values per token.

use half::bf16;

use crate::{Error, Result};

use super::with_windows;

/// Tokens that share a key channel's scale and minimum.
pub const GROUP_TOKENS: usize = 128;

/// Keys (n, d) of one head, after RoPE, through the cache and back: per channel and group of [`GROUP_TOKENS`] tokens,
/// counted from the first row, asymmetric `levels` levels between minimum and maximum, stored as bf16. The incomplete
/// last group stays exact.
///
/// # Errors
/// Where `rows` is not a whole number of rows, or `levels` is below 2.
pub fn roundtrip_keys(rows: &[f32], head_dim: usize, levels: usize) -> Result<Vec<f32>> {
    check(rows, head_dim, levels)?;
    let mut out = rows.to_vec();
    for group in out.chunks_exact_mut(GROUP_TOKENS * head_dim) {
        for channel in 0..head_dim {
            round(group, channel, head_dim, levels);
        }
    }
    Ok(out)
}

/// Values (n, d) of one head through the cache and back: the same levels per token, over all d channels.
///
/// # Errors
/// As [`roundtrip_keys`].
pub fn roundtrip_values(rows: &[f32], head_dim: usize, levels: usize) -> Result<Vec<f32>> {
    check(rows, head_dim, levels)?;
    let mut out = rows.to_vec();
    for row in out.chunks_exact_mut(head_dim) {
        round(row, 0, 1, levels);
    }
    Ok(out)
}

/// Bits per element, keys and values averaged, of a context of which `sink` + `recent` tokens stay exact: `bits` a
/// code, two bf16 per key channel and 128 tokens and two per value token, and the incomplete key group at 16 bits.
pub fn bits_per_element(
    bits: f64,
    head_dim: usize,
    context_tokens: usize,
    sink: usize,
    recent: usize,
) -> f64 {
    let history = context_tokens.saturating_sub(sink + recent);
    let values = bits + 32.0 / head_dim as f64;
    let keys = if history == 0 {
        16.0
    } else {
        let whole = (history / GROUP_TOKENS * GROUP_TOKENS) as f64 / history as f64;
        (bits + 32.0 / GROUP_TOKENS as f64) * whole + 16.0 * (1.0 - whole)
    };
    with_windows(f64::midpoint(keys, values), context_tokens, sink, recent)
}

fn check(rows: &[f32], head_dim: usize, levels: usize) -> Result<()> {
    if head_dim == 0 || !rows.len().is_multiple_of(head_dim) || levels < 2 {
        return Err(Error::invalid(
            "KIVI codec",
            format!(
                "{} values in rows of {head_dim} at {levels} levels",
                rows.len()
            ),
        ));
    }
    Ok(())
}

/// Rounds the elements `first`, `first + step` … of `x` to levels between their minimum and maximum.
fn round(x: &mut [f32], first: usize, step: usize, levels: usize) {
    let picked = || (first..x.len()).step_by(step);
    let low = picked().map(|i| x[i]).fold(f32::INFINITY, f32::min);
    let high = picked().map(|i| x[i]).fold(f32::NEG_INFINITY, f32::max);
    let top = (levels - 1) as f32;
    let scale = bf16::from_f32(((high - low) / top).max(1e-8)).to_f32();
    let low = bf16::from_f32(low).to_f32();
    for i in picked() {
        x[i] = ((x[i] - low) / scale).round().clamp(0.0, top) * scale + low;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outlier_channel_costs_the_others_nothing() {
        let d = 8;
        let rows: Vec<f32> = (0..300 * d)
            .map(|i| {
                let x = ((i * 7919) % 101) as f32 / 101.0;
                if i % d == 3 { 100.0 * x } else { x }
            })
            .collect();
        let keys = roundtrip_keys(&rows, d, 4).unwrap();
        let values = roundtrip_values(&rows, d, 4).unwrap();
        let worst = |back: &[f32]| {
            (0..256 * d)
                .filter(|i| i % d != 3)
                .map(|i| (back[i] - rows[i]).abs())
                .fold(0.0, f32::max)
        };
        assert!(worst(&keys) < 0.18, "half a step, {}", worst(&keys));
        assert!(worst(&values) > 0.5, "values share the row's range");
        assert_eq!(
            keys[256 * d..],
            rows[256 * d..],
            "the incomplete group is exact"
        );
        assert!(roundtrip_keys(&rows, 7, 4).is_err());
    }

    #[test]
    fn all_that_is_stored_is_counted() {
        let at = |context| bits_per_element(2.0, 64, context, 64, 256);
        let whole = f64::midpoint(2.0 + 32.0 / 128.0, 2.0 + 32.0 / 64.0);
        let exact = 320.0 / 4416.0;
        assert!((at(320 + 4096) - (whole + (16.0 - whole) * exact)).abs() < 1e-12);
        assert!(
            at(320 + 4096 + 127) > at(320 + 4096),
            "127 key rows stay exact"
        );
        assert!((at(100) - 16.0).abs() < 1e-12);
    }
}
