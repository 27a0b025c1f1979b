//! Report files.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use towline_report::{Bar, Emphasis, Group, Svg, bars, page};

use crate::table::{Content, Table};

/// Word in the name of a contender that is the program under test.
const OWN: &str = "towline";

/// Formats the machine and the tables as text.
pub(crate) fn text(machine: &[String], tables: &[Table]) -> String {
    let machine: String = machine.iter().map(|line| format!("{line}\n")).collect();
    tables.iter().fold(machine, |text, table| format!("{text}\n{table}"))
}

/// Formats the same as JSON, with the values of every run.
pub(crate) fn json(machine: &[String], tables: &[Table]) -> Value {
    json!({ "machine": machine, "tables": tables.iter().map(Table::to_json).collect::<Vec<_>>() })
}

/// Formats the same as a page: of each table a chart of its first figures, and its text.
pub(crate) fn html(name: &str, machine: &[String], tables: &[Table]) -> Result<String> {
    let mut sections = vec![json!({ "kind": "list", "title": "Machine", "items": machine })];
    for table in tables {
        let svg = table.columns.get(1).map(|unit| bars(unit, &groups(table))).transpose()?.flatten();
        // The title is the heading.
        let figures = table.to_string().lines().skip(1).collect::<Vec<_>>().join("\n");
        let svg = svg.as_ref().map(Svg::as_str);
        sections.push(json!({ "kind": "chart", "title": table.title, "svg": svg, "figures": figures }));
    }
    Ok(page(&format!("Benchmark: {name}"), "", &sections)?)
}

/// Bars of the first column of figures; a row without one has no bar.
fn groups(table: &Table) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for row in &table.rows {
        let Content::Measured { cells, .. } = &row.content else { continue };
        let emphasis = if row.label.contains(OWN) { Emphasis::Own } else { Emphasis::Peer };
        let Some(bar) = cells.first().and_then(|cell| Bar::new(&row.label, cell, emphasis)) else { continue };
        match groups.last_mut().filter(|group| group.name == row.group) {
            Some(group) => group.bars.push(bar),
            None => groups.push(Group { name: row.group.clone(), bars: vec![bar] }),
        }
    }
    groups
}

/// Writes `DIR/NAME.txt`, `DIR/NAME.json` and `DIR/NAME.html`.
pub(crate) fn write(directory: &Path, name: &str, machine: &[String], tables: &[Table]) -> Result<()> {
    let put = |extension: &str, content: &str| {
        let path = directory.join(format!("{name}.{extension}"));
        std::fs::write(&path, content).with_context(|| format!("{} cannot be written", path.display()))
    };
    put("txt", &text(machine, tables))?;
    put("json", &format!("{:#}\n", json(machine, tables)))?;
    put("html", &html(name, machine, tables)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Row;

    #[test]
    fn a_page_has_a_bar_for_each_row_with_figures() {
        let row =
            |group: &str, label: &str, content| Row { group: group.into(), label: label.into(), content };
        let measured =
            |cells: [&str; 2]| Content::Measured { cells: cells.map(String::from).into(), data: Value::Null };
        let table = Table {
            name: "t",
            title: "Restore <3 GiB>".into(),
            columns: vec!["what", "s", "×"],
            rows: vec![
                row("cold", "QEMU's own", measured(["1.20 (1.1–1.3)", "1.00"])),
                row("cold", "towline", measured(["1.0 (0.9–1.1)", "0.83"])),
                row("warm", "peer", Content::Missing("no such peer".into())),
                row("warm", "goal", measured(["met", "–"])),
            ],
            notes: vec!["a note".into()],
        };
        let found = groups(&table);
        let names: Vec<_> = found.iter().map(|group| (group.name.as_str(), group.bars.len())).collect();
        assert_eq!(names, [("cold", 2)]);
        let page = html("ram", &["2 processors".into()], &[table]).unwrap();
        for part in ["<svg", "Restore &lt;3 GiB&gt;", "not measured: no such peer", "a note", "2 processors"]
        {
            assert!(page.contains(part), "{part} is missing in {page}");
        }
    }
}
