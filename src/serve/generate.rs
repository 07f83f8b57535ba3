use std::time::Instant;

use candle_core::{IndexOp, Tensor};
use candle_transformers::generation::{LogitsProcessor, Sampling as Processor};

use super::Engine;
use crate::{Error, Result, interrupt};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampling {
    /// 0: always the likeliest token.
    pub temperature: f64,
    /// Only the so many likeliest tokens.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together have this probability.
    pub top_p: Option<f64>,
    pub seed: u64,
}

impl Sampling {
    /// # Errors
    /// A temperature below 0, a share outside (0, 1], no tokens to choose from.
    pub fn check(&self) -> Result<()> {
        let wrong = |flag: &str, problem: String| Err(Error::invalid(flag, problem));
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return wrong(
                "--temperature",
                format!("{} is not 0 or more", self.temperature),
            );
        }
        if self.top_k == Some(0) {
            return wrong("--top-k", "leaves no token to choose".into());
        }
        match self.top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => wrong("--top-p", format!("{p} is not in (0, 1]")),
            _ => Ok(()),
        }
    }

    fn processor(self) -> LogitsProcessor {
        let temperature = self.temperature;
        let sampling = match (self.top_k, self.top_p) {
            // So cold, the likeliest token has all of the probability, and logits over it may overflow.
            _ if temperature < 1e-6 => Processor::ArgMax,
            (None, None) => Processor::All { temperature },
            (Some(k), None) => Processor::TopK { k, temperature },
            (None, Some(p)) => Processor::TopP { p, temperature },
            (Some(k), Some(p)) => Processor::TopKThenTopP { k, p, temperature },
        };
        LogitsProcessor::from_sampling(self.seed, sampling)
    }
}

#[derive(Clone, Debug)]
pub struct GenerateOptions {
    pub max_tokens: usize,
    /// Token ids that end the text; they are not part of it.
    pub stop: Vec<u32>,
    pub sampling: Sampling,
    /// Tokens of the prompt that a step takes.
    pub chunk: usize,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stop {
    EndOfText,
    MaxTokens,
    /// Ctrl-C; what was generated until then stands.
    Interrupted,
}

/// What was generated, and at what cost.
#[derive(Clone, Debug)]
pub struct Generated {
    pub token_ids: Vec<u32>,
    pub stop: Stop,
    pub prefill_seconds: f64,
    /// Of all tokens after the first.
    pub decode_seconds: f64,
    /// Tokens that the cache holds at the end,
    pub cached_tokens: usize,
    /// and their bytes.
    pub cache_bytes: usize,
}

impl Generated {
    /// Tokens a second after the first one; `None` where there was none.
    pub fn decode_rate(&self) -> Option<f64> {
        let steps = self.token_ids.len().checked_sub(1).filter(|&n| n > 0)?;
        Some(steps as f64 / self.decode_seconds.max(1e-9))
    }
}

/// Goes on after `prompt` in a sequence of its own, and hands every token to `take` as it comes.
///
/// # Errors
/// An empty prompt, out of pages, logits that are not finite, what `take` says.
pub fn generate(
    engine: &mut Engine,
    prompt: &[u32],
    options: &GenerateOptions,
    take: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<Generated> {
    options.sampling.check()?;
    let id = engine.pool.create();
    let generated = go_on(engine, id, prompt, options, take);
    engine.pool.free(id)?;
    generated
}

fn go_on(
    engine: &mut Engine,
    id: crate::kv::pool::SequenceId,
    prompt: &[u32],
    options: &GenerateOptions,
    take: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<Generated> {
    let mut processor = options.sampling.processor();
    let mut choose = |engine: &Engine, hidden: &Tensor| -> Result<u32> {
        let logits = engine.logits(hidden)?.i(0)?;
        let largest = logits.max(0)?.to_scalar::<f32>()?;
        if !largest.is_finite() {
            return Err(Error::numeric("next token", "logits are not finite"));
        }
        Ok(processor.sample(&logits)?)
    };
    let started = Instant::now();
    let mut hidden = engine.prefill(id, prompt, options.chunk)?;
    let mut token_ids = Vec::new();
    let mut stop = Stop::MaxTokens;
    let mut decoding = Instant::now();
    while token_ids.len() < options.max_tokens {
        let token = choose(engine, &hidden)?;
        if token_ids.is_empty() {
            decoding = Instant::now();
        }
        if options.stop.contains(&token) {
            stop = Stop::EndOfText;
            break;
        }
        token_ids.push(token);
        take(token)?;
        if interrupt::check().is_err() {
            stop = Stop::Interrupted;
            break;
        }
        if token_ids.len() < options.max_tokens {
            hidden = engine.step(&[(id, &[token])])?;
        }
    }
    Ok(Generated {
        token_ids,
        stop,
        prefill_seconds: (decoding - started).as_secs_f64(),
        decode_seconds: decoding.elapsed().as_secs_f64(),
        cached_tokens: engine.pool.tokens(id)?,
        cache_bytes: engine.pool.sequence_bytes(id)?,
    })
}
