//! The INT2 codec on 4096 rows, on one thread.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use oscar_kv::quant::turboquant::random_orthogonal;
use oscar_kv::quant::{Codec, row_major};

const ROWS: usize = 4096;

fn codec(criterion: &mut Criterion) {
    let single = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .expect("one thread");
    let mut group = criterion.benchmark_group("codec");
    group.throughput(Throughput::Elements(ROWS as u64));
    for d in [64, 128] {
        // Rows of orthogonal matrices: close to Gaussian, without outliers, as rotated keys are.
        let rows: Vec<f32> = (0..(ROWS / d) as u64)
            .flat_map(|seed| row_major::<f32>(&random_orthogonal(d, seed)))
            .collect();
        let mut codec = Codec {
            head_dim: d,
            levels: 4,
            group: d,
            clip: 0.95,
            feedback: None,
        };
        group.bench_function(BenchmarkId::new("nearest", d), |b| {
            single.install(|| b.iter(|| codec.encode(black_box(&rows))));
        });
        codec.feedback = Some(row_major(&(random_orthogonal(d, 9_999) * 0.3)));
        group.bench_function(BenchmarkId::new("feedback", d), |b| {
            single.install(|| b.iter(|| codec.encode(black_box(&rows))));
        });
        let encoded = codec.encode(&rows).expect("valid settings");
        group.bench_function(BenchmarkId::new("decode", d), |b| {
            b.iter(|| black_box(&encoded).decode::<f32>());
        });
        group.bench_function(BenchmarkId::new("pack", d), |b| {
            b.iter(|| black_box(&encoded).pack());
        });
    }
    group.finish();
}

criterion_group!(benches, codec);
criterion_main!(benches);
