//! The charts of a report.

use std::ops::Range;

use super::draw::{
    Anchor, Axis, Chart, Figure, HEADS, HEAT, Ink, LABEL, Margins, SMALL, axes, cell, dot,
    layer as elements, log_ticks, path, plot_of, px, text_style, ticks, width_of,
};
use crate::eval::{Basis, MethodScore, Report, significant};
use crate::linalg::parallel;
use crate::zoo::{Entry, SideName};
use crate::{Error, Result};
use plotters::prelude::Text;
use plotters::style::TRANSPARENT;

/// Pixels of a chart that fills a phone's width, or half a page's.
const SIZE: (i32, i32) = (400, 290);

/// Relative error of what, in heat maps and tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    Output,
    Logits,
}

impl Measure {
    pub const ALL: [Self; 2] = [Self::Output, Self::Logits];

    pub fn name(self) -> &'static str {
        match self {
            Self::Output => "output",
            Self::Logits => "logits",
        }
    }

    pub fn title(self) -> &'static str {
        match self {
            Self::Output => "Attention output",
            Self::Logits => "Attention logits",
        }
    }

    /// By layer of the report (as it lists them) and query head.
    pub fn of(self, report: &Report, method: &str) -> Vec<Vec<Option<f64>>> {
        report
            .layers
            .iter()
            .map(|layer| {
                layer
                    .methods
                    .iter()
                    .find(|m| m.name == method)
                    .map(|m| match self {
                        Self::Output => m.output_error.clone(),
                        Self::Logits => m.logit_error.clone(),
                    })
                    .unwrap_or_default()
            })
            .collect()
    }
}

/// The colour of a method: the entry's own first.
pub fn method_ink(report: &Report, name: &str) -> Ink {
    if report.methods.first().is_some_and(|m| m.name == name) {
        return Ink::Method(0);
    }
    Ink::Method(match name {
        "oscar" => 1,
        "hadamard" => 2,
        "naive" => 3,
        "kivi" => 4,
        name if name.starts_with("turboquant") => 5,
        _ => 6,
    })
}

/// KL, or agreement, against bits, of every method.
pub fn accuracy(report: &Report) -> Result<Vec<Figure>> {
    let kl = |m: &MethodScore| Some(m.kl).filter(|x| *x > 0.0 && x.is_finite());
    let top1 = |m: &MethodScore| Some(m.top1 * 100.0).filter(|x| x.is_finite());
    let mut figures = Vec::new();

    let values: Vec<f64> = report.methods.iter().filter_map(kl).collect();
    if let Some((least, most)) = extent(&values) {
        let range = (least.log10() - 0.25)..(most.log10() + 0.25);
        figures.push(scatter(
            report,
            "kl-against-bits",
            "KL divergence against bits",
            &kl,
            &|m| m.kl_stderr,
            &Axis {
                ticks: log_ticks(&range),
                range,
                log: true,
                label: "KL from full precision, nats (lower is better)",
                format: &|x| significant(x, 1),
            },
            "nats",
        )?);
    }
    let values: Vec<f64> = report.methods.iter().filter_map(top1).collect();
    if let Some((least, most)) = extent(&values) {
        let pad = ((most - least) * 0.12).max(1.0);
        let range = (least - pad).max(0.0)..(most + pad).min(100.0);
        figures.push(scatter(
            report,
            "top1-against-bits",
            "Top-1 agreement against bits",
            &top1,
            &|_| None,
            &Axis {
                ticks: ticks(&range, 5),
                range,
                log: false,
                label: "same likeliest token, % (higher is better)",
                format: &|x| format!("{x:.0}"),
            },
            "%",
        )?);
    }
    Ok(figures)
}

