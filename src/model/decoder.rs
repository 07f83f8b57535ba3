//! One decoder for every family: pre-norm blocks of attention and a SwiGLU MLP.
//!
//! On a CPU in f32 a layer runs on blocks of rows, each from its norm to its residual on one thread, so that
//! activations stay in the cache and no result depends on the number of threads. Everywhere else, and as the plain
//! twin that tests compare with, the same layer runs through candle-nn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{CpuStorage, DType, Device, Layout, Module, Storage, StorageRef, Tensor};
use candle_nn::{Linear, RmsNorm, ops};
use rayon::prelude::*;

use super::dense::{self, Norm};
use super::rope::{Table, Tables};
use super::{Attention, Config};
use crate::{Error, Result};

/// Rows of one task: enough that packing the weights for the product costs little.
const BLOCK_ROWS: usize = 256;

/// One decoder layer with its weights.
pub struct DecoderLayer {
    pub(super) index: usize,
    pub(super) config: Arc<Config>,
    pub(super) tables: Arc<Tables>,
    pub(super) input_norm: RmsNorm,
    /// Rows of q, then of k, then of v.
    pub(super) qkv: Linear,
    pub(super) q_norm: Option<RmsNorm>,
    pub(super) k_norm: Option<RmsNorm>,
    pub(super) output: Linear,
    pub(super) mlp_norm: RmsNorm,
    /// Rows of the gate, then of up.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

impl DecoderLayer {
    /// Which layer of the model this is, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// W_O (hidden, heads · head_dim), as in checkpoints, in the activation dtype.
    pub fn output_projection(&self) -> &Tensor {
        self.output.weight()
    }

    /// Runs `hidden` (tokens, hidden) of the prompts of `batch` through the layer.
    ///
    /// # Errors
    /// A prompt longer than the model's context; an output that is not finite, by the layer's number.
    pub fn forward<'a>(
        &self,
        hidden: &Tensor,
        batch: impl Into<Batch<'a>>,
        attention: &mut dyn Attention,
    ) -> Result<Tensor> {
        let batch = batch.into();
        let o = self.attend(hidden, batch, attention)?;
        if self.runs_in_blocks(hidden) {
            return self.finish_blocks(&hidden.contiguous()?, &o, batch.starts.is_some());
        }
        let hidden = self.finish(hidden, &o)?;
        self.check_finite(&hidden)?;
        Ok(hidden)
    }

