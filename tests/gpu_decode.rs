//! Decode attention on the GPU equals f64 attention over the cache's numbers, whatever the lengths, heads and pages.
#![cfg(feature = "cuda")]

use std::sync::Arc;

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};
use half::bf16;
use oscar_kv::kv::cuda::Tables;
use oscar_kv::kv::cuda::decode::{Decode, LayerPages, Output, Shape, arrangement};
use oscar_kv::kv::page::{Arrangement, PAGE_TOKENS, PageLayout, Side};
use rayon::prelude::*;

/// splitmix64: every number is a function of the seed and its place.
fn bits(seed: u64, at: u64) -> u64 {
    let mut x = seed.wrapping_mul(0xd134_2543_de82_ef95) ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn uniform(seed: u64, at: u64) -> f64 {
    (bits(seed, at) >> 11) as f64 / (1u64 << 53) as f64
}

fn normal(seed: u64, at: u64) -> f64 {
    let radius = (-2.0 * uniform(seed, 2 * at).max(1e-300).ln()).sqrt();
    radius * (std::f64::consts::TAU * uniform(seed, 2 * at + 1)).cos()
}

fn gpu() -> Option<CudaDevice> {
    if oscar_kv::cuda::count() == 0 {
        eprintln!("skipped: no GPU");
        return None;
    }
    let device = oscar_kv::cuda::open(0).unwrap();
    Some(device.as_cuda_device().unwrap().clone())
}

/// (history pages, window tokens) of a sequence.
type Length = (usize, usize);

#[derive(Clone)]
struct Case {
    head_dim: usize,
    group: usize,
    arrangement: Arrangement,
    heads: usize,
    kv_heads: usize,
    lengths: Vec<Length>,
    q_scale: f64,
    /// Scales with a heavy tail.
    wild: bool,
}

struct Problem {
    case: Case,
    layout: PageLayout,
    int2: Vec<u8>,
    bf16: Vec<u8>,
    history: Vec<i32>,
    windows: Vec<i32>,
    history_pages: Vec<i32>,
    window_tokens: Vec<i32>,
    q: Vec<bf16>,
}

/// A random order of 0..n.
fn shuffled(n: usize, seed: u64) -> Vec<i32> {
    let mut order: Vec<i32> = (0..n as i32).collect();
    order.sort_by_key(|&i| bits(seed, i as u64));
    order
}

/// Rows of page ids, as wide as the longest; ids past a row's end are no pages.
fn table(counts: &[usize], ids: &[i32]) -> Vec<i32> {
    let columns = counts.iter().max().copied().unwrap_or(0).max(1);
    let mut table = vec![-1; counts.len() * columns];
    let mut from = 0;
    for (row, &count) in table.chunks_exact_mut(columns).zip(counts) {
        row[..count].copy_from_slice(&ids[from..from + count]);
        from += count;
    }
    table
}

impl Problem {
    fn new(case: Case, seed: u64) -> Self {
        let d = case.head_dim;
        let layout = PageLayout::new(d, case.group, case.arrangement).unwrap();
        let counts: Vec<usize> = case.lengths.iter().map(|l| l.0).collect();
        let window_counts: Vec<usize> = case
            .lengths
            .iter()
            .map(|l| l.1.div_ceil(PAGE_TOKENS))
            .collect();
        // Pages that no sequence has lie among them: their scales are NaN.
        let (n_int2, n_bf16) = (
            counts.iter().sum::<usize>() + 3,
            window_counts.iter().sum::<usize>() + 3,
        );
        let order = shuffled(n_int2, seed + 1);
        let window_order = shuffled(n_bf16, seed + 2);
        let history = table(&counts, &order);
        let windows = table(&window_counts, &window_order);

        let unused = &order[n_int2 - 3..];
        let mut int2 = vec![0u8; n_int2 * case.kv_heads * layout.int2_bytes()];
        int2.par_chunks_exact_mut(layout.int2_bytes())
            .enumerate()
            .for_each(|(page, bytes)| {
                let nan = unused.contains(&((page / case.kv_heads) as i32));
                let at = |i: usize| (page * (1 << 20) + i) as u64;
                for (i, byte) in bytes.iter_mut().enumerate() {
                    *byte = bits(seed + 3, at(i)) as u8;
                }
                for (i, side) in [Side::K, Side::V].into_iter().enumerate() {
                    for t in 0..PAGE_TOKENS {
                        for group in 0..layout.groups() {
                            let n = at(((i * PAGE_TOKENS) + t) * layout.groups() + group);
                            let tail = if case.wild {
                                (0.8 * normal(seed + 4, n)).exp()
                            } else {
                                1.0
                            };
                            let scale = (0.3 + 0.4 * uniform(seed + 5, n)) * tail;
                            let zero = 0.9 + 1.2 * uniform(seed + 6, n);
                            let byte = layout.scale(side, t, group);
                            let put = |x: f64| {
                                bf16::from_f64(if nan { f64::NAN } else { x }).to_le_bytes()
                            };
                            bytes[byte..byte + 2].copy_from_slice(&put(scale));
                            bytes[byte + 2..byte + 4].copy_from_slice(&put(zero));
                        }
                    }
                }
            });

        // Valid tokens of every BF16 page; spare slots are NaN.
        let mut valid = vec![0usize; n_bf16];
        let columns = windows.len() / counts.len();
        for (b, &(_, tokens)) in case.lengths.iter().enumerate() {
            for page in 0..window_counts[b] {
                valid[windows[b * columns + page] as usize] =
                    (tokens - page * PAGE_TOKENS).min(PAGE_TOKENS);
            }
        }
        let mut numbers = vec![0u8; n_bf16 * case.kv_heads * layout.bf16_bytes()];
        numbers
            .par_chunks_exact_mut(layout.bf16_bytes())
            .enumerate()
            .for_each(|(page, bytes)| {
                for (i, side) in [Side::K, Side::V].into_iter().enumerate() {
                    for t in 0..PAGE_TOKENS {
                        for c in 0..d {
                            let n = (((page * 2 + i) * PAGE_TOKENS + t) * d + c) as u64;
                            let outlier = if c % 29 == 5 { 8.0 } else { 0.7 };
                            let x = if t < valid[page / case.kv_heads] {
                                outlier * normal(seed + 7, n)
                            } else {
                                f64::NAN
                            };
                            let byte = layout.number(side, t, c);
                            bytes[byte..byte + 2].copy_from_slice(&bf16::from_f64(x).to_le_bytes());
                        }
                    }
                }
            });

        let q = (0..case.lengths.len() * case.heads * d)
            .map(|i| {
                let outlier = if (i % d).is_multiple_of(17) { 3.0 } else { 1.0 };
                bf16::from_f64(case.q_scale * outlier * normal(seed + 8, i as u64))
            })
            .collect();
        Self {
            layout,
            int2,
            bf16: numbers,
            history,
            windows,
            history_pages: counts.iter().map(|&n| n as i32).collect(),
            window_tokens: case.lengths.iter().map(|l| l.1 as i32).collect(),
            q,
            case,
        }
    }

    /// The bytes of one page of one KV head, the `index`th of a sequence.
    fn page(&self, windows: bool, b: usize, index: usize, kv_head: usize) -> &[u8] {
        let (table, bytes, size) = if windows {
            (&self.windows, &self.bf16, self.layout.bf16_bytes())
        } else {
            (&self.history, &self.int2, self.layout.int2_bytes())
        };
        let columns = table.len() / self.case.lengths.len();
        let id = table[b * columns + index] as usize;
        &bytes[(id * self.case.kv_heads + kv_head) * size..][..size]
    }

    /// Keys or values of all tokens of a sequence, (tokens, head_dim).
    fn rows(&self, side: Side, b: usize, kv_head: usize) -> Vec<f64> {
        let d = self.case.head_dim;
        let read =
            |bytes: &[u8], at: usize| f64::from(bf16::from_le_bytes([bytes[at], bytes[at + 1]]));
        let mut rows = Vec::new();
        for token in 0..self.window_tokens[b] as usize {
            let (index, t) = (token / PAGE_TOKENS, token % PAGE_TOKENS);
            let page = self.page(true, b, index, kv_head);
            rows.extend((0..d).map(|c| read(page, self.layout.number(side, t, c))));
        }
        for index in 0..self.history_pages[b] as usize {
            let page = self.page(false, b, index, kv_head);
            for t in 0..PAGE_TOKENS {
                for c in 0..d {
                    let (byte, shift) = self.layout.code(side, t, c);
                    let at = self.layout.scale(side, t, c / self.case.group);
                    let code = f64::from(page[byte] >> shift & 3);
                    rows.push((code - read(page, at + 2)) * read(page, at));
                }
            }
        }
        rows
    }

    /// Output, log-sum-exp and largest |score| of every query head of one KV head.
    fn reference(&self, b: usize, kv_head: usize) -> Vec<(Vec<f64>, f64, f64)> {
        let d = self.case.head_dim;
        let sharing = self.case.heads / self.case.kv_heads;
        let (k, v) = (
            self.rows(Side::K, b, kv_head),
            self.rows(Side::V, b, kv_head),
        );
        (0..sharing)
            .into_par_iter()
            .map(|h| {
                let row = b * self.case.heads + kv_head * sharing + h;
                let q: Vec<f64> = self.q[row * d..][..d]
                    .iter()
                    .map(|&x| f64::from(x))
                    .collect();
                let dot = |k: &[f64]| k.iter().zip(&q).map(|(k, q)| k * q).sum::<f64>();
                let scores: Vec<f64> = k
                    .chunks_exact(d)
                    .map(|k| dot(k) / (d as f64).sqrt())
                    .collect();
                let top = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
                let size = scores.iter().fold(0f64, |a, &b| a.max(b.abs()));
                let (mut sum, mut out) = (0.0, vec![0.0; d]);
                for (score, v) in scores.iter().zip(v.chunks_exact(d)) {
                    let p = (score - top).exp();
                    sum += p;
                    out.iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
                }
                for o in &mut out {
                    *o /= sum;
                }
                (out, top + sum.ln(), size)
            })
            .collect()
    }
}

struct OnDevice {
    int2: CudaSlice<u8>,
    bf16: CudaSlice<u8>,
    history: CudaSlice<i32>,
    history_pages: CudaSlice<i32>,
    windows: CudaSlice<i32>,
    window_tokens: CudaSlice<i32>,
    q: CudaSlice<bf16>,
    values: CudaSlice<bf16>,
    lse: CudaSlice<f32>,
    exact: CudaSlice<f32>,
}

fn up<T: DeviceRepr>(stream: &Arc<CudaStream>, host: &[T]) -> CudaSlice<T> {
    stream.clone_htod(host).unwrap()
}

impl OnDevice {
    fn new(stream: &Arc<CudaStream>, p: &Problem) -> Self {
        let rows = p.case.lengths.len() * p.case.heads;
        Self {
            int2: up(stream, &p.int2),
            bf16: up(stream, &p.bf16),
            history: up(stream, &p.history),
            history_pages: up(stream, &p.history_pages),
            windows: up(stream, &p.windows),
            window_tokens: up(stream, &p.window_tokens),
            q: up(stream, &p.q),
            values: stream.alloc_zeros(rows * p.case.head_dim).unwrap(),
            lse: stream.alloc_zeros(rows).unwrap(),
            exact: stream.alloc_zeros(rows * p.case.head_dim).unwrap(),
        }
    }

    fn poison(&mut self, stream: &Arc<CudaStream>) {
        let n = self.values.len();
        stream
            .memcpy_htod(&vec![bf16::NAN; n], &mut self.values)
            .unwrap();
        stream
            .memcpy_htod(&vec![f32::NAN; n], &mut self.exact)
            .unwrap();
        stream
            .memcpy_htod(&vec![f32::NAN; self.lse.len()], &mut self.lse)
            .unwrap();
    }

    fn plan(&self, decode: &mut Decode) {
        decode.plan(&self.tables()).unwrap();
    }

    fn tables(&self) -> Tables<'_> {
        Tables {
            history: self.history.as_view(),
            history_pages: self.history_pages.as_view(),
            windows: self.windows.as_view(),
            window_tokens: self.window_tokens.as_view(),
        }
    }

    fn run(&mut self, decode: &mut Decode) {
        let tables = Tables {
            history: self.history.as_view(),
            history_pages: self.history_pages.as_view(),
            windows: self.windows.as_view(),
            window_tokens: self.window_tokens.as_view(),
        };
        let pages = LayerPages {
            int2: self.int2.as_view(),
            bf16: self.bf16.as_view(),
        };
        let mut output = Output {
            values: self.values.as_view_mut(),
            lse: self.lse.as_view_mut(),
            exact: Some(self.exact.as_view_mut()),
        };
        decode
            .run(&tables, &pages, &self.q.as_view(), &mut output)
            .unwrap();
    }
}

