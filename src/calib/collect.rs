//! The layer-streamed runner: one layer's weights and all hidden states in memory, whatever the model's size.

use std::fmt;
use std::path::PathBuf;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::accumulate::{Accumulator, HoldoutRows, check_finite, output_metric};
use super::checkpoint::{Workspace, is_complete};
use super::moments::{ALGORITHM, LayerRecord, Meta, SCHEMA, Sample, Sums};
use super::progress::Progress;
use super::tensor_sums::{self, TensorAccumulator};
use crate::data::Corpus;
use crate::device;
use crate::kv::attention::{Dims, causal, tensor};
use crate::model::{Attention, DecoderLayer, Model, PackedSequence};
use crate::zoo::{Calibration, ModelInfo, Tool};
use crate::{Error, Result, interrupt};

/// What [`collect`] writes, and where.
#[derive(Clone, Debug)]
pub struct CollectOptions {
    /// The moments file. Work in progress lies beside it, in `<output>.partial/`.
    pub output: PathBuf,
    /// Tokens whose q, k, v, o are kept.
    pub sample_rows: usize,
    /// Of the tokenizer that made the token ids.
    pub tokenizer_sha256: String,
    /// Start over, whatever lies there.
    pub fresh: bool,
    /// Hidden states are kept at least this often, between layers: a resumed run repeats as much of the forward pass.
    pub checkpoint_interval: Duration,
}

pub const DEFAULT_SAMPLE_ROWS: usize = 512;

impl CollectOptions {
    /// Defaults for all but the moments file to write and the hash of the tokenizer.
    pub fn new(output: impl Into<PathBuf>, tokenizer_sha256: impl Into<String>) -> Self {
        Self {
            output: output.into(),
            sample_rows: DEFAULT_SAMPLE_ROWS,
            tokenizer_sha256: tokenizer_sha256.into(),
            fresh: false,
            checkpoint_interval: Duration::from_secs(10),
        }
    }
}

/// What [`collect`] did.
#[derive(Clone, Debug)]
pub struct Collected {
    pub path: PathBuf,
    /// Finished layers found of an earlier run; all of them where the output was complete.
    pub resumed_layers: usize,
    pub timings: Timings,
    /// The most bytes of tensors on the GPU; none on the CPU.
    pub peak_device_bytes: Option<u64>,
}

/// Where the time went.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Timings {
    /// A GPU's driver compiling what it runs for the first time.
    pub prepare: Duration,
    /// Waiting for a layer's weights.
    pub load: Duration,
    /// The decoder without its attention.
    pub decoder: Duration,
    pub attention: Duration,
    pub accumulate: Duration,
    /// Hidden states, the final file, and waiting for layer files.
    pub write: Duration,
}

