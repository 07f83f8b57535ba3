use half::bf16;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::Real;
use crate::{Error, Result};

/// Rows that one sweep rounds side by side: SIMD runs across rows, since feedback runs along channels. Loops over 32
/// lanes or fewer are unrolled before they are vectorised, and take four times as long.
const LANES: usize = 64;

/// Smallest scale of a group: a constant one would divide by zero.
const MIN_SCALE: f64 = 1e-8;

/// Uniform levels with a clipped range, for rows of one KV head in the encoded space.
///
/// Per row and group of `group` channels: scale = max(max − min, 1e-8 ·) / (levels − 1) and zero = −min / scale of
/// the clipped row, both stored as bf16; code = clamp(⌊x/scale + zero + ½⌋, 0, levels − 1) from the stored values;
/// value = (code − zero) · scale. With `feedback` F, channels are rounded in order, and channel i's error e moves
/// every later channel j by −e·F_ij; then the range is still that of the clipped row, before any feedback.
///
/// Arithmetic is plain IEEE in T, with no fused operations: codes are the same on every machine and for any number
/// of threads. Non-finite rows give codes without meaning, and no panic.
#[derive(Clone, PartialEq, Debug)]
pub struct Codec<T> {
    pub head_dim: usize,
    /// 4 for two bits; 2 to 256.
    pub levels: usize,
    /// Channels that share a scale and a zero; divides `head_dim`.
    pub group: usize,
    /// r in (0, 1]: magnitudes past the ⌊r·d⌋-th smallest of the row's d are clipped; 1 clips none.
    pub clip: f64,
    /// F (d, d), row-major; only entries above the diagonal are read. Absent: nearest rounding.
    pub feedback: Option<Vec<T>>,
}

/// What [`Codec::encode`] makes of n rows.
#[derive(Clone, PartialEq, Debug)]
pub struct Encoded {
    pub head_dim: usize,
    pub levels: usize,
    pub group: usize,
    /// (n, d), one code a byte.
    pub codes: Vec<u8>,
    /// (n, d/group).
    pub scale: Vec<bf16>,
    /// (n, d/group).
    pub zero: Vec<bf16>,
}

impl<T: Real> Codec<T> {
    /// Checks the settings; [`Codec::encode`] does so too.
    pub fn check(&self) -> Result<()> {
        let d = self.head_dim;
        let fail = |problem: String| Err(Error::invalid("codec", problem));
        if d == 0 {
            return fail("head_dim is 0".into());
        }
        if !(2..=256).contains(&self.levels) {
            return fail(format!("{} levels (2 to 256 are possible)", self.levels));
        }
        if self.group == 0 || !d.is_multiple_of(self.group) {
            return fail(format!(
                "group size {} does not divide head_dim {d}",
                self.group
            ));
        }
        if !(self.clip > 0.0 && self.clip <= 1.0) {
            return fail(format!("clip ratio {} is not in (0, 1]", self.clip));
        }
        match &self.feedback {
            Some(f) if f.len() != d * d => {
                fail(format!("feedback holds {} entries, not {d}x{d}", f.len()))
            }
            _ => Ok(()),
        }
    }

    /// Encodes rows (n, d).
    ///
    /// # Errors
    /// Where the settings are impossible, or `rows` is not a whole number of rows.
    pub fn encode(&self, rows: &[T]) -> Result<Encoded> {
        self.check()?;
        let d = self.head_dim;
        if !rows.len().is_multiple_of(d) {
            return Err(Error::invalid(
                "codec",
                format!("{} values are not rows of {d}", rows.len()),
            ));
        }
        let (n, groups) = (rows.len() / d, d / self.group);
        let mut encoded = Encoded {
            head_dim: d,
            levels: self.levels,
            group: self.group,
            codes: vec![0; n * d],
            scale: vec![bf16::ZERO; n * groups],
            zero: vec![bf16::ZERO; n * groups],
        };
        let arch = Arch::new();
        encoded
            .codes
            .par_chunks_mut(LANES * d)
            .zip(encoded.scale.par_chunks_mut(LANES * groups))
            .zip(encoded.zero.par_chunks_mut(LANES * groups))
            .zip(rows.par_chunks(LANES * d))
            .for_each_init(
                || Block::new(self),
                |block, (((codes, scale), zero), rows)| {
                    arch.dispatch(EncodeBlock {
                        codec: self,
                        block,
                        rows,
                        codes,
                        scale,
                        zero,
                    });
                },
            );
        Ok(encoded)
    }

