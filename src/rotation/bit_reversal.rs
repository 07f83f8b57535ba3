//! The permutation P that ends a composition R·H·P: it spreads neighbouring channels over the quantization groups.

use nalgebra::DMatrix;

/// Column c of R·H·P is column `columns(d)[c]` of R·H.
///
/// For d = 2ᵇ that is d − 1 − bitrev_b(c), the order of OSCAR's released files: they build P for descending
/// eigenvalues and apply it to ascending ones. For other d the bit reversal becomes a strided interleave,
/// c ↦ (c mod s)·(d/s) + ⌊c/s⌋ with s the largest divisor of d that is at most √d: neighbours land d/s apart.
pub fn columns(d: usize) -> Vec<usize> {
    let spread = |c: usize| {
        if d == 1 {
            0
        } else if d.is_power_of_two() {
            c.reverse_bits() >> (usize::BITS - d.trailing_zeros())
        } else {
            let stride = (1..=d.isqrt())
                .rev()
                .find(|&s| d.is_multiple_of(s))
                .unwrap_or(1);
            (c % stride) * (d / stride) + c / stride
        }
    };
    (0..d).map(|c| d - 1 - spread(c)).collect()
}

/// x · P: the columns of `x` (n, d) in the order of [`columns`].
pub fn apply(x: &DMatrix<f64>) -> DMatrix<f64> {
    x.select_columns(&columns(x.ncols()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_follow_the_released_order() {
        assert_eq!(columns(8), [7, 3, 5, 1, 6, 2, 4, 0]);
        assert_eq!(columns(1), [0]);
    }

    #[test]
    fn each_channel_appears_once() {
        for d in 0..=256 {
            let mut all = columns(d);
            all.sort_unstable();
            assert!(all.into_iter().eq(0..d), "{d}");
        }
    }

    /// Eight neighbours of 96 end in as many twelfths of the output.
    #[test]
    fn neighbours_spread() {
        let mut parts: Vec<usize> = columns(96)[..8].iter().map(|c| c / 12).collect();
        parts.sort_unstable();
        assert!(parts.into_iter().eq(0..8));
    }
}
