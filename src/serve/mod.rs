//! Generation: a model with all its layers in memory, going on with sequences whose keys and values lie in a
//! [`Pool`].
//!
//! [`Resident`] holds the weights, an [`Engine`] runs steps of a ragged batch, and [`generate`] makes text of one
//! sequence.

mod generate;
#[cfg(feature = "cuda")]
mod graph;

use candle_core::Tensor;
#[cfg(feature = "cuda")]
use candle_core::{CudaDevice, Device};

pub use generate::{GenerateOptions, Generated, Sampling, Stop, generate};
#[cfg(feature = "cuda")]
use graph::StepGraph;

use crate::kv::attention::Dims;
use crate::kv::pool::{Pool, SequenceId};
use crate::model::{Attention, Batch, DecoderLayer, LmHead, Model};
use crate::{Error, Result};

/// A model's weights in memory, all of them.
pub struct Resident<'m> {
    model: &'m Model,
    layers: Vec<DecoderLayer>,
    head: LmHead,
}

impl<'m> Resident<'m> {
    /// Loads every layer and the head.
    ///
    /// # Errors
    /// What [`Model::layer`] says; an interruption.
    pub fn load(model: &'m Model) -> Result<Self> {
        let mut layers = Vec::new();
        model.for_each_layer(0, |layer| {
            layers.push(layer);
            Ok(())
        })?;
        Ok(Self {
            model,
            layers,
            head: model.head()?,
        })
    }

    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Shape of every layer's attention.
    ///
    /// # Errors
    /// Heads that KV heads do not divide.
    pub fn dims(model: &Model) -> Result<Dims> {
        let config = model.config();
        Dims::new(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
    }
}

/// Sequences that a model goes on with.
pub struct Engine<'r, 'm> {
    resident: &'r Resident<'m>,
    pub pool: Pool,
    #[cfg(feature = "cuda")]
    graphs: Graphs,
}

/// The decode step that was captured last, on a GPU.
#[cfg(feature = "cuda")]
enum Graphs {
    None,
    One(graph::StepGraph),
    /// Every launch by itself: asked for, or the driver refused to capture, and why.
    Off(Option<Error>),
}

/// The seam: queries, keys and values of a layer go to the pool's step that is under way.
struct Pooled<'a>(&'a mut Pool);

impl Attention for Pooled<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _: &[usize],
    ) -> Result<Tensor> {
        self.0.attend(layer, q, k, v)
    }
}

impl<'r, 'm> Engine<'r, 'm> {
    pub fn new(resident: &'r Resident<'m>, pool: Pool) -> Self {
        Self {
            resident,
            pool,
            #[cfg(feature = "cuda")]
            graphs: Graphs::None,
        }
    }

    pub fn resident(&self) -> &'r Resident<'m> {
        self.resident
    }

    /// Appends `tokens` to each sequence: one step for all of them. Returns the last layer's output (tokens, hidden)
    /// of every token, in their order.
    ///
    /// # Errors
    /// What [`Pool::begin`] says; more tokens than the model's context; a token id beyond the vocabulary. The
    /// sequences then hold what they held before.
    pub fn step(&mut self, batch: &[(SequenceId, &[u32])]) -> Result<Tensor> {
        let lens: Vec<_> = batch.iter().map(|(_, tokens)| tokens.len()).collect();
        let starts: Vec<_> = batch
            .iter()
            .map(|&(id, _)| self.pool.tokens(id))
            .collect::<Result<_>>()?;
        let tokens: Vec<u32> = batch
            .iter()
            .flat_map(|(_, tokens)| *tokens)
            .copied()
            .collect();
        let hidden = self.resident.model.embed(&tokens)?;
        let appends: Vec<_> = batch
            .iter()
            .map(|(id, tokens)| (*id, tokens.len()))
            .collect();
        self.pool.begin(&appends)?;
        let hidden = self.run(hidden, &lens, &starts)?;
        self.pool.finish()?;
        Ok(hidden)
    }