fn shape(case: &Case, layout: PageLayout, max_batch: usize) -> Shape {
    Shape {
        layout,
        heads: case.heads,
        kv_heads: case.kv_heads,
        max_batch,
    }
}

type Results = (Vec<bf16>, Vec<f32>, Vec<f32>);

fn results(stream: &Arc<CudaStream>, on: &OnDevice) -> Results {
    (
        stream.clone_dtoh(&on.values).unwrap(),
        stream.clone_dtoh(&on.exact).unwrap(),
        stream.clone_dtoh(&on.lse).unwrap(),
    )
}

/// What is wrong with the results, and the largest errors.
fn compare(p: &Problem, kernel: &str, (values, exact, lse): &Results) -> Vec<String> {
    let (d, heads, kv_heads) = (p.case.head_dim, p.case.heads, p.case.kv_heads);
    let sharing = heads / kv_heads;
    let fast = p.case.arrangement == Arrangement::Mma;
    let mut wrong = Vec::new();
    let (mut worst, mut worst_exact, mut worst_lse, mut largest) = (0f64, 0f64, 0f64, 0f64);
    let items: Vec<(usize, usize)> = (0..p.case.lengths.len())
        .flat_map(|b| (0..kv_heads).map(move |h| (b, h)))
        .collect();
    let references: Vec<_> = items.par_iter().map(|&(b, h)| p.reference(b, h)).collect();
    for (&(b, kv_head), reference) in items.iter().zip(&references) {
        for (h, (out, log_sum, size)) in reference.iter().enumerate() {
            let row = b * heads + kv_head * sharing + h;
            let lse = f64::from(lse[row]);
            let value = |c: usize| f64::from(values[row * d + c]);
            let exactly = |c: usize| f64::from(exact[row * d + c]);
            if p.case.lengths[b] == (0, 0) {
                if !(lse.is_nan() && (0..d).all(|c| value(c).is_nan() && exactly(c).is_nan())) {
                    wrong.push(format!("sequence {b} is empty, and head {h} was written"));
                }
                continue;
            }
            let norm = |x: &dyn Fn(usize) -> f64| (0..d).map(|c| x(c) * x(c)).sum::<f64>().sqrt();
            let size_of_out = norm(&|c| out[c]);
            let error = norm(&|c| value(c) - out[c]) / size_of_out;
            let error_exact = norm(&|c| exactly(c) - out[c]) / size_of_out;
            let error_lse = (lse - log_sum).abs();
            let limit = if fast { 5e-3 } else { 1e-4 };
            let lse_limit = if fast {
                // Scores are fixed point of the largest |q| · |k|, which outlier channels make larger than any |score|.
                3e-3 + 2e-4 * size
            } else {
                1e-4 + 1e-6 * size
            };
            // Written so that NaN is wrong.
            if !(error < 5e-3 && error_exact < limit && error_lse < lse_limit) {
                let first = (0..d).find(|&c| {
                    let off = (exactly(c) - out[c]).abs();
                    off.is_nan() || off > 0.02 * size_of_out
                });
                wrong.push(format!(
                    "sequence {b} of {:?}, KV head {kv_head}, head {h}: error {error:.1e} (exact {error_exact:.1e}), \
                     lse {lse} for {log_sum}, first channel {first:?}: {:?} for {:?}",
                    p.case.lengths[b],
                    first.map(exactly),
                    first.map(|c| out[c])
                ));
            }
            worst = worst.max(error);
            worst_exact = worst_exact.max(error_exact);
            worst_lse = worst_lse.max(error_lse);
            largest = largest.max(*size);
        }
    }
    println!(
        "{} {kernel} d {d}/{} heads {heads}/{kv_heads} {:?} q {}{}: error {worst:.1e}, exact {worst_exact:.1e}, lse {worst_lse:.1e}, |score| {largest:.0}",
        if wrong.is_empty() { "ok " } else { "BAD" },
        p.case.group,
        p.case.lengths,
        p.case.q_scale,
        if p.case.wild { " wild" } else { "" },
    );
    for line in wrong.iter().take(4) {
        println!("    {line}");
    }
    wrong
}

