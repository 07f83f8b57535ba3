//! Blocked attention on the CPU: softmax in one pass over chunks of keys (Milakov and Gimelshein 2018, as in
//! FlashAttention), so that a chunk of scores is made, weighed and multiplied by values while it stands in cache.

use std::cell::Cell;
use std::ops::Range;

use rayon::prelude::*;

use super::{Causal, Dims, exp, history};
use crate::Result;
use crate::linalg::{Op, View, matmul};

/// Queries (tokens times the group's heads) that walk over the keys together, and
const BLOCK_ROWS: usize = 192;
/// keys at a time: the scores of a chunk take 384 KiB.
const CHUNK_TOKENS: usize = 512;
/// Blocks whose key weights stand in memory together.
const WAVE: usize = 256;

/// Causal attention of a packed sequence (shapes as in the module's docs), with per-token attention weights where
/// `key_weights` asks for them (method.md: the moment `vsv`).
///
/// Takes memory for one block of queries × the prompt's tokens a thread where `key_weights` is set, else for one
/// chunk.
///
/// # Errors
/// Where slices do not fit `dims` and `prompt_lens`.
pub fn causal(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dims: Dims,
    prompt_lens: &[usize],
    key_weights: bool,
) -> Result<Causal> {
    let tokens = dims.tokens(q, &[k, v], prompt_lens)?;
    let mut weights = key_weights.then(|| vec![0.0; tokens * dims.kv_heads]);
    let cache = Cache {
        k,
        v,
        k_hat: k,
        v_hat: v,
        sink: usize::MAX,
        recent: 0,
        demote_tokens: 1,
    };
    let o = attend(q, cache, dims, prompt_lens, weights.as_deref_mut());
    Ok(Causal {
        o,
        key_weights: weights,
    })
}

/// Attention as a cache with exact windows serves it: the query at position i of its prompt reads token j exactly
/// outside of [`history`](super::history), and through `k_hat` and `v_hat` (decoded codes, shaped as k and v) in it,
/// under one softmax. Returns o (tokens, heads, head_dim).
///
/// # Errors
/// Where slices do not fit `dims` and `prompt_lens`.
pub fn windowed(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    k_hat: &[f32],
    v_hat: &[f32],
    dims: Dims,
    prompt_lens: &[usize],
    sink: usize,
    recent: usize,
    demote_tokens: usize,
) -> Result<Vec<f32>> {
    dims.tokens(q, &[k, v, k_hat, v_hat], prompt_lens)?;
    let cache = Cache {
        k,
        v,
        k_hat,
        v_hat,
        sink,
        recent,
        demote_tokens,
    };
    Ok(attend(q, cache, dims, prompt_lens, None))
}

#[derive(Clone, Copy)]
struct Cache<'a> {
    k: &'a [f32],
    v: &'a [f32],
    k_hat: &'a [f32],
    v_hat: &'a [f32],
    sink: usize,
    recent: usize,
    demote_tokens: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Segment {
    Sink,
    History,
    Recent,
}

impl Cache<'_> {
    /// Tokens of `segment` that the query at position `i` of a prompt sees, also counted in the prompt.
    #[inline(always)]
    fn seen(&self, segment: Segment, i: usize) -> Range<usize> {
        let sink = self.sink.min(i + 1);
        let history = history(i, sink, self.recent, self.demote_tokens);
        match segment {
            Segment::Sink => 0..sink,
            Segment::Recent => history.end..i + 1,
            Segment::History => history,
        }
    }

    /// Tokens of `segment` that any query of a block sees.
    fn reach(&self, segment: Segment, queries: &Range<usize>) -> Range<usize> {
        let (first, last) = (
            self.seen(segment, queries.start),
            self.seen(segment, queries.end - 1),
        );
        match segment {
            Segment::Sink | Segment::History => last,
            Segment::Recent => first.start..last.end,
        }
    }
}

/// Consecutive queries of one prompt and one KV head's group.
struct Block {
    /// Where the prompt starts in the sequence.
    prompt: usize,
    /// Positions in the prompt.
    queries: Range<usize>,
    kv_head: usize,
}

fn blocks(dims: Dims, prompt_lens: &[usize]) -> Vec<Block> {
    let tokens = (BLOCK_ROWS / dims.group()).max(1);
    let mut blocks = Vec::new();
    let mut prompt = 0;
    for &len in prompt_lens {
        for start in (0..len).step_by(tokens) {
            let queries = start..(start + tokens).min(len);
            blocks.extend((0..dims.kv_heads).map(|kv_head| Block {
                prompt,
                queries: queries.clone(),
                kv_head,
            }));
        }
        prompt += len;
    }
    blocks
}

