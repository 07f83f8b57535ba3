//! `report.html`: what an entry does to a model, on one page.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Value, context};
use serde::Serialize;

use super::draw::{Figure, HEADS, escape, palette};
use super::figures::{
    self, HeatScale, LayerChart, Measure, extent, heat_map, layer_charts, median, method_ink,
};
use super::heads::{self, WorstHead};
use crate::eval::{MethodScore, Report, significant, tokens};
use crate::files::write_atomic;
use crate::zoo::{Entry, Metadata, SideName};
use crate::{Error, Result};

/// Name of the page in an entry's folder.
pub const FILE: &str = "report.html";

/// Methods whose errors are set beside the entry's, from the least done to the most.
const BEFORE: [&str; 3] = ["naive", "hadamard", "oscar"];

const UNMEASURED: &str = "The entry has not been measured yet.";

/// Everything that is shown of an entry.
pub struct Page<'a> {
    entry: &'a Entry,
    report: Option<&'a Report>,
    /// Why there is no measurement, in a sentence.
    missing: &'a str,
    accuracy: Vec<Figure>,
    heat: Vec<Heat>,
    clips: Vec<Figure>,
    layers: Vec<LayerChart>,
    worst: Vec<WorstHead>,
}

/// Heat maps of one measure.
struct Heat {
    measure: Measure,
    scale: Figure,
    panels: Vec<Panel>,
}

struct Panel {
    method: String,
    figure: Figure,
    median: Option<f64>,
    worst: Option<f64>,
}

/// What a page is made from.
pub struct Inputs {
    entry: Entry,
    report: Option<Report>,
    /// Why there is no measurement, in a sentence; empty where there is one.
    pub missing: String,
}

impl Inputs {
    /// Reads `rotations.safetensors` and, where it is there, `metrics.json` of `folder`.
    ///
    /// # Errors
    /// Where one cannot be read.
    pub fn read(folder: &Path) -> Result<Self> {
        let entry = Entry::open(folder)?;
        let (report, missing) = measured(&entry, folder)?;
        Ok(Self {
            entry,
            report,
            missing,
        })
    }

    /// Of an entry and its measurement in memory.
    pub fn new(entry: Entry, report: Option<Report>) -> Self {
        let missing = match report {
            Some(_) => String::new(),
            None => UNMEASURED.to_owned(),
        };
        Self {
            entry,
            report,
            missing,
        }
    }

    /// # Errors
    /// Where a figure cannot be drawn.
    pub fn page(&self) -> Result<Page<'_>> {
        Page::new(&self.entry, self.report.as_ref(), &self.missing)
    }
}

/// Writes `folder`/`report.html`, whole or not at all, and says where.
///
/// # Errors
/// Those of [`Inputs::read`] and [`Page::html`].
pub fn write(folder: &Path) -> Result<PathBuf> {
    let html = Inputs::read(folder)?.page()?.html()?;
    let path = folder.join(FILE);
    write_atomic(&path, |out| out.write_all(html.as_bytes()))?;
    Ok(path)
}

/// The entry's `metrics.json`, or why it does not count.
pub(super) fn measured(entry: &Entry, folder: &Path) -> Result<(Option<Report>, String)> {
    let Some(report) = Report::read(folder)? else {
        return Ok((None, UNMEASURED.to_owned()));
    };
    let of = report.provenance.entry_sha256.as_deref();
    if of.is_some_and(|of| of != entry.metadata.content_sha256) {
        return Ok((
            None,
            "Its metrics.json is of other tensors and is left out.".to_owned(),
        ));
    }
    Ok((Some(report), String::new()))
}

impl<'a> Page<'a> {
    /// # Errors
    /// Where a figure cannot be drawn.
    fn new(entry: &'a Entry, report: Option<&'a Report>, missing: &'a str) -> Result<Self> {
        let report = report.filter(|r| !r.methods.is_empty());
        let (accuracy, heat) = match report {
            Some(report) => (figures::accuracy(report)?, heat_maps(report)?),
            None => (Vec::new(), Vec::new()),
        };
        let clips = SideName::ALL.map(|side| figures::clips(entry, side));
        Ok(Self {
            entry,
            report,
            missing,
            accuracy,
            heat,
            clips: clips.into_iter().collect::<Result<_>>()?,
            layers: layer_charts(entry)?,
            worst: heads::worst(entry, report, report.and_then(before)),
        })
    }