    /// The first half of [`Self::forward`]: attention's output (tokens, heads, head_dim). Enough of a last layer whose
    /// output nobody reads.
    ///
    /// # Errors
    /// A prompt longer than the model's context.
    pub fn attend<'a>(
        &self,
        hidden: &Tensor,
        batch: impl Into<Batch<'a>>,
        attention: &mut dyn Attention,
    ) -> Result<Tensor> {
        let batch = batch.into();
        let positions = Positions::new(hidden, batch, &self.config)?;
        let (q, k, v) = if self.runs_in_blocks(hidden) {
            let table = self.tables.upto(positions.longest);
            self.project_blocks(&hidden.contiguous()?, &positions, &table)?
        } else {
            self.project(hidden, &self.turns(&positions.of_token, hidden.device())?)?
        };
        attention.attend(self.index, &q, &k, &v, batch.lens)
    }

    fn runs_in_blocks(&self, hidden: &Tensor) -> bool {
        hidden.device().is_cpu()
            && hidden.dtype() == DType::F32
            && self.output.weight().dtype() == DType::F32
    }

    /// How far tokens at these positions turn.
    pub(crate) fn turns(&self, positions: &[usize], device: &Device) -> Result<Turns> {
        let table = self
            .tables
            .upto(positions.iter().max().map_or(0, |p| p + 1));
        let half = self.config.head_dim / 2;
        let rows = |values: &[f32]| -> Result<Tensor> {
            let rows = positions
                .iter()
                .flat_map(|&p| values[p * half..(p + 1) * half].iter().copied())
                .collect();
            Ok(Tensor::from_vec(rows, (positions.len(), half), device)?)
        };
        Ok(Turns {
            cos: rows(&table.cos)?,
            sin: rows(&table.sin)?,
        })
    }

    /// [`Self::forward`] of single tokens, by candle's operations and without looking at the outcome: nothing waits for
    /// the device, so that the layer can be part of a graph.
    #[cfg(feature = "cuda")]
    pub(crate) fn queue(
        &self,
        hidden: &Tensor,
        turns: &Turns,
        attention: &mut dyn Attention,
    ) -> Result<Tensor> {
        let (q, k, v) = self.project(hidden, turns)?;
        let lens = vec![1; hidden.dim(0)?];
        let o = attention.attend(self.index, &q, &k, &v, &lens)?;
        self.finish(hidden, &o)
    }

    fn project(&self, hidden: &Tensor, turns: &Turns) -> Result<(Tensor, Tensor, Tensor)> {
        let Config {
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            ..
        } = *self.config;
        let tokens = hidden.dim(0)?;
        let qkv = self.qkv.forward(&self.input_norm.forward(hidden)?)?;
        let part = |first: usize, heads: usize| -> Result<Tensor> {
            let part = qkv.narrow(1, first * head_dim, heads * head_dim)?;
            Ok(part.reshape((tokens, heads, head_dim))?.contiguous()?)
        };
        let turn = |x: Tensor, norm: Option<&RmsNorm>| -> Result<Tensor> {
            let x = match norm {
                Some(norm) => norm.forward(&x)?,
                None => x,
            };
            let dtype = x.dtype();
            let x = x.to_dtype(DType::F32)?.transpose(0, 1)?.unsqueeze(0)?;
            let turned = candle_nn::rotary_emb::rope(&x.contiguous()?, &turns.cos, &turns.sin)?;
            Ok(turned
                .squeeze(0)?
                .transpose(0, 1)?
                .contiguous()?
                .to_dtype(dtype)?)
        };
        Ok((
            turn(part(0, heads)?, self.q_norm.as_ref())?,
            turn(part(heads, kv_heads)?, self.k_norm.as_ref())?,
            part(heads + kv_heads, kv_heads)?,
        ))
    }

    fn finish(&self, hidden: &Tensor, o: &Tensor) -> Result<Tensor> {
        let hidden = (self.output.forward(&o.flatten_from(1)?)? + hidden)?;
        let gate_up = self.gate_up.forward(&self.mlp_norm.forward(&hidden)?)?;
        let width = self.config.intermediate_size;
        let gate = ops::silu(&gate_up.narrow(1, 0, width)?.contiguous()?)?;
        let act = (gate * gate_up.narrow(1, width, width)?)?;
        Ok((self.down.forward(&act)? + hidden)?)
    }

    pub(crate) fn check_finite(&self, hidden: &Tensor) -> Result<()> {
        // A NaN or an infinity anywhere makes the sum of 0·x a NaN.
        let probe = (hidden.to_dtype(DType::F32)? * 0.0)?.sum(1)?.sum_all()?;
        if probe.to_scalar::<f32>()?.is_nan() {
            return Err(self.not_finite());
        }
        Ok(())
    }

    fn project_blocks(
        &self,
        hidden: &Tensor,
        positions: &Positions,
        table: &Table,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let Config {
            hidden_size,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            rms_norm_eps,
            ..
        } = *self.config;
        let eps = rms_norm_eps as f32;
        let (tokens, half) = (hidden.dim(0)?, head_dim / 2);
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let width = q_width + 2 * kv_width;
        let mut q = vec![0f32; tokens * q_width];
        let mut k = vec![0f32; tokens * kv_width];
        let mut v = vec![0f32; tokens * kv_width];

        let hidden = hidden.storage_and_layout();
        let norm = self.input_norm.weight().storage_and_layout();
        let qkv = LinearGuard::new(&self.qkv);
        let (hidden, norm) = (floats(&hidden)?, floats(&norm)?);
        let qkv = qkv.get(positions.decoding)?;
        let weight = |norm: &'_ RmsNorm| norm.weight().flatten_all()?.to_vec1::<f32>();
        let q_norm = self.q_norm.as_ref().map(weight).transpose()?;
        let k_norm = self.k_norm.as_ref().map(weight).transpose()?;
        let q_norm = q_norm.as_deref().map(|weight| Norm { weight, eps });
        let k_norm = k_norm.as_deref().map(|weight| Norm { weight, eps });
        hidden
            .par_chunks(BLOCK_ROWS * hidden_size)
            .zip(positions.of_token.par_chunks(BLOCK_ROWS))
            .zip(q.par_chunks_mut(BLOCK_ROWS * q_width))
            .zip(k.par_chunks_mut(BLOCK_ROWS * kv_width))
            .zip(v.par_chunks_mut(BLOCK_ROWS * kv_width))
            .for_each_init(
                || {
                    (
                        vec![0f32; BLOCK_ROWS * hidden_size],
                        vec![0f32; BLOCK_ROWS * width],
                    )
                },
                |(x, y), ((((hidden, positions), q), k), v)| {
                    let x = &mut x[..hidden.len()];
                    let y = &mut y[..positions.len() * width];
                    dense::rms_norm(hidden, norm, eps, x);
                    qkv.forward(x, y);
                    for (t, (&position, y)) in
                        positions.iter().zip(y.chunks_exact(width)).enumerate()
                    {
                        let cos = &table.cos[position * half..(position + 1) * half];
                        let sin = &table.sin[position * half..(position + 1) * half];
                        let (y_q, y_kv) = y.split_at(q_width);
                        let (y_k, y_v) = y_kv.split_at(kv_width);
                        let q = &mut q[t * q_width..(t + 1) * q_width];
                        let k = &mut k[t * kv_width..(t + 1) * kv_width];
                        dense::norm_and_turn(y_q, q_norm, cos, sin, q);
                        dense::norm_and_turn(y_k, k_norm, cos, sin, k);
                        v[t * kv_width..(t + 1) * kv_width].copy_from_slice(y_v);
                    }
                },
            );
        let tensor = |x, heads| Tensor::from_vec(x, (tokens, heads, head_dim), &Device::Cpu);
        Ok((
            tensor(q, heads)?,
            tensor(k, kv_heads)?,
            tensor(v, kv_heads)?,
        ))
    }

    fn finish_blocks(&self, hidden: &Tensor, o: &Tensor, decoding: bool) -> Result<Tensor> {
        let Config {
            hidden_size,
            intermediate_size: width,
            ..
        } = *self.config;
        let eps = self.config.rms_norm_eps as f32;
        let shape = hidden.dims2()?;
        let o = o.flatten_from(1)?.contiguous()?;
        let o_width = o.dim(1)?;
        let mut out = hidden.flatten_all()?.to_vec1::<f32>()?;

        let o = o.storage_and_layout();
        let norm = self.mlp_norm.weight().storage_and_layout();
        let [output, gate_up, down] =
            [&self.output, &self.gate_up, &self.down].map(LinearGuard::new);
        let (o, norm) = (floats(&o)?, floats(&norm)?);
        let (output, gate_up) = (output.get(decoding)?, gate_up.get(decoding)?);
        let down = down.get(decoding)?;
        let all_finite = AtomicBool::new(true);
        out.par_chunks_mut(BLOCK_ROWS * hidden_size)
            .zip(o.par_chunks(BLOCK_ROWS * o_width))
            .for_each_init(
                || {
                    (
                        vec![0f32; BLOCK_ROWS * hidden_size],
                        vec![0f32; BLOCK_ROWS * 2 * width],
                        vec![0f32; BLOCK_ROWS * width],
                    )
                },
                |(x, both, act), (out, o)| {
                    let rows = out.len() / hidden_size;
                    let x = &mut x[..out.len()];
                    let both = &mut both[..rows * 2 * width];
                    let act = &mut act[..rows * width];
                    output.add_to(o, out);
                    dense::rms_norm(out, norm, eps, x);
                    gate_up.forward(x, both);
                    dense::silu_times(both, width, act);
                    down.add_to(act, out);
                    if !dense::finite(out) {
                        all_finite.store(false, Ordering::Relaxed);
                    }
                },
            );
        if !all_finite.into_inner() {
            return Err(self.not_finite());
        }
        Ok(Tensor::from_vec(out, shape, &Device::Cpu)?)
    }

    fn not_finite(&self) -> Error {
        Error::numeric(
            format!("layer {}", self.index),
            "activations hold a NaN or an infinity",
        )
    }
}

