//! Charts as SVG, through `plotters`: colours by role, so that one drawing serves a light page, a dark page and paper.
//!
//! `plotters` counts whole pixels and writes colours as numbers. Figures are drawn [`UNITS`] times as large as they
//! are shown, in colours that stand for an [`Ink`], and both are put right in the text that comes out.

use std::fmt::Write;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::{
    Cartesian2d, ChartBuilder, ChartContext, Circle, DrawingArea, DrawingAreaErrorKind, FontFamily,
    IntoDrawingArea, LabelAreaPosition, PathElement, RGBColor, Rectangle, SVGBackend, ShapeStyle,
    Text, TextStyle,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, TRANSPARENT};

use crate::{Error, Result};

/// Steps of a pixel.
const UNITS: i32 = 4;

/// Steps of a heat map's colours.
pub const HEAT: u8 = 12;

/// Methods that have a colour of their own.
pub const METHODS: u8 = 7;

/// Heads that have a colour of their own.
pub const HEADS: u8 = 8;

/// What a colour says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    Text,
    Muted,
    Rule,
    Paper,
    Keys,
    Values,
    Method(u8),
    Head(u8),
    Heat(u8),
}

/// Light colours, which exported figures are drawn in; the page's style sheet has the same, and dark ones.
const LIGHT: [(Ink, &str); 6] = [
    (Ink::Text, "#1c1b1a"),
    (Ink::Muted, "#6b6762"),
    (Ink::Rule, "#e2ded8"),
    (Ink::Paper, "#ffffff"),
    (Ink::Keys, "#2a5db0"),
    (Ink::Values, "#b3541e"),
];
const DARK: [&str; 6] = [
    "#ece9e4", "#a09b94", "#35322f", "#181716", "#86b0f5", "#f0a070",
];
const METHOD_LIGHT: [&str; METHODS as usize] = [
    "#1f5fbf", "#b84f14", "#2a7d53", "#75706a", "#7a4fb5", "#946410", "#b03a63",
];
const METHOD_DARK: [&str; METHODS as usize] = [
    "#82b1ff", "#f2995c", "#6fc79a", "#b0aaa2", "#bd9bf0", "#dcb45c", "#ec86ab",
];
const HEAD_LIGHT: [&str; HEADS as usize] = [
    "#1f5fbf", "#b84f14", "#2a7d53", "#7a4fb5", "#b03a63", "#946410", "#1f7a8a", "#75706a",
];
const HEAD_DARK: [&str; HEADS as usize] = [
    "#82b1ff", "#f2995c", "#6fc79a", "#bd9bf0", "#ec86ab", "#dcb45c", "#74c7d4", "#b0aaa2",
];
/// Ends and middles of the heat maps' ramps, from least to most.
const HEAT_LIGHT: [[f64; 3]; 4] = [
    [246.0, 240.0, 231.0],
    [243.0, 190.0, 130.0],
    [212.0, 84.0, 50.0],
    [94.0, 12.0, 38.0],
];
const HEAT_DARK: [[f64; 3]; 4] = [
    [42.0, 38.0, 36.0],
    [120.0, 44.0, 52.0],
    [226.0, 112.0, 60.0],
    [255.0, 232.0, 176.0],
];

impl Ink {
    fn all() -> impl Iterator<Item = Self> {
        LIGHT
            .iter()
            .map(|(ink, _)| *ink)
            .chain((0..METHODS).map(Self::Method))
            .chain((0..HEADS).map(Self::Head))
            .chain((0..HEAT).map(Self::Heat))
    }

    /// Name of the style sheet's variable.
    pub fn variable(self) -> String {
        match self {
            Self::Text => "--text".to_owned(),
            Self::Muted => "--muted".to_owned(),
            Self::Rule => "--rule".to_owned(),
            Self::Paper => "--paper".to_owned(),
            Self::Keys => "--keys".to_owned(),
            Self::Values => "--values".to_owned(),
            Self::Method(i) => format!("--m{i}"),
            Self::Head(i) => format!("--h{i}"),
            Self::Heat(i) => format!("--heat{i}"),
        }
    }

