//! Sums of one layer over the calibration tokens (method.md, section 1), in f64.
//!
//! Work is cut into pieces that do not depend on the number of threads, and pieces are added in a fixed order, so
//! that the sums have the same bits on any machine size.

use half::bf16;
use rayon::prelude::*;

use super::moments::{Sample, Sums};
use crate::kv::attention::Dims;
use crate::linalg::{Op, View, matmul};
use crate::{Error, Result};

/// Rows widened to f64 at a time: with d = 128 they fit the L2 cache.
const ROWS: usize = 256;
/// Rows of a piece of the second pass.
const PIECE: usize = 4096;

/// Adds up one layer, sequence by sequence.
pub struct Accumulator {
    sums: Sums,
    sample_rows: Vec<usize>,
    sample: Sample,
    // The second pass weighs all values by the final `qq`.
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Accumulator {
    /// Of no tokens yet. `tokens`: how many are to come. `sample_rows`: ascending indices among them of the rows to
    /// keep.
    pub fn new(dims: Dims, tokens: usize, sample_rows: Vec<usize>) -> Self {
        let row = dims.kv_heads * dims.head_dim;
        Self {
            sums: Sums::zero(dims),
            sample: Sample::default(),
            sample_rows,
            keys: Vec::with_capacity(tokens * row),
            values: Vec::with_capacity(tokens * row),
        }
    }

    /// Adds one packed sequence: q and o (tokens, heads, d), k and v (tokens, kv_heads, d), and `key_weights`
    /// (tokens, kv_heads) = Σ over the group's queries of S². `layer` names the place in errors.
    ///
    /// # Errors
    /// NaN or infinity in any of them. The sums are then void.
    ///
    /// # Panics
    /// Where lengths do not fit each other.
    pub fn observe(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        o: &[f32],
        key_weights: &[f64],
    ) -> Result<()> {
        let dims = self.sums.dims;
        let Dims {
            heads,
            kv_heads,
            head_dim: d,
        } = dims;
        let tokens = k.len() / (kv_heads * d);
        assert!(
            [q.len(), o.len()] == [tokens * heads * d; 2]
                && [k.len(), v.len()] == [tokens * kv_heads * d; 2]
                && key_weights.len() == tokens * kv_heads,
            "q, k, v, o and key weights of different shapes"
        );
        check_finite(layer, dims, q, k, v, o)?;

        let sums = &mut self.sums;
        let mut jobs = Vec::new();
        for (sum, rows, heads, weights) in [
            (&mut sums.qq, q, heads, None),
            (&mut sums.oo, o, heads, None),
            (&mut sums.kk, k, kv_heads, None),
            (&mut sums.vv, v, kv_heads, None),
            (&mut sums.vsv, v, kv_heads, Some(key_weights)),
        ] {
            let count = heads / kv_heads;
            for (kv_head, into) in sum.chunks_exact_mut(d * d).enumerate() {
                jobs.push(Job {
                    rows,
                    heads,
                    first: kv_head * count,
                    count,
                    d,
                    weights,
                    kv_head,
                    kv_heads,
                    into,
                });
            }
        }
        jobs.into_par_iter().for_each(Job::run);
        add_rows(k, &mut sums.k_sum);
        add_rows(v, &mut sums.v_sum);
        for weights in key_weights.chunks_exact(kv_heads) {
            for (sum, weight) in sums.vsv_weight.iter_mut().zip(weights) {
                *sum += weight;
            }
        }

        let first = sums.tokens;
        sums.tokens += tokens;
        self.keys.extend_from_slice(k);
        self.values.extend_from_slice(v);
        let from = self.sample_rows.partition_point(|&row| row < first);
        for &row in self.sample_rows[from..]
            .iter()
            .take_while(|&&row| row < first + tokens)
        {
            let keep = |into: &mut Vec<f32>, values: &[f32], heads: usize| {
                let at = (row - first) * heads * d;
                into.extend_from_slice(&values[at..at + heads * d]);
            };
            keep(&mut self.sample.q, q, heads);
            keep(&mut self.sample.k, k, kv_heads);
            keep(&mut self.sample.v, v, kv_heads);
            keep(&mut self.sample.o, o, heads);
            self.sample.rows += 1;
        }
        Ok(())
    }

    /// The second pass, which weighs every value by its key under the final `qq`: the sums and the sampled rows.
    pub fn finish(mut self) -> (Sums, Sample) {
        let Dims {
            kv_heads,
            head_dim: d,
            ..
        } = self.sums.dims;
        let row = kv_heads * d;
        let pieces: Vec<_> = (self.keys.par_chunks(PIECE * row))
            .zip(self.values.par_chunks(PIECE * row))
            .flat_map(|(keys, values)| {
                let qq = &self.sums.qq;
                (0..kv_heads).into_par_iter().map(move |head| {
                    let qq = &qq[head * d * d..(head + 1) * d * d];
                    let weights = sensitivity(keys, head, kv_heads, d, qq);
                    let mut vwv = vec![0.0; d * d];
                    let job = Job {
                        rows: values,
                        heads: kv_heads,
                        first: head,
                        count: 1,
                        d,
                        weights: Some(&weights),
                        kv_head: 0,
                        kv_heads: 1,
                        into: &mut vwv,
                    };
                    job.run();
                    (head, weights.iter().sum::<f64>(), vwv)
                })
            })
            .collect();
        for (head, weight, vwv) in pieces {
            self.sums.vwv_weight[head] += weight;
            for (sum, x) in self.sums.vwv[head * d * d..].iter_mut().zip(vwv) {
                *sum += x;
            }
        }
        (self.sums, self.sample)
    }
}

/// Adds Σ over tokens and `count` heads from `first` on of w·xᵀx to one (d, d) sum, w a weight of the KV head.
struct Job<'a> {
    /// (tokens, heads, d)
    rows: &'a [f32],
    heads: usize,
    first: usize,
    count: usize,
    d: usize,
    /// (tokens, kv_heads), not negative
    weights: Option<&'a [f64]>,
    kv_head: usize,
    kv_heads: usize,
    into: &'a mut [f64],
}

