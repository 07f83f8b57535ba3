//! How much worse than a baseline an entry may be, and where it is worse.

use serde::{Deserialize, Serialize};

use super::report::{MethodScore, Report, significant};
use crate::{Error, Result};

/// Limits on what an entry loses against a baseline. As TOML, any of them, under these names, at the top of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tolerances {
    /// Most KL as a multiple of the baseline's.
    pub max_kl_ratio: f64,
    /// KL, in nats, that may grow whatever the ratio: for entries so good that a ratio says nothing.
    pub kl_slack: f64,
    /// Most perplexity as a multiple of the baseline's.
    pub max_perplexity_ratio: f64,
    /// Most loss of top-1 agreement, as a share of positions: 0.005 is half a percent.
    pub max_top1_drop: f64,
    /// Most growth of bits a cached number at 128K tokens.
    pub max_bits_increase: f64,
    /// Most relative error of any head's attention output as a multiple of the baseline's.
    pub max_head_error_ratio: f64,
    /// Errors up to this one are no regression, whatever the ratio.
    pub head_error_slack: f64,
}

impl Default for Tolerances {
    fn default() -> Self {
        Self {
            max_kl_ratio: 1.1,
            kl_slack: 1e-4,
            max_perplexity_ratio: 1.005,
            max_top1_drop: 0.005,
            max_bits_increase: 0.0,
            max_head_error_ratio: 1.5,
            head_error_slack: 0.05,
        }
    }
}

const NAMES: [&str; 7] = [
    "max_kl_ratio",
    "kl_slack",
    "max_perplexity_ratio",
    "max_top1_drop",
    "max_bits_increase",
    "max_head_error_ratio",
    "head_error_slack",
];

impl Tolerances {
    /// Reads TOML; `place` names it in errors.
    ///
    /// # Errors
    /// What is no TOML, a key that is no tolerance, a value that is no number of 0 or more.
    pub fn parse(text: &str, place: &str) -> Result<Self> {
        let table: toml::Table = text
            .parse()
            .map_err(|e: toml::de::Error| Error::invalid(place, e.to_string().trim_end()))?;
        for (key, value) in &table {
            if !NAMES.contains(&key.as_str()) {
                return Err(Error::unknown(place, "tolerance", key, &NAMES));
            }
            let number = match value {
                toml::Value::Float(x) => Some(*x),
                toml::Value::Integer(x) => Some(*x as f64),
                _ => None,
            };
            if !number.is_some_and(|x| x >= 0.0) {
                return Err(Error::invalid(
                    place,
                    format!("`{key}` is no number of 0 or more"),
                ));
            }
        }
        // A whole number is a fine ratio, but no float to serde.
        let floats: toml::Table = table
            .into_iter()
            .map(|(key, value)| {
                let value = match value {
                    toml::Value::Integer(x) => toml::Value::Float(x as f64),
                    other => other,
                };
                (key, value)
            })
            .collect();
        floats
            .try_into()
            .map_err(|e: toml::de::Error| Error::invalid(place, e))
    }
}

/// One thing that was compared.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub what: String,
    pub baseline: f64,
    pub now: f64,
    /// The worst that passes.
    pub limit: f64,
    /// Whether more is better.
    pub at_least: bool,
    pub regressed: bool,
}

impl Finding {
    fn new(what: impl Into<String>, baseline: f64, now: f64, limit: f64, at_least: bool) -> Self {
        // What is not a number passes nothing.
        let passes = if at_least { now >= limit } else { now <= limit };
        Self {
            what: what.into(),
            baseline,
            now,
            limit,
            at_least,
            regressed: !passes,
        }
    }

    /// What is wrong, in a sentence.
    pub fn message(&self) -> String {
        format!(
            "{} is {}, {} {} (baseline {})",
            self.what,
            significant(self.now, 4),
            if self.at_least { "below" } else { "above" },
            significant(self.limit, 4),
            significant(self.baseline, 4)
        )
    }
}

