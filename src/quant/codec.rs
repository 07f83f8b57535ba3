use half::bf16;
use pulp::Arch;
use rayon::prelude::*;

use super::Real;
use crate::{Error, Result};

/// Rows that one sweep rounds side by side: SIMD runs across rows, since feedback runs along channels.
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
                    arch.dispatch(
                        #[inline(always)]
                        || block.encode(self, rows, codes, scale, zero),
                    );
                },
            );
        Ok(encoded)
    }

    /// The rows as they come back from the cache: encode, then decode.
    pub fn roundtrip(&self, rows: &[T]) -> Result<Vec<T>> {
        Ok(self.encode(rows)?.decode())
    }

    /// How many of a row's largest magnitudes reach the clip threshold: the threshold is the last of them.
    fn ranks(&self) -> usize {
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
        Arch::new().dispatch(
            #[inline(always)]
            || {
                for (((row, codes), &scale), &zero) in rows
                    .chunks_exact_mut(self.group)
                    .zip(self.codes.chunks_exact(self.group))
                    .zip(&self.scale)
                    .zip(&self.zero)
                {
                    let (scale, zero) = (T::from_bf16(scale), T::from_bf16(zero));
                    for (value, &code) in row.iter_mut().zip(codes) {
                        *value = (T::from_i32(i32::from(code)) - zero) * scale;
                    }
                }
            },
        );
        rows
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
                let high = high[lane].at_most(threshold[lane]);
                let low = low[lane].at_least(-threshold[lane]);
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
                codes[lane] = code(x, scale[lane], zero[lane], top) as u8;
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
                codes[lane] = code as u8;
                error[lane] = channel[lane] - (T::from_i32(code) - zero[lane]) * scale[lane];
            }
            for (channel, &push) in later.iter_mut().zip(&f[i * d + i + 1..(i + 1) * d]) {
                for (x, &error) in channel.iter_mut().zip(&error) {
                    *x = *x - error * push;
                }
            }
        }
    }
}

/// clamp(⌊x/scale + zero + ½⌋, 0, top): clamped first, so that truncation is the floor.
#[inline(always)]
fn code<T: Real>(x: T, scale: T, zero: T, top: T) -> i32 {
    (x / scale + zero + T::from_f64(0.5))
        .at_least(T::default())
        .at_most(top)
        .to_i32()
}