impl Job<'_> {
    fn run(self) {
        let Self { d, heads, .. } = self;
        let mut wide = vec![0.0; ROWS * d];
        for head in self.first..self.first + self.count {
            for (block, rows) in self.rows.chunks(ROWS * heads * d).enumerate() {
                let n = rows.len() / (heads * d);
                for t in 0..n {
                    let row = &rows[(t * heads + head) * d..][..d];
                    // √w on both sides keeps the sum symmetric to the last bit.
                    let root = self.weights.map_or(1.0, |weights| {
                        weights[(block * ROWS + t) * self.kv_heads + self.kv_head].sqrt()
                    });
                    for (wide, &x) in wide[t * d..][..d].iter_mut().zip(row) {
                        *wide = root * f64::from(x);
                    }
                }
                let view = View::contiguous(&wide, n, d);
                matmul(Op::Tn, view, view, self.into, d, true, 1.0, 1.0);
            }
        }
    }
}

/// k·qq·kᵀ of every token of one KV head; `keys` (tokens, kv_heads, d).
fn sensitivity(keys: &[f32], head: usize, kv_heads: usize, d: usize, qq: &[f64]) -> Vec<f64> {
    let mut weights = Vec::with_capacity(keys.len() / (kv_heads * d));
    let (mut wide, mut image) = (vec![0.0; ROWS * d], vec![0.0; ROWS * d]);
    for rows in keys.chunks(ROWS * kv_heads * d) {
        let n = rows.len() / (kv_heads * d);
        for (t, wide) in wide.chunks_exact_mut(d).take(n).enumerate() {
            for (wide, &x) in wide.iter_mut().zip(&rows[(t * kv_heads + head) * d..][..d]) {
                *wide = f64::from(x);
            }
        }
        let (k, qq) = (View::contiguous(&wide, n, d), View::contiguous(qq, d, d));
        matmul(Op::Nn, k, qq, &mut image, d, false, 1.0, 0.0);
        let pairs = wide.chunks_exact(d).zip(image.chunks_exact(d)).take(n);
        // qq is positive semi-definite: what lies below 0 is rounding.
        weights.extend(pairs.map(|(k, image)| {
            k.iter()
                .zip(image)
                .map(|(x, y)| x * y)
                .sum::<f64>()
                .max(0.0)
        }));
    }
    weights
}

/// Adds rows (tokens, n) to their sum (n).
fn add_rows(rows: &[f32], sum: &mut [f64]) {
    for row in rows.chunks_exact(sum.len()) {
        for (sum, &x) in sum.iter_mut().zip(row) {
            *sum += f64::from(x);
        }
    }
}

/// # Errors
/// NaN or infinity in q, o (tokens, heads, d), k or v (tokens, kv_heads, d).
pub(super) fn check_finite(
    layer: usize,
    dims: Dims,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    o: &[f32],
) -> Result<()> {
    let Dims {
        heads,
        kv_heads,
        head_dim: d,
    } = dims;
    // o comes last: where q, k or v is broken, so is o.
    for (name, values, heads) in [
        ("q", q, heads),
        ("k", k, kv_heads),
        ("v", v, kv_heads),
        ("o", o, heads),
    ] {
        if let Some(at) = first_non_finite(values) {
            let (token, head) = (at / (heads * d), at / d % heads);
            let value = values[at];
            return Err(Error::numeric(
                format!("layer {layer}"),
                format!("`{name}` is {value} in head {head} at token {token} of a sequence"),
            ));
        }
    }
    Ok(())
}