/// Prompts laid end to end, or the next tokens of each.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Tokens of each; no zero.
    pub lens: &'a [usize],
    /// Position of each one's first token; `None`: all begin at 0.
    pub starts: Option<&'a [usize]>,
}

/// Whole prompts.
impl<'a> From<&'a [usize]> for Batch<'a> {
    fn from(lens: &'a [usize]) -> Self {
        Self { lens, starts: None }
    }
}

impl<'a> From<&'a Vec<usize>> for Batch<'a> {
    fn from(lens: &'a Vec<usize>) -> Self {
        Self::from(lens.as_slice())
    }
}

impl<'a, const N: usize> From<&'a [usize; N]> for Batch<'a> {
    fn from(lens: &'a [usize; N]) -> Self {
        Self::from(lens.as_slice())
    }
}

/// Cosines and sines of tokens' positions, (tokens, head_dim/2) f32.
pub(crate) struct Turns {
    pub cos: Tensor,
    pub sin: Tensor,
}

/// Where every token stands in its prompt.
struct Positions {
    of_token: Vec<usize>,
    longest: usize,
    /// Whether these are the next tokens of sequences that are under way.
    decoding: bool,
}

impl Positions {
    fn new(hidden: &Tensor, batch: Batch, config: &Config) -> Result<Self> {
        let (tokens, width) = hidden.dims2()?;
        let prompt_lens = batch.lens;
        let start = |prompt: usize| batch.starts.map_or(Some(0), |s| s.get(prompt).copied());
        let ends = prompt_lens.iter().enumerate().map(|(prompt, &len)| {
            let start = start(prompt).unwrap_or(usize::MAX);
            start.saturating_add(len)
        });
        let longest = ends.max().unwrap_or(0);
        if longest > config.max_position_embeddings {
            return Err(Error::invalid(
                "prompt",
                format!(
                    "{longest} tokens are more than the model's context of {}",
                    config.max_position_embeddings
                ),
            )
            .hint("use a shorter `--seq-len`"));
        }
        let total: usize = prompt_lens.iter().sum();
        if total != tokens || width != config.hidden_size || prompt_lens.contains(&0) {
            return Err(Error::invalid(
                "prompts",
                format!(
                    "lengths {prompt_lens:?} do not fit hidden states {tokens} x {width} of a model of width {}",
                    config.hidden_size
                ),
            ));
        }
        let prompts = prompt_lens.iter().enumerate();
        let of_token = prompts
            .flat_map(|(prompt, &len)| {
                let start = start(prompt).unwrap_or(0);
                start..start + len
            })
            .collect();
        Ok(Self {
            of_token,
            longest,
            decoding: batch.starts.is_some(),
        })
    }
}