fn scatter(
    report: &Report,
    name: &str,
    title: &str,
    value: &dyn Fn(&MethodScore) -> Option<f64>,
    spread: &dyn Fn(&MethodScore) -> Option<f64>,
    y: &Axis<'_>,
    unit: &str,
) -> Result<Figure> {
    let bits: Vec<f64> = report
        .methods
        .iter()
        .map(|m| m.bits_per_element_128k)
        .filter(|b| b.is_finite())
        .collect();
    let (least, most) = extent(&bits).unwrap_or((2.0, 3.0));
    let pad = ((most - least) * 0.14).max(0.12);
    let range = (least - pad)..(most + pad);
    let x = Axis {
        ticks: ticks(&range, 5),
        range,
        log: false,
        label: "bits a cached number at 128K tokens",
        format: &|x| trimmed(x, 2),
    };
    let points: Vec<(&MethodScore, f64)> = report
        .methods
        .iter()
        .filter(|m| m.bits_per_element_128k.is_finite())
        .filter_map(|m| Some((m, value(m)?)))
        .collect();
    let description = points
        .iter()
        .map(|(m, v)| {
            format!(
                "{}: {} {unit} at {:.2} bits",
                m.name,
                significant(*v, 3),
                m.bits_per_element_128k
            )
        })
        .collect::<Vec<_>>()
        .join("; ");
    let on_axis = |v: f64| {
        let at = if y.log { v.log10() } else { v };
        at.clamp(y.range.start, y.range.end)
    };
    Figure::draw(name, title, description, SIZE, |area| {
        let margins = Margins::default();
        let chart = axes(area, margins, &x, y, false)?;
        let plot = plot_of(&chart);
        let mut taken: Vec<[f64; 4]> = points
            .iter()
            .map(|(m, v)| {
                let (px, py) = pixel(&chart, m.bits_per_element_128k, on_axis(*v));
                [px - 6.0, py - 6.0, px + 6.0, py + 6.0]
            })
            .collect();
        for (m, v) in &points {
            let ink = method_ink(report, &m.name);
            let at = (m.bits_per_element_128k, on_axis(*v));
            if let Some(e) = spread(m).filter(|e| e.is_finite() && *e > 0.0) {
                let low = on_axis((v - e).max(v * 1e-3));
                let ends = vec![(at.0, low), (at.0, on_axis(v + e))];
                chart
                    .plotting_area()
                    .draw(&path(ends, ink.faint_line(1.5, 0.6)))?;
            }
            chart.plotting_area().draw(&dot(at, 4.5, ink.fill()))?;
        }
        // The entry's own label first: it gets the best place.
        for (m, v) in &points {
            let subject = report.methods.first().is_some_and(|s| s.name == m.name);
            let (x, y) = pixel(&chart, m.bits_per_element_128k, on_axis(*v));
            let text = format!("{} {}", m.name, significant(*v, 3));
            let size = if subject { LABEL + 0.5 } else { LABEL };
            let (place, anchor, corner) = label_place((x, y), &text, size, plot, &taken);
            taken.push(place);
            area.draw(&Text::new(
                text,
                (px(corner.0), px(corner.1)),
                text_style(method_ink(report, &m.name), size, anchor, true),
            ))?;
        }
        Ok(Some(plot))
    })
}

/// A place for a label beside its point that nothing else takes: its box, how it is anchored, and where.
fn label_place(
    (x, y): (f64, f64),
    text: &str,
    size: f64,
    plot: [i32; 4],
    taken: &[[f64; 4]],
) -> ([f64; 4], Anchor, (f64, f64)) {
    let (width, half) = (width_of(text, size), size * 0.6);
    let candidates = [
        (Anchor::Start, x + 8.0, y),
        (Anchor::End, x - 8.0, y),
        (Anchor::Start, x + 7.0, y - 9.0),
        (Anchor::Start, x + 7.0, y + 9.0),
        (Anchor::End, x - 7.0, y - 9.0),
        (Anchor::End, x - 7.0, y + 9.0),
        (Anchor::Middle, x, y - 14.0),
        (Anchor::Middle, x, y + 14.0),
    ];
    let boxed = |(anchor, ax, ay): (Anchor, f64, f64)| {
        let left = match anchor {
            Anchor::Start => ax,
            Anchor::Middle => ax - width / 2.0,
            Anchor::End => ax - width,
        };
        [left, ay - half, left + width, ay + half]
    };
    let limits = plot.map(|units| f64::from(units) / f64::from(px(1.0)));
    let cost = |b: &[f64; 4]| {
        let outside = (limits[0] - b[0]).max(0.0)
            + (b[2] - limits[2] - 6.0).max(0.0)
            + (limits[1] - 4.0 - b[1]).max(0.0)
            + (b[3] - limits[3] - 2.0).max(0.0);
        let over: f64 = taken
            .iter()
            .map(|t| {
                let w = (b[2].min(t[2]) - b[0].max(t[0])).max(0.0);
                let h = (b[3].min(t[3]) - b[1].max(t[1])).max(0.0);
                w * h
            })
            .sum();
        outside * 50.0 + over
    };
    let mut best = candidates[0];
    let mut least = f64::INFINITY;
    for candidate in candidates {
        let cost = cost(&boxed(candidate));
        if cost < least {
            (best, least) = (candidate, cost);
        }
    }
    (boxed(best), best.0, (best.1, best.2))
}

