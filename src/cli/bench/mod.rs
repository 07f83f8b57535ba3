//! `oscar bench`: what this machine makes of our programs.

mod collect;
mod decode;
mod demote;
mod step;
mod synthesize;

use anyhow::Result;
#[cfg(feature = "cuda")]
use candle_core::Device;
use clap::Subcommand;

use super::Outcome;
use super::common::Format;
#[cfg(feature = "cuda")]
use super::common::{print, print_json};
use crate::Error;
use crate::device::{self, DeviceChoice};

/// Measure this machine, on random numbers and models of any shape.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Decode(decode::Args),
    Demote(demote::Args),
    Step(step::Args),
    Collect(collect::Args),
    Synthesize(synthesize::Args),
}

pub fn run(args: &Args) -> Result<Outcome> {
    match &args.command {
        Command::Decode(args) => decode::run(args),
        Command::Demote(args) => demote::run(args),
        Command::Step(args) => step::run(args),
        Command::Collect(args) => collect::run(args),
        Command::Synthesize(args) => synthesize::run(args),
    }
}

/// What every measurement of kernels takes.
#[derive(clap::Args, Debug)]
struct GpuArgs {
    /// The GPU to measure: auto, or cuda:N
    #[arg(long, default_value_t, help_heading = "Measurement")]
    device: DeviceChoice,

    /// Timed repeats, each on a cold L2 cache
    #[arg(long, default_value_t = 60, help_heading = "Measurement")]
    repeats: usize,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

#[cfg(feature = "cuda")]
impl GpuArgs {
    fn stopwatch(&self) -> Result<crate::bench::Stopwatch> {
        match self.device.open()? {
            Device::Cuda(device) => Ok(crate::bench::Stopwatch::new(&device)?),
            _ => Err(not_a_gpu(self.device)),
        }
    }

    fn repeats(&self) -> usize {
        self.repeats.max(1)
    }

    fn print(
        &self,
        result: &impl serde::Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<Outcome> {
        match self.format {
            Format::Json => print_json(result)?,
            Format::Text => print(&text())?,
        }
        Ok(Outcome::Fine)
    }
}

#[cfg(feature = "cuda")]
fn line(timed: &crate::bench::Timed) -> String {
    format!(
        "{:.1} us (p10 {:.1}, p90 {:.1}; {} repeats), {:.1} MB, {:.2} TB/s, {:.0} % of a copy's {:.2} TB/s",
        timed.us_median,
        timed.us_p10,
        timed.us_p90,
        timed.repeats,
        timed.bytes as f64 / 1e6,
        timed.tb_per_s,
        100.0 * timed.share_of_copy(),
        timed.copy_tb_per_s
    )
}

fn not_a_gpu(device: DeviceChoice) -> anyhow::Error {
    let reason = match device {
        DeviceChoice::Cpu => None,
        _ => device::why_no_gpu(),
    }
    .unwrap_or("kernels are measured on a GPU");
    Error::invalid(format!("--device {device}"), reason)
        .hint("see `oscar devices`")
        .into()
}

#[cfg(not(feature = "cuda"))]
fn no_cuda(args: &GpuArgs) -> Result<Outcome> {
    args.device.open()?;
    Err(not_a_gpu(args.device))
}
