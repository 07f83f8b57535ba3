//! Arguments that several subcommands share, and what they resolve to.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::DType;
use clap::ValueEnum;

use crate::Error;
use crate::calib::Moments;
use crate::data::{self, ChatTemplate, Corpus, Overlong, Tokenizer, bundled};
use crate::device::DeviceChoice;
use crate::model::{Model, OpenOptions};

/// How results are printed on standard output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    #[default]
    Text,
    Json,
}

/// Dtype of activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// f32 on the CPU, bf16 on a GPU
    #[default]
    Auto,
    F32,
    Bf16,
    F16,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Hugging Face folder, GGUF file, or hub id `owner/name[@revision]`
    #[arg(short, long)]
    model: String,

    /// Name to record, where the file or folder is called otherwise, such as `owner/name`
    #[arg(long, value_name = "ID")]
    model_id: Option<String>,

    /// Where to compute: auto, cpu, or cuda:N (see `oscar devices`)
    #[arg(long, default_value_t)]
    pub device: DeviceChoice,

    /// Dtype of activations, and of weights once loaded
    #[arg(long, value_enum, default_value_t)]
    dtype: Dtype,
}

impl ModelArgs {
    /// `--model`.
    pub fn locator(&self) -> &str {
        &self.model
    }

    /// Whether `--model-id` says what the model is called.
    pub fn is_named(&self) -> bool {
        self.model_id.is_some()
    }

    pub fn open(&self) -> Result<Model> {
        if let Some(id) = &self.model_id {
            check_id(id)?;
        }
        let model = Model::open(
            &self.model,
            &OpenOptions {
                device: self.device.open()?,
                dtype: match self.dtype {
                    Dtype::Auto => None,
                    Dtype::F32 => Some(DType::F32),
                    Dtype::Bf16 => Some(DType::BF16),
                    Dtype::F16 => Some(DType::F16),
                },
            },
        )?;
        Ok(match &self.model_id {
            Some(id) => model.with_id(id),
            None => model,
        })
    }
}

/// An id becomes the name of a folder in the zoo.
pub fn check_id(id: &str) -> Result<()> {
    let sound = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .chars()
                .all(|c| c.is_alphanumeric() || "-_.".contains(c))
    };
    if id.split('/').count() > 2 || !id.split('/').all(sound) {
        return Err(Error::invalid(
            "--model-id",
            format!("`{}` is no model's name", id.escape_debug()),
        )
        .hint("give `name` or `owner/name`, of letters, digits, `-`, `_` and `.`")
        .into());
    }
    Ok(())
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Data")]
pub struct CalibrationDataArgs {
    /// Files or folders of .txt, .jsonl or .parquet; the bundled corpus where none is given
    #[arg(short, long, value_name = "PATH")]
    data: Vec<PathBuf>,

    /// Calibration tokens; more are left out
    #[arg(short, long, default_value_t = 30_000)]
    tokens: usize,

    /// Longest sequence in tokens; the model's context where that is shorter
    #[arg(long, value_name = "TOKENS")]
    seq_len: Option<usize>,

    /// Chooses which prompts are taken, in which order
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// What to do with a prompt that is longer than a sequence
    #[arg(long, value_enum, default_value = "split")]
    overlong: OverlongArg,

    /// Tokens held out of the moments, for the search of clip ratios and exponents
    #[arg(long, value_name = "TOKENS", default_value_t = data::pack::DEFAULT_HOLDOUT_TOKENS)]
    holdout: usize,

    /// Jinja chat template, instead of the model's own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OverlongArg {
    /// Its pieces become prompts of their own
    Split,
    /// Keep its beginning
    Truncate,
    /// Refuse it
    Error,
}

/// Longest sequence where `--seq-len` is not given.
const DEFAULT_SEQ_LEN: usize = 4096;

/// `--seq-len`, or the default, within the model's context.
fn seq_len(asked: Option<usize>, model: &Model) -> Result<usize> {
    let context = model.config().max_position_embeddings;
    match asked {
        Some(asked) if asked > context => Err(Error::invalid(
            "--seq-len",
            format!(
                "{asked} tokens are more than the context of {context} tokens of `{}`",
                model.id()
            ),
        )
        .hint(format!("give at most --seq-len {context}"))
        .into()),
        Some(asked) if asked < 2 => Err(Error::invalid(
            "--seq-len",
            format!("{asked} tokens leave nothing to attend to"),
        )
        .into()),
        Some(asked) => Ok(asked),
        None => Ok(DEFAULT_SEQ_LEN.min(context)),
    }
}

