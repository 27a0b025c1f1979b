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
use serde_json::{Value, json};

use crate::options::Bench;
use crate::stats::Summary;

/// Spaces between two columns.
const GAP: &str = "  ";

/// Figures of one run, by name.
pub(crate) type Figures = BTreeMap<&'static str, f64>;

/// A contender under the conditions of its group.
pub(crate) trait Entry: Copy + PartialEq {
    /// Contenders of one group are compared, and run near each other in time.
    fn group(&self) -> String;
    /// Name among its group.
    fn label(&self) -> &'static str;
}

/// An entry and its figures.
struct Measured<E> {
    entry: E,
    /// Those of the successful rounds, in their order.
    rounds: Vec<Figures>,
    /// Error that ended its rounds.
    failure: Option<String>,
}

/// Figures of all entries.
pub(crate) struct Results<E> {
    measured: Vec<Measured<E>>,
}

/// A column of a table.
#[derive(Clone, Copy)]
pub(crate) struct Column<E> {
    heading: &'static str,
    /// Name of the figure.
    figure: &'static str,
    form: Form<E>,
    /// Goal of a ratio's median; `None` for entries without one.
    goal: fn(E) -> Option<Bound>,
}

#[derive(Clone, Copy)]
enum Form<E> {
    /// Median with smallest and largest value, and this number of digits.
    Spread(usize),
    /// Median alone.
    Median(usize),
    /// Ratio to another entry, which the function names.
    Ratio(fn(E) -> E),
}

/// Bound of a ratio.
#[derive(Clone, Copy)]
pub(crate) enum Bound {
    Least(f64),
    Most(f64),
}

/// A table.
pub(crate) struct Table {
    /// Its name in JSON.
    pub(crate) name: &'static str,
    /// Line above it.
    title: String,
    /// Headings, the first of which is that of the rows' names.
    headings: Vec<&'static str>,
    rows: Vec<Row>,
    /// Lines below it.
    notes: Vec<String>,
    /// Rows of the goals of its columns.
    goals: Vec<Row>,
}

struct Row {
    group: String,
    label: String,
    content: Content,
}

enum Content {
    /// Cells as printed, and the values of each round.
    Cells(Vec<String>, Value),
    /// Reason for the lack of figures.
    Missing(String),
}

