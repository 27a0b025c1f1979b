//! Charts of published tables.
//!
//! A table of `cargo xtask bench --report` has a title, headings, a rule, and rows under the names of their groups; columns are
//! separated by at least two spaces.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use towline_report::{Bar, Emphasis, Group, bars, standalone};

use super::output::write;

/// A chart of a column of some groups.
struct Chart {
    /// Name of the published table.
    table: &'static str,
    /// Beginning of a title in it.
    title: &'static str,
    column: &'static str,
    /// Groups that are drawn.
    groups: &'static [&'static str],
    rows: &'static [Row],
    /// Text below the bars.
    unit: &'static str,
    picture: &'static str,
}

/// A row that is drawn.
struct Row {
    label: &'static str,
    /// Label in the chart, whose readers do not see the other rows.
    shown: &'static str,
    emphasis: Emphasis,
}

const CHARTS: [Chart; 2] = [
    Chart {
        table: "live.txt",
        title: "Live: ",
        column: "downtime, ms",
        groups: &["4 channels", "without multifd"],
        rows: &[
            Row { label: "QEMU to QEMU directly", shown: "QEMU's own migrate", emphasis: Emphasis::Peer },
            Row { label: "through towline", shown: "towline move", emphasis: Emphasis::Own },
        ],
        unit: "ms of downtime of a moved guest (median, smallest, largest)",
        picture: "move.svg",
    },
    Chart {
        table: "lanes.txt",
        title: "Lanes: ",
        column: "GB/s",
        groups: &["warm, 2 lanes", "warm, 4 lanes"],
        rows: &[
            Row { label: "QEMU's multifd", shown: "QEMU's multifd", emphasis: Emphasis::Peer },
            Row { label: "iperf3", shown: "iperf3", emphasis: Emphasis::Peer },
            Row { label: "auto", shown: "towline", emphasis: Emphasis::Own },
        ],
        unit: "GB/s of guest memory over TCP on the loopback interface (median, smallest, largest)",
        picture: "lanes.svg",
    },
];

/// Draws all charts.
pub(super) fn draw(tables: &Path, pictures: &Path) -> Result<()> {
    for chart in &CHARTS {
        let path = tables.join(chart.table);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let groups = chart.groups_of(&text).with_context(|| path.display().to_string())?;
        let svg = bars(chart.unit, &groups)?.context("no figures to draw")?;
        write(&pictures.join(chart.picture), &standalone(&svg))?;
    }
    Ok(())
}

impl Chart {
    fn groups_of(&self, text: &str) -> Result<Vec<Group>> {
        let mut lines = text.lines().skip_while(|line| !line.starts_with(self.title));
        let headings = lines.find(|line| line.starts_with("what ")).context("no table with that title")?;
        let column = cells(headings).position(|heading| heading == self.column);
        let column = column.with_context(|| format!("no column {}", self.column))?;
        let mut groups: Vec<Group> = Vec::new();
        for line in lines.skip(1).take_while(|line| !line.is_empty()) {
            if !line.starts_with(' ') {
                groups.push(Group { name: line.to_owned(), bars: Vec::new() });
                continue;
            }
            let cells: Vec<&str> = cells(line).collect();
            let row = self.rows.iter().find(|row| cells.first() == Some(&row.label));
            if let (Some(row), Some(figure), Some(group)) = (row, cells.get(column), groups.last_mut()) {
                let bar = Bar::new(row.shown, figure, row.emphasis);
                group.bars.push(bar.with_context(|| format!("{}: {figure} is no figure", row.label))?);
            }
        }
        groups.retain(|group| self.groups.contains(&group.name.as_str()));
        let is_whole = groups.iter().all(|group| group.bars.len() == self.rows.len());
        ensure!(
            groups.len() == self.groups.len() && is_whole,
            "expected the groups {} with all rows",
            self.groups.join(", ")
        );
        Ok(groups)
    }
}

/// Cells of a line.
fn cells(line: &str) -> impl Iterator<Item = &str> {
    line.trim().split("  ").map(str::trim).filter(|cell| !cell.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "2 processors\n\nLive: a guest, 7 runs\n\
        what                       downtime, ms  s to done\n\
        ───────────────────────  ──────────────  ─────────\n\
        4 channels\n\
        \x20 QEMU to QEMU directly   177 (139–244)       0.28\n\
        \x20 through towline         142 (108–162)       0.33\n\
        without multifd\n\
        \x20 through towline           95 (44–153)       0.52\n\
        \x20 downtime: a note\n\nGoals\nwhat  x\n";

    #[test]
    fn bars_are_those_of_the_column_and_the_groups() {
        let chart = Chart { title: "Live: ", column: "downtime, ms", groups: &["4 channels"], ..CHARTS[0] };
        let groups = chart.groups_of(TEXT).unwrap();
        let bar = |label, figure, emphasis| Bar::new(label, figure, emphasis).unwrap();
        let expected = vec![
            bar("QEMU's own migrate", "177 (139–244)", Emphasis::Peer),
            bar("towline move", "142 (108–162)", Emphasis::Own),
        ];
        assert_eq!(groups, [Group { name: "4 channels".into(), bars: expected }]);
        let other = Chart { column: "MB/s", ..chart };
        assert!(other.groups_of(TEXT).unwrap_err().to_string().contains("no column MB/s"));
    }

    #[test]
    fn the_published_tables_have_what_is_drawn() {
        let directory = tempfile::tempdir().unwrap();
        draw(&crate::command::root().join("docs/benchmarks"), directory.path()).unwrap();
        for chart in &CHARTS {
            let svg = fs::read_to_string(directory.path().join(chart.picture)).unwrap();
            assert!(svg.starts_with("<svg") && svg.matches("<rect").count() >= 4, "{}", chart.picture);
        }
    }
}