fn pixel(chart: &Chart<'_>, x: f64, y: f64) -> (f64, f64) {
    let (x, y) = chart.backend_coord(&(x, y));
    let unit = f64::from(px(1.0));
    (f64::from(x) / unit, f64::from(y) / unit)
}

/// One colour scale for all panels of a measure.
#[derive(Clone, Debug)]
pub struct HeatScale {
    /// log10 of the least and the most.
    range: Range<f64>,
}

impl HeatScale {
    /// Over all that the panels show. `None` where nothing was measured.
    pub fn over(panels: &[Vec<Vec<Option<f64>>>]) -> Option<Self> {
        let values: Vec<f64> = panels
            .iter()
            .flatten()
            .flatten()
            .flatten()
            .copied()
            .filter(|x| *x > 0.0 && x.is_finite())
            .collect();
        let (least, most) = extent(&values)?;
        let (mut low, mut high) = (least.log10(), most.log10());
        if high - low < 0.1 {
            (low, high) = (low - 0.05, high + 0.05);
        }
        Some(Self { range: low..high })
    }

    fn ink(&self, x: f64) -> Ink {
        let part = (x.max(1e-300).log10() - self.range.start) / (self.range.end - self.range.start);
        Ink::Heat((part * f64::from(HEAT)).clamp(0.0, f64::from(HEAT) - 1.0) as u8)
    }

    /// The scale itself.
    pub fn figure(&self, measure: Measure) -> Result<Figure> {
        let title = format!("Colour scale of the error of {}", measure.name());
        let (least, most) = (10f64.powf(self.range.start), 10f64.powf(self.range.end));
        let description = format!("from {} to {}", significant(least, 2), significant(most, 2));
        let (width, left, top, height) = (400, 4.0, 2.0, 10.0);
        let name = format!("{}-error-scale", measure.name());
        Figure::draw(name, title, description, (width, 30), |area| {
            let right = f64::from(width) - 4.0;
            let at = |part: f64| px(left + (right - left) * part);
            for step in 0..HEAT {
                let part = |s: u8| f64::from(s) / f64::from(HEAT);
                let corners = [
                    (at(part(step)), px(top)),
                    (at(part(step + 1)), px(top + height)),
                ];
                area.draw(&cell(corners, 0, Ink::Heat(step)))?;
            }
            for tick in log_ticks(&self.range) {
                let part = (tick.log10() - self.range.start) / (self.range.end - self.range.start);
                let anchor = if part < 0.04 {
                    Anchor::Start
                } else if part > 0.96 {
                    Anchor::End
                } else {
                    Anchor::Middle
                };
                area.draw(&Text::new(
                    significant(tick, 1),
                    (at(part), px(top + height + 4.0)),
                    text_style(Ink::Muted, SMALL, anchor, false),
                ))?;
            }
            Ok(None)
        })
    }
}

