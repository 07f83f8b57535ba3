//! Attention of one query token over a cache in f32, BF16 and INT2 on the CPU, by the same loops:
//! `cargo bench --bench cache`. Time grows with tokens · KV heads · head_dim, and with the heads of a group.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use oscar_kv::kv::page::{Arrangement, PAGE_TOKENS, PageLayout};
use oscar_kv::kv::pool::cpu::{Page, Queries, Scratch, attend, width};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

/// Pages of one task, as the pool has it.
const TASK_PAGES: usize = 16;

/// (tokens, heads of a group, KV heads, head_dim): SmolLM2-135M and Qwen3-8B.
const SHAPES: [(usize, usize, usize, usize); 3] =
    [(2048, 3, 3, 64), (32_768, 3, 3, 64), (16_384, 4, 8, 128)];

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("decode attention on the CPU");
    group.sample_size(20);
    for (tokens, heads, kv_heads, d) in SHAPES {
        let layout = PageLayout::new(d, d, Arrangement::Rows).expect("a shape that pages have");
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let pages = tokens / PAGE_TOKENS * kv_heads;
        let q: Vec<f32> = (0..heads * width(d))
            .map(|_| rng.random::<f32>() - 0.5)
            .collect();
        let floats = PAGE_TOKENS * width(d);
        let f32s: Vec<f32> = (0..2 * pages * floats)
            .map(|_| rng.random::<f32>() - 0.5)
            .collect();
        let bf16s: Vec<u16> = f32s.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
        let mut int2s = vec![0u8; pages * layout.int2_bytes()];
        rng.fill_bytes(&mut int2s);
        // Scales and zeros of about ½ and 1½.
        for page in int2s.chunks_exact_mut(layout.int2_bytes()) {
            for params in page[PAGE_TOKENS * d / 2..].chunks_exact_mut(4) {
                params.copy_from_slice(&[0x00, 0x3f, 0xc0, 0x3f]);
            }
        }
        let all: [(&str, Vec<Page>); 3] = [
            (
                "f32",
                f32s.chunks_exact(2 * floats)
                    .map(|page| Page::F32(&page[..floats], &page[floats..]))
                    .collect(),
            ),
            (
                "BF16",
                bf16s
                    .chunks_exact(layout.bf16_bytes() / 2)
                    .map(|page| Page::Bf16(page, PAGE_TOKENS))
                    .collect(),
            ),
            (
                "INT2",
                int2s
                    .chunks_exact(layout.int2_bytes())
                    .map(Page::Int2)
                    .collect(),
            ),
        ];
        let shape = format!("{tokens}x{}/{kv_heads}x{d}", heads * kv_heads);
        for (name, pages) in &all {
            group.bench_function(BenchmarkId::new(*name, &shape), |b| {
                b.iter(|| {
                    pages
                        .par_chunks(TASK_PAGES)
                        .map_init(Scratch::default, |scratch, pages| {
                            let queries = Queries {
                                q: &q,
                                group: heads,
                                seen: usize::MAX,
                            };
                            black_box(attend(queries, pages, &layout, scratch)).sum[0]
                        })
                        .sum::<f32>()
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, decode);
criterion_main!(benches);
