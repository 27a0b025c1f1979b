//! The tables of streams and requests.

use serde_json::json;

use super::entry::{Entry, Figure, Parameters, Work};
use crate::rounds::Outcome;
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

const MIB: f64 = (1 << 20) as f64;

pub(super) fn tables(parameters: &Parameters, entries: &[Entry], outcomes: &[Outcome<Figure>]) -> Vec<Table> {
    let run = Run { entries, outcomes };
    let note = "the guest is emulated: compare the rows of one table; × tap: with the same offloads; kicks, interrupts: of the whole connection";
    let table = |name, title: &str, columns, is_of: fn(Work) -> bool| Table {
        name,
        title: format!("{title}, {} runs, median (min–max)", parameters.runs),
        columns,
        rows: run.rows(is_of),
        notes: vec![note.into()],
    };
    let streams = table(
        "af-xdp-streams",
        "TCP streams of a guest",
        vec![
            "what",
            "Gbit/s",
            "× tap",
            "card CPU ms/MiB",
            "× tap",
            "receiver ms/MiB",
            "kicks/MiB",
            "interrupts/MiB",
            "zero-copy %",
        ],
        |work| matches!(work, Work::Stream(_)),
    );
    let requests = table(
        "af-xdp-requests",
        "TCP requests of a guest",
        vec!["what", "1/s", "× tap", "card CPU µs", "× tap", "p50 µs", "kicks", "interrupts", "zero-copy %"],
        |work| matches!(work, Work::Request(_)),
    );
    [streams, requests].into_iter().filter(|table| !table.rows.is_empty()).collect()
}

struct Run<'r> {
    entries: &'r [Entry],
    outcomes: &'r [Outcome<Figure>],
}

impl Run<'_> {
    fn values(&self, entry: Entry, figure: fn(&Figure) -> f64) -> Option<Vec<f64>> {
        let index = self.entries.iter().position(|other| *other == entry)?;
        Some(self.outcomes[index].values.iter().map(figure).collect())
    }

    /// Ratio to the tap with the same offloads, round by round.
    fn beside_tap(&self, entry: Entry, figure: fn(&Figure) -> f64) -> String {
        let base = self.values(Entry { carrier: entry.carrier.tap(), ..entry }, figure).unwrap_or_default();
        let values = self.values(entry, figure).unwrap_or_default();
        Summary::of_ratios(&values, &base).map_or_else(String::new, |ratio| format!("{ratio:.2}"))
    }

    fn rows(&self, is_of: fn(Work) -> bool) -> Vec<Row> {
        let chosen = self.entries.iter().zip(self.outcomes).filter(|(entry, _)| is_of(entry.work));
        let rows = chosen.map(|(entry, outcome)| {
            let contender = entry.contender();
            let content = match &outcome.failure {
                Some(reason) => Content::Missing(reason.clone()),
                None => self.content(*entry, &outcome.values),
            };
            Row { group: contender.group, label: contender.label, content }
        });
        rows.collect()
    }

    fn content(&self, entry: Entry, figures: &[Figure]) -> Content {
        let median = |figure: fn(&Figure) -> f64, scale: f64, digits: usize| {
            let summary = Summary::of(figures.iter().map(|each| figure(each) * scale));
            summary.map_or_else(String::new, |summary| format!("{:.digits$}", summary.median))
        };
        let spread = |figure: fn(&Figure) -> f64, scale: f64, digits: usize| {
            let summary = Summary::of(figures.iter().map(|each| figure(each) * scale));
            summary.map_or_else(String::new, |summary| format!("{summary:.digits$}"))
        };
        let rate: fn(&Figure) -> f64 = |figure| figure.rate;
        let card: fn(&Figure) -> f64 = |figure| figure.card_seconds;
        let (beside_rate, beside_card) = (self.beside_tap(entry, rate), self.beside_tap(entry, card));
        let zero_copy = median(|figure| figure.zero_copy, 100.0, 0);
        let cells = match entry.work {
            Work::Stream(_) => vec![
                spread(rate, 8e-9, 3),
                beside_rate,
                median(card, 1e3 * MIB, 2),
                beside_card,
                median(|figure| figure.receiver_seconds, 1e3 * MIB, 2),
                median(|figure| figure.kicks, MIB, 1),
                median(|figure| figure.calls, MIB, 1),
                zero_copy,
            ],
            Work::Request(_) => vec![
                spread(rate, 1.0, 0),
                beside_rate,
                median(card, 1e6, 0),
                beside_card,
                median(|figure| figure.p50_us, 1.0, 0),
                median(|figure| figure.kicks, 1.0, 2),
                median(|figure| figure.calls, 1.0, 2),
                zero_copy,
            ],
        };
        let data = figures.iter().map(|figure| {
            json!({
                "rate": figure.rate, "p50-us": figure.p50_us, "card-seconds": figure.card_seconds,
                "receiver-seconds": figure.receiver_seconds, "kicks": figure.kicks, "calls": figure.calls,
                "zero-copy": figure.zero_copy,
            })
        });
        Content::Measured { cells, data: data.collect() }
    }
}