/// Runs a case several times, on poisoned outputs, and compares with f64.
fn check(device: &CudaDevice, case: &Case, seed: u64) -> Vec<String> {
    let p = Problem::new(case.clone(), seed);
    let stream = device.cuda_stream();
    let mut decode = Decode::new(device, shape(case, p.layout, case.lengths.len() + 2)).unwrap();
    assert_eq!(decode.is_fast(), case.arrangement == Arrangement::Mma);
    let mut on = OnDevice::new(&stream, &p);
    let page = |bytes: usize| bytes * case.kv_heads;
    on.tables()
        .check(
            &stream,
            p.int2.len() / page(p.layout.int2_bytes()),
            p.bf16.len() / page(p.layout.bf16_bytes()),
        )
        .unwrap();
    let mut again = |on: &mut OnDevice| {
        on.poison(&stream);
        on.plan(&mut decode);
        on.run(&mut decode);
        results(&stream, on)
    };
    let first = again(&mut on);
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    let repeats = (0..5).all(|_| {
        let next = again(&mut on);
        same(&first.1, &next.1) && same(&first.2, &next.2)
    });
    let mut wrong = compare(&p, decode.kernel(), &first);
    if !repeats {
        wrong.push("another run gave other bits".into());
    }
    wrong
}

fn all(device: &CudaDevice, cases: &[Case]) {
    let wrong: Vec<String> = cases
        .iter()
        .enumerate()
        .flat_map(|(i, case)| check(device, case, 1000 * i as u64))
        .collect();
    assert!(
        wrong.is_empty(),
        "{} rows are wrong, such as {}",
        wrong.len(),
        wrong[0]
    );
}