/// Layers across, query heads down; `errors` by layer and head.
pub fn heat_map(
    method: &str,
    measure: Measure,
    layers: &[usize],
    errors: &[Vec<Option<f64>>],
    scale: &HeatScale,
) -> Result<Figure> {
    let heads = errors.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let columns = layers.len().max(1);
    let row = (170.0 / heads as f64).clamp(4.0, 16.0);
    let margins = Margins {
        left: 30,
        right: 2,
        top: 20,
        bottom: 34,
    };
    let height = (row * heads as f64).round() as i32 + margins.top + margins.bottom;
    let every = |n: usize, most: usize| n.div_ceil(most).next_power_of_two();
    let (layer_step, head_step) = (every(columns, 16), every(heads, 9));
    let x = Axis {
        range: -0.5..columns as f64 - 0.5,
        ticks: (0..columns).step_by(layer_step).map(|i| i as f64).collect(),
        log: false,
        label: "layer",
        format: &|x| {
            layers
                .get(x.round().max(0.0) as usize)
                .map_or_else(String::new, ToString::to_string)
        },
    };
    // Head 0 on top.
    let y = Axis {
        range: heads as f64 - 0.5..-0.5,
        ticks: (0..heads).step_by(head_step).map(|i| i as f64).collect(),
        log: false,
        label: "query head",
        format: &|y| format!("{y:.0}"),
    };
    let all: Vec<f64> = errors.iter().flatten().flatten().copied().collect();
    let description = format!(
        "{method}: relative error of {} of {} layers by {heads} heads; median {}, worst {}",
        measure.name(),
        layers.len(),
        median(&all).map_or("not measured".to_owned(), |x| significant(x, 2)),
        extent(&all).map_or("not measured".to_owned(), |(_, x)| significant(x, 2)),
    );
    let title = format!("{} error by layer and head, {method}", measure.title());
    let name = format!("{}-error-{}", measure.name(), file_name(method));
    let cell_width = f64::from(SIZE.0 - margins.left - margins.right) / columns as f64;
    let gap = u32::from(cell_width.min(row) >= 6.0) * 3;
    Figure::draw(name, title, description, (SIZE.0, height), |area| {
        let mut bare = axes(area, margins, &x, &y, true)?;
        for (column, heads) in errors.iter().enumerate() {
            for (head, error) in heads.iter().enumerate() {
                if let Some(error) = error {
                    let (column, head) = (column as f64, head as f64);
                    let corners = [(column - 0.5, head - 0.5), (column + 0.5, head + 0.5)];
                    bare.plotting_area()
                        .draw(&cell(corners, gap, scale.ink(*error)))?;
                }
            }
        }
        let muted = || text_style(Ink::Muted, SMALL, Anchor::Middle, true);
        bare.configure_mesh()
            .disable_mesh()
            .axis_style(TRANSPARENT)
            .set_all_tick_mark_size(px(2.0))
            .label_style(muted())
            .x_label_formatter(&|v| (x.format)(*v))
            .y_label_formatter(&|v| (y.format)(*v))
            .draw()?;
        area.draw(&Text::new(
            y.label.to_owned(),
            (px(2.0), px(1.0)),
            text_style(Ink::Muted, SMALL, Anchor::Start, false),
        ))?;
        area.draw(&Text::new(
            x.label.to_owned(),
            (
                px(f64::from(SIZE.0 - margins.right)),
                px(f64::from(height - 14)),
            ),
            text_style(Ink::Muted, SMALL, Anchor::End, false),
        ))?;
        Ok(Some(plot_of(&bare)))
    })
}

