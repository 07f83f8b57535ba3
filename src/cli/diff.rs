//! `oscar diff`: what tells two entries apart.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};

use super::Outcome;
use super::common::{Format, entry_folder, print, print_json};
use crate::calib::Moments;
use crate::eval::diff::{Diff, HeadDiff, diff};
use crate::eval::{Report, significant};
use crate::zoo::Entry;

/// Compare two entries of one model by what they do, not by their numbers.
///
/// Settings and provenance that differ; for every layer and side the angle between the subspaces that matter most, how
/// evenly either spreads channel importance, clip ratios; with a moments file also the error that each would make on
/// its held-out prompts. A flipped sign of an eigenvector is no difference.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The older entry's folder
    a: PathBuf,

    /// The newer entry's folder
    b: PathBuf,

    /// Moments file that both are tried on; see `oscar collect`
    #[arg(short, long, value_name = "FILE")]
    moments: Option<PathBuf>,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

/// One measured number of both, where both have a measurement.
#[derive(serde::Serialize)]
struct Measured {
    kl: [f64; 2],
    perplexity: [f64; 2],
    top1: [f64; 2],
    /// Whether both were measured on the same tokens.
    same_tokens: bool,
}

#[derive(serde::Serialize)]
struct View<'a> {
    a: String,
    b: String,
    #[serde(flatten)]
    diff: &'a Diff,
    measured: Option<Measured>,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let (a, b) = (Entry::open(&args.a)?, Entry::open(&args.b)?);
    let moments = args.moments.as_deref().map(Moments::open).transpose()?;
    let diff = diff(&a, &b, moments.as_ref())?;
    let view = View {
        a: args.a.display().to_string(),
        b: args.b.display().to_string(),
        measured: measured(args)?,
        diff: &diff,
    };
    match args.format {
        Format::Json => print_json(&view)?,
        Format::Text => print(&text(&view)?)?,
    }
    Ok(Outcome::Fine)
}

fn measured(args: &Args) -> Result<Option<Measured>> {
    let read = |path| Report::read(entry_folder(path)?);
    let (Some(a), Some(b)) = (read(&args.a)?, read(&args.b)?) else {
        return Ok(None);
    };
    let (Some(x), Some(y)) = (a.methods.first(), b.methods.first()) else {
        return Ok(None);
    };
    Ok(Some(Measured {
        kl: [x.kl, y.kl],
        perplexity: [x.perplexity, y.perplexity],
        top1: [x.top1, y.top1],
        same_tokens: a.provenance.token_ids_sha256 == b.provenance.token_ids_sha256,
    }))
}

fn text(view: &View) -> Result<String> {
    let mut out = format!("a  {}\nb  {}\n", view.a, view.b);
    if view.diff.same_tensors {
        out.push_str("\nThe tensors are the same.\n");
    }
    if !view.diff.changes.is_empty() {
        let mut table = plain(&["", "a", "b"]);
        for change in &view.diff.changes {
            table.add_row([&change.what, &shortened(&change.a), &shortened(&change.b)]);
        }
        write!(out, "\n{table}\n")?;
    }
    if let Some(m) = &view.measured {
        let note = if m.same_tokens {
            ""
        } else {
            ", on other tokens"
        };
        writeln!(
            out,
            "\nmeasured{note}: KL {} → {} nats, perplexity {:.3} → {:.3}, top-1 {:.1} % → {:.1} %",
            significant(m.kl[0], 3),
            significant(m.kl[1], 3),
            m.perplexity[0],
            m.perplexity[1],
            m.top1[0] * 100.0,
            m.top1[1] * 100.0
        )?;
    }
    if view.diff.same_tensors {
        return Ok(out);
    }

    let mut groups: BTreeMap<(usize, &str), Vec<&HeadDiff>> = BTreeMap::new();
    for head in &view.diff.heads {
        groups
            .entry((head.layer, head.side))
            .or_default()
            .push(head);
    }
    let rank = view
        .diff
        .heads
        .iter()
        .find_map(|head| Some(head.subspaces.get(1).or(head.subspaces.first())?.rank));
    let angle = rank.map_or_else(
        || "angle".to_owned(),
        |rank| format!("angle at rank {rank}"),
    );
    let mut table = plain(&[
        "layer",
        "side",
        &angle,
        "overlap",
        "flatness a",
        "b",
        "clip a",
        "b",
        "error a",
        "b",
    ]);
    for ((layer, side), heads) in groups {
        let span = |pick: &dyn Fn(&HeadDiff) -> Option<f64>, digits: usize| {
            range(
                &heads
                    .iter()
                    .filter_map(|head| pick(head))
                    .collect::<Vec<_>>(),
                digits,
            )
        };
        let subspace = |head: &HeadDiff| head.subspaces.get(1).or(head.subspaces.first()).copied();
        table.add_row([
            layer.to_string(),
            side.to_owned(),
            span(&|head| Some(subspace(head)?.angle_degrees), 1),
            span(&|head| Some(subspace(head)?.overlap), 3),
            span(&|head| Some(head.flatness?[0]), 2),
            span(&|head| Some(head.flatness?[1]), 2),
            span(&|head| Some(head.clip[0]), 3),
            span(&|head| Some(head.clip[1]), 3),
            span(&|head| Some(head.predicted?[0]), 4),
            span(&|head| Some(head.predicted?[1]), 4),
        ]);
    }
    write!(
        out,
        "\nBy layer and side, over its KV heads. Angles in degrees, 0 is the same subspace; flatness 1 is even; errors \
         of attention's output, predicted from moments.\n\n{table}\n"
    )?;
    let worse = |pick: fn(&HeadDiff) -> Option<[f64; 2]>| -> Option<(f64, &HeadDiff)> {
        let ratios = view.diff.heads.iter().filter_map(|head| {
            let [a, b] = pick(head)?;
            (a > 0.0).then_some((b / a, head))
        });
        ratios.max_by(|x, y| x.0.total_cmp(&y.0))
    };
    if let Some((ratio, head)) = worse(|head| head.predicted) {
        writeln!(
            out,
            "\nlargest growth of a predicted error: {}× at layer {} {}, KV head {}",
            significant(ratio, 3),
            head.layer,
            head.side,
            head.kv_head
        )?;
    }
    Ok(out)
}

fn plain(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header.iter().copied());
    table
}

/// Hashes to twelve digits, names whole, and no control characters.
fn shortened(text: &str) -> String {
    let hash = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    let shown = if hash { &text[..12] } else { text };
    shown
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

fn range(values: &[f64], digits: usize) -> String {
    let show = |x: f64| format!("{x:.digits$}");
    let least = values.iter().copied().reduce(f64::min);
    let most = values.iter().copied().reduce(f64::max);
    match (least.map(show), most.map(show)) {
        (Some(least), Some(most)) if least == most => least,
        (Some(least), Some(most)) => format!("{least}..{most}"),
        _ => "–".to_owned(),
    }
}
