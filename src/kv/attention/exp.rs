//! Softmax's inner loops, written so that they vectorise where `pulp` dispatches them to a wide instruction set.

const LANES: usize = 16;

/// 2^x within 1e-7 of the value from 2^-125 up, 0 below that; infinity from x = 128 up; NaN for NaN.
#[inline(always)]
#[allow(clippy::excessive_precision, clippy::unreadable_literal)]
pub(crate) fn exp2(x: f32) -> f32 {
    // Adding 1.5·2^23 rounds to the nearest integer and leaves it in the sum's low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x + ROUND;
    let f = x - (shifted - ROUND);
    // Minimax in relative error on [-½, ½]: 1.9e-9.
    let p = 0.000153458124_f32;
    let p = p.mul_add(f, 0.00133999309);
    let p = p.mul_add(f, 0.00961848907);
    let p = p.mul_add(f, 0.0555032864);
    let p = p.mul_add(f, 0.240226462);
    let p = p.mul_add(f, 0.693147182);
    let p = p.mul_add(f, 1.0);
    let y = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if (-125.0..128.0).contains(&x) {
        y
    } else if x < 0.0 {
        0.0
    } else {
        x + f32::INFINITY
    }
}

/// The largest of `row` and `start`; NaN is skipped.
#[inline(always)]
pub(crate) fn max(row: &[f32], start: f32) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [start; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    rest.iter().chain(&lanes).copied().fold(start, larger)
}

/// Replaces every x by 2^(x − `shift`) and returns their sum.
#[inline(always)]
pub(crate) fn exp2_sum(row: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = exp2(*x - shift);
            *lane += *x;
        }
    }
    let mut sum = 0.0;
    for x in chunks.into_remainder() {
        *x = exp2(*x - shift);
        sum += *x;
    }
    lanes.iter().sum::<f32>() + sum
}

/// The larger of `row`'s maximum and `start`; replaces every x by 2^(x − that) and returns it and their sum.
pub(super) fn weigh(row: &mut [f32], start: f32) -> (f32, f32) {
    struct Weigh<'a>(&'a mut [f32], f32);
    impl pulp::NullaryFnOnce for Weigh<'_> {
        type Output = (f32, f32);

        #[inline(always)]
        fn call(self) -> (f32, f32) {
            let max = max(self.0, self.1);
            (max, exp2_sum(self.0, max))
        }
    }
    pulp::Arch::new().dispatch(Weigh(row, start))
}

#[cfg(test)]
#[allow(clippy::float_cmp)]
mod tests {
    use super::*;

    #[test]
    fn exp2_is_that_of_f64_within_1e7() {
        let mut worst: f64 = 0.0;
        for step in -1_250_000..1_280_000 {
            let x = step as f32 * 1e-4;
            let (ours, exact) = (f64::from(exp2(x)), f64::from(x).exp2());
            worst = worst.max((ours / exact - 1.0).abs());
        }
        assert!(worst < 1.0e-7, "{worst:e}");
    }

    #[test]
    fn exp2_of_extremes() {
        assert_eq!(exp2(0.0), 1.0);
        for x in [-125.1, -126.0, -1e4, -3e38, f32::NEG_INFINITY] {
            assert_eq!(exp2(x), 0.0, "{x}");
        }
        for x in [128.0, 1e4, 3e38, f32::INFINITY] {
            assert_eq!(exp2(x), f32::INFINITY, "{x}");
        }
        assert!(exp2(127.999).is_finite());
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_maxima_cover_every_element() {
        for n in [0, 1, 15, 16, 17, 100] {
            let row: Vec<f32> = (0..n).map(|i| ((i * 37) % 101) as f32 * 0.1).collect();
            let largest = row.iter().copied().fold(-1.0, f32::max);
            assert_eq!(max(&row, -1.0), largest);
            let exact: f64 = row.iter().map(|&x| f64::from(x - largest).exp2()).sum();
            let mut powers = row.clone();
            let sum = exp2_sum(&mut powers, largest);
            assert!((f64::from(sum) - exact).abs() < 1e-5 * exact.max(1.0));
            assert!(
                powers
                    .iter()
                    .zip(&row)
                    .all(|(p, x)| (p - (x - largest).exp2()).abs() < 1e-6)
            );
        }
        assert!(exp2_sum(&mut [0.0, f32::NAN], 0.0).is_nan());
    }
}