    fn hex(self, dark: bool) -> String {
        let pick = |light: &[&str], dark_list: &[&str], i: u8| {
            let list = if dark { dark_list } else { light };
            list[usize::from(i) % list.len()].to_owned()
        };
        match self {
            Self::Method(i) => pick(&METHOD_LIGHT, &METHOD_DARK, i),
            Self::Head(i) => pick(&HEAD_LIGHT, &HEAD_DARK, i),
            Self::Heat(i) => ramp(if dark { &HEAT_DARK } else { &HEAT_LIGHT }, i),
            other => LIGHT
                .iter()
                .zip(DARK)
                .find(|((ink, _), _)| *ink == other)
                .map_or_else(String::new, |((_, light), darker)| {
                    if dark { darker } else { light }.to_owned()
                }),
        }
    }

    /// The colour that stands for this ink while `plotters` draws.
    fn stand_in(self) -> RGBColor {
        let index = Self::all().position(|ink| ink == self).unwrap_or(0);
        RGBColor(0, 0, index as u8)
    }

    pub fn fill(self) -> ShapeStyle {
        self.stand_in().filled()
    }

    /// A line of `width` pixels.
    pub fn line(self, width: f64) -> ShapeStyle {
        self.stand_in()
            .stroke_width((width * f64::from(UNITS)).round() as u32)
    }

    /// A line that lets what is under it through.
    pub fn faint_line(self, width: f64, opacity: f64) -> ShapeStyle {
        self.stand_in()
            .mix(opacity)
            .stroke_width((width * f64::from(UNITS)).round() as u32)
    }

    pub fn faint(self, opacity: f64) -> ShapeStyle {
        self.stand_in().mix(opacity).filled()
    }
}

fn ramp(stops: &[[f64; 3]; 4], step: u8) -> String {
    let at = f64::from(step) / f64::from(HEAT - 1) * (stops.len() - 1) as f64;
    let low = (at.floor() as usize).min(stops.len() - 2);
    let part = at - low as f64;
    let mut hex = String::from("#");
    for (a, b) in stops[low].iter().zip(stops[low + 1]) {
        let _ = write!(hex, "{:02x}", (a + (b - a) * part).round() as u8);
    }
    hex
}

/// Declarations of every colour, for a rule of the style sheet.
pub fn palette(dark: bool) -> String {
    Ink::all().fold(String::new(), |mut css, ink| {
        let _ = write!(css, "{}:{};", ink.variable(), ink.hex(dark));
        css
    })
}

/// Where text stands about its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<Scale, Scale>>;
type Drawn<T> = Result<T, DrawingAreaErrorKind<std::io::Error>>;