fn first_non_finite(values: &[f32]) -> Option<usize> {
    // Blocks without a branch inside are vectorised; x·0 is NaN for NaN and infinity.
    let block = values
        .chunks(1024)
        .position(|block| block.iter().map(|x| x * 0.0).sum::<f32>().is_nan())?;
    values[block * 1024..]
        .iter()
        .position(|x| !x.is_finite())
        .map(|at| block * 1024 + at)
}

/// Σ over the group's query heads of W_Oᵀ·W_O for every KV head, (kv_heads, d, d), from W_O (hidden, heads · d).
pub fn output_metric(output_projection: &[f32], dims: Dims) -> Vec<f64> {
    let Dims {
        heads,
        kv_heads,
        head_dim: d,
    } = dims;
    let mut metric = vec![0.0; kv_heads * d * d];
    let group = dims.group();
    metric
        .par_chunks_exact_mut(d * d)
        .enumerate()
        .for_each(|(kv_head, into)| {
            let job = Job {
                rows: output_projection,
                heads,
                first: kv_head * group,
                count: group,
                d,
                weights: None,
                kv_head,
                kv_heads,
                into,
            };
            job.run();
        });
    metric
}

/// Whole sequences as a moments file stores them.
#[derive(Clone, Debug, Default)]
pub struct HoldoutRows {
    pub q: Vec<bf16>,
    pub k: Vec<bf16>,
    pub v: Vec<bf16>,
}

impl HoldoutRows {
    /// Appends one sequence.
    pub fn extend(&mut self, q: &[f32], k: &[f32], v: &[f32]) {
        for (into, values) in [(&mut self.q, q), (&mut self.k, k), (&mut self.v, v)] {
            into.extend(values.iter().map(|&x| bf16::from_f32(x)));
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::kv::attention::{causal, plain};

    fn random(n: usize, seed: u64) -> Vec<f32> {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        (0..n).map(|_| random.random_range(-1.0f32..1.0)).collect()
    }

    fn close(name: &str, found: &[f64], expected: &[f64], tolerance: f64) {
        assert_eq!(found.len(), expected.len(), "{name}");
        let largest = expected.iter().fold(0.0f64, |a, x| a.max(x.abs()));
        for (at, (x, y)) in found.iter().zip(expected).enumerate() {
            assert!(
                (x - y).abs() <= tolerance * largest,
                "{name}[{at}]: {x} is not {y}"
            );
        }
    }

    /// Moments of the golden vectors, fed in two sequences, equal those of the reference.
    #[test]
    fn golden_moments() {
        for name in ["d16_mha_bias", "d64_gqa3"] {
            let path = format!(
                "{}/tests/fixtures/golden/{name}.safetensors",
                env!("CARGO_MANIFEST_DIR")
            );
            let golden = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
            let flat = |name: &str| golden[name].flatten_all().unwrap();
            let f32s = |name: &str| flat(name).to_vec1::<f32>().unwrap();
            let f64s = |name: &str| {
                flat(name)
                    .to_dtype(DType::F64)
                    .unwrap()
                    .to_vec1::<f64>()
                    .unwrap()
            };
            let (tokens, heads, d) = golden["q"].dims3().unwrap();
            let kv_heads = golden["k"].dims()[1];
            let dims = Dims::new(heads, kv_heads, d).unwrap();
            let (q, k, v, o) = (f32s("q"), f32s("k"), f32s("v"), f32s("o"));

            let mut accumulator = Accumulator::new(dims, tokens, vec![1, tokens - 1]);
            let (cut, row, kv_row) = (77, heads * d, kv_heads * d);
            let weights = vec![1.0; tokens * kv_heads];
            let (a, b) = (cut * row, cut * kv_row);
            accumulator
                .observe(
                    0,
                    &q[..a],
                    &k[..b],
                    &v[..b],
                    &o[..a],
                    &weights[..cut * kv_heads],
                )
                .unwrap();
            accumulator
                .observe(
                    0,
                    &q[a..],
                    &k[b..],
                    &v[b..],
                    &o[a..],
                    &weights[cut * kv_heads..],
                )
                .unwrap();
            let (sums, sample) = accumulator.finish();

            let (n, g) = (tokens as f64, dims.group() as f64);
            let mean = |sum: &[f64], count: f64| sum.iter().map(|x| x / count).collect::<Vec<_>>();
            close("qq", &mean(&sums.qq, n * g), &f64s("moment_qq"), 1e-12);
            close("kk", &mean(&sums.kk, n), &f64s("moment_kk"), 1e-12);
            close("vv", &mean(&sums.vv, n), &f64s("moment_vv"), 1e-12);
            // Unit weights.
            close("vsv", &mean(&sums.vsv, n), &f64s("moment_vv"), 1e-12);
            close(
                "k_mean",
                &mean(&sums.k_sum, n),
                &f64s("moment_k_mean"),
                1e-12,
            );
            close(
                "v_mean",
                &mean(&sums.v_sum, n),
                &f64s("moment_v_mean"),
                1e-12,
            );
            // The fixture holds o rounded to f32.
            close("oo", &mean(&sums.oo, n * g), &f64s("moment_oo"), 1e-6);
            for (head, weight) in sums.vwv_weight.iter().enumerate() {
                let square = head * d * d..(head + 1) * d * d;
                let vwv = mean(&sums.vwv[square.clone()], *weight);
                close("vwv", &vwv, &f64s("moment_vwv")[square], 1e-12);
            }
            assert_eq!(sample.rows, 2);
            assert_eq!(
                sample.k,
                [&k[kv_row..2 * kv_row], &k[(tokens - 1) * kv_row..]].concat()
            );
            assert_eq!(
                sample.o,
                [&o[row..2 * row], &o[(tokens - 1) * row..]].concat()
            );
        }
    }

    /// vsv and vwv of random rows equal their definitions, whatever the number of threads.
    #[test]
    fn weighted_moments_and_threads() {
        let (tokens, d) = (5000, 8);
        let dims = Dims::new(4, 2, d).unwrap();
        let q = random(tokens * 4 * d, 1);
        let (k, v) = (random(tokens * 2 * d, 2), random(tokens * 2 * d, 3));
        let prompts = [vec![100; 50]].concat();
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| {
                let out = causal(&q, &k, &v, dims, &prompts, true).unwrap();
                let weights = out.key_weights.unwrap();
                let mut accumulator = Accumulator::new(dims, tokens, Vec::new());
                accumulator
                    .observe(0, &q, &k, &v, &out.o, &weights)
                    .unwrap();
                (accumulator.finish().0, weights)
            })
        };
        let (sums, weights) = run(1);
        assert_eq!(run(3), (sums.clone(), weights.clone()));

        let plain = plain::causal(&q, &k, &v, dims, &prompts);
        close("key weights", &weights, &plain.key_weights.unwrap(), 1e-4);
        for head in 0..2 {
            let qq = &sums.qq[head * d * d..(head + 1) * d * d];
            let (mut vsv, mut vwv) = (vec![0.0; d * d], vec![0.0; d * d]);
            for t in 0..tokens {
                let row = |x: &[f32]| -> Vec<f64> {
                    x[(t * 2 + head) * d..][..d]
                        .iter()
                        .map(|&x| f64::from(x))
                        .collect()
                };
                let (k, v) = (row(&k), row(&v));
                let mut w = 0.0;
                for i in 0..d {
                    for j in 0..d {
                        w += k[i] * qq[i * d + j] * k[j];
                    }
                }
                for i in 0..d {
                    for j in 0..d {
                        vsv[i * d + j] += weights[t * 2 + head] * v[i] * v[j];
                        vwv[i * d + j] += w * v[i] * v[j];
                    }
                }
            }
            let square = head * d * d..(head + 1) * d * d;
            close("vsv", &sums.vsv[square.clone()], &vsv, 1e-12);
            close("vwv", &sums.vwv[square], &vwv, 1e-12);
        }
    }

