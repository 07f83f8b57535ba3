//! The decoder's attention as a quantized cache serves it, and the error that each layer's cache makes by itself.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::methods::{Cache, EvalMethod, Side};
use crate::kv::attention::{self, Dims, Probe};
use crate::linalg::parallel;
use crate::model::Attention;
use crate::zoo::Windows;
use crate::{Error, Result};

/// k and v (tokens, kv_heads, head_dim) of one packed sequence of one layer, on the CPU, where caches are simulated.
struct Heads<'a> {
    layer: usize,
    k: Vec<f32>,
    v: Vec<f32>,
    dims: Dims,
    prompt_lens: &'a [usize],
}

impl<'a> Heads<'a> {
    fn new(
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        prompt_lens: &'a [usize],
    ) -> Result<Self> {
        let (_, heads, head_dim) = q.dims3()?;
        Ok(Self {
            layer,
            dims: Dims::new(heads, k.dim(1)?, head_dim)?,
            k: floats(k)?,
            v: floats(v)?,
            prompt_lens,
        })
    }

    /// Where each prompt stands.
    fn prompts(&self) -> Vec<Range<usize>> {
        let mut start = 0;
        let place = |&len| {
            start += len;
            start - len..start
        };
        self.prompt_lens.iter().map(place).collect()
    }

    /// Keys and values as `cache` gives them back; tokens that no query reads from it are exact.
    fn read_back(
        &self,
        cache: &dyn Cache,
        windows: Windows,
        demote_tokens: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let (kv_heads, d) = (self.dims.kv_heads, self.dims.head_dim);
        let mut tasks = Vec::new();
        for prompt in self.prompts() {
            let Windows {
                sink_tokens: sink,
                recent_tokens: recent,
            } = windows;
            let last = prompt.len().saturating_sub(1);
            let history = attention::history(last, sink, recent, demote_tokens);
            let history = prompt.start + history.start..prompt.start + history.end;
            if !history.is_empty() {
                for head in 0..kv_heads {
                    tasks.extend([Side::K, Side::V].map(|side| (side, head, history.clone())));
                }
            }
        }
        let exact = |side| match side {
            Side::K => &self.k,
            Side::V => &self.v,
        };
        let stored = parallel(tasks.len(), |i| {
            let (side, head, history) = &tasks[i];
            let rows = head_rows(exact(*side), kv_heads, d, *head, history.clone());
            let back = cache.roundtrip(self.layer, *head, *side, &rows)?;
            if back.len() == rows.len() {
                return Ok(back);
            }
            Err(Error::invalid(
                format!("layer {} {side}, KV head {head}", self.layer),
                format!(
                    "the cache gave back {} values of {}",
                    back.len(),
                    rows.len()
                ),
            ))
        });
        let (mut k, mut v) = (self.k.clone(), self.v.clone());
        for ((side, head, history), rows) in tasks.into_iter().zip(stored) {
            let into = match side {
                Side::K => &mut k,
                Side::V => &mut v,
            };
            for (t, row) in history.zip(rows?.chunks_exact(d)) {
                into[(t * kv_heads + head) * d..][..d].copy_from_slice(row);
            }
        }
        Ok((k, v))
    }
}

/// In memory order.
fn floats(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// Rows (range, d) of head `head` of `x` (tokens, heads, d).
fn head_rows(x: &[f32], heads: usize, d: usize, head: usize, range: Range<usize>) -> Vec<f32> {
    let mut rows = Vec::with_capacity(range.len() * d);
    for t in range {
        rows.extend_from_slice(&x[(t * heads + head) * d..][..d]);
    }
    rows
}

/// Attention through one method's cache.
pub(super) struct Simulated<'a> {
    pub cache: &'a dyn Cache,
    pub windows: Windows,
    /// Tokens that leave `recent` at a time.
    pub demote_tokens: usize,
}

