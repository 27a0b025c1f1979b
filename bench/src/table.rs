//! Contenders side by side: measured in turns, and their figures as tables.
//!
//! ```text
//!   entries ─► measure: A B C, C B A, B C A … ─► Results ── table(columns) ─► Table ─► text, JSON
//!                                                                                └─► those ratios that have goals
//! ```
//! A machine changes during a measurement: other programs run, and freed memory returns to the host and is expensive to touch again.
//! So contenders take turns, and not A A B B C C: every second round runs backwards, and every second one begins with the next
//! contender, so that none always runs first, or after the same one. Ratios are taken round by round, before their median.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use crate::options::Bench;
use crate::stats::Summary;

/// Spaces between two columns.
const GAP: &str = "  ";

/// Figures of one run, by name.
pub(crate) type Figures = BTreeMap<&'static str, f64>;

/// Conditions under which contenders are compared. Those of one row run near each other in time.
pub(crate) trait Row: Copy + PartialEq {
    /// Name of the group of its contenders.
    fn name(&self) -> String;
}

/// A contender: its name, which distinguishes it, and what it is or does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Contender<K> {
    pub(crate) name: &'static str,
    pub(crate) kind: K,
}

impl<K> Contender<K> {
    pub(crate) const fn new(name: &'static str, kind: K) -> Self {
        Self { name, kind }
    }
}

impl<K> PartialEq for Contender<K> {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// A contender in a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Entry<R, K> {
    pub(crate) row: R,
    pub(crate) contender: Contender<K>,
}

impl<R: Row, K: Copy + PartialEq> Entry<R, K> {
    /// Every contender in every row.
    pub(crate) fn all(rows: impl IntoIterator<Item = R>, contenders: &[Contender<K>]) -> Vec<Self> {
        let of = |row| contenders.iter().map(move |&contender| Self { row, contender });
        rows.into_iter().flat_map(of).collect()
    }

    /// Another contender in the same row.
    pub(crate) fn with(self, contender: Contender<K>) -> Self {
        Self { contender, ..self }
    }

    /// The goal of this contender that a ratio is at least that; `None` for others.
    pub(crate) fn at_least(self, contender: Contender<K>, least: f64) -> Option<Bound> {
        (self.contender == contender).then_some(Bound::Least(least))
    }

    /// The goal of this contender that a ratio is at most that; `None` for others.
    pub(crate) fn at_most(self, contender: Contender<K>, most: f64) -> Option<Bound> {
        (self.contender == contender).then_some(Bound::Most(most))
    }
}

/// An entry and its figures.
struct Measured<R, K> {
    entry: Entry<R, K>,
    /// Those of the successful rounds, in their order.
    rounds: Vec<Figures>,
    /// Error that ended its rounds.
    failure: Option<String>,
}

/// Figures of all entries.
pub(crate) struct Results<R, K> {
    measured: Vec<Measured<R, K>>,
}

/// A column of a table.
#[derive(Clone, Copy)]
pub(crate) struct Column<R, K> {
    heading: &'static str,
    /// Name of the figure.
    figure: &'static str,
    form: Form<R, K>,
    /// Goal of a ratio's median; `None` for entries without one.
    goal: fn(Entry<R, K>) -> Option<Bound>,
}

#[derive(Clone, Copy)]
enum Form<R, K> {
    /// Median with smallest and largest value, and this number of digits.
    Spread(usize),
    /// Median alone.
    Median(usize),
    /// Ratio to another entry, which the function names.
    Ratio(fn(Entry<R, K>) -> Entry<R, K>),
}

/// Bound of a ratio.
#[derive(Clone, Copy)]
pub(crate) enum Bound {
    Least(f64),
    Most(f64),
}