    /// The layers, over the pool's step that is under way.
    fn run(&mut self, hidden: Tensor, lens: &[usize], starts: &[usize]) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let (Device::Cuda(device), Some(key)) = (hidden.device().clone(), self.pool.replay_key())
        {
            return self.replay(&device, key, hidden, starts);
        }
        let place = Batch {
            lens,
            starts: Some(starts),
        };
        let mut hidden = hidden;
        for layer in &self.resident.layers {
            hidden = layer.forward(&hidden, place, &mut Pooled(&mut self.pool))?;
        }
        Ok(hidden)
    }

    /// A decode step by one launch, where the like of it was captured before.
    #[cfg(feature = "cuda")]
    fn replay(
        &mut self,
        device: &CudaDevice,
        key: u64,
        hidden: Tensor,
        starts: &[usize],
    ) -> Result<Tensor> {
        let layers = &self.resident.layers;
        let Some(last) = layers.last() else {
            return Ok(hidden);
        };
        let turns = last.turns(starts, hidden.device())?;
        let hidden = match &self.graphs {
            Graphs::One(graph) if graph.fits(key) => graph.replay(&hidden, &turns)?,
            Graphs::Off(_) => {
                let mut hidden = hidden;
                for layer in layers {
                    hidden = layer.queue(&hidden, &turns, &mut Pooled(&mut self.pool))?;
                }
                hidden
            }
            _ => {
                let (hidden, graph) =
                    StepGraph::capture(device, layers, &mut self.pool, key, hidden, turns)?;
                self.graphs = match graph {
                    Ok(graph) => Graphs::One(graph),
                    Err(e) => Graphs::Off(Some(e)),
                };
                hidden
            }
        };
        // Layers of a graph cannot be looked at one by one: which of them it was is not known.
        last.check_finite(&hidden).map_err(|e| match e {
            Error::Numeric { problem, .. } => {
                Error::numeric("decode step, after the last layer", problem)
            }
            other => other,
        })?;
        Ok(hidden)
    }

    /// Queues the layers of the last step once more, where they are a graph: they write what they wrote. For timing.
    ///
    /// # Errors
    /// A driver that refuses.
    #[cfg(feature = "cuda")]
    pub fn replay_again(&self) -> Result<bool> {
        match &self.graphs {
            Graphs::One(graph) => graph.launch().map(|()| true),
            _ => Ok(false),
        }
    }

    /// Launches every kernel of decode steps by itself, to compare.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn without_graphs(self) -> Self {
        Self {
            graphs: Graphs::Off(None),
            ..self
        }
    }

    /// What a person should know where the driver refused to capture decode steps; nothing on the CPU.
    #[allow(clippy::unused_self)]
    pub fn graph_warning(&self) -> Option<String> {
        #[cfg(feature = "cuda")]
        if let Graphs::Off(Some(reason)) = &self.graphs {
            return Some(format!(
                "decode steps were launched kernel by kernel: {reason}"
            ));
        }
        None
    }

    /// Logits (n, vocab) in f32 of rows of [`Self::step`]'s output.
    ///
    /// # Errors
    /// Rows of another width.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.resident.head.logits(hidden)
    }

    /// Appends all of `tokens`, `chunk` a step, and returns the last one's output (1, hidden).
    ///
    /// # Errors
    /// No tokens; what [`Self::step`] says; an interruption between two steps.
    pub fn prefill(&mut self, id: SequenceId, tokens: &[u32], chunk: usize) -> Result<Tensor> {
        let mut last = None;
        for tokens in tokens.chunks(chunk.max(1)) {
            crate::interrupt::check()?;
            let hidden = self.step(&[(id, tokens)])?;
            last = Some(hidden.narrow(0, tokens.len() - 1, 1)?);
        }
        last.ok_or_else(|| Error::invalid("prompt", "holds no token"))
    }
}
