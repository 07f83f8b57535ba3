//! Limits that decide whether a measured method passes.

use std::str::FromStr;

use super::report::{MethodScore, Report};
use crate::{Error, Result};

/// Limits on one method; none set passes everything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Thresholds {
    /// Most KL a position, nats.
    pub max_kl: Option<f64>,
    /// Most KL as a share of other methods'.
    pub max_kl_ratio: Vec<KlRatio>,
    /// Most growth of perplexity over the reference's, as a share: 0.02 is 2 %.
    pub max_ppl_increase: Option<f64>,
    /// Least top-1 agreement, as a share.
    pub min_top1: Option<f64>,
}

/// `METHOD=RATIO`, as in `oscar=0.4`.
#[derive(Clone, Debug, PartialEq)]
pub struct KlRatio {
    pub method: String,
    pub limit: f64,
}

impl FromStr for KlRatio {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let place = format!("`{text}`");
        let wrong = |problem: &str| {
            Error::invalid(&place, problem).hint("write METHOD=RATIO, as in `oscar=0.4`")
        };
        let (method, limit) = text
            .split_once('=')
            .ok_or_else(|| wrong("expected a method and a ratio"))?;
        let limit: f64 = limit
            .trim()
            .parse()
            .map_err(|_| wrong("the ratio is not a number"))?;
        if method.trim().is_empty() || !limit.is_finite() || limit <= 0.0 {
            return Err(wrong("expected a method's name and a ratio above 0"));
        }
        Ok(Self {
            method: method.trim().to_owned(),
            limit,
        })
    }
}

impl Thresholds {
    /// What `subject` (a method of `report`) breaks: one sentence each, measured against limit.
    ///
    /// # Errors
    /// Where `subject` or a ratio names a method that was not evaluated.
    pub fn failures(&self, report: &Report, subject: &str) -> Result<Vec<String>> {
        let score = find(report, subject)?;
        let mut failures = Vec::new();
        let mut at_most = |what: &str, measured: f64, limit: f64| {
            if measured.is_nan() || measured > limit {
                failures.push(format!(
                    "{what} of `{subject}` is {measured:.5}, above the limit {limit}"
                ));
            }
        };
        if let Some(limit) = self.max_kl {
            at_most("KL", score.kl, limit);
        }
        for ratio in &self.max_kl_ratio {
            let other = find(report, &ratio.method)?;
            at_most(
                &format!("KL relative to `{}`", ratio.method),
                score.kl / other.kl,
                ratio.limit,
            );
        }
        if let Some(limit) = self.max_ppl_increase {
            at_most(
                "perplexity increase",
                score.perplexity / report.reference.perplexity - 1.0,
                limit,
            );
        }
        if let Some(limit) = self.min_top1
            && (score.top1.is_nan() || score.top1 < limit)
        {
            failures.push(format!(
                "top-1 agreement of `{subject}` is {:.5}, below the limit {limit}",
                score.top1
            ));
        }
        Ok(failures)
    }

    /// Refuses limits that nothing could pass, or nothing could fail.
    ///
    /// # Errors
    /// A limit that is no number or below 0, or an agreement above 1, by flag.
    pub fn check(&self) -> Result<()> {
        for (flag, limit, most) in [
            ("--max-kl", self.max_kl, f64::INFINITY),
            ("--max-ppl-increase", self.max_ppl_increase, f64::INFINITY),
            ("--min-top1", self.min_top1, 1.0),
        ] {
            if let Some(limit) = limit
                && !(0.0..=most).contains(&limit)
            {
                return Err(
                    Error::invalid(flag, format!("{limit} is no limit to hold")).hint(
                        if most.is_finite() {
                            "give a share from 0 to 1"
                        } else {
                            "give a number, 0 or more"
                        },
                    ),
                );
            }
        }
        Ok(())
    }

    /// Refuses ratios that name none of `methods`, before time is spent on measuring.
    pub fn check_names(&self, methods: &[&str]) -> Result<()> {
        let known = |ratio: &&KlRatio| methods.contains(&ratio.method.as_str());
        match self.max_kl_ratio.iter().find(|ratio| !known(ratio)) {
            Some(ratio) => Err(unknown(&ratio.method, methods)),
            None => Ok(()),
        }
    }
}

fn find<'a>(report: &'a Report, name: &str) -> Result<&'a MethodScore> {
    report.method(name).ok_or_else(|| {
        let known: Vec<_> = report.methods.iter().map(|m| m.name.as_str()).collect();
        unknown(name, &known)
    })
}

fn unknown(name: &str, methods: &[&str]) -> Error {
    Error::invalid(format!("`{name}`"), "no such method was evaluated").hint(format!(
        "evaluated: {}; add others with `--against`",
        methods.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn limits_hold_or_say_what_was_measured() {
        let report = report();
        let mut limits = Thresholds {
            max_kl: Some(0.05),
            max_kl_ratio: vec!["oscar=0.12".parse().unwrap()],
            max_ppl_increase: Some(0.02),
            min_top1: Some(0.9),
        };
        assert_eq!(limits.failures(&report, "balanced").unwrap(), [""; 0]);
        limits.max_kl_ratio[0].limit = 0.08;
        limits.min_top1 = Some(0.97);
        let failures = limits.failures(&report, "balanced").unwrap();
        assert_eq!(failures.len(), 2, "{failures:?}");
        assert!(failures[0].contains("0.09454") && failures[0].contains("0.08"));
        assert_eq!(limits.failures(&report, "oscar").unwrap().len(), 3);
    }

    #[test]
    fn what_is_not_a_number_fails() {
        let mut report = report();
        report.methods[0].kl = f64::NAN;
        let limits = Thresholds {
            max_kl: Some(1.0),
            ..Thresholds::default()
        };
        assert_eq!(limits.failures(&report, "balanced").unwrap().len(), 1);
    }

    #[test]
    fn unknown_methods_and_malformed_ratios_are_refused() {
        let limits = Thresholds {
            max_kl_ratio: vec!["kivi=0.5".parse().unwrap()],
            ..Thresholds::default()
        };
        let error = limits
            .failures(&report(), "balanced")
            .unwrap_err()
            .to_string();
        assert!(error.contains("`kivi`") && error.contains("balanced, oscar"));
        assert!(limits.check_names(&["balanced", "oscar"]).is_err());
        for bad in [
            "oscar",
            "oscar=",
            "oscar=x",
            "=0.4",
            "oscar=-1",
            "oscar=nan",
        ] {
            assert!(bad.parse::<KlRatio>().is_err(), "{bad}");
        }
    }
}
