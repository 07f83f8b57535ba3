//! Prompts in, packed token ids out.
//!
//! ```text
//!  .txt .jsonl .parquet ──prompts::read──▶ Prompt ──Tokenizer::encode_prompts──▶ TokenizedPrompt
//!                          (chat template)                                        │
//!           PackedSequence of calibration ◀──pack── ──windows──▶ PackedSequence of evaluation
//! ```

pub mod bundled;
pub mod chat_template;
mod gguf_tokenizer;
mod guard;
pub mod pack;
mod parquet_rows;
pub mod prompts;
mod python_json;
pub mod tokenizer;

pub use chat_template::ChatTemplate;
pub use pack::{
    Corpus, Overlong, PackOptions, TokenizedPrompt, WindowOptions, min_calibration_tokens, pack,
    windows,
};
pub use prompts::Prompt;
pub use tokenizer::{TokenStream, Tokenizer};