    /// The rows as they come back from the cache: encode, then decode.
    pub fn roundtrip(&self, rows: &[T]) -> Result<Vec<T>> {
        Ok(self.encode(rows)?.decode())
    }

    /// How many of a row's largest magnitudes reach the clip threshold: the threshold is the last of them.
    pub(crate) fn ranks(&self) -> usize {
        let d = self.head_dim;
        d - ((self.clip * d as f64) as usize).min(d - 1)
    }
}

impl Encoded {
    /// (code − zero) · scale, (n, d).
    pub fn decode<T: Real>(&self) -> Vec<T> {
        let mut rows = vec![T::default(); self.codes.len()];
        if self.group == 0 {
            return rows;
        }
        Arch::new().dispatch(Decode {
            encoded: self,
            rows: &mut rows,
        });
        rows
    }
}

// Structs and not closures: the call of a closure that only borrows is a function of its own, which the compiler need
// not inline, and outside the dispatch it is compiled for the oldest machine.

struct EncodeBlock<'a, T> {
    codec: &'a Codec<T>,
    block: &'a mut Block<T>,
    rows: &'a [T],
    codes: &'a mut [u8],
    scale: &'a mut [bf16],
    zero: &'a mut [bf16],
}

impl<T: Real> WithSimd for EncodeBlock<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        self.block
            .encode(self.codec, self.rows, self.codes, self.scale, self.zero);
    }
}

struct Decode<'a, T> {
    encoded: &'a Encoded,
    rows: &'a mut [T],
}

impl<T: Real> WithSimd for Decode<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let encoded = self.encoded;
        for (((row, codes), &scale), &zero) in self
            .rows
            .chunks_exact_mut(encoded.group)
            .zip(encoded.codes.chunks_exact(encoded.group))
            .zip(&encoded.scale)
            .zip(&encoded.zero)
        {
            let (scale, zero) = (T::from_bf16(scale), T::from_bf16(zero));
            for (value, &code) in row.iter_mut().zip(codes) {
                *value = (T::from_i32(i32::from(code)) - zero) * scale;
            }
        }
    }
}

type Lanes<T> = [T; LANES];

/// Up to [`LANES`] rows, channel by channel. Lanes past the last row hold what they held.
struct Block<T> {
    /// (d): what is left of channel i to round.
    rest: Vec<Lanes<T>>,
    /// (d)
    codes: Vec<Lanes<u8>>,
    /// The largest magnitudes of every row, descending; the last is the clip threshold.
    ranked: Vec<Lanes<T>>,
    /// (d/group): scale and zero.
    ranges: Vec<(Lanes<T>, Lanes<T>)>,
}

impl<T: Real> Block<T> {
    fn new(codec: &Codec<T>) -> Self {
        let none = [T::default(); LANES];
        Self {
            rest: vec![none; codec.head_dim],
            codes: vec![[0; LANES]; codec.head_dim],
            ranked: vec![none; codec.ranks()],
            ranges: vec![(none, none); codec.head_dim / codec.group],
        }
    }

    #[inline(always)]
    fn encode(
        &mut self,
        codec: &Codec<T>,
        rows: &[T],
        codes: &mut [u8],
        scale: &mut [bf16],
        zero: &mut [bf16],
    ) {
        let d = codec.head_dim;
        for (lane, row) in rows.chunks_exact(d).enumerate() {
            for (channel, &x) in self.rest.iter_mut().zip(row) {
                channel[lane] = x;
            }
        }
        let threshold = self.threshold();
        self.fit_ranges(codec, &threshold, scale, zero);
        match &codec.feedback {
            Some(f) => self.round_with_feedback(codec, f),
            None => self.round(codec, &threshold),
        }
        for (lane, row) in codes.chunks_exact_mut(d).enumerate() {
            for (code, channel) in row.iter_mut().zip(&self.codes) {
                *code = channel[lane];
            }
        }
    }