fn attend(
    q: &[f32],
    cache: Cache,
    dims: Dims,
    prompt_lens: &[usize],
    mut key_weights: Option<&mut [f64]>,
) -> Vec<f32> {
    let mut o = vec![0.0; q.len()];
    let width = dims.group() * dims.head_dim;
    // Key weights are added up in the order of the blocks, whichever thread made them.
    for wave in blocks(dims, prompt_lens).chunks(WAVE) {
        let weigh = key_weights.is_some();
        let done: Vec<(Vec<f32>, Vec<f32>)> = wave
            .par_iter()
            .with_max_len(1)
            .map(|block| with_scratch(|scratch| block.attend(q, cache, dims, weigh, scratch)))
            .collect();
        for (block, (o_block, weights)) in wave.iter().zip(done) {
            for (i, row) in block.queries.clone().zip(o_block.chunks_exact(width)) {
                let at = (block.prompt + i) * dims.heads * dims.head_dim + block.kv_head * width;
                o[at..at + width].copy_from_slice(row);
            }
            if let Some(sums) = &mut key_weights {
                for (j, weight) in weights.into_iter().enumerate() {
                    sums[(block.prompt + j) * dims.kv_heads + block.kv_head] += f64::from(weight);
                }
            }
        }
    }
    o
}

#[derive(Default)]
struct Scratch {
    q: Vec<f32>,
    /// Unnormalised probabilities of one chunk, or of all chunks one after the other, each (rows, chunk).
    p: Vec<f32>,
}

fn with_scratch<R>(task: impl FnOnce(&mut Scratch) -> R) -> R {
    thread_local!(static SCRATCH: Cell<Scratch> = Cell::default());
    let mut scratch = SCRATCH.take();
    let out = task(&mut scratch);
    SCRATCH.set(scratch);
    out
}

fn at_least(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Chunk of keys of one segment, with the maxima that its probabilities are relative to.
struct Chunk {
    tokens: Range<usize>,
    max: Vec<f32>,
}

impl Block {
    /// Output rows (queries, group, head_dim), and the tokens' weights from the prompt's start to the last query.
    fn attend(
        &self,
        q: &[f32],
        cache: Cache,
        dims: Dims,
        weigh: bool,
        scratch: &mut Scratch,
    ) -> (Vec<f32>, Vec<f32>) {
        let Dims {
            heads,
            kv_heads,
            head_dim: d,
        } = dims;
        let group = dims.group();
        let rows = self.queries.len() * group;
        // Scores in base 2.
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        let queries = at_least(&mut scratch.q, rows * d);
        for (i, row) in self
            .queries
            .clone()
            .zip(queries.chunks_exact_mut(group * d))
        {
            let from = &q[((self.prompt + i) * heads + self.kv_head * group) * d..][..group * d];
            row.iter_mut().zip(from).for_each(|(x, q)| *x = q * scale);
        }
        let queries = View::contiguous(queries, rows, d);
        let of_head = |x, tokens: &Range<usize>| -> View<f32> {
            let at = ((self.prompt + tokens.start) * kv_heads + self.kv_head) * d;
            View::strided(&<&[f32]>::clone(x)[at..], tokens.len(), d, kv_heads * d)
        };
        let mut o = vec![0.0; rows * d];
        let mut max = vec![f32::NEG_INFINITY; rows];
        let mut sum = vec![0.0; rows];
        let mut kept = Vec::new();
        let mut kept_len = 0;
        for segment in [Segment::Sink, Segment::History, Segment::Recent] {
            let (k, v) = match segment {
                Segment::Sink | Segment::Recent => (&cache.k, &cache.v),
                Segment::History => (&cache.k_hat, &cache.v_hat),
            };
            let reach = cache.reach(segment, &self.queries);
            for start in reach.clone().step_by(CHUNK_TOKENS) {
                let tokens = start..(start + CHUNK_TOKENS).min(reach.end);
                let len = rows * tokens.len();
                let p = &mut at_least(&mut scratch.p, kept_len + len)[kept_len..];
                matmul(
                    Op::Nt,
                    queries,
                    of_head(k, &tokens),
                    p,
                    tokens.len(),
                    false,
                    1.0,
                    0.0,
                );
                pulp::Arch::new().dispatch(Weigh {
                    cache: &cache,
                    segment,
                    tokens: tokens.clone(),
                    first_query: self.queries.start,
                    group,
                    p,
                    max: &mut max,
                    sum: &mut sum,
                    o: &mut o,
                });
                let weights = View::contiguous(p, rows, tokens.len());
                matmul(
                    Op::Nn,
                    weights,
                    of_head(v, &tokens),
                    &mut o,
                    d,
                    true,
                    1.0,
                    1.0,
                );
                if weigh {
                    kept_len += len;
                    kept.push(Chunk {
                        tokens,
                        max: max.clone(),
                    });
                }
            }
        }
        for (o, sum) in o.chunks_exact_mut(d).zip(&sum) {
            let norm = 1.0 / sum;
            for o in o.iter_mut() {
                *o *= norm;
            }
        }
        let mut weights = vec![0.0; if weigh { self.queries.end } else { 0 }];
        let mut rest = &scratch.p[..];
        for chunk in kept {
            let (p, after) = rest.split_at(rows * chunk.tokens.len());
            rest = after;
            pulp::Arch::new().dispatch(AddSquares {
                weights: &mut weights[chunk.tokens],
                p,
                chunk_max: &chunk.max,
                max: &max,
                sum: &sum,
            });
        }
        (o, weights)
    }
}

/// Turns a chunk's scores into probabilities relative to the rows' maxima so far, 0 where a row does not see a token,
/// and rescales what the rows have summed up before.
struct Weigh<'a> {
    cache: &'a Cache<'a>,
    segment: Segment,
    tokens: Range<usize>,
    first_query: usize,
    group: usize,
    /// (rows, tokens)
    p: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    /// (rows, head_dim)
    o: &'a mut [f32],
}

