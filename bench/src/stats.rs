//! Medians with their spread.

use std::fmt;

/// Summary of several runs. It has no mean, which a single disturbed run would change.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    /// Median.
    pub(crate) median: f64,
    /// Smallest value.
    pub(crate) min: f64,
    /// Largest value.
    pub(crate) max: f64,
}

impl Summary {
    /// Summarizes values; `None` without any.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let median = f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self { median, min, max })
    }

    /// Summarizes the ratios of `values` to `base`, round by round: a disturbance of the machine then affects both. Rounds that only
    /// one of them has are left out.
    pub(crate) fn of_ratios(values: &[f64], base: &[f64]) -> Option<Self> {
        Self::of(values.iter().zip(base).map(|(value, base)| value / base))
    }
}

impl fmt::Display for Summary {
    /// Formats `1.23 (1.10–1.40)`; the precision applies to each number, and is 2 by default.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        write!(f, "{:.digits$} ({:.digits$}–{:.digits$})", self.median, self.min, self.max)
    }
}

/// Returns those of these values that these shares of them (0 to 1) do not exceed, by their names; nothing without values.
pub(crate) fn quantiles<const N: usize>(
    mut values: Vec<f64>,
    shares: [(&'static str, f64); N],
) -> Vec<(&'static str, f64)> {
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return Vec::new() };
    shares.map(|(name, share)| (name, values[((last as f64) * share).round() as usize])).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let of = |values: &[f64]| Summary::of(values.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[2.0]), Some(Summary { median: 2.0, min: 2.0, max: 2.0 }));
        assert_eq!(of(&[9.0, 1.0, 2.0]), Some(Summary { median: 2.0, min: 1.0, max: 9.0 }));
        assert_eq!(of(&[4.0, 1.0, 2.0, 100.0]), Some(Summary { median: 3.0, min: 1.0, max: 100.0 }));
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        // The second round was disturbed for both: the ratio does not show it.
        let ratio = Summary::of_ratios(&[1.0, 10.0, 1.5], &[2.0, 20.0]).unwrap();
        assert_eq!(ratio, Summary { median: 0.5, min: 0.5, max: 0.5 });
        assert_eq!(Summary::of_ratios(&[1.0], &[]), None);
    }

    #[test]
    fn a_summary_is_formatted_with_its_spread() {
        let summary = Summary::of([1.0, 2.0, 4.0]).unwrap();
        assert_eq!(summary.to_string(), "2.00 (1.00–4.00)");
        assert_eq!(format!("{summary:.0}"), "2 (1–4)");
    }

    #[test]
    fn quantiles_are_measured_values() {
        assert_eq!(quantiles(Vec::new(), [("p50", 0.5)]), []);
        let values: Vec<f64> = (1..=101).rev().map(f64::from).collect();
        let found = quantiles(values, [("p0", 0.0), ("p99", 0.99), ("p100", 1.0)]);
        assert_eq!(found, [("p0", 1.0), ("p99", 100.0), ("p100", 101.0)]);
    }
}
