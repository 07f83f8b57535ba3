use super::methods::EvalMethod;
use super::report::Report;
use crate::Result;
use crate::data::Corpus;
use crate::model::Model;

/// How to evaluate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalOptions {
    /// First tokens of every window that stay exact.
    pub sink: usize,
    /// Latest tokens of every query that stay exact.
    pub recent: usize,
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
            probe_queries: 64,
            entry_sha256: None,
        }
    }
}

/// How far an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step<'a> {
    /// Tokens times layers times streams done, of `total`; the head counts as one layer.
    pub done: u64,
    pub total: u64,
    /// Such as `layer 3 of 30`.
    pub what: &'a str,
}

/// Runs `corpus` (each prompt one window) through `model`, once at full precision and once a method, and measures how
/// far their next-token distributions part. Every query reads the first `sink` and the latest `recent` tokens exactly
/// and all others through the method's cache; a method's error travels through its own hidden states.
pub fn validate(
    _model: &Model,
    _corpus: &Corpus,
    _methods: &[EvalMethod],
    _options: &EvalOptions,
    _progress: &mut dyn FnMut(Step),
) -> Result<Report> {
    unimplemented!()
}
