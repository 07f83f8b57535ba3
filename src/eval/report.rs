//! What an evaluation measured: JSON for machines, a table for people.

use std::path::Path;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::{Deserialize, Serialize};

use crate::files::{read_text, write_atomic};
use crate::zoo::Windows;
use crate::{Error, Result};

/// Name of a report in an entry's folder.
pub const METRICS: &str = "metrics.json";

/// Everything one evaluation measured. Serialized, it is `metrics.json` of a zoo entry and what `--format json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Tokens evaluated.
    pub tokens: usize,
    /// Tokens of the longest window: what the first column of bits counts at.
    pub context: usize,
    /// Positions measured: those that read at least one quantized token and have a next token to predict.
    pub positions: usize,
    /// Tokens that every query reads at full precision.
    pub windows: Windows,
    pub provenance: Provenance,
    pub reference: ReferenceScore,
    pub methods: Vec<MethodScore>,
    pub layers: Vec<LayerError>,
}

/// What was evaluated, on what.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Provenance {
    pub model: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub revision: Option<String>,
    pub weights_fingerprint: String,
    pub token_ids_sha256: String,
    /// `content_sha256` of the zoo entry, where one was evaluated.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub entry_sha256: Option<String>,
}

/// The model with its cache at full precision.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReferenceScore {
    pub perplexity: f64,
}

/// The model with its cache quantized by one method.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MethodScore {
    pub name: String,
    /// Bits a cached number takes at `context` tokens, scales and full-precision windows counted.
    pub bits_per_element: f64,
    /// The same at 131072 tokens.
    pub bits_per_element_128k: f64,
    /// Mean KL(full precision ‖ method) a position, nats.
    pub kl: f64,
    /// Its standard error, from the spread between windows; null for a single window.
    pub kl_stderr: Option<f64>,
    pub perplexity: f64,
    /// Share of positions whose likeliest token is the reference's.
    pub top1: f64,
}

/// Errors that one layer's cache makes by itself: measured on the reference's hidden states.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerError {
    pub layer: usize,
    pub methods: Vec<LayerMethodError>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerMethodError {
    pub name: String,
    /// Relative error of the attention logits, one a query head; null where they do not vary.
    pub logit_error: Vec<Option<f64>>,
    /// Relative error of attention's output, one a query head; null where it is zero.
    pub output_error: Vec<Option<f64>>,
}

impl Report {
    /// The scores of `name`.
    pub fn method(&self, name: &str) -> Option<&MethodScore> {
        self.methods.iter().find(|m| m.name == name)
    }

    /// The text of `metrics.json`. A number that is not finite becomes null.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string_pretty(self)
            .map_err(|e| Error::numeric("report", format!("cannot be written as JSON: {e}")))
    }

    /// Writes `metrics.json` into `folder`, whole or not at all.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let text = self.to_json()?;
        write_atomic(&folder.join(METRICS), |file| {
            use std::io::Write;
            writeln!(file, "{text}")
        })
    }

    /// Reads `metrics.json` of `folder`. `None` where there is none.
    ///
    /// # Errors
    /// A file that is no report of an evaluation.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(METRICS);
        if !path.exists() {
            return Ok(None);
        }
        serde_json::from_str(&read_text(&path)?)
            .map(Some)
            .map_err(|e| {
                Error::invalid(path.display(), format!("not what `validate` writes: {e}"))
                    .hint("remove it, or measure the entry again with `oscar validate`")
            })
    }

    /// A table of the methods, best read in a fixed-width font; plain text on terminals and elsewhere alike.
    pub fn table(&self) -> String {
        let baseline = self.method("oscar").map(|m| m.kl).filter(|&kl| kl > 0.0);
        let mut table = Table::new();
        table
            .load_style(presets::ASCII_MARKDOWN)
            .set_content_arrangement(ContentArrangement::Disabled);
        let mut header = vec![
            "method".to_owned(),
            format!("bits at {}", tokens(self.context)),
            "bits at 128K".to_owned(),
            "KL (nats)".to_owned(),
        ];
        header.extend(baseline.map(|_| "KL / oscar".to_owned()));
        header.extend(["perplexity".to_owned(), "top-1".to_owned()]);
        let columns = header.len();
        table.set_header(header);
        let mut reference = vec![
            "full precision".to_owned(),
            "16".to_owned(),
            "16".to_owned(),
            "0".to_owned(),
        ];
        reference.extend(baseline.map(|_| String::new()));
        reference.extend([
            format!("{:.3}", self.reference.perplexity),
            "100 %".to_owned(),
        ]);
        table.add_row(reference);
        for method in &self.methods {
            let spread = method
                .kl_stderr
                .map_or_else(String::new, |e| format!(" ± {}", significant(e, 2)));
            let mut row = vec![
                method.name.clone(),
                format!("{:.3}", method.bits_per_element),
                format!("{:.3}", method.bits_per_element_128k),
                format!("{}{spread}", significant(method.kl, 3)),
            ];
            row.extend(baseline.map(|kl| significant(method.kl / kl, 3)));
            row.extend([
                format!("{:.3}", method.perplexity),
                format!("{:.1} %", method.top1 * 100.0),
            ]);
            table.add_row(row);
        }
        for column in table.column_iter_mut().skip(1).take(columns) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let Windows {
            sink_tokens: sink,
            recent_tokens: recent,
        } = self.windows;
        format!(
            "{} tokens in windows of {}, sink {sink}, recent {recent}, {} positions measured\n\n{table}\n",
            self.tokens, self.context, self.positions
        )
    }
}