/// Runs all sequences of `corpus` through `model`, a layer at a time, and writes the moments file. Goes on where an
/// interrupted or killed run of the same inputs stopped; the bytes are those of an unbroken run.
///
/// # Errors
/// [`Error::Interrupted`] after Ctrl-C; inputs that differ from those of the work found
/// there; NaN or infinity in activations, with layer and place.
pub fn collect(
    model: &Model,
    corpus: &Corpus,
    options: &CollectOptions,
    progress: &mut dyn Progress,
) -> Result<Collected> {
    let count = |sequences: &[PackedSequence]| -> usize {
        sequences.iter().map(|s| s.token_ids.len()).sum()
    };
    let counted = [count(&corpus.sequences), count(&corpus.holdout)];
    if counted != [corpus.tokens, corpus.holdout_tokens] || corpus.tokens == 0 {
        let problem = format!(
            "{} tokens to calibrate and {} held out are declared, but its sequences have {} and {}",
            corpus.tokens, corpus.holdout_tokens, counted[0], counted[1]
        );
        return Err(Error::invalid("corpus", problem));
    }
    let meta = meta(model, corpus, options)?;
    let layers = meta.model.layers;
    let mut timings = Timings::default();
    let Some(workspace) = Workspace::open(&options.output, &meta, options.fresh)? else {
        let output = options.output.display();
        progress.note(&format!("`{output}` is complete already"));
        return Ok(Collected {
            path: options.output.clone(),
            resumed_layers: layers,
            timings,
            peak_device_bytes: None,
        });
    };
    let (finished, damaged) = workspace.finished_layers();
    for i in damaged {
        progress.note(&format!(
            "the checkpoint of layer {i} is damaged: computing it again"
        ));
    }
    if let (Some(first), Some(last)) = (
        finished.iter().position(|done| !done),
        finished.iter().rposition(|done| !done),
    ) {
        let sequences: Vec<_> = corpus.sequences.iter().chain(&corpus.holdout).collect();
        let kept = workspace.hidden(model.device())?;
        let (start, hidden) = match kept {
            Some((at, hidden)) if at <= first && hidden.len() == sequences.len() => (at, hidden),
            _ => {
                let embed = |sequence: &&PackedSequence| model.embed(&sequence.token_ids);
                (0, sequences.iter().map(embed).collect::<Result<_>>()?)
            }
        };
        progress.start(layers, start, corpus.tokens + corpus.holdout_tokens);
        thread::scope(|scope| {
            let mut run = Run {
                workspace: &workspace,
                scope,
                writing: None,
                sequences,
                calibration: corpus.sequences.len(),
                tokens: corpus.tokens,
                sample_rows: sample_rows(corpus.tokens, meta.sample_rows, corpus.seed),
                hidden,
                hidden_kept: Instant::now(),
                hidden_cost: Duration::ZERO,
                checkpoint_interval: options.checkpoint_interval,
                timings: &mut timings,
                progress,
            };
            let mut waiting = Instant::now();
            model.for_each_layer(start, |layer| {
                run.timings.load += waiting.elapsed();
                let i = layer.index();
                if i == start {
                    run.prepare(&layer, meta.dims(i))?;
                }
                if i <= last {
                    run.layer(&layer, meta.dims(i), finished[i], i == last)?;
                }
                waiting = Instant::now();
                Ok(())
            })?;
            run.written()
        })?;
    }
    let prompts = corpus
        .holdout
        .iter()
        .flat_map(|sequence| &sequence.prompt_lens);
    let prompt_lens: Vec<u32> = prompts.map(|&n| n as u32).collect();
    let writing = Instant::now();
    workspace.assemble(&prompt_lens)?;
    timings.write += writing.elapsed();
    Ok(Collected {
        path: options.output.clone(),
        resumed_layers: finished.iter().filter(|&&done| done).count(),
        timings,
        peak_device_bytes: device::peak_memory(model.device())?,
    })
}

/// A run at work.
struct Run<'a, 'scope, 'env> {
    workspace: &'env Workspace,
    /// Layers are written while the next one runs.
    scope: &'scope Scope<'scope, 'env>,
    writing: Option<ScopedJoinHandle<'scope, Result<()>>>,
    /// The first `calibration` enter the moments, the others are held out.
    sequences: Vec<&'a PackedSequence>,
    calibration: usize,
    tokens: usize,
    sample_rows: Vec<usize>,
    hidden: Vec<Tensor>,
    hidden_kept: Instant,
    /// Of keeping them the last time.
    hidden_cost: Duration,
    checkpoint_interval: Duration,
    timings: &'a mut Timings,
    progress: &'a mut dyn Progress,
}

