//! Token ids into sequences: packed prompts for calibration, joined windows for evaluation.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

use crate::files::hex;
use crate::model::PackedSequence;
use crate::{Error, Result};

/// One prompt's token ids and where the prompt stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizedPrompt {
    /// File, and line or row where the file holds more than one.
    pub place: String,
    pub token_ids: Vec<u32>,
}

/// What to do with a prompt of more than `seq_len` tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlong {
    /// Its pieces of `seq_len` tokens become prompts of their own.
    #[default]
    Split,
    /// Keep its first `seq_len` tokens.
    Truncate,
    /// Refuse it by name.
    Error,
}

/// Sequences for one run, and the fingerprint of all their tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corpus {
    /// Of at most `seq_len` tokens each.
    pub sequences: Vec<PackedSequence>,
    /// Of one prompt each; no token of theirs is in `sequences`. Empty in an evaluation corpus.
    pub holdout: Vec<PackedSequence>,
    /// Prompts in `sequences`: pieces of split prompts and evaluation windows count as one each.
    pub prompts: usize,
    /// Tokens in `sequences`.
    pub tokens: usize,
    /// Tokens in `holdout`.
    pub holdout_tokens: usize,
    pub seq_len: usize,
    pub seed: u64,
    /// SHA-256 over `sequences`, then `holdout`, all numbers as little-endian u32: the number of sequences, and of each
    /// sequence the number of its prompts, their lengths and the ids.
    pub token_ids_sha256: String,
}

/// How [`pack`] fills sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackOptions {
    pub seq_len: usize,
    /// Calibration tokens, the holdout not counted; `None` takes all there are.
    pub budget_tokens: Option<usize>,
    pub seed: u64,
    pub overlong: Overlong,
    /// Tokens to hold out, 0 for none; never more than a quarter of all tokens.
    pub holdout_tokens: usize,
    /// Longest held-out sequence, capped by `seq_len`: the smaller, the more documents are held out.
    pub holdout_seq_len: usize,
    /// Fewer calibration tokens than this are refused; see [`min_calibration_tokens`].
    pub min_tokens: usize,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            seq_len: 4096,
            budget_tokens: None,
            seed: 0,
            overlong: Overlong::default(),
            holdout_tokens: DEFAULT_HOLDOUT_TOKENS,
            holdout_seq_len: usize::MAX,
            min_tokens: MIN_CALIBRATION_TOKENS,
        }
    }
}

/// How [`windows`] cuts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowOptions {
    /// Tokens of every window.
    pub seq_len: usize,
    /// Upper bound of tokens; `None` takes every whole window.
    pub budget_tokens: Option<usize>,
    /// Chooses windows where the budget does not cover them all.
    pub seed: u64,
    /// Stands between two documents, see [`super::Tokenizer::separator`].
    pub separator: Option<u32>,
}

pub const DEFAULT_HOLDOUT_TOKENS: usize = 4096;

/// Below this, moments describe the prompts rather than the model.
pub const MIN_CALIBRATION_TOKENS: usize = 2048;

/// The least tokens to calibrate `head_dim` channels with: a moment of rank head_dim needs several times as many rows.
pub const fn min_calibration_tokens(head_dim: usize) -> usize {
    let by_rank = 8 * head_dim;
    if by_rank > MIN_CALIBRATION_TOKENS {
        by_rank
    } else {
        MIN_CALIBRATION_TOKENS
    }
}

/// Calibration sequences: prompts shuffled by `seed`, cut at `budget_tokens`, packed so that none attends to another.
///
/// Prompts of fewer than two tokens are dropped. Same input and options, same result.
///
/// # Errors
/// Fewer than `min_tokens` tokens, a prompt of more than `seq_len` tokens under [`Overlong::Error`], `seq_len` below 2.
pub fn pack(prompts: &[TokenizedPrompt], options: &PackOptions) -> Result<Corpus> {
    todo!("{prompts:?} {options:?}")
}

/// Evaluation windows: documents joined end to end, cut in windows of exactly `seq_len` tokens that are one prompt each.
/// The rest after the last whole window is dropped.
///
/// # Errors
/// Not one whole window, or a budget below one window.
pub fn windows(prompts: &[TokenizedPrompt], options: &WindowOptions) -> Result<Corpus> {
    todo!("{prompts:?} {options:?}")
}
