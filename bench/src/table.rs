//! Tables of measured rows, as text for people and JSON for machines.
//!
//! ```text
//! Title
//! what                          seconds  ratio
//! ────────────────────────────  ───────  ─────
//! a group
//!   QEMU's own                     1.20   1.00
//!   with a thing                not measured: the reason
//!   note, note
//! ```

use std::fmt;

use serde_json::{Value, json};

/// Spaces between two columns.
const GAP: &str = "  ";

/// A table.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// Its name in JSON.
    pub name: &'static str,
    /// Line above it.
    pub title: String,
    /// Headings of the columns, the first of which has the names of the rows.
    pub columns: Vec<&'static str>,
    /// Rows.
    pub rows: Vec<Row>,
    /// Lines below it.
    pub notes: Vec<String>,
}

/// A row.
#[derive(Debug, Clone)]
pub struct Row {
    /// Group, whose name precedes consecutive rows of it; empty: none.
    pub group: String,
    /// Name of the row.
    pub label: String,
    /// Figures, or the reason for their lack.
    pub content: Content,
}

/// Content of a row after its label.
#[derive(Debug, Clone)]
pub enum Content {
    /// Figures.
    Measured {
        /// Cells of the columns after the first, as printed.
        cells: Vec<String>,
        /// Data of the cells, for programs.
        data: Value,
    },
    /// Reason for the lack of figures.
    Missing(String),
}

impl Table {
    /// Formats it for programs.
    pub fn to_json(&self) -> Value {
        let row = |row: &Row| {
            let mut value = json!({ "group": row.group, "label": row.label });
            match &row.content {
                Content::Measured { cells, data } => {
                    let columns = self.columns.iter().skip(1).zip(cells);
                    let cells: serde_json::Map<_, _> =
                        columns.map(|(column, cell)| ((*column).to_owned(), cell.as_str().into())).collect();
                    value["cells"] = cells.into();
                    value["data"] = data.clone();
                }
                Content::Missing(reason) => value["not-measured"] = reason.as_str().into(),
            }
            value
        };
        let rows: Vec<Value> = self.rows.iter().map(row).collect();
        json!({ "name": self.name, "title": self.title, "rows": rows, "notes": self.notes })
    }

    /// Returns the width of each column in characters.
    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|column| width(column)).collect();
        for row in &self.rows {
            let cells = match &row.content {
                Content::Measured { cells, .. } => cells.as_slice(),
                Content::Missing(_) => &[],
            };
            let all =
                std::iter::once(width(&row.label) + row.indent()).chain(cells.iter().map(|cell| width(cell)));
            for (widest, width) in widths.iter_mut().zip(all) {
                *widest = width.max(*widest);
            }
        }
        widths
    }
}

impl Row {
    fn indent(&self) -> usize {
        if self.group.is_empty() { 0 } else { GAP.len() }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        writeln!(f, "{}", self.title)?;
        line(f, &widths, self.columns.iter().copied())?;
        let rules: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
        line(f, &widths, rules.iter().map(String::as_str))?;
        let mut group = "";
        for row in &self.rows {
            if row.group != group {
                writeln!(f, "{}", row.group)?;
                group = &row.group;
            }
            let label = format!("{}{}", " ".repeat(row.indent()), row.label);
            match &row.content {
                Content::Measured { cells, .. } => {
                    line(
                        f,
                        &widths,
                        std::iter::once(label.as_str()).chain(cells.iter().map(String::as_str)),
                    )?;
                }
                Content::Missing(reason) => {
                    writeln!(f, "{}{GAP}not measured: {reason}", padded(&label, widths[0]))?;
                }
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{GAP}{note}"))
    }
}

/// Writes a line, its first cell aligned left, the others right.
fn line<'a>(
    f: &mut fmt::Formatter<'_>,
    widths: &[usize],
    cells: impl Iterator<Item = &'a str>,
) -> fmt::Result {
    let mut text = String::new();
    for (index, (cell, width_)) in cells.zip(widths).enumerate() {
        match index {
            0 => text.push_str(&padded(cell, *width_)),
            _ => {
                text.push_str(GAP);
                text.push_str(&" ".repeat(width_.saturating_sub(width(cell))));
                text.push_str(cell);
            }
        }
    }
    writeln!(f, "{}", text.trim_end())
}

fn padded(text: &str, to: usize) -> String {
    format!("{text}{}", " ".repeat(to.saturating_sub(width(text))))
}

/// Returns the width in characters, none of which is wide in these tables.
fn width(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let row = |group: &str, label: &str, cells: [&str; 2]| Row {
            group: group.into(),
            label: label.into(),
            content: Content::Measured { cells: cells.map(String::from).into(), data: json!(1) },
        };
        let missing = Content::Missing("no such peer".into());
        Table {
            name: "t",
            title: "A table".into(),
            columns: vec!["what", "s", "×"],
            rows: vec![
                row("cold", "QEMU's own", ["1.20 (1.1–1.3)", "1.00"]),
                row("cold", "ours", ["1.0", "0.83"]),
                Row { group: "warm".into(), label: "peer".into(), content: missing },
            ],
            notes: vec!["a note".into()],
        }
    }

    #[test]
    fn text_is_aligned_and_has_the_reasons() {
        let wanted = "A table\n\
                      what                       s     ×\n\
                      ────────────  ──────────────  ────\n\
                      cold\n\
                      \x20 QEMU's own  1.20 (1.1–1.3)  1.00\n\
                      \x20 ours                   1.0  0.83\n\
                      warm\n\
                      \x20 peer        not measured: no such peer\n\
                      \x20 a note\n";
        assert_eq!(table().to_string(), wanted);
    }

    #[test]
    fn json_has_the_figures_and_the_reasons() {
        let value = table().to_json();
        assert_eq!(value["rows"][0]["cells"], json!({ "s": "1.20 (1.1–1.3)", "×": "1.00" }));
        assert_eq!(value["rows"][1]["data"], 1);
        assert_eq!(value["rows"][2]["not-measured"], "no such peer");
    }
}