/// A linear scale, in whichever direction, with labels where they are wanted.
#[derive(Clone, Debug)]
pub struct Scale {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (start, end): (i32, i32)) -> i32 {
        let part = (value - self.range.start) / (self.range.end - self.range.start);
        start + (part * f64::from(end - start)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        // Asked for twice, for thick rules and for thin ones between them.
        if hint.weight().allow_light_points() {
            Vec::new()
        } else {
            self.ticks.clone()
        }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// One figure.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Of its file, without the extension.
    pub name: String,
    /// One line, for those who cannot see it.
    pub title: String,
    /// What it shows, in numbers.
    pub description: String,
    width: i32,
    height: i32,
    /// Elements, in colours that stand for inks.
    body: String,
    /// Corners of the plotting area in the figure's units: x0, y0, x1, y1.
    pub plot: Option<[i32; 4]>,
}

impl Figure {
    /// A figure of `size` pixels, drawn by `paint`, which returns the plotting area if there is one.
    pub fn draw(
        name: impl Into<String>,
        title: impl Into<String>,
        description: impl Into<String>,
        (width, height): (i32, i32),
        paint: impl FnOnce(&Area<'_>) -> Drawn<Option<[i32; 4]>>,
    ) -> Result<Self> {
        let (name, title) = (name.into(), title.into());
        let (body, plot) = body((width, height), paint)
            .map_err(|e| Error::numeric(format!("figure `{name}`"), e))?;
        Ok(Self {
            name,
            title,
            description: description.into(),
            width,
            height,
            body,
            plot,
        })
    }

    /// The same with elements of [`layer`] on top.
    #[must_use]
    pub fn with(&self, elements: &str) -> Self {
        Self {
            body: self.body.clone() + elements,
            ..self.clone()
        }
    }

    /// For a page with the style sheet; `id` tells figures of a page apart. `class` is the element's.
    pub fn inline(&self, id: &str, class: &str) -> String {
        let body = inked(&self.body, |ink| format!("var({})", ink.variable()));
        self.element(
            &format!("class=\"{class}\" aria-labelledby=\"{id}-t {id}-d\""),
            id,
            &body,
        )
    }

    /// A file of its own, in light colours.
    pub fn standalone(&self) -> String {
        let body = inked(&self.body, |ink| ink.hex(false));
        let attributes = format!(
            "xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" \
             font-family=\"system-ui, Helvetica, Arial, sans-serif\" aria-labelledby=\"f-t f-d\"",
            self.width, self.height
        );
        let halo = format!(
            "<style>text{{paint-order:stroke;stroke:{};stroke-width:{}px;stroke-linejoin:round}}</style>",
            Ink::Paper.hex(false),
            3 * UNITS
        );
        self.element(&attributes, "f", &(halo + &body)) + "\n"
    }

    fn element(&self, attributes: &str, id: &str, body: &str) -> String {
        format!(
            "<svg viewBox=\"0 0 {} {}\" role=\"img\" {attributes}><title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">\
             {}</desc>{body}</svg>",
            self.width * UNITS,
            self.height * UNITS,
            escape(&self.title),
            escape(&self.description),
        )
    }
}

/// Elements alone, to be put into a figure of the same size and axes.
pub fn layer(
    size: (i32, i32),
    paint: impl FnOnce(&Area<'_>) -> Drawn<Option<[i32; 4]>>,
) -> Result<String> {
    let (body, _) = body(size, paint).map_err(|e| Error::numeric("figure", e))?;
    Ok(body)
}

fn body<T>(
    (width, height): (i32, i32),
    paint: impl FnOnce(&Area<'_>) -> Drawn<T>,
) -> Drawn<(String, T)> {
    let mut text = String::new();
    let result = {
        let size = ((width * UNITS) as u32, (height * UNITS) as u32);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let result = paint(&area)?;
        area.present()?;
        result
    };
    Ok((tidied(&text), result))
}

/// Without the outer element, and without attributes that say nothing. `plotters` writes an element a line, and text
/// on a line of its own.
fn tidied(svg: &str) -> String {
    let mut out = String::with_capacity(svg.len());
    for line in svg.lines() {
        if line.starts_with("<svg") || line.starts_with("</svg") {
            continue;
        }
        out.push_str(line);
    }
    for (from, to) in [
        (" opacity=\"1\"", ""),
        (" stroke=\"none\"", ""),
        (" font-family=\"sans-serif\"", ""),
        (" text-anchor=\"start\"", ""),
        (" \"/>", "\"/>"),
    ] {
        out = out.replace(from, to);
    }
    out
}

/// Colours in place of those that stand for inks.
fn inked(body: &str, colour: impl Fn(Ink) -> String) -> String {
    Ink::all().fold(body.to_owned(), |text, ink| {
        let RGBColor(r, g, b) = ink.stand_in();
        let stand_in = format!("\"#{r:02X}{g:02X}{b:02X}\"");
        text.replace(&stand_in, &format!("\"{}\"", colour(ink)))
    })
}

/// For text and attributes of HTML and SVG.
pub fn escape(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Not allowed in XML, even escaped.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
        out
    })
}

/// One axis of a chart.
pub struct Axis<'a> {
    /// In the scale's own numbers: their logarithms to base 10 where `log`.
    pub range: Range<f64>,
    /// What is labelled.
    pub ticks: Vec<f64>,
    pub log: bool,
    pub label: &'a str,
    /// Of a tick's number.
    pub format: &'a dyn Fn(f64) -> String,
}

impl Axis<'_> {
    fn place(&self, x: f64) -> f64 {
        if self.log { x.log10() } else { x }
    }

    fn number(&self, x: f64) -> f64 {
        if self.log { 10f64.powf(x) } else { x }
    }
}

/// Pixels around the plotting area.
#[derive(Clone, Copy)]
pub struct Margins {
    pub left: i32,
    pub right: i32,
    pub top: i32,
    pub bottom: i32,
}

impl Default for Margins {
    fn default() -> Self {
        Self {
            left: 44,
            right: 8,
            top: 26,
            bottom: 40,
        }
    }
}

