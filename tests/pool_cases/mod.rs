//! Interleavings of what sequences do in a pool, and a plain list of tokens a sequence to compare with. The pool is a
//! parameter, so that every store runs the same.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use half::bf16;
use oscar_kv::kv::attention::Dims;
use oscar_kv::kv::page::{Arrangement, PAGE_TOKENS, PageLayout, Side};
use oscar_kv::kv::pool::{PageCounts, Pool, PoolShape, SequenceId, Transforms};
use oscar_kv::zoo::Windows;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::pool_entry::entry;

const LAYERS: usize = 2;

#[derive(Clone, Debug)]
pub struct Case {
    dims: Dims,
    group: usize,
    windows: Windows,
    /// Whether anything is demoted at all.
    int2: bool,
    capacity: PageCounts,
    actions: Vec<Action>,
    seed: u64,
}

#[derive(Clone, Debug)]
pub enum Action {
    Create,
    /// By place in the list of sequences, round and round.
    Fork(usize),
    Free(usize),
    /// Tokens for some sequences in one step.
    Append(Vec<(usize, usize)>),
    /// Begins such a step, runs one layer, and gives up.
    GiveUp(usize, usize),
}

pub fn cases() -> impl Strategy<Value = Case> {
    let dims = prop::sample::select(vec![
        (1, 1, 16, 16),
        (4, 2, 64, 64),
        (8, 1, 128, 128),
        (3, 1, 64, 32),
        (12, 1, 24, 8),
        (2, 2, 80, 80),
    ]);
    let tokens = prop_oneof![3 => Just(1_usize), 2 => 1..70_usize, 1 => 100..200_usize];
    let some = prop::collection::vec((0..4_usize, tokens), 1..4);
    let actions = prop_oneof![
        1 => Just(Action::Create),
        1 => (0..8_usize).prop_map(Action::Fork),
        1 => (0..8_usize).prop_map(Action::Free),
        1 => (0..8_usize, 1..150_usize).prop_map(|(at, n)| Action::GiveUp(at, n)),
        6 => some.prop_map(Action::Append),
    ];
    (
        dims,
        prop::sample::select(vec![(0, 64), (64, 64), (64, 128)]),
        prop::bool::weighted(0.85),
        (4..24_usize, 0..20_usize),
        prop::collection::vec(actions, 1..24),
        any::<u64>(),
    )
        .prop_map(|(dims, windows, int2, capacity, actions, seed)| Case {
            dims: Dims::new(dims.0, dims.1, dims.2).unwrap(),
            group: dims.3,
            windows: Windows {
                sink_tokens: windows.0,
                recent_tokens: windows.1,
            },
            int2,
            capacity: PageCounts {
                bf16: capacity.0,
                int2: capacity.1,
            },
            actions,
            seed,
        })
}

/// Heavy-tailed rows with a few loud channels, and an offset that centering is there for.
pub fn rows(rng: &mut ChaCha8Rng, n: usize, d: usize) -> Vec<f32> {
    (0..n * d)
        .map(|i| {
            let normal = (0..6).map(|_| rng.random::<f32>() - 0.5).sum::<f32>();
            let loud = if i % d % 11 == 3 { 8.0 } else { 1.0 };
            let x = loud * normal / (0.2 + rng.random::<f32>());
            // As a model in bf16 has them.
            bf16::from_f32(x + if i % d == 5 { 4.0 } else { 0.0 }).to_f32()
        })
        .collect()
}

/// Keys and values of a layer, and the queries: (tokens, heads, d) each.
#[derive(Clone, Default)]
struct Tokens {
    k: Vec<f32>,
    v: Vec<f32>,
}

/// The plain list that the pool is compared with.
#[derive(Clone, Default)]
struct Plain {
    tokens: usize,
    /// A step was given up since the last one, and may have demoted the page that it had to.
    given_up: bool,
    layers: [Tokens; LAYERS],
}