/// Every boundary of windows and history: one token, tiles, pages, a sequence shorter than its sink, no history, no
/// windows, none of either.
fn boundaries() -> Vec<Length> {
    let mut lengths: Vec<Length> = [
        1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 72, 255, 256, 257, 320,
    ]
    .into_iter()
    .map(|tokens| (0, tokens))
    .collect();
    lengths.extend([
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 8),
        (7, 257),
        (8, 320),
        (9, 300),
        (33, 319),
    ]);
    lengths
}

const LONG: [Length; 5] = [(190, 317), (0, 5), (78, 320), (12, 0), (350, 258)];

fn case(head_dim: usize, heads: usize, kv_heads: usize, lengths: &[Length]) -> Case {
    Case {
        head_dim,
        group: head_dim,
        arrangement: Arrangement::Mma,
        heads,
        kv_heads,
        lengths: lengths.to_vec(),
        q_scale: 2.0,
        wild: true,
    }
}

/// The fast kernel's pages, where the GPU has that kernel.
fn fast(device: &CudaDevice) -> bool {
    let (best, why) = arrangement(device, 128, 128, 4).unwrap();
    if let Some(why) = why {
        eprintln!("skipped: {why}");
    }
    best == Arrangement::Mma
}

#[test]
fn tensor_core_pages_of_every_length() {
    let Some(device) = gpu().filter(fast) else {
        return;
    };
    let mut cases = Vec::new();
    // Many short sequences: blocks go from item to item, and rings round, within a few rows.
    let many: Vec<Length> = (0..150).map(|i| (i % 5, 1 + 37 * i % 320)).collect();
    for head_dim in [64, 128, 256] {
        cases.push(case(head_dim, 8, 2, &boundaries()));
        for sharing in [4, 8, 12, 16] {
            cases.push(case(head_dim, 2 * sharing, 2, &many[..40]));
        }
        cases.push(case(head_dim, 16, 4, &LONG));
        // Windows alone, many pages of them: a cache that is never demoted.
        cases.push(case(head_dim, 4, 1, &[(0, 9001), (0, 64), (0, 1234)]));
        for sharing in [1, 2, 3, 6, 7, 8, 12, 16] {
            cases.push(case(
                head_dim,
                2 * sharing,
                2,
                &[(60, 265), (3, 1), (0, 131)],
            ));
        }
    }
    // Flat and sharp softmax, tame scales; a single sequence cut over all blocks; a batch of many short ones.
    for q_scale in [0.1, 6.0] {
        let sharp = Case {
            q_scale,
            wild: false,
            ..case(128, 8, 2, &LONG)
        };
        cases.push(sharp);
    }
    for heads in [8, 16, 32] {
        cases.push(case(128, heads, 2, &[(1599, 320)]));
        let flat = Case {
            q_scale: 0.1,
            wild: false,
            ..case(128, heads / 2, 1, &[(3000, 320)])
        };
        cases.push(flat);
    }
    cases.push(case(128, 8, 2, &many));
    all(&device, &cases);
}