    /// Figures for papers, as files: names and contents. Charts of one layer show that of the worst head.
    pub fn svgs(&self) -> Vec<(String, String)> {
        let heat = self.heat.iter().flat_map(|heat| {
            std::iter::once(&heat.scale).chain(heat.panels.iter().map(|p| &p.figure))
        });
        let mut files: Vec<(String, String)> = self
            .accuracy
            .iter()
            .chain(heat)
            .chain(&self.clips)
            .map(|figure| (format!("{}.svg", figure.name), figure.standalone()))
            .collect();
        let shown = self.shown_layer();
        for chart in &self.layers {
            if let Some(layer) = shown
                && let Some((_, lines)) = chart.layers.iter().find(|(at, _)| *at == layer)
            {
                files.push((
                    format!("{}-layer-{layer}.svg", chart.frame.name),
                    chart.frame.with(lines).standalone(),
                ));
            }
        }
        files
    }

    fn shown_layer(&self) -> Option<usize> {
        let first = || self.entry.layers.keys().next().copied();
        self.worst.first().map(|head| head.layer).or_else(first)
    }

    /// HTML: what Markdown sets in bold is set in bold.
    fn sentence(&self) -> String {
        let text = sentence(self.entry, self.report, &|name| escape(name));
        let parts = text.split("**").enumerate();
        parts.fold(String::new(), |out, (i, part)| {
            out + match i {
                0 => "",
                i if i % 2 == 1 => "<b>",
                _ => "</b>",
            } + part
        })
    }

    /// The page.
    ///
    /// # Errors
    /// Where the template fails, which is a defect of this crate.
    pub fn html(&self) -> Result<String> {
        let fail = |e: minijinja::Error| Error::numeric("report", e);
        let mut environment = Environment::new();
        environment.set_auto_escape_callback(|_| AutoEscape::Html);
        environment
            .add_template("page", include_str!("page.html"))
            .map_err(fail)?;
        let template = environment.get_template("page").map_err(fail)?;
        let metadata = &self.entry.metadata;
        let safe = Value::from_safe_string;
        let inline = |figures: &[Figure]| -> Vec<Value> {
            let html = |f: &Figure| safe(f.inline(&f.name, "figure"));
            figures.iter().map(html).collect()
        };
        let shown = self.shown_layer();
        let mut html = template
            .render(context! {
                style => safe(include_str!("style.css").to_owned()),
                script => safe(include_str!("page.js").to_owned()),
                light => safe(palette(false)),
                dark => safe(palette(true)),
                model => metadata.model.id.as_str(),
                method => metadata.method.as_str(),
                bits => metadata.quantizer.bits,
                sentence => safe(self.sentence()),
                missing => self.missing,
                measured => self.report.is_some(),
                context => self.report.map(|r| tokens(r.context)),
                setting => self.report.map(setting),
                key_figures => self.key_figures(),
                methods => self.report.map(|r| Value::from(Serde(method_rows(r)))),
                accuracy => inline(&self.accuracy),
                heat => self.heat.iter().map(heat_context).collect::<Vec<_>>(),
                heat_data => self.heat_data().map(safe),
                clips => inline(&self.clips),
                layer_charts => self.layers.iter().map(|c| layer_context(c, shown)).collect::<Vec<_>>(),
                layer_options => self.layer_options(),
                heads_legend => self.heads_legend(),
                worst => Value::from(Serde(&self.worst)),
                before => self.report.and_then(before),
                provenance => provenance(metadata, self.report),
                version => env!("CARGO_PKG_VERSION"),
                tool => env!("CARGO_PKG_NAME"),
            })
            .map_err(fail)?;
        // Names may hold what no page may.
        html.retain(|c| !c.is_control() || c == '\n');
        Ok(html)
    }