/// Clip ratios of one side: a dot a transform, a line through the layers' medians.
pub fn clips(entry: &Entry, side: SideName) -> Result<Figure> {
    let (layers, clips): (Vec<usize>, Vec<Vec<f64>>) = entry
        .layers
        .iter()
        .map(|(layer, parts)| {
            let clip = match side {
                SideName::K => &parts.k.clip,
                SideName::V => &parts.v.clip,
            };
            (*layer, clip.iter().map(|c| f64::from(*c)).collect())
        })
        .unzip();
    // Both sides on one scale.
    let all: Vec<f64> = entry
        .layers
        .values()
        .flat_map(|parts| parts.k.clip.iter().chain(&parts.v.clip))
        .map(|c| f64::from(*c))
        .collect();
    let (least, most) = extent(&all).unwrap_or((0.9, 1.0));
    let range = (least - 0.01)..(most + 0.005).max(least + 0.02);
    let (what, ink) = match side {
        SideName::K => ("keys", Ink::Keys),
        SideName::V => ("values", Ink::Values),
    };
    let x = layer_axis(&layers);
    let y = Axis {
        ticks: ticks(&range, 5),
        range,
        log: false,
        label: "clip ratio of a row's range (1 clips nothing)",
        format: &|c| {
            format!("{c:.3}")
                .trim_end_matches('0')
                .trim_end_matches('.')
                .to_owned()
        },
    };
    let own: Vec<f64> = clips.iter().flatten().copied().collect();
    let description = match (extent(&own), median(&own)) {
        (Some((least, most)), Some(median)) => {
            format!("{what}: {least:.3} to {most:.3}, median {median:.3}")
        }
        _ => format!("{what}: none"),
    };
    let title = format!("Clip ratios of {what} by layer");
    Figure::draw(
        format!("clip-{what}"),
        title,
        description,
        (SIZE.0, 220),
        |area| {
            let chart = axes(area, Margins::default(), &x, &y, false)?;
            let line: Vec<(f64, f64)> = layers
                .iter()
                .zip(&clips)
                .filter_map(|(layer, clips)| Some((*layer as f64, median(clips)?)))
                .collect();
            chart
                .plotting_area()
                .draw(&path(line, ink.faint_line(1.5, 0.55)))?;
            for (layer, clips) in layers.iter().zip(&clips) {
                for clip in clips {
                    let at = (*layer as f64, *clip);
                    chart.plotting_area().draw(&dot(at, 2.6, ink.faint(0.75)))?;
                }
            }
            Ok(Some(plot_of(&chart)))
        },
    )
}

fn layer_axis(layers: &[usize]) -> Axis<'static> {
    let least = layers.first().copied().unwrap_or(0) as f64;
    let most = layers.last().copied().unwrap_or(0) as f64;
    let range = (least - 0.5)..(most + 0.5);
    let mut ticks = ticks(&range, 6);
    ticks.retain(|t| t.fract() == 0.0);
    Axis {
        ticks,
        range,
        log: false,
        label: "layer",
        format: &|x| format!("{x:.0}"),
    }
}

/// A chart whose lines are another layer's at a choice.
#[derive(Clone, Debug)]
pub struct LayerChart {
    pub frame: Figure,
    /// What it shows of a side.
    pub side: SideName,
    /// Elements by layer.
    pub layers: Vec<(usize, String)>,
}

/// Spectra and channel importance of keys and values. Empty for an entry made without data.
pub fn layer_charts(entry: &Entry) -> Result<Vec<LayerChart>> {
    let mut charts = Vec::new();
    for side in SideName::ALL {
        let ids: Vec<usize> = entry.layers.keys().copied().collect();
        let bases: Vec<(usize, Vec<Basis>)> = parallel(ids.len(), |i| {
            let units = 0..entry.transforms(ids[i]);
            let bases = units.filter_map(|unit| Basis::of(entry, ids[i], side, unit));
            (ids[i], bases.collect())
        });
        let spectra = collect(&bases, |basis| {
            let most = basis.spectrum.first().copied().filter(|x| *x > 0.0)?;
            Some(basis.spectrum.iter().map(|x| x / most).collect())
        });
        let importance = collect(&bases, Basis::importance);
        let what = match side {
            SideName::K => "keys",
            SideName::V => "values",
        };
        if !spectra.is_empty() {
            charts.push(lines(
                &format!("spectrum-{what}"),
                &format!("Spectrum of {what}"),
                "eigenvalue, share of the largest",
                "eigenvalue, largest first",
                side,
                &spectra,
                false,
            )?);
        }
        if !importance.is_empty() {
            charts.push(lines(
                &format!("importance-{what}"),
                &format!("Channel importance of {what}"),
                "cost of an error there, mean 1 (level: after the transform)",
                "the model's own channel",
                side,
                &importance,
                true,
            )?);
        }
    }
    Ok(charts)
}

type Lines = Vec<(usize, Vec<Vec<f64>>)>;

fn collect(bases: &[(usize, Vec<Basis>)], pick: impl Fn(&Basis) -> Option<Vec<f64>>) -> Lines {
    bases
        .iter()
        .map(|(layer, bases)| (*layer, bases.iter().filter_map(&pick).collect::<Vec<_>>()))
        .filter(|(_, lines)| !lines.is_empty())
        .collect()
}

