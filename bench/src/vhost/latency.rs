//! Latencies and their quantiles.

/// Latencies of one measurement in microseconds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Latencies(Vec<f64>);

impl Latencies {
    /// Adds a latency in microseconds.
    pub(crate) fn push(&mut self, microseconds: f64) {
        self.0.push(microseconds);
    }

    /// Adds those of another thread.
    pub(crate) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    /// Returns the latency that this share of them (0 to 1) does not exceed; `None` without any.
    pub(crate) fn quantile(&mut self, share: f64) -> Option<f64> {
        self.0.sort_by(f64::total_cmp);
        let last = self.0.len().checked_sub(1)?;
        Some(self.0[((last as f64) * share).round() as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_measured_values() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.quantile(0.5), None);
        (1..=101).rev().for_each(|value| latencies.push(f64::from(value)));
        assert_eq!([0.0, 0.99, 1.0].map(|share| latencies.quantile(share)), [1.0, 100.0, 101.0].map(Some));
    }
}
