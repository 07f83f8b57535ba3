//! Rotations by head dim, and all those of a model of the size of Qwen3-8B.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use nalgebra::DMatrix;
use oscar_kv::linalg::parallel;
use oscar_kv::quant::feedback_matrix;
use oscar_kv::quant::turboquant::random_orthogonal;
use oscar_kv::rotation::{balanced, oscar};

/// A moment with eigenvalues that fall over four decades, as those of keys do.
fn moment(d: usize, seed: u64) -> DMatrix<f64> {
    let u = random_orthogonal(d, seed);
    let values = DMatrix::from_fn(d, d, |i, j| {
        if i == j {
            10f64.powf(-4.0 * i as f64 / d as f64)
        } else {
            0.0
        }
    });
    &u * values * u.transpose()
}

fn by_head_dim(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("rotation");
    group.sample_size(10);
    for d in [64, 80, 128, 256] {
        let (m, s) = (moment(d, 1), moment(d, 2));
        group.bench_function(BenchmarkId::new("oscar", d), |b| {
            b.iter(|| oscar(black_box(&m)));
        });
        group.bench_function(BenchmarkId::new("balanced", d), |b| {
            b.iter(|| balanced(black_box(&m), black_box(&s), 0.4));
        });
        group.bench_function(BenchmarkId::new("feedback", d), |b| {
            b.iter(|| feedback_matrix(black_box(&m)));
        });
    }
    group.finish();
}

/// 36 layers of 8 KV heads of 128 channels, keys and values, on all threads.
fn whole_model(criterion: &mut Criterion) {
    let (m, s) = (moment(128, 1), moment(128, 2));
    let heads = 36 * 8;
    let mut group = criterion.benchmark_group("qwen3-8b");
    group.sample_size(10);
    group.bench_function("oscar", |b| {
        b.iter(|| parallel(2 * heads, |_| oscar(black_box(&m))));
    });
    group.bench_function("balanced", |b| {
        b.iter(|| {
            parallel(heads, |_| {
                let keys = balanced(black_box(&m), black_box(&s), 0.4)?;
                let metric = keys.query.tr_mul(&m) * &keys.query;
                Ok::<_, oscar_kv::Error>((keys, feedback_matrix(&metric)?, oscar(&s)?))
            })
        });
    });
    group.finish();
}

criterion_group!(benches, by_head_dim, whole_model);
criterion_main!(benches);