    #[test]
    fn non_finite_values_are_named() {
        let dims = Dims::new(2, 1, 4).unwrap();
        let good = vec![1.0; 3 * 2 * 4];
        let mut k = vec![1.0; 3 * 4];
        k[2 * 4 + 1] = f32::NEG_INFINITY;
        let mut accumulator = Accumulator::new(dims, 3, Vec::new());
        let error = accumulator
            .observe(7, &good, &k, &[1.0; 12], &good, &[1.0; 3])
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "layer 7: `k` is -inf in head 0 at token 2 of a sequence"
        );
    }

    /// δ·metric·δᵀ is the squared error after the output projection.
    #[test]
    fn output_metric_is_the_error_after_projection() {
        let (hidden, d) = (12, 4);
        let dims = Dims::new(4, 2, d).unwrap();
        let projection = random(hidden * 4 * d, 5);
        let metric = output_metric(&projection, dims);
        let delta = [0.3, -1.0, 0.5, 2.0];
        // KV head 1 serves query heads 2 and 3.
        let mut expected = 0.0;
        for head in 2..4 {
            for row in projection.chunks(4 * d) {
                let error: f64 = (0..d)
                    .map(|i| f64::from(row[head * d + i]) * delta[i])
                    .sum();
                expected += error * error;
            }
        }
        let metric = &metric[d * d..];
        let found: f64 = (0..d * d)
            .map(|at| delta[at / d] * metric[at] * delta[at % d])
            .sum();
        assert!((found - expected).abs() < 1e-12 * expected);
    }
}