#[test]
fn rows_of_any_head_dim_and_group() {
    let Some(device) = gpu() else {
        return;
    };
    let mut cases = Vec::new();
    for (head_dim, group) in [
        (64, 64),
        (80, 80),
        (96, 32),
        (112, 16),
        (128, 128),
        (128, 64),
        (192, 64),
        (256, 256),
        (40, 20),
        (8, 4),
    ] {
        for (heads, kv_heads) in [(8, 2), (7, 1)] {
            let lengths = if heads == 8 {
                boundaries()
            } else {
                LONG.to_vec()
            };
            cases.push(Case {
                group,
                arrangement: Arrangement::Rows,
                ..case(head_dim, heads, kv_heads, &lengths)
            });
        }
    }
    for sharing in [1, 2, 3, 12, 16, 20] {
        let lengths = [(60, 265), (3, 1), (0, 131)];
        cases.push(Case {
            arrangement: Arrangement::Rows,
            ..case(128, 2 * sharing, 2, &lengths)
        });
    }
    all(&device, &cases);
}

/// Sums of codes are int32, and a block's share of a long cache holds more tokens than those have room for: 115 million
/// tokens whose values are all ones bits, weighed as heavily as can be after a light first page.
#[test]
fn runs_longer_than_an_accumulator() {
    let Some(device) = gpu().filter(fast) else {
        return;
    };
    for sharing in [1, 8] {
        long_runs(&device, sharing);
    }
}

