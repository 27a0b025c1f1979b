//! Number of tests that passed, failed and were skipped, read from the output of `cargo test`.

use std::fmt;

/// The sums. A skip that a test prints (`SKIPPED name: reason`) makes that test a skipped one, not a passed one.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
    /// Tests with `#[ignore = "nightly"]` that did not run.
    pub(crate) nightly: usize,
    /// Names of the tests that failed.
    pub(crate) failures: Vec<String>,
    /// Names of those that were skipped, with the reason.
    pub(crate) skips: Vec<String>,
}

impl Counts {
    /// Adds the counts in the output of one run.
    pub(crate) fn read(&mut self, output: &str) {
        // A test that skips itself returns early, and the harness takes that for a pass.
        let mut returned_early = 0;
        for line in output.lines() {
            if let Some(skip) = line.strip_prefix("SKIPPED ").filter(|skip| skip.contains(": ")) {
                self.skips.push(skip.to_owned());
                self.skipped += 1;
                returned_early += 1;
            }
            let Some(test) = line.strip_prefix("test ") else { continue };
            if let Some(result) = test.strip_prefix("result: ") {
                self.passed += number_before(result, " passed").saturating_sub(returned_early);
                self.failed += number_before(result, " failed");
                returned_early = 0;
            } else if let Some(name) = test.strip_suffix(" ... FAILED") {
                self.failures.push(name.to_owned());
            } else if let Some((_, ", nightly")) = test.split_once(" ... ignored") {
                self.nightly += 1;
            } else if let Some((name, reason)) = test.split_once(" ... ignored") {
                self.skipped += 1;
                self.skips.push(format!("{name}{}", reason.replacen(", ", ": ", 1)));
            }
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

fn number_before(text: &str, word: &str) -> usize {
    let Some(end) = text.find(word) else { return 0 };
    let start = text[..end].rfind(|character: char| !character.is_ascii_digit()).map_or(0, |at| at + 1);
    text[start..end].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed_and_skips_are_no_passes() {
        let mut counts = Counts::default();
        let output = [
            "test a ... ok",
            "SKIPPED b: target/lab is missing; run `cargo xtask setup`",
            "test b ... ok",
            "test d ... ignored, a measurement",
            "test e ... ignored, nightly",
            "test c::d ... FAILED",
            "test result: ok. 2 passed; 0 failed; 2 ignored; 0 measured; 3 filtered out; finished in 0.00s",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
        ];
        counts.read(&output.join("\n"));
        let failures = vec!["c::d".to_owned()];
        let skips = vec![
            "b: target/lab is missing; run `cargo xtask setup`".to_owned(),
            "d: a measurement".to_owned(),
        ];
        let expected = Counts { passed: 11, failed: 2, skipped: 2, nightly: 1, failures, skips };
        assert_eq!(counts, expected);
        assert_eq!(counts.to_string(), "11 passed, 2 failed, 2 skipped");
    }
}