/// A tensor's storage, held for reading.
type Guard<'a> = (StorageRef<'a>, &'a Layout);

/// The elements of a contiguous f32 tensor in CPU memory.
fn floats<'a>((storage, layout): &'a Guard) -> Result<&'a [f32]> {
    match (&**storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(data)), Some((start, end))) => Ok(&data[start..end]),
        _ => Err(
            candle_core::Error::Msg("expected a contiguous f32 tensor on the CPU".into()).into(),
        ),
    }
}

/// A [`Linear`] in CPU memory, held for reading.
struct LinearGuard<'a> {
    weight: Guard<'a>,
    bias: Option<Guard<'a>>,
}

impl<'a> LinearGuard<'a> {
    fn new(linear: &'a Linear) -> Self {
        Self {
            weight: linear.weight().storage_and_layout(),
            bias: linear.bias().map(Tensor::storage_and_layout),
        }
    }

    fn get(&self, decoding: bool) -> Result<dense::Linear<'_>> {
        Ok(dense::Linear {
            weight: floats(&self.weight)?,
            inputs: self.weight.1.dims()[1],
            bias: self.bias.as_ref().map(floats).transpose()?,
            decoding,
        })
    }
}

/// The final norm and the language-model head.
pub struct LmHead {
    pub(super) config: Arc<Config>,
    pub(super) norm: RmsNorm,
    pub(super) head: Linear,
}