    fn key_figures(&self) -> Vec<(String, String, String)> {
        let Some((report, subject)) = self.report.and_then(|r| Some((r, r.methods.first()?)))
        else {
            return Vec::new();
        };
        let of = |label: &str, value: String, note: String| (label.to_owned(), value, note);
        vec![
            of(
                "KL divergence",
                significant(subject.kl, 3),
                match subject.kl_stderr {
                    Some(e) => format!("nats, ± {}", significant(e, 2)),
                    None => "nats".to_owned(),
                },
            ),
            of(
                "Same likeliest token",
                format!("{:.1}\u{a0}%", subject.top1 * 100.0),
                format!("of {} positions", grouped(report.positions)),
            ),
            of(
                "Perplexity",
                format!("{:.2}", subject.perplexity),
                format!("{:.2} in full precision", report.reference.perplexity),
            ),
            of(
                "Bits a number",
                format!("{:.2}", subject.bits_per_element_128k),
                format!(
                    "at 128K tokens; {:.2} at {}",
                    subject.bits_per_element,
                    tokens(report.context)
                ),
            ),
        ]
    }

    /// What the readout under the heat maps looks up: layers, and errors by measure and method.
    fn heat_data(&self) -> Option<String> {
        let report = self.report.filter(|_| !self.heat.is_empty())?;
        let layers: Vec<usize> = report.layers.iter().map(|l| l.layer).collect();
        let rounded = |errors: Vec<Vec<Option<f64>>>| -> Vec<Vec<Option<f64>>> {
            let round = |x: f64| significant(x, 3).parse::<f64>().ok();
            errors
                .into_iter()
                .map(|heads| heads.into_iter().map(|x| x.and_then(round)).collect())
                .collect()
        };
        let measures: serde_json::Map<_, _> = self
            .heat
            .iter()
            .map(|heat| {
                let methods: serde_json::Map<_, _> = heat
                    .panels
                    .iter()
                    .map(|panel| {
                        let errors = rounded(heat.measure.of(report, &panel.method));
                        (panel.method.clone(), serde_json::json!(errors))
                    })
                    .collect();
                (heat.measure.name().to_owned(), methods.into())
            })
            .collect();
        let json = serde_json::json!({ "layers": layers, "errors": measures }).to_string();
        // Nothing in a script element may look like its end.
        Some(json.replace('<', "\\u003c"))
    }

    fn layer_options(&self) -> Vec<Value> {
        let shown = self.shown_layer();
        let worst = |layer| self.worst.first().is_some_and(|head| head.layer == layer);
        let has = |layer: &usize| {
            self.layers
                .iter()
                .any(|chart| chart.layers.iter().any(|(at, _)| at == layer))
        };
        self.entry
            .layers
            .keys()
            .filter(|layer| has(layer))
            .map(|&layer| {
                let note = if worst(layer) {
                    ", with the worst head"
                } else {
                    ""
                };
                context! {
                    layer,
                    text => format!("{layer}{note}"),
                    selected => shown == Some(layer),
                }
            })
            .collect()
    }

    /// Colours of the lines in the charts of a layer.
    fn heads_legend(&self) -> Vec<Value> {
        let most = self
            .entry
            .layers
            .keys()
            .map(|l| self.entry.transforms(*l))
            .max();
        match most.unwrap_or(0) {
            0 | 1 => Vec::new(),
            n => (0..n)
                .map(|head| context! { head, ink => head % usize::from(HEADS) })
                .collect(),
        }
    }
}

/// The result in a sentence of Markdown; `shown` makes names safe where it goes.
pub(super) fn sentence(
    entry: &Entry,
    report: Option<&Report>,
    shown: &dyn Fn(&str) -> String,
) -> String {
    let metadata = &entry.metadata;
    let Some((report, subject)) = report.and_then(|r| Some((r, r.methods.first()?))) else {
        return format!(
            "Keys and values of {} layers, encoded by **{}** for {}\u{2011}bit caches.",
            entry.layers.len(),
            metadata.method,
            metadata.quantizer.bits
        );
    };
    let mut text = format!(
        "With {:.2} bits a cached number at 128K tokens instead of 16, **{}** keeps the model’s likeliest next token at \
         {:.1}\u{a0}% of positions and moves perplexity from {:.2} to {:.2}",
        subject.bits_per_element_128k,
        shown(&subject.name),
        subject.top1 * 100.0,
        report.reference.perplexity,
        subject.perplexity,
    );
    let other = before(report).and_then(|name| report.method(name));
    if let Some(other) = other.filter(|o| o.kl > 0.0 && subject.kl > 0.0) {
        let ratio = other.kl / subject.kl;
        let (factor, word) = if ratio >= 1.0 {
            (ratio, "smaller")
        } else {
            (1.0 / ratio, "larger")
        };
        let _ = write!(
            text,
            "; its KL divergence is {}× {word} than that of {}",
            significant(factor, 2),
            shown(&other.name)
        );
    }
    text + "."
}