    /// The smallest of every row's `ranked.len()` largest magnitudes, by insertion: a few comparisons a channel for
    /// the clip ratios in use, and SIMD over rows, where a selection per row would branch.
    #[inline(always)]
    fn threshold(&mut self) -> Lanes<T> {
        self.ranked.fill([T::default(); LANES]);
        for channel in &self.rest {
            let mut x = channel.map(T::abs);
            for rank in &mut self.ranked {
                for (rank, x) in rank.iter_mut().zip(&mut x) {
                    let (larger, smaller) = (x.at_least(*rank), x.at_most(*rank));
                    (*rank, *x) = (larger, smaller);
                }
            }
        }
        self.ranked[self.ranked.len() - 1]
    }

    #[inline(always)]
    fn fit_ranges(
        &mut self,
        codec: &Codec<T>,
        threshold: &Lanes<T>,
        scale: &mut [bf16],
        zero: &mut [bf16],
    ) {
        let steps = T::from_i32(codec.levels as i32 - 1);
        let groups = self.ranges.len();
        for (at, channels) in self.rest.chunks_exact(codec.group).enumerate() {
            let (mut low, mut high) = (channels[0], channels[0]);
            for channel in channels {
                for ((low, high), &x) in low.iter_mut().zip(&mut high).zip(channel) {
                    (*low, *high) = (low.at_most(x), high.at_least(x));
                }
            }
            let (range_scale, range_zero) = &mut self.ranges[at];
            for (lane, (scale, zero)) in scale
                .chunks_exact_mut(groups)
                .zip(zero.chunks_exact_mut(groups))
                .enumerate()
            {
                let clipped = |x: T| x.at_most(threshold[lane]).at_least(-threshold[lane]);
                let (low, high) = (clipped(low[lane]), clipped(high[lane]));
                scale[at] = ((high - low) / steps)
                    .at_least(T::from_f64(MIN_SCALE))
                    .to_bf16();
                range_scale[lane] = T::from_bf16(scale[at]);
                zero[at] = (-low / range_scale[lane]).to_bf16();
                range_zero[lane] = T::from_bf16(zero[at]);
            }
        }
    }

    #[inline(always)]
    fn round(&mut self, codec: &Codec<T>, threshold: &Lanes<T>) {
        let top = T::from_i32(codec.levels as i32 - 1);
        for (i, (channel, codes)) in self.rest.iter().zip(&mut self.codes).enumerate() {
            let (scale, zero) = &self.ranges[i / codec.group];
            for lane in 0..LANES {
                let x = channel[lane]
                    .at_most(threshold[lane])
                    .at_least(-threshold[lane]);
                codes[lane] = code(x, scale[lane], zero[lane], top).to_u8();
            }
        }
    }

    #[inline(always)]
    fn round_with_feedback(&mut self, codec: &Codec<T>, f: &[T]) {
        let top = T::from_i32(codec.levels as i32 - 1);
        let d = codec.head_dim;
        for i in 0..d {
            let (scale, zero) = &self.ranges[i / codec.group];
            let (done, later) = self.rest.split_at_mut(i + 1);
            let (channel, codes) = (&done[i], &mut self.codes[i]);
            let mut error = [T::default(); LANES];
            for lane in 0..LANES {
                let code = code(channel[lane], scale[lane], zero[lane], top);
                codes[lane] = code.to_u8();
                error[lane] = channel[lane] - (code - zero[lane]) * scale[lane];
            }
            for (channel, &push) in later.iter_mut().zip(&f[i * d + i + 1..(i + 1) * d]) {
                for (x, &error) in channel.iter_mut().zip(&error) {
                    *x = *x - error * push;
                }
            }
        }
    }
}

/// clamp(⌊x/scale + zero + ½⌋, 0, top), a whole number; 0 for NaN.
#[inline(always)]
fn code<T: Real>(x: T, scale: T, zero: T, top: T) -> T {
    (x / scale + zero + T::from_f64(0.5))
        .at_least(T::default())
        .at_most(top)
        .floor()
}

