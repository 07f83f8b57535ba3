use super::rope::Rope;

/// Geometry and numeric knobs of a decoder, whatever its family.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `llama`, `mistral`, `qwen2` or `qwen3`.
    pub model_type: String,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    pub rms_norm_eps: f64,
    pub rope: Rope,
    pub max_position_embeddings: usize,
    /// q, k and v projections have biases.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub output_bias: bool,
    /// Each head of q and k passes an RMS norm before RoPE.
    pub qk_norm: bool,
    /// The language-model head is the embedding table.
    pub tie_word_embeddings: bool,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }
}
