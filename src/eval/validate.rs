use candle_core::Tensor;

use super::methods::EvalMethod;
use super::metrics::{Reference, Totals};
use super::real::{self, Told};
use super::report::{
    LayerError, LayerMethodError, MethodScore, Provenance, ReferenceScore, Report,
};
use super::simulate::{Observed, Simulated};
use crate::data::Corpus;
use crate::model::{Attention, DecoderLayer, LmHead, Model};
use crate::zoo::Windows;
use crate::{Error, Result, interrupt};

/// Logits that stand in memory at once, of the reference and of one method: enough rows that the head's weights are
/// not read for each anew.
const LOGIT_BYTES: usize = 64 << 20;

/// How to evaluate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalOptions {
    /// First tokens of every window that stay exact.
    pub sink: usize,
    /// Latest tokens of every query that stay exact.
    pub recent: usize,
    /// Tokens that leave `recent` at a time in a simulated cache: 1, or 64 as the real one has it.
    pub demote_tokens: usize,
    /// Queries a window whose attention is compared layer by layer; 0 leaves [`Report::layers`] empty.
    pub probe_queries: usize,
    /// `content_sha256` of the entry that is evaluated, for the report.
    pub entry_sha256: Option<String>,
}

impl Default for EvalOptions {
    fn default() -> Self {
        Self {
            sink: 64,
            recent: 256,
            demote_tokens: 1,
            probe_queries: 64,
            entry_sha256: None,
        }
    }
}

/// How far an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step<'a> {
    /// Tokens that ran through a layer of a stream (the reference's, and one a method), of `total`. The head counts
    /// as one more layer.
    pub done: u64,
    pub total: u64,
    /// Such as `layer 3 of 30`.
    pub what: &'a str,
    /// What runs otherwise than it might, once.
    pub warning: Option<&'a str>,
}

