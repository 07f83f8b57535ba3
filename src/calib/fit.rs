//! From moments to a zoo entry.
//!
//! For every layer, side and KV head (or layer, in scope `layer`): moments → transform → feedback matrix → clip ratio
//! and exponent by search. Layers and heads are independent, so the bytes do not depend on the number of threads.

use std::collections::BTreeMap;

use nalgebra::{DMatrix, DVector};

use super::moments::{Holdout, LayerMoments, Moments};
use crate::linalg::parallel;
use crate::quant::{self, Codec};
use crate::rotation::search::{Axis, Objective, OutputError, search};
use crate::rotation::{self, HeldOut, Sensitivity, Transform, hadamard};
use crate::zoo::{
    Entry, Fit, FitSide, KMoment, Layer, Metadata, Method, Quantizer, Rounding, SCHEMA, Scope,
    Side, SideName, Tool, VMoment, Windows,
};
use crate::{Error, Result, interrupt};

/// Version of the computation (`tool.algorithm` of an entry): grows whenever the same moments give other bytes.
pub const ALGORITHM: u32 = 1;

/// Bits of a code.
const BITS: u32 = 2;

/// How much the held-out, sensitivity-weighted moments count against those of the whole calibration: the former know
/// what attention reads, the latter have more tokens. Fewer tokens suffice for a mean.
const HELD_OUT_SHARE: f64 = 0.6;
const HELD_OUT_MEAN_SHARE: f64 = 0.9;

/// Held-out tokens used, longest prompts first: more only cost time.
const MAX_HELD_OUT_TOKENS: usize = 16_384;

/// Shorter held-out prompts say nothing about a long context.
const MIN_PROMPT_TOKENS: usize = 128;

/// Context that the windows of an entry are made for; in shorter prompts they are as much shorter.
const WINDOWS_CONTEXT_TOKENS: usize = 4096;

/// Queries a KV head, over all held-out prompts, for weighted moments; and every how manieth of them for the search.
const QUERIES: usize = 512;
const SEARCH_STEP: usize = 4;

/// Energy a channel of what stands in for a moment without energy: nothing, beside the other heads of a layer.
const STAND_IN: f64 = 1e-24;

/// Without held-out prompts.
const DEFAULT_EXPONENT: f64 = 0.4;
const DEFAULT_K_CLIP: f64 = 0.95;
const DEFAULT_V_CLIP: f64 = 0.94;

/// What [`fit`] makes of moments.
#[derive(Clone, Debug, PartialEq)]
pub struct FitOptions {
    pub method: Method,
    pub scope: Scope,
    pub rounding: Rounding,
    /// Subtract means before encoding. `None`: for `balanced` alone.
    pub center: Option<bool>,
    /// The moment whose eigenvectors rotate values. `None`: `balanced` balances values as it does keys, with W_O in
    /// the queries' place; `oscar` takes `oo`.
    pub v_moment: Option<VMoment>,
    /// Channels that share a scale. `None`: head_dim.
    pub group: Option<usize>,
    /// Clip ratios in (0, 1]. `None`: searched.
    pub k_clip: Option<f64>,
    pub v_clip: Option<f64>,
    /// p of `balanced`, for keys and values. `None`: searched.
    pub exponent: Option<f64>,
    pub windows: Windows,
}

impl Default for FitOptions {
    fn default() -> Self {
        Self {
            method: Method::Balanced,
            scope: Scope::Head,
            rounding: Rounding::Feedback,
            center: None,
            v_moment: None,
            group: None,
            k_clip: None,
            v_clip: None,
            exponent: None,
            windows: Windows {
                sink_tokens: 64,
                recent_tokens: 256,
            },
        }
    }
}

impl FitOptions {
    /// The released OSCAR tool's choices: one matrix a layer, `vwv`, plain rounding, clip ratios 0.96 and 0.92.
    pub fn released() -> Self {
        Self {
            method: Method::Oscar,
            scope: Scope::Layer,
            rounding: Rounding::Nearest,
            v_moment: Some(VMoment::Vwv),
            k_clip: Some(0.96),
            v_clip: Some(0.92),
            ..Self::default()
        }
    }

    fn centered(&self) -> bool {
        self.center.unwrap_or(self.method == Method::Balanced)
    }

    /// Whether anything is searched or weighed by what attention reads.
    fn uses_held_out(&self) -> bool {
        self.k_clip.is_none()
            || self.v_clip.is_none()
            || self.method == Method::Balanced
            || self.rounding == Rounding::Feedback
            || self.centered()
    }

