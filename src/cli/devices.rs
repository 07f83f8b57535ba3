//! `oscar devices`: what `--device` can name.

use anyhow::Result;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::Outcome;
use super::common::{Format, print};
use crate::device::{self, DeviceInfo};

/// List the devices that `--device` can name, with their memory.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let devices = device::list()?;
    match args.format {
        Format::Json => print(&serde_json::to_string_pretty(&devices)?)?,
        Format::Text => print(&table(&devices))?,
    }
    if let Some(reason) = device::why_no_gpu() {
        eprintln!("no GPU: {reason}");
    }
    Ok(Outcome::Fine)
}

fn table(devices: &[DeviceInfo]) -> String {
    let gib = |bytes: Option<u64>| {
        bytes.map_or_else(String::new, |b| {
            format!("{:.1} GiB", b as f64 / f64::from(1 << 30))
        })
    };
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(["device", "name", "capability", "memory", "free"]);
    for device in devices {
        table.add_row([
            device.device.clone(),
            device.name.clone(),
            device.compute_capability.clone().unwrap_or_default(),
            gib(device.memory_bytes),
            gib(device.free_bytes),
        ]);
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}