impl Case {
    /// How a page is arranged, where it can be.
    #[allow(dead_code)] // by tests on the CPU
    pub fn layout(&self, arrangement: Arrangement) -> Option<PageLayout> {
        PageLayout::new(self.dims.head_dim, self.group, arrangement).ok()
    }

    fn shape(&self) -> PoolShape {
        let entry = entry(LAYERS, self.dims, self.group, self.seed);
        let transforms = self
            .int2
            .then(|| Arc::new(Transforms::new(&entry).unwrap()));
        PoolShape {
            layers: LAYERS,
            dims: self.dims,
            windows: self.windows,
            transforms,
        }
    }
}

/// What a store owes.
#[derive(Clone, Copy)]
pub struct Promise<'a> {
    /// Where the model's tensors lie.
    pub device: &'a Device,
    /// Error of a step's outputs, relative to them.
    pub tolerance: f64,
    /// Whether every stored number is the definition's; else codes are, but for some that lay between two levels.
    pub exact: bool,
}

/// Runs a case on the pool that `make` makes.
pub fn run(case: &Case, make: &dyn Fn(PoolShape, PageCounts) -> Pool, promise: Promise) {
    let shape = case.shape();
    let mut pool = make(shape.clone(), case.capacity);
    let mut rng = ChaCha8Rng::seed_from_u64(case.seed);
    let two = [pool.create(), pool.create()];
    let mut plain = BTreeMap::from(two.map(|id| (id, Plain::default())));
    let Dims {
        heads,
        kv_heads,
        head_dim: d,
    } = case.dims;
    for action in &case.actions {
        let ids: Vec<_> = plain.keys().copied().collect();
        let pick = |at: usize| (!ids.is_empty()).then(|| ids[at % ids.len().max(1)]);
        match action {
            Action::Create => {
                plain.insert(pool.create(), Plain::default());
            }
            Action::Fork(at) => {
                if let Some(id) = pick(*at) {
                    let before = pool.usage();
                    let fork = pool.fork(id).unwrap();
                    // It undoes a step that was given up.
                    assert!(
                        pool.usage().used_bytes <= before.used_bytes,
                        "a fork takes no page"
                    );
                    plain.insert(fork, plain[&id].clone());
                }
            }
            Action::Free(at) => {
                if let Some(id) = pick(*at) {
                    pool.free(id).unwrap();
                    assert!(pool.tokens(id).is_err());
                    plain.remove(&id);
                }
            }
            Action::GiveUp(at, n) => {
                let Some(id) = pick(*at) else { continue };
                if pool.begin(&[(id, *n)]).is_ok() {
                    let tensor = |rng: &mut ChaCha8Rng, heads| {
                        tensor(rows(rng, n * heads, d), heads, d, promise.device)
                    };
                    let (q, k) = (tensor(&mut rng, heads), tensor(&mut rng, kv_heads));
                    pool.attend(0, &q, &k, &k).unwrap();
                    plain.get_mut(&id).unwrap().given_up = true;
                }
            }
            Action::Append(list) => {
                let mut appends: BTreeMap<SequenceId, usize> = BTreeMap::new();
                for &(at, n) in list {
                    if let Some(id) = pick(at) {
                        appends.insert(id, n);
                    }
                }
                let appends: Vec<_> = appends.into_iter().collect();
                if appends.is_empty() {
                    continue;
                }
                let before = pool.usage();
                if let Err(error) = pool.begin(&appends) {
                    let message = error.to_string();
                    assert!(
                        message.contains("out of memory") && message.contains("bytes"),
                        "{message}"
                    );
                    // A step that was given up may have been undone, which takes no page.
                    assert!(pool.usage().used_bytes <= before.used_bytes);
                } else {
                    append(&mut pool, &appends, &mut plain, &shape, &mut rng, promise);
                }
            }
        }
        assert!(pool.adds_up(), "after {action:?}");
        for (&id, plain) in &plain {
            assert_eq!(pool.tokens(id).unwrap(), plain.tokens);
            stored(&pool, id, plain, &shape, promise.exact);
        }
    }
    for id in plain.into_keys() {
        pool.free(id).unwrap();
    }
    let usage = pool.usage();
    assert_eq!((usage.used, pool.adds_up()), (PageCounts::default(), true));
}