impl LmHead {
    /// Logits (n, vocab) in f32 of rows of the last layer's output `hidden` (n, hidden), before the final norm.
    /// Call it on chunks of rows: a vocabulary is large.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let (_, width) = hidden.dims2()?;
        if width != self.config.hidden_size {
            return Err(Error::invalid(
                "hidden states",
                format!(
                    "have width {width}, where {} is expected",
                    self.config.hidden_size
                ),
            ));
        }
        let logits = self.head.forward(&self.norm.forward(hidden)?)?;
        Ok(logits.to_dtype(DType::F32)?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Result as CandleResult;

    use super::super::{FullAttention, Rope, RopeScaling};
    use super::*;

    fn layer(qk_norm: bool, biases: bool) -> DecoderLayer {
        let config = Config {
            model_type: "qwen3".into(),
            hidden_size: 48,
            intermediate_size: 80,
            num_hidden_layers: 1,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            vocab_size: 10,
            rms_norm_eps: 1e-6,
            rope: Rope {
                theta: 10_000.0,
                scaling: RopeScaling::None,
            },
            max_position_embeddings: 1000,
            qkv_bias: biases,
            output_bias: biases,
            qk_norm,
            tie_word_embeddings: true,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
        };
        let random = |shape: &[usize]| Tensor::randn(0f32, 0.3, shape, &Device::Cpu).unwrap();
        let norm = |n| RmsNorm::new((random(&[n]) + 1.0).unwrap(), 1e-6);
        let linear = |outputs, inputs, bias: bool| {
            let bias = bias.then(|| random(&[outputs]));
            Linear::new(random(&[outputs, inputs]), bias)
        };
        DecoderLayer {
            index: 0,
            tables: Arc::new(Tables::new(&config.rope, 16)),
            config: Arc::new(config),
            input_norm: norm(48),
            qkv: linear(128, 48, biases),
            q_norm: qk_norm.then(|| norm(16)),
            k_norm: qk_norm.then(|| norm(16)),
            output: linear(48, 64, biases),
            mlp_norm: norm(48),
            gate_up: linear(160, 48, false),
            down: linear(48, 80, false),
        }
    }

    fn largest_difference(a: &Tensor, b: &Tensor) -> CandleResult<f32> {
        (a - b)?.abs()?.max_all()?.to_scalar()
    }

    #[test]
    fn blocks_of_rows_equal_the_plain_layer() -> Result<()> {
        let prompts = [2 * BLOCK_ROWS - 9, 30];
        for (qk_norm, biases) in [(false, false), (true, true)] {
            let layer = layer(qk_norm, biases);
            let tokens = prompts.iter().sum::<usize>();
            let hidden = Tensor::randn(0f32, 1.0, (tokens, 48), &Device::Cpu)?;
            let positions = Positions::new(&hidden, (&prompts).into(), &layer.config)?;
            let table = layer.tables.upto(positions.longest);
            let turns = layer.turns(&positions.of_token, &Device::Cpu)?;
            let plain = layer.project(&hidden, &turns)?;
            let fast = layer.project_blocks(&hidden, &positions, &table)?;
            for (a, b) in [
                (&plain.0, &fast.0),
                (&plain.1, &fast.1),
                (&plain.2, &fast.2),
            ] {
                assert!(b.is_contiguous() && largest_difference(a, b)? < 1e-4);
            }
            let o = FullAttention.attend(0, &plain.0, &plain.1, &plain.2, &prompts)?;
            let a = layer.finish(&hidden, &o)?;
            let b = layer.finish_blocks(&hidden, &o, false)?;
            assert!(largest_difference(&a, &b)? < 1e-4);
        }
        Ok(())
    }

    #[test]
    fn both_paths_name_the_layer_that_overflows() -> Result<()> {
        let layer = layer(false, false);
        let hidden = Tensor::zeros((300, 48), DType::F32, &Device::Cpu)?;
        let o = Tensor::full(f32::MAX, (300, 4, 16), &Device::Cpu)?;
        for result in [
            layer.check_finite(&layer.finish(&hidden, &o)?),
            layer.finish_blocks(&hidden, &o, false).map(|_| ()),
        ] {
            let message = result.unwrap_err().to_string();
            assert!(message.starts_with("layer 0: "), "{message}");
        }
        Ok(())
    }
}
