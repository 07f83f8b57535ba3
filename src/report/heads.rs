//! Where the worst heads are, and what can be seen of why.

use serde::Serialize;

use super::figures::{Measure, median};
use crate::eval::{Report, significant};
use crate::rotation::spectrum::effective_rank;
use crate::zoo::{Entry, SideName};

/// Rows of the table.
const SHOWN: usize = 12;

/// A head and what stands out about it.
#[derive(Clone, Debug, Serialize)]
pub struct WorstHead {
    pub layer: usize,
    /// Query head; `None` where only KV heads are known.
    pub head: Option<usize>,
    pub kv_head: usize,
    /// Relative error of attention's output, both sides quantized; of the worse side alone where nothing was measured.
    pub output: f64,
    pub logits: Option<f64>,
    /// The same head's output error with the method compared to.
    pub before: Option<f64>,
    pub k: HeadSide,
    pub v: HeadSide,
    pub why: String,
}

/// One side of a head.
#[derive(Clone, Debug, Serialize)]
pub struct HeadSide {
    pub clip: f64,
    /// Effective rank of the spectrum over head_dim: 1 is flat.
    pub flatness: Option<f64>,
    /// Relative error of attention's output on held-out prompts with this side alone quantized.
    pub alone: Option<f64>,
}

/// The worst heads, worst first. `before` names the method whose errors are set beside the entry's.
pub fn worst(entry: &Entry, report: Option<&Report>, before: Option<&str>) -> Vec<WorstHead> {
    let mut heads = match report.filter(|r| !r.layers.is_empty()) {
        Some(report) => measured(entry, report, before),
        None => fitted(entry),
    };
    heads.sort_by(|a, b| b.output.total_cmp(&a.output));
    let medians = Medians::of(&heads);
    heads.truncate(SHOWN);
    for head in &mut heads {
        head.why = medians.why(head);
    }
    heads
}

fn measured(entry: &Entry, report: &Report, before: Option<&str>) -> Vec<WorstHead> {
    let Some(subject) = report.methods.first() else {
        return Vec::new();
    };
    let output = Measure::Output.of(report, &subject.name);
    let logits = Measure::Logits.of(report, &subject.name);
    let before = before.map(|name| Measure::Output.of(report, name));
    let at = |list: &[Vec<Option<f64>>], i: usize, head: usize| {
        list.get(i)
            .and_then(|heads| heads.get(head))
            .copied()
            .flatten()
    };
    let mut found = Vec::new();
    for (i, layer) in report.layers.iter().enumerate() {
        let model = &entry.metadata.model;
        let heads = model.heads.get(layer.layer).copied().unwrap_or(0);
        let kv_heads = model.kv_heads.get(layer.layer).copied().unwrap_or(0);
        let group = (heads / kv_heads.max(1)).max(1);
        for head in 0..heads {
            let kv_head = head / group;
            let (Some(error), Some(k), Some(v)) = (
                at(&output, i, head),
                side(entry, layer.layer, SideName::K, kv_head),
                side(entry, layer.layer, SideName::V, kv_head),
            ) else {
                continue;
            };
            found.push(WorstHead {
                layer: layer.layer,
                head: Some(head),
                kv_head,
                output: error,
                logits: at(&logits, i, head),
                before: before.as_ref().and_then(|list| at(list, i, head)),
                k,
                v,
                why: String::new(),
            });
        }
    }
    found
}

/// From what the fit saw, by KV head.
fn fitted(entry: &Entry) -> Vec<WorstHead> {
    let mut found = Vec::new();
    for &layer in entry.layers.keys() {
        for kv_head in 0..entry.transforms(layer) {
            let (Some(k), Some(v)) = (
                side(entry, layer, SideName::K, kv_head),
                side(entry, layer, SideName::V, kv_head),
            ) else {
                continue;
            };
            let Some(output) = [k.alone, v.alone].into_iter().flatten().reduce(f64::max) else {
                continue;
            };
            found.push(WorstHead {
                layer,
                head: None,
                kv_head,
                output,
                logits: None,
                before: None,
                k,
                v,
                why: String::new(),
            });
        }
    }
    found
}