/// Runs `corpus` (each prompt one window) through `model`, once at full precision and once a method, and measures how
/// far their next-token distributions part. Every query reads the first `sink` and the latest `recent` tokens of its
/// prompt exactly and all others through the method's cache; a method's error travels through its own hidden states.
///
/// Weights are loaded a layer at a time. Memory: hidden states of methods + 1 streams, one layer, and one window's
/// queries, keys and values. A method in the real cache ([`EvalMethod::real`]) holds all layers, and its pages.
///
/// # Errors
/// Where no window is longer than `sink` + `recent`, two methods share a name, the model or a method gives logits
/// that are not finite, or the run is interrupted.
pub fn validate(
    model: &Model,
    corpus: &Corpus,
    methods: &[EvalMethod],
    options: &EvalOptions,
    progress: &mut dyn FnMut(Step),
) -> Result<Report> {
    let windows = Windows {
        sink_tokens: options.sink,
        recent_tokens: options.recent,
    };
    let context = check(corpus, methods, windows)?;
    for transforms in methods.iter().filter_map(|method| method.real.as_ref()) {
        real::shape(model, transforms, windows)?;
    }
    let layers = model.config().num_hidden_layers;
    let streams = methods.len() + 1;
    let mut progress = Meter {
        report: progress,
        done: 0,
        total: (corpus.tokens * streams * (layers + 1)) as u64,
    };
    if !model.device().is_cpu() {
        progress.add(0, "preparing the GPU (once a machine its driver compiles)")?;
    }

    let embedded = corpus
        .sequences
        .iter()
        .map(|sequence| model.embed(&sequence.token_ids))
        .collect::<Result<Vec<_>>>()?;
    let mut hidden = vec![embedded; streams];
    let mut errors = Vec::new();
    let simulated: Vec<_> = methods.iter().filter(|m| m.real.is_none()).collect();
    model.for_each_layer(0, |layer| {
        let what = format!("layer {} of {layers}", layer.index() + 1);
        let mut observed = Observed {
            methods: &simulated,
            windows,
            queries: options.probe_queries,
            errors: Vec::new(),
            prompts: 0,
        };
        let (reference, others) = hidden.split_at_mut(1);
        push(&layer, corpus, &mut reference[0], &mut observed, &mut |n| {
            progress.add(n, &what)
        })?;
        errors.extend(layer_error(layer.index(), &observed));
        for (method, hidden) in methods.iter().zip(others) {
            if method.real.is_some() {
                continue;
            }
            let mut simulated = Simulated {
                cache: method.cache.as_ref(),
                windows,
                demote_tokens: options.demote_tokens,
            };
            push(&layer, corpus, hidden, &mut simulated, &mut |n| {
                progress.add(n, &what)
            })
            .map_err(|e| of_method(e, &method.name))?;
        }
        Ok(())
    })?;
    for (method, hidden) in methods.iter().zip(&mut hidden[1..]) {
        if let Some(transforms) = &method.real {
            let mut tell = |told: Told| match told {
                Told::Tokens(tokens) => progress.add(tokens * layers, "real cache"),
                Told::Warning(warning) => {
                    progress.tell("real cache", Some(&warning));
                    Ok(())
                }
            };
            *hidden = real::serve(model, corpus, transforms, windows, &mut tell)
                .map_err(|e| of_method(e, &method.name))?;
        }
    }

    let scores = score(
        &model.head()?,
        model.config().vocab_size,
        corpus,
        methods,
        windows,
        &hidden,
        &mut progress,
    )?;
    Ok(Report {
        tokens: corpus.tokens,
        context,
        positions: scores.positions,
        windows,
        provenance: Provenance {
            model: model.id().to_owned(),
            revision: model.revision().map(str::to_owned),
            weights_fingerprint: model.weights_fingerprint()?,
            token_ids_sha256: corpus.token_ids_sha256.clone(),
            entry_sha256: options.entry_sha256.clone(),
        },
        reference: ReferenceScore {
            perplexity: (scores.reference_nll / scores.positions as f64).exp(),
        },
        methods: methods
            .iter()
            .zip(&scores.methods)
            .map(|(method, totals)| {
                let bits = |context| {
                    let Windows {
                        sink_tokens: sink,
                        recent_tokens: recent,
                    } = windows;
                    method.cache.bits_per_element(context, sink, recent)
                };
                MethodScore {
                    name: method.name.clone(),
                    bits_per_element: bits(context),
                    bits_per_element_128k: bits(128 << 10),
                    kl: totals.kl(),
                    kl_stderr: totals.kl_stderr(),
                    perplexity: totals.perplexity(),
                    top1: totals.top1(),
                }
            })
            .collect(),
        layers: errors,
    })
}

struct Meter<'a> {
    report: &'a mut dyn FnMut(Step),
    done: u64,
    total: u64,
}

impl Meter<'_> {
    fn add(&mut self, tokens: usize, what: &str) -> Result<()> {
        self.done += tokens as u64;
        self.tell(what, None);
        interrupt::check()
    }

    fn tell(&mut self, what: &str, warning: Option<&str>) {
        (self.report)(Step {
            done: self.done,
            total: self.total,
            what,
            warning,
        });
    }
}

/// The longest prompt's tokens.
fn check(corpus: &Corpus, methods: &[EvalMethod], windows: Windows) -> Result<usize> {
    for (i, method) in methods.iter().enumerate() {
        if methods[..i].iter().any(|other| other.name == method.name) {
            return Err(Error::invalid(
                format!("method `{}`", method.name),
                "is evaluated twice",
            ));
        }
    }
    windows.check()?;
    let lens = corpus.sequences.iter().flat_map(|s| &s.prompt_lens);
    let context = lens.copied().max().unwrap_or(0);
    let exact = windows.sink_tokens + windows.recent_tokens;
    if measured(context, windows) == 0 {
        return Err(Error::invalid(
            "evaluation data",
            format!(
                "no window is longer than the {exact} tokens that stay exact (the longest has {context}), so nothing \
                 would be read quantized"
            ),
        )
        .hint(format!("raise `--seq-len` above {}", exact + 1)));
    }
    Ok(context)
}