/// The method to compare with: the paper's where it was measured.
pub(super) fn before(report: &Report) -> Option<&str> {
    let subject = report.methods.first()?;
    BEFORE
        .into_iter()
        .rev()
        .find(|name| *name != subject.name && report.method(name).is_some())
}

fn heat_maps(report: &Report) -> Result<Vec<Heat>> {
    let Some(subject) = report.methods.first() else {
        return Ok(Vec::new());
    };
    let mut names: Vec<&str> = BEFORE
        .into_iter()
        .filter(|name| *name != subject.name && report.method(name).is_some())
        .collect();
    if names.is_empty() {
        names.extend(
            report
                .methods
                .iter()
                .skip(1)
                .map(|m| m.name.as_str())
                .take(3),
        );
    }
    names.push(&subject.name);
    let layers: Vec<usize> = report.layers.iter().map(|l| l.layer).collect();
    let mut out = Vec::new();
    for measure in Measure::ALL {
        let errors: Vec<_> = names.iter().map(|name| measure.of(report, name)).collect();
        let Some(scale) = HeatScale::over(&errors) else {
            continue;
        };
        let panels = names
            .iter()
            .zip(&errors)
            .map(|(name, errors)| {
                let all: Vec<f64> = errors.iter().flatten().flatten().copied().collect();
                Ok(Panel {
                    method: (*name).to_owned(),
                    figure: heat_map(name, measure, &layers, errors, &scale)?,
                    median: median(&all),
                    worst: extent(&all).map(|(_, most)| most),
                })
            })
            .collect::<Result<_>>()?;
        out.push(Heat {
            measure,
            scale: scale.figure(measure)?,
            panels,
        });
    }
    Ok(out)
}

fn heat_context(heat: &Heat) -> Value {
    let shown = |x: Option<f64>| x.map_or_else(|| "–".to_owned(), |x| significant(x, 2));
    let panels: Vec<Value> = heat
        .panels
        .iter()
        .map(|panel| {
            let figure = &panel.figure;
            context! {
                method => panel.method.as_str(),
                svg => Value::from_safe_string(figure.inline(&figure.name, "figure")),
                plot => figure.plot.map(|p| p.map(|x| x.to_string()).join(" ")),
                median => shown(panel.median),
                worst => shown(panel.worst),
            }
        })
        .collect();
    context! {
        name => heat.measure.name(),
        title => heat.measure.title(),
        scale => Value::from_safe_string(heat.scale.inline(&heat.scale.name, "figure")),
        panels,
    }
}

fn layer_context(chart: &LayerChart, shown: Option<usize>) -> Value {
    let lines = chart
        .layers
        .iter()
        .fold(String::new(), |text, (layer, elements)| {
            let on = if shown == Some(*layer) { " on" } else { "" };
            text + &format!("<g class=\"layer{on}\" data-layer=\"{layer}\">{elements}</g>")
        });
    let name = &chart.frame.name;
    context! {
        title => chart.frame.title.as_str(),
        side => chart.side.as_str(),
        svg => Value::from_safe_string(chart.frame.with(&lines).inline(name, "figure")),
    }
}

#[derive(Serialize)]
struct MethodRow {
    name: String,
    ink: String,
    bits: String,
    bits_128k: String,
    kl: String,
    ratio: String,
    perplexity: String,
    top1: String,
    subject: bool,
}

fn method_rows(report: &Report) -> Vec<MethodRow> {
    let baseline = report.method("oscar").map(|m| m.kl).filter(|kl| *kl > 0.0);
    let row = |(i, m): (usize, &MethodScore)| MethodRow {
        name: m.name.clone(),
        ink: method_ink(report, &m.name).variable(),
        bits: format!("{:.2}", m.bits_per_element),
        bits_128k: format!("{:.2}", m.bits_per_element_128k),
        kl: match m.kl_stderr {
            Some(e) => format!("{} ± {}", significant(m.kl, 3), significant(e, 2)),
            None => significant(m.kl, 3),
        },
        ratio: baseline.map_or_else(String::new, |kl| significant(m.kl / kl, 2)),
        perplexity: format!("{:.2}", m.perplexity),
        top1: format!("{:.1}", m.top1 * 100.0),
        subject: i == 0,
    };
    report.methods.iter().enumerate().map(row).collect()
}