fn side(entry: &Entry, layer: usize, name: SideName, kv_head: usize) -> Option<HeadSide> {
    let parts = entry.layers.get(&layer)?;
    let (found, fit) = match name {
        SideName::K => (
            &parts.k,
            entry.metadata.fit.as_ref().and_then(|f| f.k.get(&layer)),
        ),
        SideName::V => (
            &parts.v,
            entry.metadata.fit.as_ref().and_then(|f| f.v.get(&layer)),
        ),
    };
    let head = found.for_head(kv_head)?;
    let flatness = head.spectrum.map(|spectrum| {
        let spectrum: Vec<f64> = spectrum.iter().map(|x| f64::from(*x)).collect();
        effective_rank(&spectrum) / spectrum.len().max(1) as f64
    });
    let alone = fit.and_then(|fit| {
        let list = &fit.output_error;
        let unit = if list.len() == 1 { 0 } else { kv_head };
        list.get(unit).map(|x| f64::from(*x))
    });
    Some(HeadSide {
        clip: f64::from(head.clip),
        flatness,
        alone,
    })
}

/// What is usual among the entry's heads.
struct Medians {
    output: f64,
    logits: Option<f64>,
    k_flatness: Option<f64>,
    v_flatness: Option<f64>,
}

impl Medians {
    fn of(heads: &[WorstHead]) -> Self {
        let list = |pick: &dyn Fn(&WorstHead) -> Option<f64>| {
            median(&heads.iter().filter_map(pick).collect::<Vec<_>>())
        };
        Self {
            output: list(&|h| Some(h.output)).unwrap_or(0.0),
            logits: list(&|h| h.logits),
            k_flatness: list(&|h| h.k.flatness),
            v_flatness: list(&|h| h.v.flatness),
        }
    }

    fn why(&self, head: &WorstHead) -> String {
        let mut reasons = Vec::new();
        if self.output > 0.0 {
            reasons.push(format!(
                "{}× the median error",
                significant(head.output / self.output, 2)
            ));
        }
        let (mut keys, mut values) = (true, true);
        if let (Some(k), Some(v)) = (head.k.alone, head.v.alone) {
            // Errors of the two sides add up in power.
            let share = k * k / (k * k + v * v).max(f64::MIN_POSITIVE);
            (keys, values) = (share > 0.35, share < 0.65);
            reasons.push(match (keys, values) {
                (true, false) => format!("keys make {:.0}\u{a0}% of it", share * 100.0),
                (false, true) => format!("values make {:.0}\u{a0}% of it", (1.0 - share) * 100.0),
                _ => "keys and values alike".to_owned(),
            });
        }
        for (counts, side, flatness, usual) in [
            (keys, "keys", head.k.flatness, self.k_flatness),
            (values, "values", head.v.flatness, self.v_flatness),
        ] {
            let (Some(flatness), Some(usual)) = (flatness, usual) else {
                continue;
            };
            if counts && flatness > 1.25 * usual {
                reasons.push(format!("the spectrum of {side} is flatter than usual"));
            } else if counts && flatness < 0.6 * usual {
                reasons.push(format!("the spectrum of {side} is steeper than usual"));
            }
        }
        if let (Some(logits), Some(usual)) = (head.logits, self.logits) {
            if values && logits < usual && head.output > 1.5 * self.output {
                reasons.push(
                    "logits no worse than usual: the output is small against the values it averages"
                        .to_owned(),
                );
            } else if logits > 1.5 * usual {
                reasons.push(format!(
                    "logits off by {}× the median",
                    significant(logits / usual, 2)
                ));
            }
        }
        reasons.join("; ")
    }
}