#[cfg(test)]
mod tests {
    use nalgebra::DMatrix;
    use proptest::prelude::*;

    use super::*;
    use crate::quant::turboquant::random_orthogonal;
    use crate::quant::{feedback_matrix, row_major};

    /// The definition, a row at a time.
    fn plain<T: Real>(codec: &Codec<T>, rows: &[T]) -> Encoded {
        let d = codec.head_dim;
        let top = codec.levels as i32 - 1;
        let (mut codes, mut scales, mut zeros) = (vec![], vec![], vec![]);
        for row in rows.chunks(d) {
            let mut sorted: Vec<T> = row.iter().map(|x| x.abs()).collect();
            sorted.sort_by(|a, b| a.partial_cmp(b).unwrap());
            let t = sorted[((codec.clip * d as f64) as usize).min(d - 1)];
            let clipped: Vec<T> = row.iter().map(|x| x.at_most(t).at_least(-t)).collect();
            let first = scales.len();
            for group in clipped.chunks(codec.group) {
                let low = group.iter().fold(group[0], |a, &b| a.at_most(b));
                let high = group.iter().fold(group[0], |a, &b| a.at_least(b));
                let scale = ((high - low) / T::from_i32(top))
                    .at_least(T::from_f64(1e-8))
                    .to_bf16();
                scales.push(scale);
                zeros.push((-low / T::from_bf16(scale)).to_bf16());
            }
            let mut rest = match codec.feedback {
                Some(_) => row.to_vec(),
                None => clipped,
            };
            for i in 0..d {
                let scale = T::from_bf16(scales[first + i / codec.group]);
                let zero = T::from_bf16(zeros[first + i / codec.group]);
                let x = rest[i] / scale + zero + T::from_f64(0.5);
                let code = (x.to_f32().floor() as i32).clamp(0, top);
                codes.push(code as u8);
                if let Some(f) = &codec.feedback {
                    let error = rest[i] - (T::from_i32(code) - zero) * scale;
                    for j in i + 1..d {
                        rest[j] = rest[j] - error * f[i * d + j];
                    }
                }
            }
        }
        Encoded {
            head_dim: d,
            levels: codec.levels,
            group: codec.group,
            codes,
            scale: scales,
            zero: zeros,
        }
    }

