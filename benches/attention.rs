//! Attention of one layer: `cargo bench --bench attention`. Time grows with tokens² · heads · head_dim.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use oscar_kv::kv::attention::{Dims, Probe, causal, windowed};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| 3.0 * (rng.random::<f32>() - 0.5)).collect()
}

/// (tokens, heads, kv_heads, head_dim): SmolLM2-135M at three lengths, and Qwen3-8B.
const SHAPES: [(usize, usize, usize, usize); 4] = [
    (1024, 9, 3, 64),
    (2048, 9, 3, 64),
    (4096, 9, 3, 64),
    (2048, 32, 8, 128),
];

fn layers(c: &mut Criterion) {
    let mut group = c.benchmark_group("attention");
    group.sample_size(10);
    for (tokens, heads, kv_heads, d) in SHAPES {
        let dims = Dims::new(heads, kv_heads, d).expect("shapes fit");
        let q = random(1, tokens * heads * d);
        let [k, v, k_hat, v_hat] = [2, 3, 4, 5].map(|seed| random(seed, tokens * kv_heads * d));
        let shape = format!("{tokens}x{heads}/{kv_heads}x{d}");
        for key_weights in [false, true] {
            let name = if key_weights {
                "causal with key weights"
            } else {
                "causal"
            };
            group.bench_function(BenchmarkId::new(name, &shape), |b| {
                b.iter(|| causal(black_box(&q), &k, &v, dims, &[tokens], key_weights));
            });
        }
        group.bench_function(BenchmarkId::new("windowed", &shape), |b| {
            b.iter(|| {
                windowed(
                    black_box(&q),
                    &k,
                    &v,
                    &k_hat,
                    &v_hat,
                    dims,
                    &[tokens],
                    64,
                    256,
                    1,
                )
            });
        });
    }
    group.finish();
}

fn probes(c: &mut Criterion) {
    let (tokens, group, d) = (4096, 3, 64);
    let positions: Vec<usize> = (0..128).map(|i| i * 32 + 31).collect();
    let q = random(1, positions.len() * group * d);
    let [k, v, k_hat, v_hat] = [2, 3, 4, 5].map(|seed| random(seed, tokens * d));
    let mut bench = c.benchmark_group("probe, 128 positions x 3 heads of 4096 tokens, one thread");
    bench.sample_size(10);
    bench.bench_function("new", |b| {
        b.iter(|| Probe::new(black_box(&q), &k, &v, d, &positions, 64, 256));
    });
    let probe = Probe::new(&q, &k, &v, d, &positions, 64, 256).expect("shapes fit");
    bench.bench_function("keys", |b| {
        b.iter(|| probe.error(Some(black_box(&k_hat)), None));
    });
    bench.bench_function("values", |b| {
        b.iter(|| probe.error(None, Some(black_box(&v_hat))));
    });
    bench.finish();
}

criterion_group!(benches, layers, probes);
criterion_main!(benches);
