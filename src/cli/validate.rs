//! `oscar validate`: the model on the packed cache against full precision and other methods.

use std::path::PathBuf;

use anyhow::Result;

use super::common::{EvaluationDataArgs, Format, ModelArgs, entry_folder, moments_beside, print};
use super::progress::Meter;
use super::{Outcome, against};
use crate::calib::Moments;
use crate::data::Tokenizer;
use crate::eval::{EvalMethod, EvalOptions, KlRatio, Thresholds, check_entry, validate};
use crate::kv::page::PAGE_TOKENS;
use crate::report as page;
use crate::zoo::Entry;

/// Measure what a 2-bit cache with an entry costs: KL, perplexity and top-1 agreement against full precision.
///
/// Teacher-forced on the model itself: each query reads sink and recent tokens exactly, and all others through the
/// packed cache (codes, bf16 scale and zero, decoded back). Ends with 1 where a threshold is passed.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The entry's folder
    entry: PathBuf,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    data: EvaluationDataArgs,

    /// Other methods to measure: naive, hadamard, oscar, kivi, turboquant, or the folder of another entry
    #[arg(
        short,
        long,
        value_name = "METHOD",
        value_delimiter = ',',
        help_heading = "Comparison"
    )]
    against: Vec<String>,

    /// Moments file that `--against oscar` is fitted from; the one beside the entry where not given
    #[arg(long, value_name = "FILE", help_heading = "Comparison")]
    moments: Option<PathBuf>,

    /// Where keys and values lie: simulated beside the exact ones, or in the cache that serves, token by token
    #[arg(long, value_enum, default_value_t, help_heading = "Comparison")]
    cache: CacheArg,

    /// Tokens at the start of a sequence kept in full precision; the entry's own where not given
    #[arg(long, value_name = "TOKENS", help_heading = "Windows")]
    sink: Option<usize>,

    /// Latest tokens kept in full precision; the entry's own where not given
    #[arg(long, value_name = "TOKENS", help_heading = "Windows")]
    recent: Option<usize>,

    /// Most KL per token, in nats
    #[arg(long, value_name = "NATS", help_heading = "Thresholds")]
    max_kl: Option<f64>,

    /// Most KL as a share of another method's, such as `oscar=0.4`
    #[arg(long, value_name = "METHOD=RATIO", help_heading = "Thresholds")]
    max_kl_ratio: Vec<KlRatio>,

    /// Most growth of perplexity, as a share: 0.02 is 2 %
    #[arg(long, value_name = "SHARE", help_heading = "Thresholds")]
    max_ppl_increase: Option<f64>,

    /// Least share of positions where the likeliest token stays the same
    #[arg(long, value_name = "SHARE", help_heading = "Thresholds")]
    min_top1: Option<f64>,

    /// Do not keep the result in the entry's metrics.json, report.html and README.md
    #[arg(long, help_heading = "Output")]
    no_write: bool,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum CacheArg {
    /// Attention reads exact and decoded tokens: quick, and any codec
    #[default]
    Simulated,
    /// The pages that `oscar generate` runs on, and the simulation by the same rule beside it
    Real,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let thresholds = Thresholds {
        max_kl: args.max_kl,
        max_kl_ratio: args.max_kl_ratio.clone(),
        max_ppl_increase: args.max_ppl_increase,
        min_top1: args.min_top1,
    };
    thresholds.check()?;
    let entry = Entry::open(&args.entry)?;
    let model = args.model.open()?;
    for warning in check_entry(&entry, &model)? {
        eprintln!("warning: {warning}");
    }
    let subject = entry.metadata.method.as_str();
    let moments = moments(args)?;
    let mut methods = match args.cache {
        CacheArg::Simulated => vec![EvalMethod::from_entry(subject, &entry)?],
        CacheArg::Real => vec![
            EvalMethod::real(subject, &entry)?,
            EvalMethod::paged(format!("{subject}-simulated"), &entry)?,
        ],
    };
    for name in &args.against {
        methods.extend(against::methods(name, &model, moments.as_ref())?);
    }
    tell_apart(&mut methods);
    let names: Vec<_> = methods.iter().map(|method| method.name.as_str()).collect();
    thresholds.check_names(&names)?;

    let tokenizer = Tokenizer::load(&model)?;
    let corpus = args.data.read(&model, &tokenizer)?;
    let options = EvalOptions {
        sink: args.sink.unwrap_or(entry.metadata.windows.sink_tokens),
        recent: args.recent.unwrap_or(entry.metadata.windows.recent_tokens),
        demote_tokens: match args.cache {
            CacheArg::Simulated => 1,
            CacheArg::Real => PAGE_TOKENS,
        },
        entry_sha256: Some(entry.metadata.content_sha256.clone()),
        ..EvalOptions::default()
    };
    let mut meter = Meter::new();
    let report = validate(&model, &corpus, &methods, &options, &mut |step| {
        meter.step(step);
    })?;
    meter.finish();

    if !args.no_write {
        let folder = entry_folder(&args.entry)?;
        report.write(folder)?;
        page::write(folder)?;
        page::card::write(folder, None)?;
    }
    let failures = thresholds.failures(&report, &methods[0].name)?;
    match args.format {
        Format::Json => print(&report.to_json()?)?,
        Format::Text => print(&report.table())?,
    }
    for failure in &failures {
        eprintln!("failed: {failure}");
    }
    Ok(if failures.is_empty() {
        Outcome::Fine
    } else {
        Outcome::CheckFailed
    })
}

/// `--moments`, or the file that `oscar calibrate` leaves beside the entry.
fn moments(args: &Args) -> Result<Option<Moments>> {
    let beside = moments_beside(entry_folder(&args.entry)?);
    let path = match &args.moments {
        Some(path) => path,
        None if beside.exists() => &beside,
        None => return Ok(None),
    };
    Ok(Some(Moments::open(path)?))
}

/// Two entries of one method are `balanced` and `balanced-2`.
fn tell_apart(methods: &mut [EvalMethod]) {
    for i in 1..methods.len() {
        let (before, after) = methods.split_at_mut(i);
        let name = after[0].name.clone();
        let mut number = 1;
        while before.iter().any(|method| method.name == after[0].name) {
            number += 1;
            after[0].name = format!("{name}-{number}");
        }
    }
}
