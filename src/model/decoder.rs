use candle_core::Tensor;

use super::Attention;
use crate::Result;

/// One decoder layer with its weights.
pub struct DecoderLayer {
    index: usize,
    output_projection: Tensor,
}

impl DecoderLayer {
    /// Which layer of the model this is, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Runs `hidden` (tokens, hidden) of one packed sequence through the layer; `prompt_lens` sums to tokens.
    pub fn forward(
        &self,
        _hidden: &Tensor,
        _prompt_lens: &[usize],
        _attention: &mut dyn Attention,
    ) -> Result<Tensor> {
        unimplemented!()
    }

    /// W_O (hidden, heads · head_dim), as in checkpoints, in the activation dtype.
    pub fn output_projection(&self) -> &Tensor {
        &self.output_projection
    }
}

/// The final norm and the language-model head.
pub struct LmHead {}

impl LmHead {
    /// Logits (n, vocab) in f32 of rows of the last layer's output `hidden` (n, hidden), before the final norm.
    /// Call it on chunks of rows: a vocabulary is large.
    pub fn logits(&self, _hidden: &Tensor) -> Result<Tensor> {
        unimplemented!()
    }
}
