//! `oscar bench demote`.

use anyhow::Result;

use super::GpuArgs;
use crate::cli::Outcome;
use crate::zoo::Rounding;

/// Time the way from 16 to 2 bits, keys and values of one layer: encode, clip, round, pack.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Tokens at once, a multiple of 64
    #[arg(short, long, default_value_t = 32_768)]
    tokens: usize,

    /// Key-value heads
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,

    /// Channels a head
    #[arg(long, default_value_t = 128)]
    head_dim: usize,

    /// Channels that share a scale and a zero; all of a head where not given
    #[arg(long, value_name = "CHANNELS")]
    group: Option<usize>,

    /// Clip ratio of both sides
    #[arg(long, default_value_t = 0.95)]
    clip: f64,

    /// nearest, or feedback
    #[arg(long, default_value_t = Rounding::Feedback)]
    rounding: Rounding,

    #[command(flatten)]
    gpu: GpuArgs,
}

#[cfg(not(feature = "cuda"))]
pub fn run(args: &Args) -> Result<Outcome> {
    super::no_cuda(&args.gpu)
}

#[cfg(feature = "cuda")]
pub fn run(args: &Args) -> Result<Outcome> {
    use crate::bench::{DemoteShape, demote};

    let shape = DemoteShape {
        tokens: args.tokens,
        kv_heads: args.kv_heads,
        head_dim: args.head_dim,
        group: args.group.unwrap_or(args.head_dim),
        clip: args.clip,
        rounding: args.rounding,
    };
    let times = demote(&mut args.gpu.stopwatch()?, &shape, args.gpu.repeats())?;
    args.gpu.print(&times, || {
        let both = &times.both_sides;
        format!(
            "keys and values: {}\na side: {:.1} us",
            super::line(both),
            both.us_median / 2.0
        )
    })
}