impl Attention for Simulated<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        prompt_lens: &[usize],
    ) -> Result<Tensor> {
        let heads = Heads::new(layer, q, k, v, prompt_lens)?;
        let (k_hat, v_hat) = heads.read_back(self.cache, self.windows, self.demote_tokens)?;
        let Windows {
            sink_tokens: sink,
            recent_tokens: recent,
        } = self.windows;
        let back = |x: Vec<f32>| Tensor::from_vec(x, k.shape(), k.device());
        let (k_hat, v_hat) = (back(k_hat)?, back(v_hat)?);
        let demote = self.demote_tokens;
        attention::tensor::windowed(q, k, v, &k_hat, &v_hat, prompt_lens, sink, recent, demote)
    }
}

/// Exact attention that also asks what each method's cache would have changed at sampled queries of this layer.
pub(super) struct Observed<'a> {
    pub methods: &'a [&'a EvalMethod],
    pub windows: Windows,
    /// Queries a prompt; 0 for none.
    pub queries: usize,
    /// By method and query head: sums of relative squared errors of logits and of output,
    pub errors: Vec<Vec<(f64, f64)>>,
    /// over as many prompts.
    pub prompts: usize,
}

impl Attention for Observed<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        prompt_lens: &[usize],
    ) -> Result<Tensor> {
        if self.queries > 0 && !self.methods.is_empty() {
            let heads = Heads::new(layer, q, k, v, prompt_lens)?;
            self.observe(q, &heads)?;
        }
        Ok(attention::tensor::causal(q, k, v, prompt_lens, false)?.0)
    }
}

impl Observed<'_> {
    fn observe(&mut self, q: &Tensor, heads: &Heads) -> Result<()> {
        let Windows {
            sink_tokens: sink,
            recent_tokens: recent,
        } = self.windows;
        let Dims {
            heads: n,
            kv_heads,
            head_dim: d,
        } = heads.dims;
        let hats = self
            .methods
            .iter()
            .map(|method| heads.read_back(method.cache.as_ref(), self.windows, 1))
            .collect::<Result<Vec<_>>>()?;
        self.errors.resize(self.methods.len(), Vec::new());
        for prompt in heads.prompts() {
            let positions = sampled(sink + recent..prompt.len(), self.queries);
            if positions.is_empty() {
                continue;
            }
            let rows = positions.iter().map(|&i| (prompt.start + i) as u32);
            let rows = Tensor::from_iter(rows, q.device())?;
            let queries = floats(&q.index_select(&rows, 0)?)?;
            let measured = parallel(n, |head| {
                let kv = |x: &[f32]| {
                    head_rows(x, kv_heads, d, head / heads.dims.group(), prompt.clone())
                };
                let (k, v) = (kv(&heads.k), kv(&heads.v));
                let q = head_rows(&queries, n, d, head, 0..positions.len());
                let probe = Probe::new(&q, &k, &v, d, &positions, sink, recent)?;
                hats.iter()
                    .map(|(k_hat, v_hat)| probe.error(Some(&kv(k_hat)), Some(&kv(v_hat))))
                    .collect::<Result<Vec<_>>>()
            });
            for (head, methods) in measured.into_iter().enumerate() {
                for (sums, error) in self.errors.iter_mut().zip(methods?) {
                    sums.resize(n, (0.0, 0.0));
                    sums[head].0 += error.logits;
                    sums[head].1 += error.output;
                }
            }
            self.prompts += 1;
        }
        Ok(())
    }
}

