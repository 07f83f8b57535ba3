//! `oscar bench decode`.

use anyhow::Result;

use super::GpuArgs;
use crate::cli::Outcome;

/// Time decode attention of one layer: BF16 windows and INT2 history in one launch, on random pages.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Sequences, one query token each
    #[arg(short, long, default_value_t = 1)]
    batch: usize,

    /// Tokens a sequence, windows counted
    #[arg(short, long, value_name = "TOKENS", default_value_t = 102_400)]
    context: usize,

    /// Query heads
    #[arg(long, default_value_t = 32)]
    heads: usize,

    /// Key-value heads
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,

    /// Channels a head
    #[arg(long, default_value_t = 128)]
    head_dim: usize,

    /// Channels that share a scale and a zero; all of a head where not given
    #[arg(long, value_name = "CHANNELS")]
    group: Option<usize>,

    /// Tokens at the start that stay in bf16
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    sink: usize,

    /// Latest tokens that stay in bf16
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    recent: usize,

    /// What the cache holds
    #[arg(long, value_enum, default_value = "int2")]
    kv: Kv,

    #[command(flatten)]
    gpu: GpuArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kv {
    /// 2 bits but for the windows
    Int2,
    /// bf16 throughout
    Bf16,
}

#[cfg(not(feature = "cuda"))]
pub fn run(args: &Args) -> Result<Outcome> {
    super::no_cuda(&args.gpu)
}

#[cfg(feature = "cuda")]
pub fn run(args: &Args) -> Result<Outcome> {
    use crate::bench::{DecodeShape, decode};
    use crate::zoo::Windows;

    let windows = Windows {
        sink_tokens: args.sink,
        recent_tokens: args.recent,
    };
    windows.check()?;
    let shape = DecodeShape {
        batch: args.batch,
        context: args.context,
        heads: args.heads,
        kv_heads: args.kv_heads,
        head_dim: args.head_dim,
        group: args.group.unwrap_or(args.head_dim),
        windows: (args.kv == Kv::Int2).then_some(windows),
    };
    let times = decode(&mut args.gpu.stopwatch()?, &shape, args.gpu.repeats())?;
    if let Some(reason) = &times.fallback {
        eprintln!("warning: {reason}");
    }
    args.gpu.print(&times, || {
        format!(
            "{}: {}\nplan, once a step for all layers: {:.1} us",
            times.kernel,
            super::line(&times.attention),
            times.plan.us_median
        )
    })
}
