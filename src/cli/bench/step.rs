//! `oscar bench step`.

use std::path::PathBuf;

use anyhow::Result;

use crate::cli::Outcome;
use crate::cli::common::{Format, ModelArgs};

/// Time a whole decode step of a model over a long cache, INT2 against BF16.
///
/// The cache is filled with random pages; what the step computes is thrown away. `oscar bench synthesize` makes
/// checkpoints of any shape, and `oscar calibrate` their entries. A profiler that waits to be told when to begin
/// (`ncu --profile-from-start off`) sees one step of each kind of cache, kernel by kernel.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The entry's folder
    #[arg(short, long, value_name = "ENTRY")]
    zoo: PathBuf,

    /// Tokens in the cache before the first step
    #[arg(short, long, value_name = "TOKENS", default_value_t = 102_400)]
    context: usize,

    /// Timed steps
    #[arg(long, default_value_t = 64, help_heading = "Measurement")]
    repeats: usize,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

#[cfg(not(feature = "cuda"))]
pub fn run(args: &Args) -> Result<Outcome> {
    let _ = (&args.zoo, args.context, args.repeats, args.format);
    args.model.open()?;
    Err(super::not_a_gpu(args.model.device))
}

#[cfg(feature = "cuda")]
pub fn run(args: &Args) -> Result<Outcome> {
    use std::sync::Arc;

    use crate::bench::{StepTimes, step};
    use crate::cli::common::{print, print_json};
    use crate::kv::pool::{Pool, PoolShape, Transforms};
    use crate::serve::{Engine, Resident};
    use crate::zoo::Entry;

    #[derive(serde::Serialize)]
    struct Row {
        kv: &'static str,
        #[serde(flatten)]
        times: StepTimes,
    }

    let entry = Entry::open(&args.zoo)?;
    let model = args.model.open()?;
    if !model.device().is_cuda() {
        return Err(super::not_a_gpu(args.model.device));
    }
    let transforms = Arc::new(Transforms::new(&entry)?);
    let resident = Resident::load(&model)?;
    let mut rows = Vec::new();
    for (kv, transforms) in [("int2", Some(transforms)), ("bf16", None)] {
        for graph in [true, false] {
            let shape = PoolShape {
                layers: model.config().num_hidden_layers,
                dims: Resident::dims(&model)?,
                windows: entry.metadata.windows,
                transforms: transforms.clone(),
            };
            let tokens = args.context + args.repeats + 8;
            let capacity = shape.pages_for(1, tokens, 4096)?;
            let pool = Pool::on(model.device(), shape, capacity)?;
            if let Some(warning) = pool.warning() {
                eprintln!("warning: {warning}");
            }
            let engine = Engine::new(&resident, pool);
            let times = step(engine, args.context, args.repeats, graph)?;
            rows.push(Row { kv, times });
        }
    }
    match args.format {
        Format::Json => print_json(&rows)?,
        Format::Text => {
            let line = |row: &Row| {
                let StepTimes {
                    ms_median,
                    ms_p10,
                    ms_p90,
                    steps,
                    cache_bytes,
                    graph,
                    graph_ms,
                    ..
                } = row.times;
                let how = match (graph, graph_ms) {
                    (true, Some(ms)) => format!("one graph of {ms:.3} ms"),
                    (true, None) => "one graph".to_string(),
                    _ => "kernel by kernel".to_string(),
                };
                format!(
                    "{} {how}: {ms_median:.3} ms a token (p10 {ms_p10:.3}, p90 {ms_p90:.3}; {steps} steps), cache {:.1} MB",
                    row.kv,
                    cache_bytes as f64 / 1e6
                )
            };
            print(&rows.iter().map(line).collect::<Vec<_>>().join("\n"))?;
        }
    }
    for row in &rows {
        if let Some(warning) = &row.times.graph_warning {
            eprintln!("warning: {}: {warning}", row.kv);
        }
    }
    Ok(Outcome::Fine)
}
