//! How the time of calibrating grows with tokens, layers and head_dim: random checkpoints of one width, all else equal.

#[path = "../tests/checkpoint/mod.rs"]
mod checkpoint;

use std::hint::black_box;

use checkpoint::{Checkpoint, Shape, VOCAB};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use oscar_kv::calib::fit::{FitOptions, fit};
use oscar_kv::calib::progress::Silent;
use oscar_kv::calib::{CollectOptions, Moments, collect};
use oscar_kv::data::{Corpus, PackOptions, TokenizedPrompt, pack};
use oscar_kv::model::{Model, OpenOptions};
use tempfile::TempDir;

const SEQ_LEN: usize = 512;

struct Bench {
    folder: TempDir,
    model: Model,
}

impl Bench {
    fn new(layers: usize, head_dim: usize) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let shape = Shape {
            model_type: "llama",
            heads: 8,
            kv_heads: 2,
            head_dim,
            hidden: 256,
            tied: true,
            llama3: false,
        };
        let path = folder.path().join("model");
        Checkpoint::with_layers(shape, layers).write_folder(&path, 1);
        let model = Model::open(&path.to_string_lossy(), &OpenOptions::default())
            .expect("a sound checkpoint");
        Self { folder, model }
    }

    fn collect(&self, tokens: usize) -> Moments {
        let options = CollectOptions {
            fresh: true,
            ..CollectOptions::new(self.folder.path().join("moments.safetensors"), "none")
        };
        let done =
            collect(&self.model, &corpus(tokens), &options, &mut Silent).expect("a finished run");
        Moments::open(&done.path).expect("a sound file")
    }
}

fn corpus(tokens: usize) -> Corpus {
    let prompts: Vec<_> = (0..tokens / SEQ_LEN + 2)
        .map(|prompt| TokenizedPrompt {
            place: prompt.to_string(),
            token_ids: (0..SEQ_LEN as u32)
                .map(|i| (i * i + 7 * prompt as u32) % VOCAB as u32)
                .collect(),
        })
        .collect();
    let options = PackOptions {
        seq_len: SEQ_LEN,
        budget_tokens: Some(tokens),
        holdout_tokens: SEQ_LEN,
        min_tokens: 1,
        ..PackOptions::default()
    };
    pack(&prompts, &options).expect("enough tokens")
}

fn scaling(c: &mut Criterion) {
    let mut group = c.benchmark_group("collect");
    group.sample_size(10);
    for tokens in [2048, 4096, 8192] {
        let bench = Bench::new(2, 64);
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(BenchmarkId::new("tokens", tokens), |b| {
            b.iter(|| black_box(bench.collect(tokens)));
        });
    }
    for layers in [2, 4, 8] {
        let bench = Bench::new(layers, 64);
        group.throughput(Throughput::Elements(layers as u64));
        group.bench_function(BenchmarkId::new("layers", layers), |b| {
            b.iter(|| black_box(bench.collect(2048)));
        });
    }
    for head_dim in [32, 64, 128] {
        let bench = Bench::new(2, head_dim);
        group.throughput(Throughput::Elements(head_dim as u64));
        group.bench_function(BenchmarkId::new("head_dim", head_dim), |b| {
            b.iter(|| black_box(bench.collect(2048)));
        });
    }
    group.finish();

    let mut group = c.benchmark_group("fit");
    group.sample_size(10);
    for head_dim in [32, 64, 128] {
        let moments = Bench::new(2, head_dim).collect(2048);
        for (name, options) in [
            ("searched", FitOptions::default()),
            ("given", FitOptions::released()),
        ] {
            group.bench_function(BenchmarkId::new(name, head_dim), |b| {
                b.iter(|| black_box(fit(&moments, &options).expect("a finished fit")));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, scaling);
criterion_main!(benches);