// A closure would not do: its call is not inlined into the function that has the wide instructions.
impl pulp::NullaryFnOnce for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Range { start, end } = self.tokens;
        let d = self.o.len() / self.max.len();
        let rows = self
            .p
            .chunks_exact_mut(end - start)
            .zip(self.o.chunks_exact_mut(d));
        for (row, (p, o)) in rows.enumerate() {
            let seen = self
                .cache
                .seen(self.segment, self.first_query + row / self.group);
            let from = seen.start.clamp(start, end) - start;
            let to = seen.end.clamp(start, end) - start;
            if from >= to {
                p.fill(0.0);
                continue;
            }
            p[..from].fill(0.0);
            p[to..].fill(0.0);
            let seen = &mut p[from..to];
            let max = exp::max(seen, self.max[row]);
            let decay = exp::exp2(self.max[row] - max);
            self.max[row] = max;
            self.sum[row] = self.sum[row] * decay + exp::exp2_sum(seen, max);
            for o in o {
                *o *= decay;
            }
        }
    }
}

/// Adds every token's squared probabilities, once the rows' maxima and sums are known.
struct AddSquares<'a> {
    weights: &'a mut [f32],
    /// (rows, weights), relative to
    p: &'a [f32],
    chunk_max: &'a [f32],
    max: &'a [f32],
    sum: &'a [f32],
}