/// One frame for all layers, so that they compare.
fn lines(
    name: &str,
    title: &str,
    y_label: &str,
    x_label: &str,
    side: SideName,
    layers: &Lines,
    level: bool,
) -> Result<LayerChart> {
    /// Smaller ones are rounding, and would flatten what matters.
    const LEAST: f64 = 1e-8;
    let all: Vec<f64> = layers
        .iter()
        .flat_map(|(_, lines)| lines.iter().flatten().copied())
        .filter(|x| *x > 0.0 && x.is_finite())
        .collect();
    let (least, most) = extent(&all).unwrap_or((0.1, 1.0));
    let least = least.max(most * LEAST);
    let range = least.log10().floor()..(most * 1.3).log10();
    let d = layers
        .iter()
        .flat_map(|(_, lines)| lines.iter().map(Vec::len))
        .max()
        .unwrap_or(1);
    let last = d as f64 - 1.0;
    let x = Axis {
        range: 0.0..last.max(1.0),
        ticks: (0..d)
            .step_by((d / 4).max(1))
            .filter(|i| d - 1 - i > d / 8)
            .chain([d - 1])
            .map(|i| i as f64)
            .collect(),
        log: false,
        label: x_label,
        format: &|x| format!("{x:.0}"),
    };
    let y = Axis {
        ticks: log_ticks(&range),
        range: range.clone(),
        log: true,
        label: y_label,
        format: &|v| decade(v),
    };
    let size = (SIZE.0, 240);
    let margins = Margins::default();
    let description = format!(
        "lines of {} layers, one a transform; the layer chosen is shown",
        layers.len()
    );
    let frame = Figure::draw(name, title, description, size, |area| {
        let chart = axes(area, margins, &x, &y, false)?;
        if level {
            let ends = vec![(0.0, 0.0), (last.max(1.0), 0.0)];
            chart
                .plotting_area()
                .draw(&path(ends, Ink::Text.faint_line(1.25, 0.7)))?;
        }
        Ok(Some(plot_of(&chart)))
    })?;
    let drawn = layers
        .iter()
        .map(|(layer, lines)| {
            let text = elements(size, |area| {
                let chart = axes(area, margins, &x, &y, true)?;
                for (head, line) in lines.iter().enumerate() {
                    let points: Vec<(f64, f64)> = line
                        .iter()
                        .enumerate()
                        .map(|(i, v)| {
                            let at = v.max(1e-300).log10().clamp(range.start, range.end);
                            (i as f64, at)
                        })
                        .collect();
                    let ink = Ink::Head(head as u8 % HEADS);
                    chart
                        .plotting_area()
                        .draw(&path(points, ink.faint_line(1.5, 0.9)))?;
                }
                Ok(None)
            })?;
            Ok((*layer, text))
        })
        .collect::<Result<Vec<_>, Error>>()?;
    Ok(LayerChart {
        frame,
        side,
        layers: drawn,
    })
}

/// Powers of ten as such, with a real exponent.
fn decade(x: f64) -> String {
    const RAISED: [char; 10] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'];
    let power = x.log10().round() as i32;
    if (x.log10() - f64::from(power)).abs() > 1e-6 || (-2..=3).contains(&power) {
        return significant(x, 1);
    }
    let mut text = String::from("10");
    if power < 0 {
        text.push('⁻');
    }
    for digit in power.unsigned_abs().to_string().bytes() {
        text.push(RAISED[usize::from(digit - b'0')]);
    }
    text
}

/// Up to `digits` decimals, without zeros at their end.
fn trimmed(x: f64, digits: usize) -> String {
    let text = format!("{x:.digits$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Letters, digits and dashes of a method's name.
fn file_name(method: &str) -> String {
    method
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect()
}

pub fn extent(values: &[f64]) -> Option<(f64, f64)> {
    let finite = || values.iter().copied().filter(|x| x.is_finite());
    let least = finite().fold(f64::INFINITY, f64::min);
    let most = finite().fold(f64::NEG_INFINITY, f64::max);
    (least <= most).then_some((least, most))
}

pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|x| x.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    if n == 0 {
        return None;
    }
    Some(f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]))
}