impl Run<'_, '_, '_> {
    /// Has a GPU's driver compile all that a layer needs, and keeps that out of every other number.
    fn prepare(&mut self, layer: &DecoderLayer, dims: Dims) -> Result<()> {
        let device = self.hidden[0].device().clone();
        if device.is_cpu() {
            return Ok(());
        }
        let begin = Instant::now();
        self.progress
            .note("preparing the GPU; its driver compiles for up to half a minute, once a machine");
        let rows = self.hidden[0].dim(0)?.min(16);
        let few = self.hidden[0].narrow(0, 0, rows)?;
        for mode in [Mode::Accumulate, Mode::Keep] {
            let sums = Observations::new(dims, 0, vec![0], &device);
            let mut observer = Observer::new(dims, mode, sums);
            layer.forward(&few, &[rows], &mut observer)?;
            observer.sums.finish()?;
        }
        tensor_sums::output_metric(layer.output_projection(), dims)?;
        device.synchronize()?;
        self.timings.prepare = begin.elapsed();
        device::reset_peak_memory(&device)
    }

    /// Waits for the layer that is being written.
    fn written(&mut self) -> Result<()> {
        if let Some(writing) = self.writing.take() {
            let begin = Instant::now();
            writing
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            self.timings.write += begin.elapsed();
        }
        Ok(())
    }

    /// Takes the hidden states through one layer; sums and commits it unless `finished`.
    fn layer(
        &mut self,
        layer: &DecoderLayer,
        dims: Dims,
        finished: bool,
        last: bool,
    ) -> Result<()> {
        let i = layer.index();
        let device = self.hidden[0].device().clone();
        let tokens = if finished { 0 } else { self.tokens };
        let sums = Observations::new(dims, tokens, self.sample_rows.clone(), &device);
        let mut observer = Observer::new(dims, Mode::Forward, sums);
        let begin = Instant::now();
        for (at, sequence) in self.sequences.iter().enumerate() {
            interrupt::check()?;
            observer.mode = if finished {
                Mode::Forward
            } else if at < self.calibration {
                Mode::Accumulate
            } else {
                Mode::Keep
            };
            let (hidden, lens) = (&self.hidden[at], &sequence.prompt_lens);
            if last {
                // Nobody reads what comes after it.
                layer.attend(hidden, lens, &mut observer)?;
            } else {
                self.hidden[at] = layer.forward(hidden, lens, &mut observer)?;
            }
            if self.progress.tokens(sequence.token_ids.len()).is_break() {
                return Err(Error::Interrupted);
            }
        }
        device.synchronize()?;
        let observed = observer.attention + observer.accumulate;
        self.timings.decoder += begin.elapsed().saturating_sub(observed);
        self.timings.attention += observer.attention;
        let Observer {
            sums,
            holdout,
            accumulate,
            ..
        } = observer;
        self.timings.accumulate += accumulate;
        if !finished {
            let begin = Instant::now();
            let (sums, sample) = sums.finish()?;
            let projection = layer.output_projection();
            let wo = if device.is_cpu() {
                let projection = projection.to_dtype(DType::F32)?.flatten_all()?;
                output_metric(&projection.to_vec1::<f32>()?, dims)
            } else {
                tensor_sums::output_metric(projection, dims)?
            };
            let record = LayerRecord {
                sums,
                wo,
                sample,
                holdout,
            };
            self.timings.accumulate += begin.elapsed();
            self.written()?;
            let workspace = self.workspace;
            let write = move || workspace.write_layer(i, &record);
            self.writing = Some(self.scope.spawn(write));
        }
        // Often enough that a run killed again and again still gets on, rarely enough to cost little; and after Ctrl-C,
        // which ends the run here.
        let interval = self.checkpoint_interval.min(30 * self.hidden_cost);
        let due = self.hidden_kept.elapsed() >= interval || interrupt::check().is_err();
        if due && !last {
            self.written()?;
            let begin = Instant::now();
            self.workspace.write_hidden(i + 1, &self.hidden)?;
            self.hidden_kept = Instant::now();
            self.hidden_cost = begin.elapsed();
            self.timings.write += self.hidden_cost;
        }
        self.progress.layer_done(i);
        Ok(())
    }
}

/// What to do with the q, k, v of a sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Forward,
    Accumulate,
    Keep,
}

/// The sums of a layer, where its activations are.
enum Observations {
    Cpu(Accumulator),
    Device(TensorAccumulator),
}

impl Observations {
    fn new(dims: Dims, tokens: usize, sample_rows: Vec<usize>, device: &Device) -> Self {
        if device.is_cpu() {
            Self::Cpu(Accumulator::new(dims, tokens, sample_rows))
        } else {
            Self::Device(TensorAccumulator::new(dims, sample_rows))
        }
    }

    fn finish(self) -> Result<(Sums, Sample)> {
        match self {
            Self::Cpu(sums) => Ok(sums.finish()),
            Self::Device(sums) => sums.finish(),
        }
    }
}

/// Looks on through the seam of the decoder.
struct Observer {
    dims: Dims,
    mode: Mode,
    sums: Observations,
    holdout: HoldoutRows,
    attention: Duration,
    accumulate: Duration,
}

impl Observer {
    fn new(dims: Dims, mode: Mode, sums: Observations) -> Self {
        Self {
            dims,
            mode,
            sums,
            holdout: HoldoutRows::default(),
            attention: Duration::ZERO,
            accumulate: Duration::ZERO,
        }
    }
}

