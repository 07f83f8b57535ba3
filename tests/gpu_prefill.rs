//! Attention of chunks on a GPU against its definition in f64. Needs a GPU; the speeds are printed by
//! `cargo test --release --features cuda --test gpu_prefill -- --ignored --nocapture`.
#![cfg(feature = "cuda")]

mod pages;

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use half::bf16;
use oscar_kv::bench::Stopwatch;
use oscar_kv::kv::cuda::decode::LayerPages;
use oscar_kv::kv::cuda::prefill::{Cached, Prefill};
use oscar_kv::kv::cuda::{PoolShape, Tables};
use oscar_kv::kv::page::{Arrangement, PAGE_TOKENS, PageLayout};
use pages::{Quantized, Random, SIDES, gpu, put_number, put_quantized};
use rayon::prelude::*;

const LAYERS: usize = 2;
const LAYER: usize = 1;
const KV_HEADS: usize = 2;
/// Three sequences stand in the tables; this one is asked.
const SEQUENCES: usize = 3;
const SEQUENCE: usize = 1;

/// One sequence's cache on both sides.
struct Cache {
    int2_pool: CudaSlice<u8>,
    bf16_pool: CudaSlice<u8>,
    history_table: CudaSlice<i32>,
    history_pages: CudaSlice<i32>,
    window_table: CudaSlice<i32>,
    window_tokens: CudaSlice<i32>,
    /// Of each KV head: keys and values, (cached tokens, d).
    cached: Vec<[Vec<f32>; 2]>,
}