fn long_runs(device: &CudaDevice, sharing: usize) {
    let (d, batch, times) = (64, 30, 20_000);
    let mut p = Problem::new(
        Case {
            q_scale: 0.0,
            ..case(d, sharing, 1, &[(3, 0)])
        },
        5,
    );
    let size = p.layout.int2_bytes();
    for (index, scale) in [0.2f32, 0.75, 0.75].into_iter().enumerate() {
        let page = &mut p.int2[p.history[index] as usize * size..][..size];
        for t in 0..PAGE_TOKENS {
            for c in 0..d {
                let (byte, shift) = p.layout.code(Side::V, t, c);
                page[byte] |= 3 << shift;
            }
            let at = p.layout.scale(Side::V, t, 0);
            page[at..at + 2].copy_from_slice(&bf16::from_f32(scale).to_le_bytes());
        }
    }
    // All scores are 0, so any number of repetitions has the same mean.
    let (out, ..) = &p.reference(0, 0)[0];
    let stream = device.cuda_stream();
    let mut on = OnDevice::new(&stream, &p);
    on.history = up(&stream, &p.history.repeat(batch * times));
    on.history_pages = up(&stream, &vec![3 * times as i32; batch]);
    on.windows = up(&stream, &vec![-1; batch]);
    on.window_tokens = up(&stream, &vec![0; batch]);
    on.q = up(&stream, &vec![bf16::ZERO; batch * sharing * d]);
    on.values = stream.alloc_zeros(batch * sharing * d).unwrap();
    on.exact = stream.alloc_zeros(batch * sharing * d).unwrap();
    on.lse = stream.alloc_zeros(batch * sharing).unwrap();
    on.poison(&stream);
    let mut decode = Decode::new(device, shape(&p.case, p.layout, batch)).unwrap();
    on.plan(&mut decode);
    on.run(&mut decode);
    let (_, exact, lse) = results(&stream, &on);
    let size = out.iter().map(|x| x * x).sum::<f64>().sqrt();
    let log_sum = ((3 * times * PAGE_TOKENS) as f64).ln();
    for (row, lse) in exact.chunks_exact(d).zip(lse) {
        let square = |(x, out): (&f32, &f64)| (f64::from(*x) - out).powi(2);
        let error = row.iter().zip(out).map(square).sum::<f64>().sqrt() / size;
        assert!(error < 5e-3, "{error}");
        assert!(
            (f64::from(lse) - log_sum).abs() < 3e-3,
            "{lse} for {log_sum}"
        );
    }
}