fn setting(report: &Report) -> String {
    format!(
        "{} tokens in windows of {}, {} positions measured; the first {} and the latest {} tokens stay exact.",
        grouped(report.tokens),
        grouped(report.context),
        grouped(report.positions),
        report.windows.sink_tokens,
        report.windows.recent_tokens
    )
}

/// 16384 as 16,384.
pub(super) fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

pub(super) fn provenance(
    metadata: &Metadata,
    report: Option<&Report>,
) -> Vec<(String, String, bool)> {
    let m = metadata;
    let row = |key: &str, value: String| (key.to_owned(), value, false);
    let hash = |key: &str, value: &str| (key.to_owned(), value.to_owned(), true);
    let mut rows = vec![row("Model", m.model.id.clone())];
    if let Some(revision) = m.model.revision.as_ref().filter(|r| !r.is_empty()) {
        rows.push(hash("Revision", revision));
    }
    let alike = |list: &[usize]| match extent(&list.iter().map(|x| *x as f64).collect::<Vec<_>>()) {
        Some((least, most)) if least < most => format!("{least}–{most}"),
        Some((least, _)) => least.to_string(),
        None => "–".to_owned(),
    };
    rows.extend([
        row(
            "Geometry",
            format!(
                "{}, {} layers, {} heads over {} KV heads, head_dim {}",
                m.model.architecture,
                m.model.layers,
                alike(&m.model.heads),
                alike(&m.model.kv_heads),
                alike(&m.model.head_dim)
            ),
        ),
        row(
            "Method",
            format!(
                "{}, one transform a {}; keys from {}, values from {}",
                m.method,
                m.scope,
                m.k_moment.map_or("no data", |x| x.as_str()),
                m.v_moment.map_or("no data", |x| x.as_str())
            ),
        ),
    ]);
    if let Some(fit) = &m.fit {
        let centered = |c| if c { ", centered" } else { "" };
        rows.push(row(
            "Rounding",
            format!(
                "keys {}{}; values {}{}",
                fit.k_rounding,
                centered(fit.k_centered),
                fit.v_rounding,
                centered(fit.v_centered)
            ),
        ));
    }
    if let Some(imported) = &m.imported {
        for (key, file) in [("Keys from", &imported.k), ("Values from", &imported.v)] {
            rows.push(hash(key, &format!("{} {}", file.name, file.sha256)));
        }
    }
    let c = &m.calibration;
    rows.extend([
        row(
            "Quantizer",
            format!(
                "{} bits, {}, groups of {}, scales in {}",
                m.quantizer.bits, m.quantizer.codec, m.quantizer.group, m.quantizer.scale_dtype
            ),
        ),
        row(
            "Windows",
            format!(
                "{} sink and {} recent tokens in full precision",
                m.windows.sink_tokens, m.windows.recent_tokens
            ),
        ),
        row(
            "Calibration",
            format!(
                "{} tokens of {} prompts, sequences of {}, seed {}, {} on {}",
                grouped(c.tokens),
                grouped(c.prompts),
                grouped(c.seq_len),
                c.seed,
                c.dtype,
                c.device
            ),
        ),
        row(
            "Written by",
            format!(
                "{} {}, algorithm {}",
                m.tool.name, m.tool.version, m.tool.algorithm
            ),
        ),
        hash("Content", &m.content_sha256),
        hash("Weights", &m.model.weights_fingerprint),
        hash("Configuration", &m.model.config_sha256),
        hash("Calibration tokens", &c.token_ids_sha256),
        hash("Tokenizer", &c.tokenizer_sha256),
    ]);
    if let Some(report) = report {
        rows.push(row("Measured on", report.provenance.model.clone()));
        rows.push(hash(
            "Evaluation tokens",
            &report.provenance.token_ids_sha256,
        ));
    }
    rows
}