/// Compares the first method of `now` with the method `name` of `baseline`, measured on the same tokens. One finding a
/// number, and one a layer for the head that is furthest beyond its limit, or nearest to it.
///
/// # Errors
/// Where a report lacks the method.
pub fn compare(
    now: &Report,
    baseline: &Report,
    name: &str,
    tolerances: &Tolerances,
) -> Result<Vec<Finding>> {
    let missing = || Error::invalid("report", "holds no measurement of the method to compare");
    let subject: &MethodScore = now.methods.first().ok_or_else(missing)?;
    let old = baseline.method(name).ok_or_else(missing)?;
    let t = tolerances;
    let mut findings = vec![
        Finding::new(
            "KL",
            old.kl,
            subject.kl,
            (old.kl * t.max_kl_ratio).max(old.kl + t.kl_slack),
            false,
        ),
        Finding::new(
            "perplexity",
            old.perplexity,
            subject.perplexity,
            old.perplexity * t.max_perplexity_ratio,
            false,
        ),
        Finding::new(
            "top-1 agreement",
            old.top1,
            subject.top1,
            old.top1 - t.max_top1_drop,
            true,
        ),
        Finding::new(
            "bits at 128K",
            old.bits_per_element_128k,
            subject.bits_per_element_128k,
            old.bits_per_element_128k + t.max_bits_increase,
            false,
        ),
    ];
    for layer in &now.layers {
        let before = baseline.layers.iter().find(|l| l.layer == layer.layer);
        let errors = |layer: &super::report::LayerError, name: &str| {
            let method = layer.methods.iter().find(|m| m.name == name);
            method.map(|m| m.output_error.clone()).unwrap_or_default()
        };
        let (new, old) = (
            errors(layer, &subject.name),
            before.map(|l| errors(l, name)).unwrap_or_default(),
        );
        let worst = new
            .iter()
            .zip(&old)
            .enumerate()
            .filter_map(|(head, (new, old))| {
                let (new, old) = ((*new)?, (*old)?);
                let limit = (old * t.max_head_error_ratio).max(t.head_error_slack);
                let what = format!("output error of layer {}, head {head}", layer.layer);
                Some(Finding::new(what, old, new, limit, false))
            })
            .max_by(|a, b| (a.now / a.limit).total_cmp(&(b.now / b.limit)));
        findings.extend(worst);
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::super::report::{LayerError, LayerMethodError};
    use super::*;

    #[test]
    fn names_are_the_fields() {
        let json = serde_json::to_value(Tolerances::default()).unwrap();
        let mut fields: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
        let mut names = NAMES.map(str::to_owned).to_vec();
        fields.sort();
        names.sort();
        assert_eq!(fields, names);
    }

    #[test]
    fn files_change_what_they_name_and_misspelt_names_are_refused() {
        let got = Tolerances::parse("max_kl_ratio = 2\nmax_top1_drop = 0.01", "t.toml").unwrap();
        let expected = Tolerances {
            max_kl_ratio: 2.0,
            max_top1_drop: 0.01,
            ..Tolerances::default()
        };
        assert_eq!(got, expected);
        assert_eq!(Tolerances::parse("", "t").unwrap(), Tolerances::default());
        let message = |text: &str| Tolerances::parse(text, "t.toml").unwrap_err().to_string();
        let misspelt = message("max_kl_ration = 2");
        assert!(
            misspelt.contains("`max_kl_ration`")
                && misspelt.contains("did you mean `max_kl_ratio`?")
        );
        assert!(message("colour = 1").contains("known are"));
        assert!(message("[kl]\nmax = 1").contains("`kl`"));
        for bad in [
            "max_kl_ratio = -1",
            "max_kl_ratio = nan",
            "max_kl_ratio = 'a'",
            "max_kl_ratio",
        ] {
            assert!(message(bad).starts_with("t.toml"), "{bad}");
        }
    }

    #[test]
    fn what_is_worse_than_allowed_is_found() {
        let baseline = report();
        let mut now = report();
        let regressed = |now: &Report| -> Vec<String> {
            let found = compare(now, &baseline, "balanced", &Tolerances::default()).unwrap();
            found
                .into_iter()
                .filter(|f| f.regressed)
                .map(|f| f.what)
                .collect()
        };
        assert_eq!(regressed(&now), [""; 0]);
        now.methods[0].kl *= 1.2;
        now.methods[0].top1 -= 0.01;
        assert_eq!(regressed(&now), ["KL", "top-1 agreement"]);
        now.methods[0].kl = f64::NAN;
        assert_eq!(regressed(&now)[0], "KL");
        assert!(compare(&now, &baseline, "none", &Tolerances::default()).is_err());
    }

    #[test]
    fn one_bad_head_is_named() {
        let with = |errors: &[f64]| {
            let mut report = report();
            report.layers = vec![LayerError {
                layer: 7,
                methods: vec![LayerMethodError {
                    name: "balanced".to_owned(),
                    logit_error: vec![],
                    output_error: errors.iter().map(|x| Some(*x)).collect(),
                }],
            }];
            report
        };
        let found = compare(
            &with(&[0.1, 0.4, 0.04]),
            &with(&[0.1, 0.2, 0.001]),
            "balanced",
            &Tolerances::default(),
        )
        .unwrap();
        let heads: Vec<_> = found.iter().filter(|f| f.regressed).collect();
        assert_eq!(heads.len(), 1);
        assert_eq!(heads[0].what, "output error of layer 7, head 1");
        assert!(
            heads[0].message().contains("above 0.3000"),
            "{}",
            heads[0].message()
        );
    }
}