fn prompts(
    paths: &[PathBuf],
    bundled: bundled::Part,
    chat_template: Option<&Path>,
    tokenizer: &Tokenizer,
    model: &Model,
) -> Result<Vec<data::TokenizedPrompt>> {
    let template = match chat_template {
        Some(path) => Some(ChatTemplate::from_file(path, tokenizer)?),
        None => ChatTemplate::of(tokenizer),
    };
    let prompts = if paths.is_empty() {
        bundled::read(bundled, template.as_ref())?
    } else {
        data::prompts::read(paths, template.as_ref())?
    };
    Ok(tokenizer.encode_prompts(&prompts, model.config().vocab_size)?)
}

impl CalibrationDataArgs {
    /// Reads, renders, tokenizes and packs the prompts.
    pub fn read(&self, model: &Model, tokenizer: &Tokenizer) -> Result<Corpus> {
        let prompts = prompts(
            &self.data,
            bundled::Part::Calibration,
            self.chat_template.as_deref(),
            tokenizer,
            model,
        )?;
        let corpus = data::pack(
            &prompts,
            &data::PackOptions {
                seq_len: seq_len(self.seq_len, model)?,
                budget_tokens: Some(self.tokens),
                seed: self.seed,
                overlong: match self.overlong {
                    OverlongArg::Split => Overlong::Split,
                    OverlongArg::Truncate => Overlong::Truncate,
                    OverlongArg::Error => Overlong::Error,
                },
                holdout_tokens: self.holdout,
                min_tokens: data::min_calibration_tokens(model.config().head_dim),
                ..data::PackOptions::default()
            },
        )?;
        if corpus.holdout_tokens < self.holdout / 2 {
            eprintln!(
                "note: {} tokens are held out where --holdout asks for {}: the prompts hold no more",
                corpus.holdout_tokens, self.holdout
            );
        }
        Ok(corpus)
    }
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Data")]
pub struct EvaluationDataArgs {
    /// Files or folders of .txt, .jsonl or .parquet; the bundled evaluation corpus where none is given
    #[arg(short, long, value_name = "PATH")]
    pub data: Vec<PathBuf>,

    /// Evaluation tokens, rounded down to whole windows
    #[arg(short, long, default_value_t = 16_384)]
    pub tokens: usize,

    /// Tokens of a window; the model's context where that is shorter
    #[arg(long, value_name = "TOKENS")]
    pub seq_len: Option<usize>,

    /// Chooses which windows are taken
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Jinja chat template, instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
}

impl EvaluationDataArgs {
    pub fn read(&self, model: &Model, tokenizer: &Tokenizer) -> Result<Corpus> {
        let prompts = prompts(
            &self.data,
            bundled::Part::Evaluation,
            self.chat_template.as_deref(),
            tokenizer,
            model,
        )?;
        Ok(data::windows(
            &prompts,
            &data::WindowOptions {
                seq_len: seq_len(self.seq_len, model)?,
                budget_tokens: Some(self.tokens),
                seed: self.seed,
                separator: tokenizer.separator(),
            },
        )?)
    }
}

/// Prints a result; a closed pipe comes back as the error that `main` takes for success.
pub fn print(text: &str) -> Result<()> {
    let end = if text.ends_with('\n') { "" } else { "\n" };
    print_bytes(&[text.as_bytes(), end.as_bytes()].concat())
}

/// As [`print`], as it is.
pub fn print_bytes(bytes: &[u8]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .context(CANNOT_PRINT)
}

/// What is said where printing fails.
pub const CANNOT_PRINT: &str = "cannot write to standard output";

/// Prints a result as indented JSON.
pub fn print_json(value: &impl serde::Serialize) -> Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}

/// Whether `path` is a moments file rather than an entry's folder or file.
pub fn is_moments(path: &Path) -> Result<bool> {
    Ok(!path.is_dir() && Moments::recognise(path)?)
}

/// Where the moments of an entry are kept: beside it, not in it, since an entry is published as it is.
pub fn moments_beside(entry: &Path) -> PathBuf {
    // `.` and `..` have no name of their own.
    let entry = &entry.canonicalize().unwrap_or_else(|_| entry.to_owned());
    let name = entry.file_name().unwrap_or_default().to_string_lossy();
    entry.with_file_name(format!("{name}.moments.safetensors"))
}

/// The folder of an entry that is named by its folder or by the file in it.
///
/// # Errors
/// Where there is neither.
pub fn entry_folder(path: &Path) -> crate::Result<&Path> {
    let found = std::fs::metadata(path).map_err(Error::io("read", path))?;
    Ok(match path.parent() {
        _ if found.is_dir() => path,
        Some(parent) if parent == Path::new("") => Path::new("."),
        parent => parent.unwrap_or(path),
    })
}

/// Whether two paths are one place, where that can be told.
pub fn same_place(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    real(a) == real(b)
}