/// Positions of a prompt that read quantized tokens and have a next token.
fn measured(prompt_len: usize, windows: Windows) -> usize {
    prompt_len.saturating_sub(1 + windows.sink_tokens + windows.recent_tokens)
}

/// Names the method at fault, but for interruptions and the like.
fn of_method(error: Error, name: &str) -> Error {
    match error {
        Error::Numeric { place, problem } => Error::Numeric {
            place: format!("method `{name}`, {place}"),
            problem,
        },
        other => other,
    }
}

/// Runs every sequence of one stream through `layer`.
fn push(
    layer: &DecoderLayer,
    corpus: &Corpus,
    hidden: &mut [Tensor],
    attention: &mut dyn Attention,
    done: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<()> {
    for (hidden, sequence) in hidden.iter_mut().zip(&corpus.sequences) {
        *hidden = layer.forward(hidden, &sequence.prompt_lens, attention)?;
        done(sequence.token_ids.len())?;
    }
    Ok(())
}

fn layer_error(layer: usize, observed: &Observed) -> Option<LayerError> {
    if observed.prompts == 0 {
        return None;
    }
    let prompts = observed.prompts as f64;
    let root = |square: f64| Some(square.sqrt()).filter(|x| x.is_finite());
    let methods = observed
        .methods
        .iter()
        .zip(&observed.errors)
        .map(|(method, heads)| LayerMethodError {
            name: method.name.clone(),
            logit_error: heads.iter().map(|(x, _)| root(x / prompts)).collect(),
            output_error: heads.iter().map(|(_, x)| root(x / prompts)).collect(),
        })
        .collect();
    Some(LayerError { layer, methods })
}

struct Scores {
    reference_nll: f64,
    positions: usize,
    methods: Vec<Totals>,
}

fn score(
    head: &LmHead,
    vocab: usize,
    corpus: &Corpus,
    methods: &[EvalMethod],
    windows: Windows,
    hidden: &[Vec<Tensor>],
    progress: &mut Meter,
) -> Result<Scores> {
    let mut scores = Scores {
        reference_nll: 0.0,
        positions: 0,
        methods: vec![Totals::default(); methods.len()],
    };
    let logits = |stream: usize, sequence: usize, start: usize, rows: usize| -> Result<Vec<f32>> {
        let logits = head.logits(&hidden[stream][sequence].narrow(0, start, rows)?)?;
        Ok(logits.flatten_all()?.to_vec1::<f32>()?)
    };
    let block = (LOGIT_BYTES / size_of::<f32>() / vocab).clamp(32, 512);
    for (index, sequence) in corpus.sequences.iter().enumerate() {
        let mut prompt_start = 0;
        for &len in &sequence.prompt_lens {
            let positions = measured(len, windows);
            let first = prompt_start + windows.sink_tokens + windows.recent_tokens;
            prompt_start += len;
            let mut window = vec![Vec::with_capacity(positions); methods.len()];
            for start in (first..first + positions).step_by(block) {
                let rows = block.min(first + positions - start);
                let targets = &sequence.token_ids[start + 1..=start + rows];
                let not_finite = |whose: &str| {
                    Error::numeric(
                        format!(
                            "{whose}, window {}, tokens {start} to {}",
                            index + 1,
                            start + rows - 1
                        ),
                        "logits are not finite",
                    )
                };
                let full = logits(0, index, start, rows)?;
                let reference =
                    Reference::new(&full, vocab).ok_or_else(|| not_finite("full precision"))?;
                scores.reference_nll += reference.nll(targets).iter().sum::<f64>();
                for (i, method) in methods.iter().enumerate() {
                    let quantized = logits(i + 1, index, start, rows)?;
                    let compared = reference
                        .compare(&quantized, targets)
                        .ok_or_else(|| not_finite(&format!("method `{}`", method.name)))?;
                    window[i].extend(compared);
                }
                interrupt::check()?;
            }
            scores.positions += positions;
            for (totals, window) in scores.methods.iter_mut().zip(&window) {
                totals.add_window(window);
            }
        }
        progress.add(sequence.token_ids.len() * (methods.len() + 1), "logits")?;
    }
    Ok(scores)
}