/// Font sizes in pixels.
pub const SMALL: f64 = 12.0;
pub const LABEL: f64 = 13.0;

pub fn text_style(ink: Ink, size: f64, anchor: Anchor, middle: bool) -> TextStyle<'static> {
    let h = match anchor {
        Anchor::Start => HPos::Left,
        Anchor::Middle => HPos::Center,
        Anchor::End => HPos::Right,
    };
    let v = if middle { VPos::Center } else { VPos::Top };
    // The backend divides sizes by this, to turn what it takes for a line's height into a font's size.
    let size = size * 1.24 * f64::from(UNITS);
    let mut style = TextStyle::from((FontFamily::SansSerif, size)).pos(Pos::new(h, v));
    style.color = ink.stand_in().to_backend_color();
    style
}

/// Axes with thin horizontal rules, labels, and what they measure above and below; `silent` ones are laid out, not
/// drawn. Returns the chart to draw in.
pub fn axes<'a>(
    area: &Area<'a>,
    margins: Margins,
    x: &Axis<'_>,
    y: &Axis<'_>,
    silent: bool,
) -> Drawn<Chart<'a>> {
    let px = |pixels: i32| pixels * UNITS;
    let scale = |axis: &Axis<'_>| Scale {
        range: axis.range.clone(),
        ticks: axis.ticks.iter().map(|t| axis.place(*t)).collect(),
    };
    let mut chart = ChartBuilder::on(area)
        .margin_top(px(margins.top))
        .margin_right(px(margins.right))
        .set_label_area_size(LabelAreaPosition::Left, px(margins.left))
        .set_label_area_size(LabelAreaPosition::Bottom, px(margins.bottom))
        .build_cartesian_2d(scale(x), scale(y))?;
    if silent {
        return Ok(chart);
    }
    let label = text_style(Ink::Muted, SMALL, Anchor::Middle, true);
    chart
        .configure_mesh()
        .disable_x_mesh()
        .axis_style(TRANSPARENT)
        .bold_line_style(Ink::Rule.line(1.0))
        .light_line_style(TRANSPARENT)
        .set_all_tick_mark_size(px(3))
        .label_style(label)
        .x_label_formatter(&|v| (x.format)(x.number(*v)))
        .y_label_formatter(&|v| (y.format)(y.number(*v)))
        .draw()?;
    let (width, height) = area.dim_in_pixel();
    area.draw(&Text::new(
        y.label.to_owned(),
        (px(2), px(1)),
        text_style(Ink::Muted, SMALL, Anchor::Start, false),
    ))?;
    area.draw(&Text::new(
        x.label.to_owned(),
        (
            i32::try_from(width).unwrap_or(i32::MAX) - px(margins.right),
            i32::try_from(height).unwrap_or(i32::MAX) - px(16),
        ),
        text_style(Ink::Muted, SMALL, Anchor::End, false),
    ))?;
    Ok(chart)
}

/// Corners of a chart's plotting area.
pub fn plot_of(chart: &Chart<'_>) -> [i32; 4] {
    let (x, y) = chart.plotting_area().get_pixel_range();
    [x.start, y.start, x.end, y.end]
}

/// A dot of `radius` pixels.
pub fn dot<C>(at: C, radius: f64, style: ShapeStyle) -> Circle<C, i32> {
    Circle::new(at, (radius * f64::from(UNITS)).round() as i32, style)
}

pub fn path<C: Clone>(points: Vec<C>, style: ShapeStyle) -> PathElement<C> {
    PathElement::new(points, style)
}

/// A filled rectangle between two corners, `gap` units smaller at its right and bottom.
pub fn cell<C>(corners: [C; 2], gap: u32, ink: Ink) -> Rectangle<C> {
    let mut cell = Rectangle::new(corners, ink.fill());
    cell.set_margin(0, gap, 0, gap);
    cell
}

/// Pixels to units.
pub fn px(pixels: f64) -> i32 {
    (pixels * f64::from(UNITS)).round() as i32
}

/// Rough width of text in pixels: fonts are the reader's.
pub fn width_of(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.56
}