/// A captured step works for whatever lengths and pages the tables hold when it is replayed.
#[test]
fn a_step_is_one_graph() {
    use candle_core::cuda_backend::cudarc::driver::sys::CUgraphInstantiate_flags;
    use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let Some(device) = gpu() else {
        return;
    };
    // SAFETY: one stream is used, so that nothing needs events to wait for; a capture may not record them.
    #[allow(unsafe_code)]
    unsafe {
        device.disable_event_tracking();
    }
    let stream = device.cuda_stream();
    let kinds = [Arrangement::Mma, Arrangement::Rows];
    for arrangement in kinds
        .into_iter()
        .filter(|&a| a == Arrangement::Rows || fast(&device))
    {
        let base = Case {
            arrangement,
            ..case(128, 8, 2, &[(40, 300), (0, 17), (9, 320)])
        };
        let p = Problem::new(base.clone(), 77);
        let mut decode = Decode::new(&device, shape(&base, p.layout, 3)).unwrap();
        let mut on = OnDevice::new(&stream, &p);
        // Once without a graph: modules are loaded.
        on.plan(&mut decode);
        on.run(&mut decode);
        stream.synchronize().unwrap();
        stream
            .begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .unwrap();
        on.plan(&mut decode);
        on.run(&mut decode);
        on.run(&mut decode);
        let graph = stream
            .end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
            .unwrap()
            .unwrap();
        let mut wrong = Vec::new();
        for lengths in [
            vec![(40, 300), (0, 17), (9, 320)],
            vec![(3, 64), (0, 1), (8, 5)],
        ] {
            let mut now = Problem::new(base.clone(), 77);
            now.case.lengths.clone_from(&lengths);
            now.history_pages = lengths.iter().map(|l| l.0 as i32).collect();
            now.window_tokens = lengths.iter().map(|l| l.1 as i32).collect();
            stream
                .memcpy_htod(&now.history_pages, &mut on.history_pages)
                .unwrap();
            stream
                .memcpy_htod(&now.window_tokens, &mut on.window_tokens)
                .unwrap();
            on.poison(&stream);
            graph.launch().unwrap();
            wrong.extend(compare(&now, "graph", &results(&stream, &on)));
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}

#[test]
fn bad_tables_and_shapes_are_named() {
    let Some(device) = gpu() else {
        return;
    };
    let stream = device.cuda_stream();
    let base = Case {
        arrangement: Arrangement::Rows,
        ..case(64, 4, 2, &[(3, 70), (2, 5)])
    };
    let p = Problem::new(base.clone(), 9);
    let on = OnDevice::new(&stream, &p);
    let says = |tables: &Tables<'_>, int2, bf16| {
        tables.check(&stream, int2, bf16).unwrap_err().to_string()
    };
    let problem = says(&on.tables(), 2, 100);
    assert!(
        problem.contains("history of sequence") && problem.contains("the pool has 2"),
        "{problem}"
    );
    let problem = says(&on.tables(), 100, 0);
    assert!(
        problem.contains("windows of sequence 0: entry 0"),
        "{problem}"
    );
    let mut longer = OnDevice::new(&stream, &p);
    longer.history_pages = up(&stream, &[3, 4]);
    let problem = says(&longer.tables(), 100, 100);
    assert!(
        problem.contains("history of sequence 1: 4 pages do not fit"),
        "{problem}"
    );
    longer.history_pages = up(&stream, &[1]);
    assert!(says(&longer.tables(), 100, 100).contains("no batch"));
    for (heads, kv_heads, max_batch) in
        [(4, 3, 1), (0, 1, 1), (4, 0, 1), (4, 2, 0), (4, 2, 1 << 20)]
    {
        let shape = Shape {
            layout: p.layout,
            heads,
            kv_heads,
            max_batch,
        };
        assert!(
            Decode::new(&device, shape).is_err(),
            "{heads} {kv_heads} {max_batch}"
        );
    }
    let mut small = Decode::new(&device, shape(&base, p.layout, 1)).unwrap();
    assert!(small.plan(&on.tables()).is_err());
}