impl Attention for Observer {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        prompt_lens: &[usize],
    ) -> Result<Tensor> {
        // What was queued before is not attention's time.
        q.device().synchronize()?;
        let begin = Instant::now();
        let observing = self.mode == Mode::Accumulate;
        let o = match &mut self.sums {
            Observations::Cpu(sums) => {
                let floats = |x: &Tensor| -> Result<Vec<f32>> {
                    Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
                };
                let (q_rows, k_rows, v_rows) = (floats(q)?, floats(k)?, floats(v)?);
                let out = causal(&q_rows, &k_rows, &v_rows, self.dims, prompt_lens, observing)?;
                self.attention += begin.elapsed();
                let begin = Instant::now();
                match self.mode {
                    Mode::Forward => {}
                    Mode::Accumulate => {
                        let weights = out.key_weights.as_deref().unwrap_or_default();
                        sums.observe(layer, &q_rows, &k_rows, &v_rows, &out.o, weights)?;
                    }
                    Mode::Keep => {
                        check_finite(layer, self.dims, &q_rows, &k_rows, &v_rows, &out.o)?;
                        self.holdout.extend(&q_rows, &k_rows, &v_rows);
                    }
                }
                self.accumulate += begin.elapsed();
                Tensor::from_vec(out.o, q.shape(), q.device())?
            }
            Observations::Device(sums) => {
                let floats = |x: &Tensor| x.to_dtype(DType::F32);
                let (q, k, v) = (floats(q)?, floats(k)?, floats(v)?);
                let (o, weights) = tensor::causal_in_place(&q, &k, &v, prompt_lens, observing)?;
                o.device().synchronize()?;
                self.attention += begin.elapsed();
                let begin = Instant::now();
                match (self.mode, weights) {
                    (Mode::Accumulate, Some(weights)) => {
                        sums.observe(layer, &q, &k, &v, &o, &weights)?;
                    }
                    (Mode::Keep, _) => {
                        tensor_sums::keep(&mut self.holdout, layer, self.dims, &q, &k, &v, &o)?;
                    }
                    _ => {}
                }
                o.device().synchronize()?;
                self.accumulate += begin.elapsed();
                o
            }
        };
        Ok(o.to_dtype(q.dtype())?)
    }
}

/// The same tokens for all layers, ascending.
fn sample_rows(tokens: usize, rows: usize, seed: u64) -> Vec<usize> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut rows = rand::seq::index::sample(&mut random, tokens, rows).into_vec();
    rows.sort_unstable();
    rows
}

/// Name, fingerprints and geometry of a model, as an entry states them.
pub fn model_info(model: &Model) -> Result<ModelInfo> {
    let config = model.config();
    let layers = config.num_hidden_layers;
    Ok(ModelInfo {
        id: model.id().to_owned(),
        revision: model.revision().map(str::to_owned),
        architecture: config.model_type.clone(),
        config_sha256: model.config_sha256().to_owned(),
        weights_fingerprint: model.weights_fingerprint()?,
        layers,
        heads: vec![config.num_attention_heads; layers],
        kv_heads: vec![config.num_key_value_heads; layers],
        head_dim: vec![config.head_dim; layers],
    })
}

/// The inputs of a run, as the file will state them.
fn meta(model: &Model, corpus: &Corpus, options: &CollectOptions) -> Result<Meta> {
    Ok(Meta {
        schema: SCHEMA,
        model: model_info(model)?,
        calibration: Calibration {
            tokens: corpus.tokens,
            prompts: corpus.prompts,
            seq_len: corpus.seq_len,
            token_ids_sha256: corpus.token_ids_sha256.clone(),
            tokenizer_sha256: options.tokenizer_sha256.clone(),
            seed: corpus.seed,
            dtype: model.dtype().as_str().to_owned(),
            device: if model.device().is_cpu() {
                "cpu"
            } else {
                "cuda"
            }
            .to_owned(),
        },
        holdout_tokens: corpus.holdout_tokens,
        sample_rows: options.sample_rows.min(corpus.tokens),
        tool: Tool {
            name: env!("CARGO_PKG_NAME").to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            algorithm: ALGORITHM,
        },
        content_sha256: String::new(),
    })
}

/// What a run will take, from the model's headers and the corpus alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    pub architecture: String,
    pub layers: usize,
    pub hidden_size: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: String,
    pub tokens: usize,
    pub holdout_tokens: usize,
    pub seq_len: usize,
    /// Of the decoder, as stored.
    pub weights_bytes: u64,
    /// One layer once loaded.
    pub layer_bytes: u64,
    /// Of all sequences.
    pub hidden_bytes: u64,
    /// The moments file.
    pub moments_bytes: u64,
    /// The most memory at a time, estimated; of the host where a GPU computes.
    pub peak_memory_bytes: u64,
    /// The most memory of the GPU at a time, estimated; none on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_device_bytes: Option<u64>,
    /// The most disk at a time: the moments file, finished layers and hidden states.
    pub peak_disk_bytes: u64,
}