/// Measures each entry once in each round. One that fails is not measured again. Progress is printed on standard error.
///
/// # Errors
/// The run was cancelled.
pub(crate) fn measure<E: Entry>(
    bench: &Bench,
    entries: impl IntoIterator<Item = E>,
    mut run: impl FnMut(E) -> Result<Figures>,
) -> Result<Results<E>> {
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
            let name = format!("round {}/{rounds}: {}: {}", round + 1, entry.group(), entry.label());
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
fn order<E: Entry>(measured: &[Measured<E>], round: usize) -> Vec<usize> {
    let indices: Vec<usize> = (0..measured.len()).collect();
    let group = |index: usize| measured[index].entry.group();
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
    pub(crate) fn chosen<E: Entry>(&self, entries: impl IntoIterator<Item = E>) -> Result<Vec<E>> {
        let rows = &self.options.rows;
        let is_chosen = |entry: &E| {
            let group = entry.group();
            rows.is_empty() || rows.iter().any(|part| group.contains(part))
        };
        let entries: Vec<E> = entries.into_iter().filter(is_chosen).collect();
        ensure!(!entries.is_empty(), "no row matches --rows {rows:?}: leave it out for all rows");
        Ok(entries)
    }
}

impl<E> Column<E> {
    /// A figure's median with its smallest and largest value.
    pub(crate) const fn spread(figure: &'static str, digits: usize) -> Self {
        Self { heading: figure, figure, form: Form::Spread(digits), goal: |_| None }
    }

    /// A figure's median.
    pub(crate) const fn median(figure: &'static str, digits: usize) -> Self {
        Self { heading: figure, figure, form: Form::Median(digits), goal: |_| None }
    }

    /// The ratio of a figure to that of another entry.
    pub(crate) const fn ratio(heading: &'static str, figure: &'static str, against: fn(E) -> E) -> Self {
        Self { heading, figure, form: Form::Ratio(against), goal: |_| None }
    }

    /// Gives a ratio a goal.
    pub(crate) const fn with_goal(mut self, goal: fn(E) -> Option<Bound>) -> Self {
        self.goal = goal;
        self
    }
}

impl<E> Measured<E> {
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

impl<E: Entry> Results<E> {
    /// Results without entries, to be extended.
    pub(crate) fn none() -> Self {
        Self { measured: Vec::new() }
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.measured.extend(other.measured);
    }

    fn ratio(&self, of: &Measured<E>, figure: &str, against: fn(E) -> E) -> Option<Summary> {
        let base = against(of.entry);
        let base = self.measured.iter().find(|other| other.entry == base)?;
        Summary::of_ratios(&of.values(figure), &base.values(figure))
    }

    fn cell(&self, of: &Measured<E>, column: &Column<E>) -> String {
        let summary = match column.form {
            Form::Ratio(against) => self.ratio(of, column.figure, against),
            Form::Spread(_) | Form::Median(_) => Summary::of(of.values(column.figure)),
        };
        match (summary, column.form) {
            (None, _) => "–".into(),
            (Some(summary), Form::Spread(digits)) => format!("{summary:.digits$}"),
            (Some(summary), Form::Median(digits)) => format!("{:.digits$}", summary.median),
            (Some(summary), Form::Ratio(_)) => summary.to_string(),
        }
    }

    /// Returns the table of those entries that are wanted; empty without any.
    pub(crate) fn table(
        &self,
        name: &'static str,
        title: &str,
        columns: &[Column<E>],
        wanted: impl Fn(E) -> bool,
    ) -> Table {
        let row = |of: &&Measured<E>| {
            let content = match &of.failure {
                Some(reason) => Content::Missing(reason.clone()),
                None => Content::Cells(columns.iter().map(|it| self.cell(of, it)).collect(), of.data()),
            };
            Row { group: of.entry.group(), label: of.entry.label().into(), content }
        };
        let wanted: Vec<_> = self.measured.iter().filter(|of| wanted(of.entry)).collect();
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
    fn goal(&self, of: &Measured<E>, column: &Column<E>) -> Option<Row> {
        let Form::Ratio(against) = column.form else { return None };
        let (bound, ratio) = ((column.goal)(of.entry)?, self.ratio(of, column.figure, against)?);
        let (text, is_met) = match bound {
            Bound::Least(least) => (format!("≥ {least}"), ratio.median >= least),
            Bound::Most(most) => (format!("≤ {most}"), ratio.median <= most),
        };
        let cells = vec![ratio.to_string(), text, if is_met { "yes" } else { "no" }.into()];
        let content = Content::Cells(cells, json!({ "ratio": ratio.median, "met": is_met }));
        let label = format!("{}, {}: {}", of.entry.label(), column.figure, column.heading);
        Some(Row { group: of.entry.group(), label, content })
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

    /// Formats it for programs.
    pub(crate) fn to_json(&self) -> Value {
        let row = |row: &Row| {
            let mut value = json!({ "group": row.group, "label": row.label });
            match &row.content {
                Content::Cells(_, data) => value["data"] = data.clone(),
                Content::Missing(reason) => value["not-measured"] = reason.as_str().into(),
            }
            value
        };
        let rows: Vec<Value> = self.rows.iter().map(row).collect();
        json!({ "name": self.name, "title": self.title, "rows": rows, "notes": self.notes })
    }

    /// Returns the width of each column in characters, none of which is wide in these tables.
    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.headings.iter().map(|heading| heading.chars().count()).collect();
        for row in &self.rows {
            let cells = match &row.content {
                Content::Cells(cells, _) => cells.as_slice(),
                Content::Missing(_) => &[],
            };
            let label = row.label.chars().count() + GAP.len();
            let all = std::iter::once(label).chain(cells.iter().map(|cell| cell.chars().count()));
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
            match &row.content {
                Content::Cells(cells, _) => line(f, &widths, &[&[label], cells.as_slice()].concat())?,
                Content::Missing(reason) => {
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

    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Contender(&'static str, &'static str);

    impl Entry for Contender {
        fn group(&self) -> String {
            self.0.into()
        }

        fn label(&self) -> &'static str {
            self.1
        }
    }

    const ENTRIES: [Contender; 4] = [
        Contender("cold", "QEMU's own"),
        Contender("cold", "ours"),
        Contender("warm", "ours"),
        Contender("warm", "peer"),
    ];

    fn measured(bench: &Bench) -> Results<Contender> {
        let mut round = 0.0;
        let run = |entry| {
            round += 1.0;
            match entry {
                Contender(_, "peer") => bail!("no such peer"),
                Contender("cold", "ours") => Ok(Figures::from([("s", round / 2.0)])),
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
        let ratio = Column::ratio("×", "s", |entry: Contender| Contender(entry.0, "QEMU's own"));
        let columns: [Column<Contender>; 2] = [
            Column::spread("s", 1),
            ratio.with_goal(|entry| (entry == Contender("cold", "ours")).then_some(Bound::Most(0.8))),
        ];
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
        let value = table.to_json();
        assert_eq!(value["rows"][1]["data"], json!({ "s": [1.0] }));
        assert_eq!(value["rows"][3]["not-measured"], "no such peer");
    }

    #[test]
    fn rows_are_chosen_by_their_group() {
        let chosen = Bench::of_test(["--rows", "war"]).chosen(ENTRIES).unwrap();
        assert_eq!(chosen, ENTRIES[2..]);
        let error = Bench::of_test(["--rows", "hot"]).chosen(ENTRIES).unwrap_err();
        assert!(error.to_string().starts_with("no row matches --rows [\"hot\"]"), "{error}");
    }
}