    /// Values are rotated by this moment's eigenvectors.
    fn rotates_values_by(&self) -> Option<VMoment> {
        match self.method {
            Method::Balanced => self.v_moment,
            Method::Oscar => Some(self.v_moment.unwrap_or(VMoment::Oo)),
            Method::Hadamard | Method::Identity => None,
        }
    }

    /// The channels of a group, for a model of these head dims.
    ///
    /// # Errors
    /// Options that are out of range, or fit neither the model nor each other.
    pub fn check(&self, head_dims: &[usize]) -> Result<usize> {
        for (flag, clip) in [("--k-clip", self.k_clip), ("--v-clip", self.v_clip)] {
            if clip.is_some_and(|clip| !(clip > 0.0 && clip <= 1.0)) {
                return Err(Error::invalid(
                    flag,
                    "a clip ratio lies in (0, 1]; 1 clips nothing",
                ));
            }
        }
        if self.exponent.is_some_and(|p| !(0.0..=1.0).contains(&p)) {
            return Err(Error::invalid("--p", "the exponent lies in [0, 1]")
                .hint("useful ones lie in [0.2, 0.5]; leave it out to search"));
        }
        if self.exponent.is_some() && self.method != Method::Balanced {
            let problem = format!("method `{}` has no exponent", self.method);
            return Err(Error::invalid("--p", problem));
        }
        if self.v_moment.is_some() && matches!(self.method, Method::Hadamard | Method::Identity) {
            let problem = format!("method `{}` uses no moment", self.method);
            return Err(Error::invalid("--v-moment", problem));
        }
        self.windows.check()?;
        if let Some(head_dim) = head_dims.iter().find(|d| !d.is_multiple_of(4)) {
            return Err(Error::invalid(
                "model",
                format!(
                    "head_dim {head_dim} is not divisible by 4: 2-bit codes are packed four to a byte"
                ),
            ));
        }
        let common = head_dims.iter().copied().fold(0, greatest_common_divisor);
        match self.group {
            None => Ok(common),
            Some(group) if group > 0 && common.is_multiple_of(group) => Ok(group),
            Some(group) => Err(Error::invalid(
                "--group",
                format!("{group} does not divide head_dim {common}"),
            )),
        }
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// What [`fit`] made.
#[derive(Clone, Debug, PartialEq)]
pub struct Fitted {
    pub entry: Entry,
    /// Heads that had nothing to fit to, and what stands in; in order of layers.
    pub warnings: Vec<String>,
}

/// Makes a zoo entry of moments, with no model at hand.
///
/// # Errors
/// Options that do not fit the model or each other; NaN or infinity in moments, with layer and KV head.
pub fn fit(moments: &Moments, options: &FitOptions) -> Result<Fitted> {
    let meta = moments.meta();
    let group = options.check(&meta.model.head_dim)?;
    let uses_held_out = options.uses_held_out();
    let mut layers = parallel(moments.layers(), |i| {
        interrupt::check()?;
        let holdout = uses_held_out.then(|| moments.holdout(i)).transpose()?;
        fit_layer(&moments.layer(i)?, holdout.as_ref(), group, options)
    })
    .into_iter()
    .collect::<Result<Vec<_>>>()?;

    let mut warnings = Vec::new();
    if meta.holdout_tokens == 0 && uses_held_out {
        warnings.push("no held-out prompts in the moments: clip ratios are defaults".to_owned());
    }
    let centered = options.centered();
    let mut report = Fit {
        k_rounding: options.rounding,
        v_rounding: options.rounding,
        k_centered: centered,
        v_centered: centered,
        k: BTreeMap::new(),
        v: BTreeMap::new(),
    };
    for (i, layer) in layers.iter_mut().enumerate() {
        warnings.append(&mut layer.warnings);
        report.k.insert(i, std::mem::take(&mut layer.k));
        report.v.insert(i, std::mem::take(&mut layer.v));
    }
    let from_data = matches!(options.method, Method::Balanced | Method::Oscar);
    let metadata = Metadata {
        schema: SCHEMA,
        method: options.method,
        scope: options.scope,
        k_moment: from_data.then_some(KMoment::Qq),
        v_moment: match options.method {
            // Balanced values come from what is read quantized, weighted by S².
            Method::Balanced => Some(options.v_moment.unwrap_or(VMoment::Vsv)),
            _ => options.rotates_values_by(),
        },
        quantizer: Quantizer {
            bits: BITS,
            group,
            codec: "uniform".to_owned(),
            scale_dtype: "bfloat16".to_owned(),
        },
        windows: options.windows,
        model: meta.model.clone(),
        calibration: meta.calibration.clone(),
        tool: Tool {
            algorithm: ALGORITHM,
            ..meta.tool.clone()
        },
        fit: Some(report),
        imported: None,
        content_sha256: String::new(),
    };
    let layers = layers.into_iter().map(|layer| layer.layer).enumerate();
    Ok(Fitted {
        entry: Entry {
            metadata,
            layers: layers.collect(),
        },
        warnings,
    })
}

struct FittedLayer {
    layer: Layer,
    k: FitSide,
    v: FitSide,
    warnings: Vec<String>,
}

/// One KV head of one layer.
struct Head {
    /// Held-out prompts, with the queries that the search measures.
    searched: Vec<HeldOut>,
    /// L (d, d), row-major, with L·Lᵀ = W_Oᵀ·W_O of a query head, up to scale.
    factor: Vec<f32>,
    k: Target,
    v: Target,
}

/// What a transform is made for.
#[derive(Clone)]
struct Target {
    /// (d, d): the moment that an orthogonal method takes eigenvectors of.
    moment: DMatrix<f64>,
    /// (d, d): error δ costs δ·metric·δᵀ.
    metric: DMatrix<f64>,
    /// (d, d): centered where keys or values are.
    spread: DMatrix<f64>,
    mean: DVector<f64>,
}

fn fit_layer(
    moments: &LayerMoments,
    holdout: Option<&Holdout>,
    group: usize,
    options: &FitOptions,
) -> Result<FittedLayer> {
    let layer = moments.layer;
    let heads = parallel(moments.qq.len(), |head| {
        Head::new(moments, holdout, head, options)
    })
    .into_iter()
    .collect::<Result<Vec<_>>>()?;
    let warnings = heads
        .iter()
        .enumerate()
        .flat_map(|(head, (_, warnings))| {
            warnings
                .iter()
                .map(move |warning| format!("layer {layer} KV head {head}: {warning}"))
        })
        .collect();
    let heads: Vec<Head> = heads.into_iter().map(|(head, _)| head).collect();
    let objectives = heads
        .iter()
        .map(|head| Objective::new(&head.searched, &head.factor))
        .collect::<Result<Vec<_>>>()?;

    let units: Vec<Vec<usize>> = match options.scope {
        Scope::Head => (0..heads.len()).map(|head| vec![head]).collect(),
        Scope::Layer => vec![(0..heads.len()).collect()],
    };
    let fitted = parallel(2 * units.len(), |i| {
        let unit = &units[i / 2];
        Unit {
            side: SideName::ALL[i % 2],
            heads: unit
                .iter()
                .map(|&head| (&heads[head], &objectives[head]))
                .collect(),
            group,
            options,
        }
        .fit()
        .map_err(|e| located(e, layer, SideName::ALL[i % 2], unit))
    })
    .into_iter()
    .collect::<Result<Vec<_>>>()?;

    let side = |name: SideName| -> (Side, FitSide) {
        let units = fitted.iter().skip(name as usize).step_by(2);
        let all = |part: fn(&FittedUnit) -> &Option<Vec<f32>>| -> Option<Vec<Vec<f32>>> {
            units.clone().map(|unit| part(unit).clone()).collect()
        };
        let means = heads
            .iter()
            .map(|head| floats(&head.target(name).mean))
            .collect();
        let side = Side {
            encode: units
                .clone()
                .map(|unit| unit.basis.encode.clone())
                .collect(),
            dual: all(|unit| &unit.basis.dual),
            mean: options.centered().then_some(means),
            clip: units.clone().map(|unit| unit.clip as f32).collect(),
            feedback: all(|unit| &unit.basis.feedback),
            spectrum: all(|unit| &unit.basis.spectrum),
        };
        let report = FitSide {
            exponent: units
                .clone()
                .filter_map(|unit| Some(unit.exponent? as f32))
                .collect(),
            output_error: units
                .filter_map(|unit| Some(unit.error?.relative() as f32))
                .collect(),
        };
        (side, report)
    };
    let (k, k_report) = side(SideName::K);
    let (v, v_report) = side(SideName::V);
    Ok(FittedLayer {
        layer: Layer {
            head_dim: moments.qq.first().map_or(0, DMatrix::nrows),
            k,
            v,
        },
        k: k_report,
        v: v_report,
        warnings,
    })
}

fn located(error: Error, layer: usize, side: SideName, heads: &[usize]) -> Error {
    match error {
        Error::Numeric { place, problem } => Error::numeric(
            format!("layer {layer} {side}, KV heads {heads:?}: {place}"),
            problem,
        ),
        other => other,
    }
}

impl Head {
    fn new(
        moments: &LayerMoments,
        holdout: Option<&Holdout>,
        head: usize,
        options: &FitOptions,
    ) -> Result<(Self, Vec<String>)> {
        let place = || format!("layer {} KV head {head}", moments.layer);
        for (name, list) in [
            ("qq", &moments.qq),
            ("kk", &moments.kk),
            ("oo", &moments.oo),
            ("vv", &moments.vv),
            ("vsv", &moments.vsv),
            ("vwv", &moments.vwv),
            ("wo", &moments.wo),
        ] {
            if list[head].iter().any(|x| !x.is_finite()) {
                return Err(Error::numeric(
                    place(),
                    format!("moment `{name}` holds NaN or infinity"),
                ));
            }
        }
        let d = moments.qq[head].nrows();
        let mut warnings = Vec::new();
        let mut alive = |matrix: &DMatrix<f64>, of: f64, what: &str| {
            if matrix.trace() > 1e-12 * of && matrix.trace() > 1e-30 {
                matrix.clone()
            } else {
                warnings.push(format!("{what}; the identity stands in"));
                DMatrix::identity(d, d) * STAND_IN
            }
        };
        let qq = alive(&moments.qq[head], 0.0, "queries have no energy");
        let wo = alive(&moments.wo[head], 0.0, "the output projection is zero");
        let kk = &moments.kk[head];
        let vv = &moments.vv[head];
        let factor = factor(&wo)?;
        let held_out = holdout.map_or_else(Vec::new, |holdout| {
            held_out(moments, holdout, head, options.windows)
        });
        let sensitivity = Sensitivity::of(
            &held_out,
            &factor,
            &floats(&moments.k_mean[head]),
            &floats(&moments.v_mean[head]),
        );

        let (mut metric, mut k_mean, mut v_mean) = (
            qq.clone(),
            moments.k_mean[head].clone(),
            moments.v_mean[head].clone(),
        );
        let mut k_spread = moments.key_covariance(head);
        let mut v_spread = moments.value_covariance(head);
        if let Some(felt) = &sensitivity {
            let blend = |a: &DMatrix<f64>, b: &DMatrix<f64>| {
                a * (1.0 - HELD_OUT_SHARE) + b * HELD_OUT_SHARE
            };
            if felt.queries.trace() > 0.0 {
                metric = blend(&qq, &(&felt.queries * (qq.trace() / felt.queries.trace())));
            }
            k_spread = blend(&k_spread, &felt.keys);
            v_spread = blend(&v_spread, &felt.values);
            let blend_means = |a: &DVector<f64>, b: &DVector<f64>| {
                a * (1.0 - HELD_OUT_MEAN_SHARE) + b * HELD_OUT_MEAN_SHARE
            };
            k_mean = blend_means(&k_mean, &felt.key_mean);
            v_mean = blend_means(&v_mean, &felt.value_mean);
        }
        if !options.centered() {
            k_spread += &k_mean * k_mean.transpose();
            v_spread += &v_mean * v_mean.transpose();
        }
        let k_spread = alive(&k_spread, kk.trace(), "keys do not vary");
        let v_spread = alive(&v_spread, vv.trace(), "values do not vary");
        let v_moment = match options.rotates_values_by() {
            Some(VMoment::Oo) => &moments.oo[head],
            Some(VMoment::Vsv) => &moments.vsv[head],
            Some(VMoment::Vwv) => &moments.vwv[head],
            Some(VMoment::Vv) | None => vv,
        };
        let v_moment = alive(v_moment, 0.0, "values have no energy");
        let head = Self {
            searched: held_out
                .iter()
                .map(|prompt| prompt.thinned(SEARCH_STEP))
                .collect(),
            factor,
            k: Target {
                moment: qq,
                metric,
                spread: k_spread,
                mean: k_mean,
            },
            v: Target {
                moment: v_moment,
                metric: wo,
                spread: v_spread,
                mean: v_mean,
            },
        };
        Ok((head, warnings))
    }

    fn target(&self, side: SideName) -> &Target {
        match side {
            SideName::K => &self.k,
            SideName::V => &self.v,
        }
    }
}

/// L (d, d), row-major, with L·Lᵀ = `metric`.
pub(super) fn factor(metric: &DMatrix<f64>) -> Result<Vec<f32>> {
    let basis = rotation::eigen::symmetric(metric)?;
    let mut l = basis.vectors;
    for (mut column, value) in l.column_iter_mut().zip(&basis.values) {
        column *= value.max(0.0).sqrt();
    }
    Ok(quant::row_major(&l))
}

/// The held-out prompts of a KV head, longest first, with queries sampled evenly.
pub(super) fn held_out(
    moments: &LayerMoments,
    holdout: &Holdout,
    head: usize,
    windows: Windows,
) -> Vec<HeldOut> {
    let d = moments.qq[head].nrows();
    let (tokens, kv_heads) = (holdout.tokens(), moments.qq.len());
    if tokens == 0 || d == 0 {
        return Vec::new();
    }
    let group = holdout.q.len() / (tokens * kv_heads * d);
    let mut prompts = Vec::new();
    let mut start = 0;
    for &len in &holdout.prompt_lens {
        prompts.push(start..start + len);
        start += len;
    }
    prompts.sort_by_key(|prompt| std::cmp::Reverse(prompt.len()));
    let mut budget = MAX_HELD_OUT_TOKENS;
    prompts.retain(|prompt| {
        let taken = prompt.len() >= MIN_PROMPT_TOKENS && prompt.len() <= budget;
        budget -= if taken { prompt.len() } else { 0 };
        taken
    });

    let scaled = |window: usize, len: usize| {
        if len >= WINDOWS_CONTEXT_TOKENS {
            window
        } else {
            (window * len).div_ceil(WINDOWS_CONTEXT_TOKENS)
        }
    };
    let reach = |len: usize| {
        let (sink, recent) = (
            scaled(windows.sink_tokens, len),
            scaled(windows.recent_tokens, len).max(1),
        );
        (sink, recent, len.saturating_sub(sink + recent))
    };
    let readers: usize = prompts.iter().map(|prompt| reach(prompt.len()).2).sum();
    let step = readers.div_ceil(QUERIES).max(1);
    let rows = |x: &[f32], heads: usize, first: usize, width: usize, at: usize| {
        x[(at * heads + first) * d..(at * heads + first + width) * d].to_vec()
    };
    prompts
        .into_iter()
        .map(|prompt| {
            let (sink, recent, _) = reach(prompt.len());
            let first = (sink + recent + step / 2).min(prompt.len());
            let positions: Vec<usize> = (first..prompt.len()).step_by(step).collect();
            let heads = kv_heads * group;
            HeldOut {
                head_dim: d,
                group,
                q: positions
                    .iter()
                    .flat_map(|&i| rows(&holdout.q, heads, head * group, group, prompt.start + i))
                    .collect(),
                k: prompt
                    .clone()
                    .flat_map(|i| rows(&holdout.k, kv_heads, head, 1, i))
                    .collect(),
                v: prompt
                    .clone()
                    .flat_map(|i| rows(&holdout.v, kv_heads, head, 1, i))
                    .collect(),
                positions,
                sink,
                recent,
            }
        })
        .filter(|prompt| !prompt.positions.is_empty())
        .collect()
}

/// A side of the KV heads that share a transform.
struct Unit<'a> {
    side: SideName,
    heads: Vec<(&'a Head, &'a Objective<'a>)>,
    group: usize,
    options: &'a FitOptions,
}

struct FittedUnit {
    basis: Basis,
    clip: f64,
    exponent: Option<f64>,
    error: Option<OutputError>,
}

/// A transform as an entry stores it.
#[derive(Clone)]
struct Basis {
    encode: Vec<f32>,
    dual: Option<Vec<f32>>,
    back: Vec<f32>,
    feedback: Option<Vec<f32>>,
    spectrum: Option<Vec<f32>>,
}

impl Unit<'_> {
    fn fit(&self) -> Result<FittedUnit> {
        let options = self.options;
        let target = self.target();
        let balances = options.method == Method::Balanced
            && (self.side == SideName::K || options.rotates_values_by().is_none());
        let (given, default) = match self.side {
            SideName::K => (options.k_clip, DEFAULT_K_CLIP),
            SideName::V => (options.v_clip, DEFAULT_V_CLIP),
        };
        let searches = self
            .heads
            .iter()
            .any(|(_, objective)| !objective.is_empty());
        let clip = match given {
            Some(clip) => Axis::fixed(clip),
            None if !searches => Axis::fixed(default),
            None => Axis {
                coarse: vec![0.92, 0.945, 0.97],
                fine: 0.0125,
                bounds: (0.85, 1.0),
            },
        };
        let exponent = match options.exponent {
            Some(p) => Axis::fixed(p),
            None if !balances || !searches => Axis::fixed(DEFAULT_EXPONENT),
            None => Axis {
                coarse: vec![0.3, 0.4, 0.5],
                fine: 0.05,
                bounds: (0.2, 0.5),
            },
        };
        let mut known: Vec<(f64, Basis)> = Vec::new();
        let mut basis_at = |p: f64| -> Result<Basis> {
            if let Some((_, basis)) = known.iter().find(|(at, _)| at.total_cmp(&p).is_eq()) {
                return Ok(basis.clone());
            }
            let basis = self.basis(&target, balances, p)?;
            known.push((p, basis.clone()));
            Ok(basis)
        };
        let (clip, p, error) = if clip.coarse.len() + exponent.coarse.len() > 2 {
            let best = search(&clip, &exponent, |clip, p| {
                self.measure(&basis_at(p)?, clip)
            })?;
            (best.clip, best.exponent, Some(best.error))
        } else {
            (clip.coarse[0], exponent.coarse[0], None)
        };
        Ok(FittedUnit {
            basis: basis_at(p)?,
            clip,
            exponent: balances.then_some(p),
            error,
        })
    }

    /// Averages over the heads.
    fn target(&self) -> Target {
        let targets: Vec<&Target> = self
            .heads
            .iter()
            .map(|(head, _)| head.target(self.side))
            .collect();
        let mean = |part: fn(&Target) -> &DMatrix<f64>| {
            let sum = targets[1..]
                .iter()
                .fold(part(targets[0]).clone(), |sum, t| sum + part(t));
            sum / targets.len() as f64
        };
        Target {
            moment: mean(|t| &t.moment),
            metric: mean(|t| &t.metric),
            spread: mean(|t| &t.spread),
            mean: targets[0].mean.clone(),
        }
    }

    fn basis(&self, target: &Target, balances: bool, p: f64) -> Result<Basis> {
        let d = target.metric.nrows();
        let (encode, spectrum) = if balances {
            let balanced = rotation::balanced(&target.metric, &target.spread, p)?;
            (balanced.encode, Some(balanced.spectrum))
        } else {
            match self.options.method {
                Method::Hadamard => (hadamard::matrix(d), None),
                Method::Identity => (DMatrix::identity(d, d), None),
                Method::Oscar | Method::Balanced => {
                    let rotation = rotation::oscar(&target.moment)?;
                    (rotation.matrix, Some(rotation.spectrum))
                }
            }
        };
        // What is stored is rounded to f32 first: the inverse is that of the rounded matrix.
        let encode = quant::row_major(&encode);
        let rounded = DMatrix::from_row_iterator(d, d, encode.iter().map(|&x| f64::from(x)));
        let back = if balances {
            rounded
                .try_inverse()
                .filter(|inverse| inverse.iter().all(|x| x.is_finite()))
                .ok_or_else(|| Error::numeric("transform", "it has no inverse in f32"))?
        } else {
            rounded.transpose()
        };
        let feedback = match self.options.rounding {
            Rounding::Nearest => None,
            Rounding::Feedback => {
                let metric = &back * &target.metric * back.transpose();
                Some(quant::row_major(&quant::feedback_matrix(&metric)?))
            }
        };
        let dual = balances.then(|| match self.side {
            SideName::K => quant::row_major(&back.transpose()),
            SideName::V => quant::row_major(&back),
        });
        Ok(Basis {
            encode,
            dual,
            back: quant::row_major(&back),
            feedback,
            spectrum: spectrum.map(|list| list.into_iter().map(|x| x as f32).collect()),
        })
    }

    fn measure(&self, basis: &Basis, clip: f64) -> Result<OutputError> {
        let mut total = OutputError::default();
        for (head, objective) in &self.heads {
            let mean = &head.target(self.side).mean;
            let codec = Codec {
                head_dim: mean.len(),
                levels: 1 << BITS,
                group: self.group,
                // As it is stored.
                clip: f64::from(clip as f32),
                feedback: basis.feedback.clone(),
            };
            let transform = Transform::new(
                basis.encode.clone(),
                basis.back.clone(),
                self.options.centered().then(|| floats(mean)),
                codec,
            )?;
            total = total + objective.error(self.side, &transform)?;
        }
        Ok(total)
    }
}

fn floats(vector: &DVector<f64>) -> Vec<f32> {
    vector.iter().map(|&x| x as f32).collect()
}
