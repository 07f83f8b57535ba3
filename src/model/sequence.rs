/// Token ids of one or more prompts laid end to end. Positions restart at 0 with every prompt, and prompts never
/// attend to each other (a block-diagonal causal mask).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedSequence {
    pub token_ids: Vec<u32>,
    /// Sums to `token_ids.len()`; no zero.
    pub prompt_lens: Vec<usize>,
}
