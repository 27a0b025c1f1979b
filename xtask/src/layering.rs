//! `cargo xtask layering`: checks which crate depends on which, by `cargo metadata`, and that no files of a crate import each
//! other in a circle.
//!
//! Only what is shipped counts: normal and build dependencies. Tests may use the lab.

mod imports;
mod names;

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::{metadata, root};

/// Crates of the workspace that a crate may depend on.
enum May {
    Use(&'static [&'static str]),
    UseAllBut(&'static [&'static str]),
}

/// ARCHITECTURE.md draws this table.
const TABLE: &[(&str, May)] = &[
    ("towline-channel", May::Use(&[])),
    ("towline-protocol", May::Use(&[])),
    ("towline-migration", May::Use(&["towline-channel", "towline-protocol"])),
    ("towline-image", May::Use(&["towline-migration", "towline-channel", "towline-protocol"])),
    ("towline-compat", May::Use(&["towline-protocol"])),
    ("towline-vhost-user", May::Use(&["towline-channel"])),
    ("towline-qmp", May::Use(&["towline-channel"])),
    ("towline-launch", May::Use(&["towline-qmp"])),
    ("towline-frontend", May::Use(&[])),
    ("towline-net", May::Use(&["towline-vhost-user", "towline-channel"])),
    ("towline-vsock", May::Use(&["towline-vhost-user", "towline-channel"])),
    (
        "towline-control",
        May::Use(&[
            "towline-qmp",
            "towline-compat",
            "towline-migration",
            "towline-image",
            "towline-launch",
            "towline-channel",
            "towline-protocol",
        ]),
    ),
    ("towline-report", May::Use(&[])),
    ("towline-sandbox", May::Use(&[])),
    ("towline-cli", May::UseAllBut(&["towline-lab", "towline-bench", "towline-frontend", "xtask"])),
    ("towline-lab", May::UseAllBut(&["towline-cli", "towline-bench", "xtask"])),
    ("towline-bench", May::UseAllBut(&["towline-cli", "xtask"])),
    ("towline-fuzz", May::UseAllBut(&["towline-cli", "towline-bench", "xtask"])),
    ("xtask", May::Use(&["towline-lab"])),
];
/// The crate without system calls, and the attributes that its root must have.
const PURE_CRATE: &str = "crates/protocol/src/lib.rs";

/// Fails on any edge that the table does not have, if `protocol` is not pure, and on a circle of imports in a crate: each
/// change of one file of a circle touches all of them.
pub(crate) fn run() -> Result<()> {
    let metadata = metadata()?;
    let mut faults = faults(&metadata)?;
    let source = std::fs::read_to_string(root().join(PURE_CRATE));
    faults.extend(impurities(&source.with_context(|| format!("{PURE_CRATE} cannot be read"))?));
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        let circles = imports::circles(&manifest.with_file_name("src"))?;
        faults.extend(circles.iter().map(|circle| format!("{name} has a circle of imports: {circle}")));
    }
    if faults.is_empty() {
        return Ok(());
    }
    bail!("layering:\n  {}", faults.join("\n  "));
}

fn faults(metadata: &Value) -> Result<Vec<String>> {
    let packages = metadata["packages"].as_array().context("cargo metadata without packages")?;
    let names: Vec<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let mut faults = Vec::new();
    for package in packages {
        let user = package["name"].as_str().unwrap_or_default();
        let Some((_, may)) = TABLE.iter().find(|(name, _)| *name == user) else {
            faults.push(format!(
                "{user} is not in the table; add it to xtask/src/layering.rs and ARCHITECTURE.md"
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let used = dependency["name"].as_str().unwrap_or_default();
            let allowed = match may {
                May::Use(list) => list.contains(&used),
                May::UseAllBut(list) => !list.contains(&used),
            };
            if names.contains(&used) && dependency["kind"] != "dev" && !allowed {
                faults.push(format!("{user} uses {used}, which the table does not have"));
            }
        }
    }
    Ok(faults)
}

/// The attributes that the pure crate's root lacks.
fn impurities(source: &str) -> Vec<String> {
    let attributes: Vec<&str> =
        source.lines().map(str::trim).filter(|line| line.starts_with("#![")).collect();
    let unpure = |lacks: &str| format!("{PURE_CRATE} lacks {lacks}");
    let mut faults = Vec::new();
    if !attributes.iter().any(|line| *line == "#![no_std]" || *line == "#![cfg_attr(not(test), no_std)]") {
        faults.push(unpure("#![no_std]"));
    }
    if !attributes.contains(&"#![forbid(unsafe_code)]") {
        faults.push(unpure("#![forbid(unsafe_code)]"));
    }
    faults
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn metadata(user: &str, used: &str, kind: &Value) -> Value {
        json!({ "packages": [
            { "name": user, "dependencies": [{ "name": used, "kind": kind }, { "name": "libc", "kind": null }] },
            { "name": used, "dependencies": [] },
        ] })
    }

    #[test]
    fn an_edge_of_the_table_is_no_fault() {
        let none = Vec::<String>::new();
        assert_eq!(faults(&metadata("towline-image", "towline-protocol", &Value::Null)).unwrap(), none);
        assert_eq!(faults(&metadata("towline-cli", "towline-control", &Value::Null)).unwrap(), none);
        assert_eq!(faults(&metadata("towline-channel", "towline-lab", &json!("dev"))).unwrap(), none);
    }

    #[test]
    fn any_other_edge_is_one() {
        for (user, used, kind) in [
            ("towline-protocol", "towline-channel", Value::Null),
            ("towline-channel", "towline-lab", json!("build")),
            ("towline-lab", "towline-cli", Value::Null),
            ("xtask", "towline-image", Value::Null),
        ] {
            let wanted = format!("{user} uses {used}, which the table does not have");
            assert_eq!(faults(&metadata(user, used, &kind)).unwrap(), [wanted]);
        }
    }

    #[test]
    fn a_crate_outside_the_table_is_one() {
        let found = faults(&json!({ "packages": [{ "name": "towline-new", "dependencies": [] }] })).unwrap();
        let wanted = "towline-new is not in the table; add it to xtask/src/layering.rs and ARCHITECTURE.md";
        assert_eq!(found, [wanted]);
    }

    #[test]
    fn the_pure_crate_has_its_attributes() {
        assert!(impurities("//! x\n#![no_std]\n#![forbid(unsafe_code)]\n").is_empty());
        let wanted =
            [format!("{PURE_CRATE} lacks #![no_std]"), format!("{PURE_CRATE} lacks #![forbid(unsafe_code)]")];
        assert_eq!(impurities("// #![no_std]\n#![deny(unsafe_code)]\n"), wanted);
    }
}
