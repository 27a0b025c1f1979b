//! Interleaved measurement.
//!
//! A machine changes during a measurement: other programs run, and freed memory returns to the host and is expensive to touch again.
//! So contenders run A B C, C B A, B C A … and not A A B B C C: every second round runs backwards, and every second one begins with
//! the next contender, so that none always runs first, or after the same one.

use anyhow::Result;
use towline_channel::Cancel;

/// Result of a contender's runs, in the order of the rounds.
#[derive(Debug, Clone)]
pub struct Outcome<T> {
    /// Values of the successful rounds.
    pub values: Vec<T>,
    /// Error that ended its runs.
    pub failure: Option<String>,
}

/// One of the compared programs or methods.
#[derive(Debug, Clone)]
pub struct Contender {
    /// Contenders are compared with others of their group, and run near them in time.
    pub group: String,
    /// Name among its group.
    pub label: String,
}

/// Runs every contender `runs` times. `measure` receives its index, and is not called again for one that failed. Progress is printed
/// on standard error.
///
/// # Errors
/// The run was cancelled.
pub fn run<T>(
    contenders: &[Contender],
    runs: usize,
    cancel: &Cancel,
    mut measure: impl FnMut(usize) -> Result<T>,
) -> Result<Vec<Outcome<T>>> {
    let mut outcomes: Vec<Outcome<T>> =
        contenders.iter().map(|_| Outcome { values: Vec::new(), failure: None }).collect();
    for round in 0..runs {
        for index in order(contenders, round) {
            cancel.check()?;
            let outcome = &mut outcomes[index];
            if outcome.failure.is_some() {
                continue;
            }
            let Contender { group, label } = &contenders[index];
            eprintln!("round {}/{runs}: {group}: {label}", round + 1);
            match measure(index) {
                Ok(value) => outcome.values.push(value),
                Err(error) => {
                    // A failure during cancellation is not the contender's.
                    cancel.check()?;
                    eprintln!("round {}/{runs}: {group}: {label}: {error:#}", round + 1);
                    outcome.failure = Some(format!("{error:#}"));
                }
            }
        }
    }
    Ok(outcomes)
}

/// Returns the order of a round: groups in their order, their members rotated and reversed.
fn order(contenders: &[Contender], round: usize) -> Vec<usize> {
    let indices: Vec<usize> = (0..contenders.len()).collect();
    let groups = indices.chunk_by(|first, second| contenders[*first].group == contenders[*second].group);
    groups
        .flat_map(|group| {
            let mut group = group.to_vec();
            let first = round / 2 % group.len();
            group.rotate_left(first);
            if round % 2 == 1 {
                group.reverse();
            }
            group
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    fn contenders(groups: &[&str]) -> Vec<Contender> {
        groups.iter().map(|group| Contender { group: (*group).into(), label: String::new() }).collect()
    }

    #[test]
    fn every_round_has_another_order_of_all() {
        let contenders = contenders(&["a", "a", "a", "b", "b"]);
        let orders: Vec<_> = (0..4).map(|round| order(&contenders, round)).collect();
        assert_eq!(orders, [[0, 1, 2, 3, 4], [2, 1, 0, 4, 3], [1, 2, 0, 4, 3], [0, 2, 1, 3, 4]]);
    }

    #[test]
    fn a_contender_that_failed_is_not_run_again() {
        let mut calls = [0; 2];
        let outcomes = run(&contenders(&["a", "a"]), 3, &Cancel::new().unwrap(), |index| {
            calls[index] += 1;
            if index == 1 {
                bail!("broken");
            }
            Ok(calls[index])
        })
        .unwrap();
        assert_eq!((outcomes[0].values.as_slice(), outcomes[0].failure.as_deref()), (&[1, 2, 3][..], None));
        assert_eq!((outcomes[1].values.len(), outcomes[1].failure.as_deref()), (0, Some("broken")));
        assert_eq!(calls, [3, 1]);
    }

    #[test]
    fn cancellation_is_not_a_contenders_failure() {
        let cancel = Cancel::new().unwrap();
        let result = run(&contenders(&["a"]), 3, &cancel, |_| -> Result<()> {
            cancel.cancel();
            bail!("its guest was killed");
        });
        assert!(result.unwrap_err().is::<towline_channel::Error>());
    }
}