/// A table.
#[derive(Serialize)]
pub(crate) struct Table {
    /// Its name in JSON.
    name: &'static str,
    /// Line above it.
    title: String,
    /// Headings, the first of which is that of the rows' names.
    #[serde(skip)]
    headings: Vec<&'static str>,
    rows: Vec<Line>,
    /// Lines below it.
    notes: Vec<String>,
    /// Rows of the goals of its columns.
    #[serde(skip)]
    goals: Vec<Line>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Line {
    group: String,
    label: String,
    #[serde(skip)]
    cells: Vec<String>,
    /// Values of each round.
    #[serde(skip_serializing_if = "Value::is_null")]
    data: Value,
    /// Reason for the lack of figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_measured: Option<String>,
}

/// Measures each entry once in each round. One that fails is not measured again. Progress is printed on standard error.
///
/// # Errors
/// The run was cancelled.
pub(crate) fn measure<R: Row, K: Copy + PartialEq>(
    bench: &Bench,
    entries: impl IntoIterator<Item = Entry<R, K>>,
    mut run: impl FnMut(Entry<R, K>) -> Result<Figures>,
) -> Result<Results<R, K>> {
    let start = |entry| Measured { entry, rounds: Vec::new(), failure: None };
    let mut measured: Vec<_> = entries.into_iter().map(start).collect();
    let rounds = usize::from(bench.options.runs);
    for round in 0..rounds {
        for index in order(&measured, round) {
            bench.cancel.check()?;
            let Measured { entry, rounds: done, failure } = &mut measured[index];
            if failure.is_some() {
                continue;
            }
            let name =
                format!("round {}/{rounds}: {}: {}", round + 1, entry.row.name(), entry.contender.name);
            eprintln!("{name}");
            match run(*entry) {
                Ok(figures) => done.push(figures),
                Err(error) => {
                    // A failure during cancellation is not the contender's.
                    bench.cancel.check()?;
                    eprintln!("{name}: {error:#}");
                    *failure = Some(format!("{error:#}"));
                }
            }
        }
    }
    Ok(Results { measured })
}

/// Returns the order of a round: groups in their order, their members rotated and reversed.
fn order<R: Row, K>(measured: &[Measured<R, K>], round: usize) -> Vec<usize> {
    let indices: Vec<usize> = (0..measured.len()).collect();
    let group = |index: usize| measured[index].entry.row.name();
    let groups = indices.chunk_by(|first, second| group(*first) == group(*second));
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

impl Bench {
    /// Keeps the entries that `--rows` selects.
    ///
    /// # Errors
    /// There are none.
    pub(crate) fn chosen<R: Row, K>(&self, mut entries: Vec<Entry<R, K>>) -> Result<Vec<Entry<R, K>>> {
        let rows = &self.options.rows;
        entries.retain(|entry| {
            let name = entry.row.name();
            rows.is_empty() || rows.iter().any(|part| name.contains(part))
        });
        ensure!(!entries.is_empty(), "no row matches --rows {rows:?}: leave it out for all rows");
        Ok(entries)
    }
}

impl<R, K> Column<R, K> {
    /// A figure's median with its smallest and largest value.
    pub(crate) const fn spread(figure: &'static str, digits: usize) -> Self {
        Self { heading: figure, figure, form: Form::Spread(digits), goal: |_| None }
    }

    /// A figure's median.
    pub(crate) const fn median(figure: &'static str, digits: usize) -> Self {
        Self { heading: figure, figure, form: Form::Median(digits), goal: |_| None }
    }

    /// The ratio of a figure to that of another entry.
    pub(crate) const fn ratio(
        heading: &'static str,
        figure: &'static str,
        against: fn(Entry<R, K>) -> Entry<R, K>,
    ) -> Self {
        Self { heading, figure, form: Form::Ratio(against), goal: |_| None }
    }

    /// Gives a ratio a goal.
    pub(crate) const fn with_goal(mut self, goal: fn(Entry<R, K>) -> Option<Bound>) -> Self {
        self.goal = goal;
        self
    }
}

impl<R, K> Measured<R, K> {
    fn values(&self, figure: &str) -> Vec<f64> {
        self.rounds.iter().filter_map(|figures| figures.get(figure).copied()).collect()
    }

    /// Returns the values of all rounds, by figure.
    fn data(&self) -> Value {
        let names = self.rounds.iter().flat_map(|figures| figures.keys().copied());
        names
            .map(|name| (name.to_owned(), json!(self.values(name))))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }
}

impl<R: Row, K: Copy + PartialEq> Results<R, K> {
    /// Results without entries, to be extended.
    pub(crate) fn none() -> Self {
        Self { measured: Vec::new() }
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.measured.extend(other.measured);
    }

    fn ratio(&self, of: &Measured<R, K>, column: &Column<R, K>) -> Option<Summary> {
        let Form::Ratio(against) = column.form else { return None };
        let (base, figure) = (against(of.entry), column.figure);
        let base = self.measured.iter().find(|other| other.entry == base)?;
        Summary::of_ratios(&of.values(figure), &base.values(figure))
    }

    fn cell(&self, of: &Measured<R, K>, column: &Column<R, K>) -> String {
        let summary = || Summary::of(of.values(column.figure));
        let cell = match column.form {
            Form::Spread(digits) => summary().map(|it| format!("{it:.digits$}")),
            Form::Median(digits) => summary().map(|it| format!("{:.digits$}", it.median)),
            Form::Ratio(_) => self.ratio(of, column).map(|it| it.to_string()),
        };
        cell.unwrap_or_else(|| "–".into())
    }

    /// Returns the table of those entries that are wanted; empty without any.
    pub(crate) fn table(
        &self,
        name: &'static str,
        title: &str,
        columns: &[Column<R, K>],
        wanted: impl Fn(R) -> bool,
    ) -> Table {
        let row = |of: &&Measured<R, K>| {
            let (cells, data) = match of.failure {
                Some(_) => (Vec::new(), Value::Null),
                None => (columns.iter().map(|it| self.cell(of, it)).collect(), of.data()),
            };
            let (group, label) = (of.entry.row.name(), of.entry.contender.name.into());
            Line { group, label, cells, data, not_measured: of.failure.clone() }
        };
        let wanted: Vec<_> = self.measured.iter().filter(|of| wanted(of.entry.row)).collect();
        let rounds = wanted.iter().map(|of| of.rounds.len()).max().unwrap_or_default();
        Table {
            name,
            title: format!("{title}, {rounds} runs, median (min–max)"),
            headings: std::iter::once("what").chain(columns.iter().map(|column| column.heading)).collect(),
            rows: wanted.iter().map(row).collect(),
            notes: Vec::new(),
            goals: wanted
                .iter()
                .flat_map(|of| columns.iter().filter_map(|column| self.goal(of, column)))
                .collect(),
        }
    }

    /// Returns the row of a goal, if it was measured.
    fn goal(&self, of: &Measured<R, K>, column: &Column<R, K>) -> Option<Line> {
        let (bound, ratio) = ((column.goal)(of.entry)?, self.ratio(of, column)?);
        let (text, is_met) = match bound {
            Bound::Least(least) => (format!("≥ {least}"), ratio.median >= least),
            Bound::Most(most) => (format!("≤ {most}"), ratio.median <= most),
        };
        let cells = vec![ratio.to_string(), text, if is_met { "yes" } else { "no" }.into()];
        let (group, data) = (of.entry.row.name(), json!({ "ratio": ratio.median, "met": is_met }));
        let label = format!("{}, {}: {}", of.entry.contender.name, column.figure, column.heading);
        Some(Line { group, label, cells, data, not_measured: None })
    }
}

impl Table {
    /// Adds lines below it.
    pub(crate) fn with_notes<N: Into<String>>(mut self, notes: impl IntoIterator<Item = N>) -> Self {
        self.notes.extend(notes.into_iter().map(Into::into));
        self
    }

    /// Returns the table of the goals of these tables.
    pub(crate) fn goals(tables: &mut [Self]) -> Self {
        Self {
            name: "goals",
            title: "Ratios, round by round, against their goals".into(),
            headings: vec!["what", "ratio", "goal", "met"],
            rows: tables.iter_mut().flat_map(|table| std::mem::take(&mut table.goals)).collect(),
            notes: Vec::new(),
            goals: Vec::new(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the width of each column in characters, none of which is wide in these tables.
    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.headings.iter().map(|heading| heading.chars().count()).collect();
        for row in &self.rows {
            let label = row.label.chars().count() + GAP.len();
            let all = std::iter::once(label).chain(row.cells.iter().map(|cell| cell.chars().count()));
            for (widest, width) in widths.iter_mut().zip(all) {
                *widest = width.max(*widest);
            }
        }
        widths
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        writeln!(f, "{}", self.title)?;
        line(f, &widths, &self.headings)?;
        let rules: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
        line(f, &widths, &rules)?;
        let mut group = "";
        for row in &self.rows {
            if row.group != group {
                writeln!(f, "{}", row.group)?;
                group = &row.group;
            }
            let label = format!("{GAP}{}", row.label);
            match &row.not_measured {
                None => line(f, &widths, &[&[label], row.cells.as_slice()].concat())?,
                Some(reason) => {
                    writeln!(f, "{label:<width$}{GAP}not measured: {reason}", width = widths[0])?;
                }
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{GAP}{note}"))
    }
}

/// Writes a line, its first cell aligned left, the others right.
fn line(f: &mut fmt::Formatter<'_>, widths: &[usize], cells: &[impl AsRef<str>]) -> fmt::Result {
    let mut text = String::new();
    for (index, (cell, &width)) in cells.iter().zip(widths).enumerate() {
        let cell = cell.as_ref();
        text += &if index == 0 { format!("{cell:<width$}") } else { format!("{GAP}{cell:>width$}") };
    }
    writeln!(f, "{}", text.trim_end())
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    impl Row for &'static str {
        fn name(&self) -> String {
            (*self).into()
        }
    }

    const QEMU: Contender<()> = Contender::new("QEMU's own", ());
    const OURS: Contender<()> = Contender::new("ours", ());
    const PEER: Contender<()> = Contender::new("peer", ());
    const ENTRIES: [Entry<&str, ()>; 4] = [
        Entry { row: "cold", contender: QEMU },
        Entry { row: "cold", contender: OURS },
        Entry { row: "warm", contender: OURS },
        Entry { row: "warm", contender: PEER },
    ];

    fn measured(bench: &Bench) -> Results<&'static str, ()> {
        let mut round = 0.0;
        let run = |entry: Entry<&str, ()>| {
            round += 1.0;
            match (entry.row, entry.contender.name) {
                (_, "peer") => bail!("no such peer"),
                ("cold", "ours") => Ok(Figures::from([("s", round / 2.0)])),
                _ => Ok(Figures::from([("s", round)])),
            }
        };
        measure(bench, ENTRIES, run).unwrap()
    }

    #[test]
    fn every_round_has_another_order_of_all() {
        let entries = [ENTRIES[0], ENTRIES[1], ENTRIES[1], ENTRIES[2], ENTRIES[3]];
        let start = |entry| Measured { entry, rounds: Vec::new(), failure: None };
        let measured = entries.map(start);
        let orders: Vec<_> = (0..4).map(|round| order(&measured, round)).collect();
        assert_eq!(orders, [[0, 1, 2, 3, 4], [2, 1, 0, 4, 3], [1, 2, 0, 4, 3], [0, 2, 1, 3, 4]]);
    }

    #[test]
    fn a_contender_that_failed_is_not_run_again_and_has_its_reason() {
        let results = measured(&Bench::of_test(["--runs", "3"]));
        assert_eq!(results.measured[0].values("s").len(), 3);
        assert_eq!((results.measured[3].rounds.len(), results.measured[3].failure.is_some()), (0, true));
    }

    #[test]
    fn cancellation_is_not_a_contenders_failure() {
        let bench = Bench::of_test(["--runs", "3"]);
        let result = measure(&bench, ENTRIES, |_| {
            bench.cancel.cancel();
            bail!("its guest was killed");
        });
        assert!(result.err().unwrap().is::<towline_channel::Error>());
    }

    #[test]
    fn text_is_aligned_and_has_ratios_and_reasons() {
        let results = measured(&Bench::of_test(["--runs", "1"]));
        let ratio = Column::ratio("×", "s", |entry: Entry<&str, ()>| entry.with(QEMU));
        let columns: [Column<&str, ()>; 2] =
            [Column::spread("s", 1), ratio.with_goal(|entry| entry.at_most(OURS, 0.8))];
        let mut table = results.table("t", "A table", &columns, |_| true).with_notes(["a note"]);
        let wanted = "A table, 1 runs, median (min–max)\n\
                      what                      s                 ×\n\
                      ────────────  ─────────────  ────────────────\n\
                      cold\n\
                      \x20 QEMU's own  1.0 (1.0–1.0)  1.00 (1.00–1.00)\n\
                      \x20 ours        1.0 (1.0–1.0)  1.00 (1.00–1.00)\n\
                      warm\n\
                      \x20 ours        3.0 (3.0–3.0)                 –\n\
                      \x20 peer        not measured: no such peer\n\
                      \x20 a note\n";
        assert_eq!(table.to_string(), wanted);
        let goals = Table::goals(std::slice::from_mut(&mut table)).to_string();
        assert!(goals.ends_with("cold\n  ours, s: ×  1.00 (1.00–1.00)  ≤ 0.8   no\n"), "{goals}");
        let value = serde_json::to_value(&table).unwrap();
        assert_eq!(value["rows"][1]["data"], json!({ "s": [1.0] }));
        assert_eq!(value["rows"][3]["not-measured"], "no such peer");
    }

    #[test]
    fn rows_are_chosen_by_their_group() {
        let chosen = Bench::of_test(["--rows", "war"]).chosen(ENTRIES.to_vec()).unwrap();
        assert_eq!(chosen, ENTRIES[2..]);
        let error = Bench::of_test(["--rows", "hot"]).chosen(ENTRIES.to_vec()).unwrap_err();
        assert!(error.to_string().starts_with("no row matches --rows [\"hot\"]"), "{error}");
    }
}
