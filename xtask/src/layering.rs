//! `cargo xtask layering`: checks which crate depends on which, by `cargo metadata`, and that no files of a
//! crate use each other in a circle.
//!
//! Only what is shipped counts: normal and build dependencies. Tests may use the lab.

mod circles;
mod names;

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command::{packages, refuse, root};

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
    ("towline-memload", May::Use(&["towline-migration", "towline-channel", "towline-protocol"])),
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
const PURE: [&str; 2] = ["#![no_std]", "#![forbid(unsafe_code)]"];

/// Fails on any edge that the table does not have, if `protocol` is not pure, and on a circle of files in a
/// crate: each change of one file of a circle touches all of them.
pub(crate) fn run() -> Result<()> {
    let packages = packages()?;
    let mut faults = faults(&packages);
    let source = std::fs::read_to_string(root().join(PURE_CRATE)).context(PURE_CRATE)?;
    let lacking = PURE.iter().filter(|attribute| !source.lines().any(|line| line == **attribute));
    faults.extend(lacking.map(|attribute| format!("{PURE_CRATE} lacks {attribute}")));
    for package in &packages {
        let name = package["name"].as_str().unwrap_or_default();
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        let circles = circles::of(&manifest.with_file_name("src")).context(name.to_owned())?;
        faults.extend(circles.iter().map(|circle| format!("{name} has a circle of files: {circle}")));
    }
    refuse("layering:", &faults)
}

fn faults(packages: &[Value]) -> Vec<String> {
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
            let is_ours = packages.iter().any(|package| package["name"] == used);
            if is_ours && dependency["kind"] != "dev" && !allowed {
                faults.push(format!("{user} uses {used}, which the table does not have"));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(user: &str, used: &str, kind: &Value) -> Vec<String> {
        faults(&[
            json!({ "name": user, "dependencies": [{ "name": used, "kind": kind }, { "name": "libc", "kind": null }] }),
            json!({ "name": used, "dependencies": [] }),
        ])
    }

    #[test]
    fn an_edge_of_the_table_is_no_fault() {
        assert_eq!(found("towline-image", "towline-protocol", &Value::Null), [""; 0]);
        assert_eq!(found("towline-cli", "towline-control", &Value::Null), [""; 0]);
        assert_eq!(found("towline-channel", "towline-lab", &json!("dev")), [""; 0]);
    }

    #[test]
    fn any_other_edge_is_one_and_an_unknown_crate_too() {
        for (user, used, kind) in [
            ("towline-protocol", "towline-channel", Value::Null),
            ("towline-channel", "towline-lab", json!("build")),
            ("towline-lab", "towline-cli", Value::Null),
        ] {
            let wanted = format!("{user} uses {used}, which the table does not have");
            assert_eq!(found(user, used, &kind), [wanted]);
        }
        let wanted = "towline-new is not in the table; add it to xtask/src/layering.rs and ARCHITECTURE.md";
        assert_eq!(faults(&[json!({ "name": "towline-new", "dependencies": [] })]), [wanted]);
    }
}