impl Cache {
    fn new(
        device: &CudaDevice,
        shape: PoolShape,
        history: usize,
        window_tokens: usize,
        random: &mut Random,
    ) -> Self {
        let layout = shape.layout;
        let (d, group) = (layout.head_dim, layout.group);
        let windows = window_tokens.div_ceil(PAGE_TOKENS);
        let (max_history, max_windows) = (history + 1, windows + 2);
        let pages = [history, windows].map(|n| {
            // A permutation of more pages than are used.
            let total = n + 3;
            let step = (3..total).find(|&s| gcd(s, total) == 1).unwrap_or(1);
            (
                (0..n).map(|i| (i * step + 1) % total).collect::<Vec<_>>(),
                total,
            )
        });
        let mut cached = vec![[vec![], vec![]]; KV_HEADS];
        // Memory that was never written holds NaN patterns.
        let mut int2 = vec![0xffu8; LAYERS * pages[0].1 * KV_HEADS * layout.int2_bytes()];
        let mut bf16s = vec![0xffu8; LAYERS * pages[1].1 * KV_HEADS * layout.bf16_bytes()];
        for &page in &pages[0].0 {
            for (head, cached) in cached.iter_mut().enumerate() {
                let at = ((LAYER * pages[0].1 + page) * KV_HEADS + head) * layout.int2_bytes();
                let bytes = &mut int2[at..at + layout.int2_bytes()];
                bytes.fill(0);
                for (s, side) in SIDES.into_iter().enumerate() {
                    let groups = PAGE_TOKENS * layout.groups();
                    let quantized = Quantized {
                        codes: (0..PAGE_TOKENS * d)
                            .map(|_| random.below(4) as u8)
                            .collect(),
                        scale: (0..groups)
                            .map(|_| bf16::from_f32((0.8 * random.normal()).exp() * 0.5))
                            .collect(),
                        zero: (0..groups)
                            .map(|_| bf16::from_f32(1.5 + 0.5 * random.normal()))
                            .collect(),
                    };
                    put_quantized(bytes, &layout, side, &quantized);
                    cached[s].extend(quantized.decode(group));
                }
            }
        }
        for (i, &page) in pages[1].0.iter().enumerate() {
            for (head, cached) in cached.iter_mut().enumerate() {
                let at = ((LAYER * pages[1].1 + page) * KV_HEADS + head) * layout.bf16_bytes();
                let bytes = &mut bf16s[at..at + layout.bf16_bytes()];
                let tokens = (window_tokens - i * PAGE_TOKENS).min(PAGE_TOKENS);
                for (s, side) in SIDES.into_iter().enumerate() {
                    for (j, x) in random.rows(tokens, 1, d).into_iter().enumerate() {
                        put_number(bytes, &layout, side, j / d, j % d, x);
                        cached[s].push(x.to_f32());
                    }
                }
            }
        }
        let table = |pages: &[usize], max: usize| {
            let mut table = vec![-1i32; SEQUENCES * max];
            for (i, &page) in pages.iter().enumerate() {
                table[SEQUENCE * max + i] = page as i32;
            }
            table
        };
        let stream = device.cuda_stream();
        Self {
            int2_pool: stream.clone_htod(&int2).unwrap(),
            bf16_pool: stream.clone_htod(&bf16s).unwrap(),
            history_table: stream.clone_htod(&table(&pages[0].0, max_history)).unwrap(),
            history_pages: stream.clone_htod(&[0, history as i32, 0]).unwrap(),
            window_table: stream.clone_htod(&table(&pages[1].0, max_windows)).unwrap(),
            window_tokens: stream.clone_htod(&[0, window_tokens as i32, 0]).unwrap(),
            cached,
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// (n, heads, d) in f64: every query over what is cached and the chunk up to its own token.
fn definition(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    cached: Option<&[[Vec<f32>; 2]]>,
    heads: usize,
    d: usize,
) -> Vec<f64> {
    let group = heads / KV_HEADS;
    q.par_chunks(d)
        .enumerate()
        .flat_map_iter(|(row, q)| {
            let (token, head) = (row / heads, row % heads / group);
            let side = |s: usize, own: &[f32]| -> Vec<f32> {
                let mut rows = cached.map_or(vec![], |c| c[head][s].clone());
                for t in 0..=token {
                    rows.extend(&own[(t * KV_HEADS + head) * d..][..d]);
                }
                rows
            };
            let (keys, values) = (side(0, k), side(1, v));
            let scores: Vec<f64> = keys
                .chunks(d)
                .map(|k| {
                    k.iter()
                        .zip(q)
                        .map(|(&a, &b)| f64::from(a) * f64::from(b))
                        .sum::<f64>()
                        / (d as f64).sqrt()
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut out = vec![0.0; d];
            for (weight, v) in weights.iter().zip(values.chunks(d)) {
                for (o, &v) in out.iter_mut().zip(v) {
                    *o += weight / sum * f64::from(v);
                }
            }
            out
        })
        .collect()
}

fn floats(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

#[test]
fn a_chunk_attends_to_pages_and_to_itself() {
    use Arrangement::{Mma, Rows};
    let Some(device) = gpu() else { return };
    let stream = device.cuda_stream();
    // head_dim, group of channels, heads a KV head, INT2 pages, window tokens, tokens of the chunk
    for (d, channels, arrangement, group, history, window_tokens, n) in [
        (128, 128, Mma, 4, 3, 100, 70),
        (128, 128, Mma, 1, 0, 0, 200),
        (128, 128, Mma, 16, 1, 64, 17),
        (128, 128, Mma, 4, 50, 320, 33),
        (64, 64, Mma, 3, 90, 0, 1),
        (128, 32, Rows, 4, 2, 65, 33),
        (128, 4, Rows, 5, 2, 1, 1),
        (64, 64, Mma, 3, 4, 320, 130),
        (64, 64, Mma, 7, 2, 0, 1),
        (64, 32, Rows, 4, 2, 65, 33),
        (80, 80, Rows, 4, 2, 65, 90),
        (80, 40, Rows, 1, 0, 63, 5),
        (96, 32, Rows, 2, 2, 65, 90),
        (112, 112, Rows, 4, 2, 65, 90),
        (192, 192, Rows, 4, 2, 65, 90),
        (256, 256, Mma, 8, 3, 100, 70),
        (256, 64, Rows, 2, 2, 10, 90),
        (72, 24, Rows, 3, 2, 65, 40),
        (16, 16, Rows, 3, 2, 65, 40),
    ] {
        let shape = PoolShape {
            layout: PageLayout::new(d, channels, arrangement).unwrap(),
            layers: LAYERS,
            kv_heads: KV_HEADS,
        };
        let heads = group * KV_HEADS;
        for sharpness in [0.3, 2.0] {
            let mut random = Random::new(d as u64 + n as u64);
            let cache = Cache::new(&device, shape, history, window_tokens, &mut random);
            let q: Vec<bf16> = (0..n * heads * d)
                .map(|i| {
                    bf16::from_f32(
                        random.normal() * sharpness * if i % 31 == 5 { 3.0 } else { 1.0 },
                    )
                })
                .collect();
            let (k, v) = (random.rows(n, KV_HEADS, d), random.rows(n, KV_HEADS, d));
            let (device_q, device_k, device_v) = (
                stream.clone_htod(&q).unwrap(),
                stream.clone_htod(&k).unwrap(),
                stream.clone_htod(&v).unwrap(),
            );
            let prefill = Prefill::new(&device, shape, heads).unwrap();
            let run = |with_cache: bool| {
                let mut out = stream.clone_htod(&vec![bf16::NAN; n * heads * d]).unwrap();
                let tables = Tables {
                    history: cache.history_table.as_view(),
                    history_pages: cache.history_pages.as_view(),
                    windows: cache.window_table.as_view(),
                    window_tokens: cache.window_tokens.as_view(),
                };
                let (int2, bf16) = (
                    cache.int2_pool.len() / LAYERS,
                    cache.bf16_pool.len() / LAYERS,
                );
                let pages = LayerPages {
                    int2: cache.int2_pool.slice(LAYER * int2..),
                    bf16: cache.bf16_pool.slice(LAYER * bf16..),
                };
                let cached = Cached {
                    pages: &pages,
                    tables: &tables,
                    sequence: SEQUENCE,
                };
                prefill
                    .attend(
                        &device_q.as_view(),
                        &device_k.as_view(),
                        &device_v.as_view(),
                        with_cache.then_some(cached),
                        &mut out.as_view_mut(),
                    )
                    .unwrap();
                floats(&stream.clone_dtoh(&out).unwrap())
            };
            for with_cache in [true, false] {
                let got = run(with_cache);
                assert!(got == run(with_cache), "two runs differ");
                let want = definition(
                    &floats(&q),
                    &floats(&k),
                    &floats(&v),
                    with_cache.then_some(&cache.cached[..]),
                    heads,
                    d,
                );
                let (mut error, mut size, mut worst) = (0.0, 0.0, (0.0, 0));
                for (i, (&got, &want)) in got.iter().zip(&want).enumerate() {
                    let e = (f64::from(got) - want).abs();
                    // A NaN must not be outdone by a number.
                    if e.is_nan() || e > worst.0 {
                        worst = (e, i);
                    }
                    error += e * e;
                    size += want * want;
                }
                let relative = (error / size).sqrt();
                println!(
                    "d {d} groups of {channels} {arrangement:?} G {group} history {history} windows {window_tokens} n {n} \
                     sharpness {sharpness} cache {with_cache}: {relative:.1e}, worst {:.1e} at token {} head {} channel {}",
                    worst.0,
                    worst.1 / (heads * d),
                    worst.1 / d % heads,
                    worst.1 % d
                );
                // Keys in groups are rounded to bf16 when they are decoded, which moves every score.
                let limit = if channels == d { 5e-3 } else { 1e-2 };
                assert!(relative < limit, "d {d} {arrangement:?} G {group} n {n}");
            }
        }
    }
}

#[test]
fn impossible_calls_are_refused() {
    let Some(device) = gpu() else { return };
    let stream = device.cuda_stream();
    let shape = PoolShape {
        layout: PageLayout::new(64, 64, Arrangement::Mma).unwrap(),
        layers: 1,
        kv_heads: 2,
    };
    assert!(Prefill::new(&device, shape, 3).is_err());
    let prefill = Prefill::new(&device, shape, 4).unwrap();
    let q = stream.clone_htod(&vec![bf16::ONE; 3 * 4 * 64]).unwrap();
    let k = stream.clone_htod(&vec![bf16::ONE; 3 * 2 * 64]).unwrap();
    let mut out = stream.clone_htod(&vec![bf16::ONE; 3 * 4 * 64]).unwrap();
    let (q, k) = (q.as_view(), k.as_view());
    assert!(
        prefill
            .attend(&q, &k, &k, None, &mut out.as_view_mut())
            .is_ok()
    );
    assert!(
        prefill
            .attend(&q, &k, &q, None, &mut out.as_view_mut())
            .is_err()
    );
    assert!(
        prefill
            .attend(&k, &k, &k, None, &mut out.as_view_mut())
            .is_err()
    );
}

#[test]
#[ignore = "prints speeds"]
fn speeds() {
    let Some(device) = gpu() else { return };
    let stream = device.cuda_stream();
    let mut watch = Stopwatch::new(&device).unwrap();
    println!(
        "| d | heads | tokens | cached | us, median (p10-p90) | TFLOP/s |\n|---|---|---|---|---|---|"
    );
    for (d, kv_heads, group, n, history) in [
        (128, 8, 4, 8192, 0),
        (128, 8, 4, 2048, 512),
        (128, 8, 4, 512, 512),
        (128, 8, 4, 64, 512),
        (128, 8, 4, 8, 1600),
        (64, 3, 3, 2048, 0),
        (256, 8, 2, 2048, 64),
    ] {
        let layout = PageLayout::new(d, d, Arrangement::Mma).unwrap();
        let shape = PoolShape {
            layout,
            layers: 1,
            kv_heads,
        };
        let heads = kv_heads * group;
        let mut random = Random::new(9);
        let mut tensor = |rows: usize| {
            let one: Vec<bf16> = (0..1 << 16)
                .map(|_| bf16::from_f32(random.normal() * 0.3))
                .collect();
            let all: Vec<bf16> = one.iter().copied().cycle().take(rows * d).collect();
            stream.clone_htod(&all).unwrap()
        };
        let (q, k, v, mut out) = (
            tensor(n * heads),
            tensor(n * kv_heads),
            tensor(n * kv_heads),
            tensor(n * heads),
        );
        // Scales of about 0.5 and zeros of about 1.5, whatever the place.
        let int2 =
            [0x00u8, 0x3f, 0xc0, 0x3f].repeat((history + 1) * kv_heads * layout.int2_bytes() / 4);
        let int2_pool = stream.clone_htod(&int2).unwrap();
        let bf16_pool = stream
            .clone_htod(&vec![0u8; kv_heads * layout.bf16_bytes()])
            .unwrap();
        let table: Vec<i32> = (0..=history as i32).rev().collect();
        let table = stream.clone_htod(&table).unwrap();
        let pages = stream.clone_htod(&[history as i32]).unwrap();
        let none = stream.clone_htod(&[0i32]).unwrap();
        let tables = Tables {
            history: table.as_view(),
            history_pages: pages.as_view(),
            windows: none.as_view(),
            window_tokens: none.as_view(),
        };
        let pages = LayerPages {
            int2: int2_pool.as_view(),
            bf16: bf16_pool.as_view(),
        };
        let prefill = Prefill::new(&device, shape, heads).unwrap();
        let timed = watch
            .time(20, 0, &mut || {
                let cached = Cached {
                    pages: &pages,
                    tables: &tables,
                    sequence: 0,
                };
                prefill.attend(
                    &q.as_view(),
                    &k.as_view(),
                    &v.as_view(),
                    Some(cached),
                    &mut out.as_view_mut(),
                )
            })
            .unwrap();
        let pairs = n * (history * PAGE_TOKENS) + n * (n + 1) / 2;
        println!(
            "| {d} | {heads} over {kv_heads} | {n} | {} | {:.1} ({:.1}-{:.1}) | {:.0} |",
            history * PAGE_TOKENS,
            timed.us_median,
            timed.us_p10,
            timed.us_p90,
            4.0 * (pairs * heads * d) as f64 / timed.us_median / 1e6
        );
    }
}
