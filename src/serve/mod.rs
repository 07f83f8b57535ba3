//! Generation: a model with all its layers in memory, going on with sequences whose keys and values lie in a
//! [`Pool`].
//!
//! [`Resident`] holds the weights, an [`Engine`] runs steps of a ragged batch, and [`generate`] makes text of one
//! sequence.

mod generate;

use candle_core::Tensor;

pub use generate::{GenerateOptions, Generated, Sampling, Stop, generate};

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
        Self { resident, pool }
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
        let mut hidden = self.resident.model.embed(&tokens)?;
        let appends: Vec<_> = batch
            .iter()
            .map(|(id, tokens)| (*id, tokens.len()))
            .collect();
        self.pool.begin(&appends)?;
        let place = Batch {
            lens: &lens,
            starts: Some(&starts),
        };
        for layer in &self.resident.layers {
            hidden = layer.forward(&hidden, place, &mut Pooled(&mut self.pool))?;
        }
        self.pool.finish()?;
        Ok(hidden)
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