    fn values(n: usize, seed: u64) -> Vec<f32> {
        let d = (n as f64).sqrt().ceil() as usize;
        let mut values = row_major::<f32>(&random_orthogonal(d.max(2), seed));
        values.truncate(n);
        for x in values.iter_mut().step_by(13) {
            *x *= 6.0;
        }
        values
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn sweeps_equal_the_definition(
            (head_dim, group) in prop::sample::select(vec![
                (4, 4), (8, 2), (16, 16), (64, 64), (64, 32), (80, 16), (96, 96), (128, 128),
            ]),
            levels in prop::sample::select(vec![2usize, 3, 4, 8, 16, 256]),
            clip in 0.05..=1.0f64,
            n in 0usize..150,
            shaped in any::<bool>(),
            seed in 0u64..1000,
        ) {
            let rows = values(n * head_dim, seed);
            let feedback = shaped.then(|| values(head_dim * head_dim, seed + 1));
            let codec = Codec { head_dim, levels, group, clip, feedback };
            prop_assert_eq!(codec.encode(&rows).unwrap(), plain(&codec, &rows));
        }

        #[test]
        fn packing_loses_nothing(
            quarter in 1usize..40,
            n in 0usize..20,
            seed in any::<u64>(),
            levels in 2usize..=4,
        ) {
            let head_dim = 4 * quarter;
            let mix = |i: usize| (seed ^ i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
            let encoded = Encoded {
                head_dim,
                levels,
                group: head_dim,
                codes: (0..n * head_dim).map(|i| (mix(i) % levels as u64) as u8).collect(),
                scale: vec![bf16::ONE; n],
                zero: vec![bf16::ZERO; n],
            };
            let packed = encoded.pack().unwrap();
            prop_assert_eq!(packed.bytes.len(), n * quarter);
            prop_assert_eq!(packed.unpack(), encoded);
        }
    }

    #[test]
    fn bytes_hold_four_quarters() {
        let codes = vec![1, 0, 2, 0, 3, 0, 1, 0];
        let encoded = Encoded {
            head_dim: 8,
            levels: 4,
            group: 8,
            codes,
            scale: vec![bf16::ONE],
            zero: vec![bf16::ZERO],
        };
        assert_eq!(encoded.pack().unwrap().bytes, [0b01_11_10_01, 0]);
    }

    /// The point of feedback: the error that the metric sees is smaller, though the plain one is larger.
    #[test]
    fn feedback_lowers_the_error_that_matters() {
        let d = 64;
        let u = random_orthogonal(d, 1);
        let spread = DMatrix::from_fn(
            d,
            d,
            |i, j| {
                if i == j { 0.85f64.powi(i as i32) } else { 0.0 }
            },
        );
        let metric = &u * spread * u.transpose();
        let rows: Vec<f64> = (10..14)
            .flat_map(|seed| row_major::<f64>(&random_orthogonal(d, seed)))
            .collect();
        let mut codec = Codec {
            head_dim: d,
            levels: 4,
            group: d,
            clip: 0.95,
            feedback: None,
        };
        let error = |codec: &Codec<f64>| {
            let back = codec.roundtrip(&rows).unwrap();
            let delta: Vec<f64> = back.iter().zip(&rows).map(|(a, b)| a - b).collect();
            let delta = DMatrix::from_row_slice(rows.len() / d, d, &delta);
            (&delta * &metric).dot(&delta)
        };
        let nearest = error(&codec);
        codec.feedback = Some(row_major(&feedback_matrix(&metric).unwrap()));
        let shaped = error(&codec);
        assert!(shaped < 0.5 * nearest, "{shaped} {nearest}");
    }

    #[test]
    fn threads_change_nothing() {
        let rows = values(1000 * 64, 5);
        let codec = Codec {
            head_dim: 64,
            levels: 4,
            group: 64,
            clip: 0.9,
            feedback: Some(values(64 * 64, 6)),
        };
        let on = |threads| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap()
                .install(|| codec.encode(&rows).unwrap())
        };
        assert_eq!(on(1), on(3));
    }

    #[test]
    fn hostile_rows_do_not_panic() {
        let codec = Codec {
            head_dim: 4,
            levels: 4,
            group: 4,
            clip: 0.9,
            feedback: Some(vec![f32::MAX; 16]),
        };
        let rows = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            0.0,
            f32::MAX,
            f32::MIN,
            1e-45,
            -0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            7.0,
            7.0,
            7.0,
            7.0,
        ];
        let encoded = codec.encode(&rows).unwrap();
        assert!(encoded.codes.iter().all(|&code| code < 4));
        assert_eq!(encoded.decode::<f32>()[8..12], [0.0; 4]);
    }

    #[test]
    fn impossible_settings_are_refused() {
        let good = Codec::<f32> {
            head_dim: 64,
            levels: 4,
            group: 32,
            clip: 1.0,
            feedback: None,
        };
        assert!(good.check().is_ok());
        let message = |codec: Codec<f32>| codec.encode(&[]).unwrap_err().to_string();
        assert!(
            message(Codec {
                group: 48,
                ..good.clone()
            })
            .contains("48 does not divide")
        );
        assert!(
            message(Codec {
                group: 0,
                ..good.clone()
            })
            .contains("group size 0")
        );
        assert!(
            message(Codec {
                levels: 1,
                ..good.clone()
            })
            .contains("1 levels")
        );
        assert!(
            message(Codec {
                clip: 0.0,
                ..good.clone()
            })
            .contains("clip ratio 0")
        );
        assert!(
            message(Codec {
                clip: f64::NAN,
                ..good.clone()
            })
            .contains("NaN")
        );
        assert!(
            message(Codec {
                feedback: Some(vec![]),
                ..good.clone()
            })
            .contains("64x64")
        );
        assert!(good.encode(&[0.0; 65]).is_err());
        let eight = Codec { levels: 8, ..good };
        assert!(eight.encode(&[0.0; 64]).unwrap().pack().is_err());
    }
}