fn tensor(x: Vec<f32>, heads: usize, d: usize, device: &Device) -> Tensor {
    let tokens = x.len() / (heads * d);
    Tensor::from_vec(x, (tokens, heads, d), device).unwrap()
}

fn append(
    pool: &mut Pool,
    appends: &[(SequenceId, usize)],
    plain: &mut BTreeMap<SequenceId, Plain>,
    shape: &PoolShape,
    rng: &mut ChaCha8Rng,
    promise: Promise,
) {
    let Dims {
        heads,
        kv_heads,
        head_dim: d,
    } = shape.dims;
    let tokens: usize = appends.iter().map(|&(_, n)| n).sum();
    for layer in 0..LAYERS {
        // Scores of a few units: where one token takes it all, errors of scores do not show.
        let q: Vec<_> = rows(rng, tokens * heads, d)
            .iter()
            .map(|x| x / 32.0)
            .collect();
        let (k, v) = (
            rows(rng, tokens * kv_heads, d),
            rows(rng, tokens * kv_heads, d),
        );
        let mut at = 0;
        for &(id, n) in appends {
            let list = &mut plain.get_mut(&id).unwrap().layers[layer];
            let range = at * kv_heads * d..(at + n) * kv_heads * d;
            list.k.extend(&k[range.clone()]);
            list.v.extend(&v[range]);
            at += n;
        }
        let o = pool.attend(
            layer,
            &tensor(q.clone(), heads, d, promise.device),
            &tensor(k, kv_heads, d, promise.device),
            &tensor(v, kv_heads, d, promise.device),
        );
        let o = o.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let mut at = 0;
        for &(id, n) in appends {
            let range = at * heads * d..(at + n) * heads * d;
            let expected = attention(&q[range.clone()], pool, id, layer, n);
            let norm = |squares: &dyn Fn(usize) -> f64| {
                (0..expected.len()).map(squares).sum::<f64>().sqrt()
            };
            let ours = &o[range];
            let error = norm(&|i| (f64::from(ours[i]) - expected[i]).powi(2));
            let whole = norm(&|i| expected[i].powi(2));
            assert!(
                error < promise.tolerance * whole,
                "{id}, layer {layer}, {n} new tokens: off by {error} of {whole}"
            );
            at += n;
        }
    }
    pool.finish().unwrap();
    for &(id, n) in appends {
        let plain = plain.get_mut(&id).unwrap();
        plain.tokens += n;
        plain.given_up = false;
    }
}

/// Every token of one head as the rule has it: encoded and rounded, `history` pages of it through the codec.
fn expected(
    list: &Tokens,
    side: Side,
    layer: usize,
    head: usize,
    shape: &PoolShape,
    history: usize,
) -> Vec<f32> {
    let (kv_heads, d) = (shape.dims.kv_heads, shape.dims.head_dim);
    let all = if side == Side::K { &list.k } else { &list.v };
    let own: Vec<f32> = all
        .chunks_exact(kv_heads * d)
        .flat_map(|token| &token[head * d..(head + 1) * d])
        .copied()
        .collect();
    let transform = shape
        .transforms
        .as_ref()
        .map(|t| &t.layer(layer)[head][usize::from(side == Side::V)]);
    let encoded = transform.map_or(own.clone(), |t| t.forward(&own));
    let mut rows: Vec<f32> = encoded
        .into_iter()
        .map(|x| bf16::from_f32(x).to_f32())
        .collect();
    if let Some(transform) = transform {
        let first = shape.windows.sink_tokens * d;
        let range = first..first + history * PAGE_TOKENS * d;
        if history > 0 {
            let back = transform.codec().roundtrip(&rows[range.clone()]).unwrap();
            rows[range].copy_from_slice(&back);
        }
    }
    rows
}