/// 4096 as `4K`, 1000 as `1000`.
pub fn tokens(n: usize) -> String {
    if n >= 1024 && n.is_multiple_of(1024) {
        format!("{}K", n / 1024)
    } else {
        n.to_string()
    }
}

/// `digits` significant digits, without an exponent down to 1e-6.
pub fn significant(x: f64, digits: i32) -> String {
    if x == 0.0 || !x.is_finite() {
        return x.to_string();
    }
    let decimals = digits - 1 - x.abs().log10().floor() as i32;
    if decimals > 8 {
        return format!("{x:.*e}", digits as usize - 1);
    }
    format!("{x:.*}", decimals.max(0) as usize)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::eval) fn report() -> Report {
        let method = |name: &str, kl| MethodScore {
            name: name.to_owned(),
            bits_per_element: 3.359,
            bits_per_element_128k: 2.284,
            kl,
            kl_stderr: None,
            perplexity: 12.7,
            top1: 0.95,
        };
        Report {
            tokens: 8192,
            context: 4096,
            positions: 7550,
            windows: Windows {
                sink_tokens: 64,
                recent_tokens: 256,
            },
            provenance: Provenance {
                model: "tiny".to_owned(),
                revision: None,
                weights_fingerprint: "w".to_owned(),
                token_ids_sha256: "t".to_owned(),
                entry_sha256: None,
            },
            reference: ReferenceScore { perplexity: 12.5 },
            methods: vec![method("balanced", 0.0173), method("oscar", 0.183)],
            layers: vec![],
        }
    }

    #[test]
    fn the_table_shows_the_ratio_where_oscar_is_there() {
        let mut report = report();
        let text = report.table();
        assert!(text.contains("| balanced       |"), "{text}");
        assert!(
            text.contains("bits at 4K") && text.contains("0.0945"),
            "{text}"
        );
        report.methods.pop();
        assert!(!report.table().contains("KL / oscar"));
    }

    #[test]
    fn json_has_the_promised_keys_and_reads_back() {
        let value: serde_json::Value = serde_json::from_str(&report().to_json().unwrap()).unwrap();
        for key in ["tokens", "context", "reference", "methods", "layers"] {
            assert!(value.get(key).is_some(), "{key}");
        }
        for key in [
            "name",
            "bits_per_element",
            "bits_per_element_128k",
            "kl",
            "perplexity",
            "top1",
        ] {
            assert!(value["methods"][0].get(key).is_some(), "{key}");
        }
        let back: Report = serde_json::from_value(value).unwrap();
        assert_eq!(back.methods[1].name, "oscar");
    }

    #[test]
    fn numbers_keep_their_digits() {
        assert_eq!(significant(0.017_34, 3), "0.0173");
        assert_eq!(significant(1.478, 3), "1.48");
        assert_eq!(significant(387.9, 3), "388");
        assert_eq!(significant(0.0, 3), "0");
        assert_eq!(significant(1.2e-9, 3), "1.20e-9");
    }
}
