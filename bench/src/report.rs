//! Report files.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::table::Table;

/// Formats the machine and the tables as text.
pub(crate) fn text(machine: &[String], tables: &[Table]) -> String {
    let machine: String = machine.iter().map(|line| format!("{line}\n")).collect();
    tables.iter().fold(machine, |text, table| format!("{text}\n{table}"))
}

/// Formats the same as JSON, with the values of every run.
pub(crate) fn json(machine: &[String], tables: &[Table]) -> Value {
    json!({ "machine": machine, "tables": tables.iter().map(Table::to_json).collect::<Vec<_>>() })
}

/// Writes `DIR/NAME.txt` and `DIR/NAME.json`.
pub(crate) fn write(directory: &Path, name: &str, text: &str, json: &Value) -> Result<()> {
    let put = |extension: &str, content: &str| {
        let path = directory.join(format!("{name}.{extension}"));
        std::fs::write(&path, content).with_context(|| format!("{} cannot be written", path.display()))
    };
    put("txt", text)?;
    put("json", &format!("{json:#}\n"))
}