/// Attention in f64 over what the pool holds, of the last `new` tokens of `id`.
fn attention(q: &[f32], pool: &Pool, id: SequenceId, layer: usize, new: usize) -> Vec<f64> {
    let shape = pool.shape();
    let Dims {
        heads, head_dim: d, ..
    } = shape.dims;
    let before = pool.tokens(id).unwrap();
    let mut o = vec![0.0; q.len()];
    for kv_head in 0..shape.dims.kv_heads {
        let [k, v] = [Side::K, Side::V].map(|side| pool.read(id, layer, kv_head, side).unwrap());
        assert_eq!(k.len(), (before + new) * d);
        let sides = shape.transforms.as_ref().map(|t| &t.layer(layer)[kv_head]);
        for i in 0..new {
            for h in kv_head * shape.dims.group()..(kv_head + 1) * shape.dims.group() {
                let at = (i * heads + h) * d;
                let q = &q[at..at + d];
                let q = sides.map_or(q.to_vec(), |sides| sides[0].query(q));
                let dot = |a: &[f32], b: &[f32]| -> f64 {
                    a.iter()
                        .zip(b)
                        .map(|(&a, &b)| f64::from(a) * f64::from(b))
                        .sum()
                };
                let scores: Vec<f64> = k
                    .chunks_exact(d)
                    .take(before + i + 1)
                    .map(|k| dot(&q, k) / (d as f64).sqrt())
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = p.iter().sum();
                let mut row = vec![0.0f32; d];
                for (c, x) in row.iter_mut().enumerate() {
                    let sums = p
                        .iter()
                        .zip(v.chunks_exact(d))
                        .map(|(p, v)| p * f64::from(v[c]));
                    *x = (sums.sum::<f64>() / sum) as f32;
                }
                let row = sides.map_or(row.clone(), |sides| sides[1].backward(&row));
                for (o, x) in o[at..at + d].iter_mut().zip(row) {
                    *o = f64::from(x);
                }
            }
        }
    }
    o
}

/// Whether rows differ by rounding, but for a few channels that fell to another level.
fn alike(ours: &[f32], theirs: &[f32], d: usize) -> bool {
    let mut far = 0;
    for (a, b) in ours.chunks_exact(d).zip(theirs.chunks_exact(d)) {
        let mean_square = b.iter().map(|x| x * x).sum::<f32>() / d as f32;
        let near = |(a, b): (&f32, &f32)| (a - b).abs() < 0.03 * (b.abs() + mean_square.sqrt());
        far += d - a.iter().zip(b).filter(|&pair| near(pair)).count();
    }
    ours.len() == theirs.len() && far * 8 <= ours.len()
}

/// What the pool holds of a sequence is what the rule says.
fn stored(pool: &Pool, id: SequenceId, plain: &Plain, shape: &PoolShape, exact: bool) {
    let rule = shape.rule().unwrap();
    for layer in 0..LAYERS {
        for head in 0..shape.dims.kv_heads {
            for side in [Side::K, Side::V] {
                let mut ours = pool.read(id, layer, head, side).unwrap();
                // Without those of a step that was given up.
                ours.truncate(plain.tokens * shape.dims.head_dim);
                let holds = |tokens| {
                    let pages = rule.history_pages(tokens);
                    let theirs = expected(&plain.layers[layer], side, layer, head, shape, pages);
                    if exact {
                        ours == theirs
                    } else {
                        alike(&ours, &theirs, shape.dims.head_dim)
                    }
                };
                assert!(
                    holds(plain.tokens) || plain.given_up && holds(plain.tokens + 1),
                    "{id}, layer {layer}, head {head}, {side}, {} tokens",
                    plain.tokens
                );
            }
        }
    }
}