/// Estimates a run of [`collect`] without reading weights or writing anything.
///
/// # Errors
/// What is at the output belongs to other inputs.
pub fn plan(model: &Model, corpus: &Corpus, options: &CollectOptions) -> Result<Plan> {
    is_complete(
        &options.output,
        &meta(model, corpus, options)?,
        options.fresh,
    )?;
    let config = model.config();
    let (heads, kv_heads, d) = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    );
    let sizes = model.sizes();
    let element = model.dtype().size_in_bytes();
    let Corpus {
        tokens,
        holdout_tokens,
        seq_len,
        ..
    } = *corpus;
    let longest = seq_len.min(tokens.max(holdout_tokens));
    let hidden_bytes = ((tokens + holdout_tokens) * config.hidden_size * element) as u64;
    let sums = kv_heads * (7 * d * d + 2 * d + 2) * 8;
    let sample = options.sample_rows.min(tokens) * 2 * (heads + kv_heads) * d * 4;
    let holdout = holdout_tokens * (heads + 2 * kv_heads) * d * 2;
    let layer_file = (sums + sample + holdout) as u64;
    let moments_bytes = layer_file * config.num_hidden_layers as u64;
    // Keys and values wait for the second pass.
    let second_pass = (tokens * 2 * kv_heads * d * 4) as u64;
    // q, k, v, o once as tensors and once as slices; the hidden states of a sequence and their norms; the MLP.
    let sequence = longest
        * (2 * 2 * (heads + kv_heads) * d * 4
            + 4 * config.hidden_size * element
            + 3 * config.intermediate_size * element);
    let program = 64 << 20;
    // The next layer loads while one works, and the last one's record is written.
    let computing = 2 * sizes.layer_bytes + hidden_bytes + second_pass + sequence as u64;
    let (peak_memory_bytes, peak_device_bytes) = if model.device().is_cpu() {
        (program + computing + 2 * layer_file, None)
    } else {
        // Scores, masked, as probabilities and squared, of a block of queries.
        let scores = (tensor::block_scores(heads, longest) * 4 * 4) as u64;
        let libraries = 1 << 29;
        let host = 2 * libraries + sizes.layer_bytes + 2 * hidden_bytes + 2 * layer_file;
        // A quarter lies unused between tensors.
        let device = libraries + (computing + scores) * 5 / 4;
        (host, Some(device))
    };
    Ok(Plan {
        architecture: config.model_type.clone(),
        layers: config.num_hidden_layers,
        hidden_size: config.hidden_size,
        heads,
        kv_heads,
        head_dim: d,
        dtype: model.dtype().as_str().to_owned(),
        tokens,
        holdout_tokens,
        seq_len,
        weights_bytes: sizes.stored_bytes,
        layer_bytes: sizes.layer_bytes,
        hidden_bytes,
        moments_bytes,
        peak_memory_bytes,
        peak_device_bytes,
        peak_disk_bytes: 2 * moments_bytes + hidden_bytes,
    })
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes: u64| indicatif::BinaryBytes(bytes).to_string();
        let mut rows = vec![
            (
                "model",
                format!(
                    "{}, {} layers, hidden size {}, {} heads, {} KV heads, head_dim {}",
                    self.architecture,
                    self.layers,
                    self.hidden_size,
                    self.heads,
                    self.kv_heads,
                    self.head_dim
                ),
            ),
            (
                "tokens",
                format!(
                    "{} to calibrate, {} held out, sequences of up to {}",
                    self.tokens, self.holdout_tokens, self.seq_len
                ),
            ),
            (
                "weights",
                format!(
                    "{} stored, {} a layer once loaded as {}",
                    size(self.weights_bytes),
                    size(self.layer_bytes),
                    self.dtype
                ),
            ),
            ("hidden states", size(self.hidden_bytes)),
            ("moments file", size(self.moments_bytes)),
            (
                "peak memory",
                format!("about {}", size(self.peak_memory_bytes)),
            ),
            ("peak disk", format!("about {}", size(self.peak_disk_bytes))),
        ];
        if let Some(peak) = self.peak_device_bytes {
            rows.push(("peak GPU", format!("about {}", size(peak))));
        }
        for (i, (name, value)) in rows.iter().enumerate() {
            let end = if i + 1 < rows.len() { "\n" } else { "" };
            write!(f, "{name:<14} {value}{end}")?;
        }
        Ok(())
    }
}