/// Up to `n` positions spread evenly over `range`, ascending.
fn sampled(range: Range<usize>, n: usize) -> Vec<usize> {
    let n = n.min(range.len());
    (0..n)
        .map(|i| range.start + (2 * i + 1) * range.len() / (2 * n))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::Device;

    use super::*;
    use crate::quant::Codec;
    use crate::rotation::Transform;

    /// Marks what was stored.
    struct Marked;

    impl Cache for Marked {
        fn roundtrip(&self, _: usize, head: usize, side: Side, rows: &[f32]) -> Result<Vec<f32>> {
            let mark = if side == Side::K { 100.0 } else { 200.0 };
            Ok(rows.iter().map(|x| x + mark + head as f32).collect())
        }

        fn bits_per_element(&self, _: usize, _: usize, _: usize) -> f64 {
            2.0
        }
    }

    #[test]
    fn only_tokens_that_leave_the_windows_go_through_the_cache() {
        let (kv_heads, d, prompt_lens) = (2, 4, [7, 2, 5]);
        let x: Vec<f32> = (0..14 * kv_heads * d).map(|i| i as f32).collect();
        let heads = Heads {
            layer: 0,
            k: x.clone(),
            v: x.clone(),
            dims: Dims::new(2, kv_heads, d).unwrap(),
            prompt_lens: &prompt_lens,
        };
        let windows = Windows {
            sink_tokens: 1,
            recent_tokens: 3,
        };
        let (k, v) = heads.read_back(&Marked, windows, 1).unwrap();
        for t in 0..14 {
            // Of prompts 0..7, 7..9 and 9..14.
            let history = matches!(t, 1..4 | 10);
            for head in 0..kv_heads {
                let at = (t * kv_heads + head) * d;
                let mark = |side| if history { side + head as i32 } else { 0 };
                assert_eq!((k[at] - x[at]) as i32, mark(100), "token {t} head {head}");
                assert_eq!(
                    (v[at + 3] - x[at + 3]) as i32,
                    mark(200),
                    "token {t} head {head}"
                );
            }
        }
    }

    #[test]
    fn samples_are_ascending_and_inside() {
        assert_eq!(sampled(320..4096, 2), [1264, 3152]);
        assert_eq!(sampled(3..6, 64), [3, 4, 5]);
        assert!(sampled(9..9, 4).is_empty());
    }

    /// One [keys, values] a KV head.
    struct Golden(Vec<[Transform; 2]>);

    impl Cache for Golden {
        fn roundtrip(&self, _: usize, head: usize, side: Side, rows: &[f32]) -> Result<Vec<f32>> {
            self.0[head][usize::from(side == Side::V)].roundtrip(rows)
        }

        fn bits_per_element(&self, _: usize, _: usize, _: usize) -> f64 {
            2.0
        }
    }

    #[test]
    fn attention_through_the_packed_cache_equals_the_golden_vectors() {
        for case in ["d16_mha_bias", "d64_gqa3"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("tests/fixtures/golden")
                .join(case)
                .with_extension("safetensors");
            let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
            let tensor = |name: &str| tensors[name].to_dtype(DType::F32).unwrap();
            let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let settings = tensors["settings"].to_vec1::<f64>().unwrap();
            let [kv_heads, d, sink, recent] = [3, 4, 9, 10].map(|i| settings[i] as usize);
            let means = tensor("moment_k_mean").to_vec2::<f32>().unwrap();
            let heads = (0..kv_heads).map(|head| {
                let matrix = |name: &str| tensor(&format!("h{head}_{name}"));
                let codec = |clip, feedback: Option<Tensor>| Codec {
                    head_dim: d,
                    levels: 4,
                    group: d,
                    clip,
                    feedback: feedback.map(|f| flat(&f)),
                };
                let v_encode = matrix("v_encode");
                [
                    Transform::new(
                        flat(&matrix("encode")),
                        flat(&matrix("query").t().unwrap()),
                        Some(means[head].clone()),
                        codec(settings[7], Some(matrix("feedback"))),
                    ),
                    Transform::new(
                        flat(&v_encode),
                        flat(&v_encode.t().unwrap()),
                        None,
                        codec(settings[8], None),
                    ),
                ]
                .map(Result::unwrap)
            });
            let cache = Golden(heads.collect());
            let mut attention = Simulated {
                cache: &cache,
                windows: Windows {
                    sink_tokens: sink,
                    recent_tokens: recent,
                },
                demote_tokens: 1,
            };
            let [q, k, v] = ["q", "k", "v"].map(tensor);
            let tokens = [q.dim(0).unwrap()];
            let o = flat(&attention.attend(0, &q, &k, &v, &tokens).unwrap());
            let distance = |a: &[f32], b: &[f32]| -> f64 {
                let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
                squares.sum::<f64>().sqrt()
            };
            let [exact, golden] = ["o", "o_int2"].map(|name| flat(&tensor(name)));
            let (error, effect) = (distance(&o, &golden), distance(&exact, &golden));
            // A few codes on the edge between two levels fall to the other side in f32.
            assert!(error < 0.02 * effect, "{case}: {error} of {effect}");
        }
    }
}
