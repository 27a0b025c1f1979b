//! Medians with their spread.

use std::fmt;

/// What several runs of one thing say. No mean: a single run that was disturbed would move it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// The middle value; between the two middle ones if there is an even number.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
    /// How many values there are.
    pub count: usize,
}

impl Summary {
    /// `None` if there are no values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let count = values.len();
        let median = f64::midpoint(values[(count - 1) / 2], values[count / 2]);
        Some(Self { median, min, max, count })
    }

    /// Of `values` against `base`, value by value: both were measured in the same round, and what disturbed the machine
    /// then disturbed both. Rounds that only one of them has are left out.
    pub fn of_ratios(values: &[f64], base: &[f64]) -> Option<Self> {
        Self::of(values.iter().zip(base).map(|(value, base)| value / base))
    }
}

impl fmt::Display for Summary {
    /// `1.23 (1.10–1.40)`; the precision is that of each number, two digits unless said.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        write!(f, "{:.digits$} ({:.digits$}–{:.digits$})", self.median, self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let of = |values: &[f64]| Summary::of(values.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[2.0]), Some(Summary { median: 2.0, min: 2.0, max: 2.0, count: 1 }));
        assert_eq!(of(&[9.0, 1.0, 2.0]), Some(Summary { median: 2.0, min: 1.0, max: 9.0, count: 3 }));
        assert_eq!(
            of(&[4.0, 1.0, 2.0, 100.0]),
            Some(Summary { median: 3.0, min: 1.0, max: 100.0, count: 4 })
        );
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        // The second round was disturbed for both: the ratio does not show it.
        let ratio = Summary::of_ratios(&[1.0, 10.0, 1.5], &[2.0, 20.0]).unwrap();
        assert_eq!(ratio, Summary { median: 0.5, min: 0.5, max: 0.5, count: 2 });
        assert_eq!(Summary::of_ratios(&[1.0], &[]), None);
    }

    #[test]
    fn it_is_written_with_its_spread() {
        let summary = Summary::of([1.0, 2.0, 4.0]).unwrap();
        assert_eq!(summary.to_string(), "2.00 (1.00–4.00)");
        assert_eq!(format!("{summary:.0}"), "2 (1–4)");
    }
}