/// Ticks 1, 2, 5 × 10ⁿ, or whole decades where there are many, within `range` of a logarithmic axis.
pub fn log_ticks(range: &Range<f64>) -> Vec<f64> {
    let decades = range.end - range.start;
    let steps: &[f64] = if decades > 3.0 {
        &[1.0]
    } else if decades > 1.2 {
        &[1.0, 3.0]
    } else {
        &[1.0, 2.0, 5.0]
    };
    let stride = ((decades / 5.0).ceil() as i32).max(1);
    ((range.start.floor() as i32)..=(range.end.ceil() as i32))
        .filter(|decade| decade.rem_euclid(stride) == 0 || steps.len() > 1)
        // Divided, not multiplied by 0.1: 3 / 10 is 0.3.
        .flat_map(|decade| {
            let power = 10f64.powi(decade.abs());
            let scaled = move |s: &f64| if decade < 0 { s / power } else { s * power };
            steps.iter().map(scaled)
        })
        .filter(|t| {
            let at = t.log10();
            at >= range.start - 1e-9 && at <= range.end + 1e-9
        })
        .collect()
}

/// Round numbers, about `count` of them, within `range`.
pub fn ticks(range: &Range<f64>, count: usize) -> Vec<f64> {
    let span = range.end - range.start;
    if span <= 0.0 || !span.is_finite() {
        return vec![range.start];
    }
    let raw = span / count.max(1) as f64;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|s| s * power)
        .find(|s| *s >= raw * 0.8)
        .unwrap_or(10.0 * power);
    let first = (range.start / step - 1e-9).ceil() as i64;
    let last = (range.end / step + 1e-9).floor() as i64;
    (first..=last).map(|i| i as f64 * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(&(0.0..1.3), 5), [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]);
        assert_eq!(
            ticks(&(0.0..30.0), 6),
            [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
        );
        assert_eq!(log_ticks(&(-2.0..0.0)), [0.01, 0.03, 0.1, 0.3, 1.0]);
        assert_eq!(ticks(&(1.0..1.0), 3), [1.0]);
    }

    #[test]
    fn every_ink_has_a_colour_of_its_own_in_both_palettes() {
        for dark in [false, true] {
            let css = palette(dark);
            for ink in Ink::all() {
                assert!(css.contains(&format!("{}:#", ink.variable())), "{ink:?}");
                assert_eq!(ink.hex(dark).len(), 7, "{ink:?}");
            }
        }
        let stand_ins: std::collections::BTreeSet<_> = Ink::all()
            .map(|ink| {
                let RGBColor(_, _, b) = ink.stand_in();
                b
            })
            .collect();
        assert_eq!(stand_ins.len(), Ink::all().count());
    }

    /// WCAG 2.2: 4.5 for text.
    #[test]
    fn text_stands_out_from_paper() {
        let luminance = |hex: &str| -> f64 {
            let part = |i: usize| {
                let x = f64::from(u8::from_str_radix(&hex[i..i + 2], 16).unwrap()) / 255.0;
                if x <= 0.04045 {
                    x / 12.92
                } else {
                    ((x + 0.055) / 1.055).powf(2.4)
                }
            };
            0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5)
        };
        for dark in [false, true] {
            let paper = luminance(&Ink::Paper.hex(dark));
            let written = [Ink::Text, Ink::Muted, Ink::Keys, Ink::Values].into_iter();
            for ink in written.chain((0..METHODS).map(Ink::Method)) {
                let (a, b) = (luminance(&ink.hex(dark)), paper);
                let contrast = (a.max(b) + 0.05) / (a.min(b) + 0.05);
                assert!(contrast >= 4.5, "{ink:?}, dark {dark}: {contrast:.2}");
            }
        }
    }

    #[test]
    fn hostile_text_is_text() {
        let figure = Figure::draw("f", "<script>", "\"&\u{1}", (20, 20), |area| {
            area.draw(&Text::new(
                "</svg><b>".to_owned(),
                (0, 0),
                text_style(Ink::Text, LABEL, Anchor::Start, false),
            ))?;
            Ok(None)
        })
        .unwrap();
        for svg in [figure.inline("a", "c"), figure.standalone()] {
            assert!(!svg.contains("<script>") && !svg.contains("<b>"), "{svg}");
            assert!(!svg.contains('\u{1}') && svg.matches("</svg>").count() == 1);
        }
    }
}