impl pulp::NullaryFnOnce for AddSquares<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (row, p) in self.p.chunks_exact(self.weights.len()).enumerate() {
            let share = exp::exp2(self.chunk_max[row] - self.max[row]) / self.sum[row];
            for (w, &p) in self.weights.iter_mut().zip(p) {
                *w += (p * share) * (p * share);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kv::attention::{plain, random};

    fn close(ours: &[f32], exact: &[f32]) -> Result<(), String> {
        for (at, (a, b)) in ours.iter().zip(exact).enumerate() {
            if (a - b).abs() > 3e-5 * b.abs().max(1.0) {
                return Err(format!("element {at}: {a}, not {b}"));
            }
        }
        Ok(())
    }

    fn dims() -> impl Strategy<Value = Dims> {
        let head_dim = prop::sample::select(vec![16, 20, 64, 80, 128]);
        (
            1..=3_usize,
            prop::sample::select(vec![1_usize, 2, 3, 5, 16]),
            head_dim,
        )
            .prop_map(|(kv_heads, group, d)| Dims::new(kv_heads * group, kv_heads, d).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn blocked_attention_is_the_plain_one(
            dims in dims(),
            prompt_lens in prop::collection::vec(1..90_usize, 1..4),
            long in prop::option::weighted(0.2, 500..700_usize),
            sink in prop::sample::select(vec![0, 1, 4, 64, 1000]),
            recent in prop::sample::select(vec![0, 1, 2, 30, 64, 1000]),
            demote_tokens in prop::sample::select(vec![1, 7, 64]),
            seed in any::<u64>(),
        ) {
            let (dims, prompt_lens) = match long {
                Some(len) => (Dims::new(4, 2, 16).unwrap(), vec![3, len]),
                None => (dims, prompt_lens),
            };
            let tokens: usize = prompt_lens.iter().sum();
            let n = tokens * dims.kv_heads * dims.head_dim;
            let q = random(seed, tokens * dims.heads * dims.head_dim, 1.5);
            let [k, v, k_hat, v_hat] = [1, 2, 3, 4].map(|i| random(seed ^ i, n, 1.0));

            let ours = causal(&q, &k, &v, dims, &prompt_lens, true).unwrap();
            let exact = plain::causal(&q, &k, &v, dims, &prompt_lens);
            prop_assert_eq!(close(&ours.o, &exact.o), Ok(()));
            let (ours, exact) = (ours.key_weights.unwrap(), exact.key_weights.unwrap());
            for (a, b) in ours.iter().zip(&exact) {
                prop_assert!((a - b).abs() <= 2e-5 * b.max(1e-2), "key weight {a}, not {b}");
            }

            let ours = windowed(&q, &k, &v, &k_hat, &v_hat, dims, &prompt_lens, sink, recent, demote_tokens).unwrap();
            let exact = plain::windowed(&q, &k, &v, &k_hat, &v_hat, dims, &prompt_lens, sink, recent, demote_tokens);
            prop_assert_eq!(close(&ours, &exact), Ok(()));
        }
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let dims = Dims::new(6, 2, 32).unwrap();
        let prompt_lens = [300, 1, 450];
        let q = random(1, 751 * 6 * 32, 1.0);
        let [k, v, k_hat, v_hat] = [2, 3, 4, 5].map(|i| random(i, 751 * 2 * 32, 1.0));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| {
                (
                    causal(&q, &k, &v, dims, &prompt_lens, true).unwrap(),
                    windowed(&q, &k, &v, &k_hat, &v_hat, dims, &prompt_lens, 4, 32, 8).unwrap(),
                )
            })
        };
        let one = run(1);
        assert!(run(2) == one && run(5) == one);
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let dims = Dims::new(1, 1, 16).unwrap();
        let (q, k, v) = (
            random(1, 700 * 16, 300.0),
            random(2, 700 * 16, 300.0),
            random(3, 700 * 16, 1.0),
        );
        let ours = causal(&q, &k, &v, dims, &[700], false).unwrap();
        assert!(ours.o.iter().all(|x| x.is_finite()));
        // Scores of 10^5 leave rounding of 10^-2 in f32: all but near ties agree.
        let exact = plain::causal(&q, &k, &v, dims, &[700]);
        let off = ours
            .o
            .iter()
            .zip(&exact.o)
            .filter(|(a, b)| (*a - *b).abs() > 0.1)
            .count();
        assert!(off < 700 * 16 / 100, "{off}");
    }

    #[test]
    fn nan_and_infinity_reach_the_queries_that_see_them() {
        let dims = Dims::new(2, 1, 16).unwrap();
        let q = random(1, 600 * 32, 1.0);
        let (k, v) = (random(2, 600 * 16, 1.0), random(3, 600 * 16, 1.0));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut spoilt = v.clone();
            spoilt[5 * 16] = bad;
            let o = causal(&q, &k, &spoilt, dims, &[600], true).unwrap().o;
            assert!((5..600).all(|i| !o[i * 32].is_finite()));
            let mut spoilt = q.clone();
            spoilt[599 * 32] = bad;
            let o = causal(&spoilt, &k, &v, dims, &[600], true).unwrap().o;
            assert!(o[..599 * 32].iter().all(|x| x.is_finite()));
            assert!(o[599 * 32..599 * 32 + 16].iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let dims = Dims::new(2, 1, 4).unwrap();
        let (q, k) = (vec![0.0; 24], vec![0.0; 12]);
        assert!(causal(&q, &k, &k, dims, &[2], false).is_err());
        assert!(causal(&q, &k[..8], &k, dims, &[3], false).is_err());
        assert!(windowed(&q, &k, &k, &k, &k[..4], dims, &[1, 2], 0, 0, 1).is_err());
        assert!(causal(&[], &[], &[], dims, &[], true).unwrap().o.is_empty());
        assert!(causal(&q, &k, &k, dims, &[3, usize::MAX], false).is_err());
        let broken = Dims {
            heads: 3,
            kv_heads: 2,
            head_dim: 4,
        };
        assert!(causal(&[], &[], &[], broken, &[], true).is_err());
        assert!(
            Dims::new(0, 1, 1).is_err()
                && Dims::new(4, 3, 8).is_err()
                && Dims::new(4, 0, 8).is_err()
        );
    }
}
