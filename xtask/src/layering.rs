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

/// Has the table of crates; the last column lists those of the workspace that a crate may use.
const ARCHITECTURE: &str = "ARCHITECTURE.md";
/// The crate without system calls, and the attributes that its root must have.
const PURE_CRATE: &str = "crates/protocol/src/lib.rs";
const PURE: [&str; 2] = ["#![no_std]", "#![forbid(unsafe_code)]"];

/// Fails on any edge that the table does not have, if `protocol` is not pure, and on a circle of files in a
/// crate: each change of one file of a circle touches all of them.
pub(crate) fn run() -> Result<()> {
    let packages = packages()?;
    let read = |name| std::fs::read_to_string(root().join(name)).context(name);
    let table = read(ARCHITECTURE)?;
    let mut faults = faults(&packages, &table);
    faults.extend(unknown(&packages, &table));
    let source = read(PURE_CRATE)?;
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

fn faults(packages: &[Value], table: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for package in packages {
        let user = package["name"].as_str().unwrap_or_default();
        let Some(may_use) = may_use(table, user) else {
            faults.push(format!("{user} is not in the table; add it to {ARCHITECTURE}"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let used = dependency["name"].as_str().unwrap_or_default();
            let is_ours = packages.iter().any(|package| package["name"] == used);
            if is_ours && dependency["kind"] != "dev" && !allows(may_use, used) {
                faults.push(format!("{user} uses {used}, which the table does not have"));
            }
        }
    }
    faults
}

/// Names in the last column that no crate has: one after `all but` would allow what it should forbid.
fn unknown(packages: &[Value], table: &str) -> Vec<String> {
    let names: Vec<_> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let is_known = |name: &&str| *name == "–" || names.iter().any(|known| short(known) == *name);
    let rows = names.iter().filter_map(|user| may_use(table, user));
    let listed = rows.flat_map(|may_use| may_use.trim_start_matches("all but ").split(", "));
    let unknown = listed.filter(|name| !is_known(name));
    unknown.map(|name| format!("{name} in {ARCHITECTURE} is not a crate")).collect()
}

/// The last column of a crate's row in the table.
fn may_use<'a>(table: &'a str, user: &str) -> Option<&'a str> {
    let row = format!("| `{}` | ", short(user));
    let columns = table.lines().find_map(|line| line.strip_prefix(&row)?.strip_suffix(" |"))?;
    columns.rsplit_once(" | ").map(|(_, may_use)| may_use)
}

/// Returns true if `may_use`, as `channel, protocol` or `all but cli, xtask`, has this crate.
fn allows(may_use: &str, used: &str) -> bool {
    let (listed, is_allowed) = may_use.strip_prefix("all but ").map_or((may_use, true), |but| (but, false));
    listed.split(", ").any(|name| name == short(used)) == is_allowed
}

/// The name of a crate in the table.
fn short(package: &str) -> &str {
    package.trim_start_matches("towline-")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table() -> String {
        std::fs::read_to_string(root().join(ARCHITECTURE)).unwrap()
    }

    fn found(user: &str, used: &str, kind: &Value) -> Vec<String> {
        let packages = [
            json!({ "name": user, "dependencies": [{ "name": used, "kind": kind }, { "name": "libc", "kind": null }] }),
            json!({ "name": used, "dependencies": [] }),
        ];
        faults(&packages, &table())
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
        let bench = [json!({ "name": "towline-bench" }), json!({ "name": "towline-cli" })];
        assert_eq!(
            unknown(&bench, "| `bench` | x | all but clii, cli |"),
            ["clii in ARCHITECTURE.md is not a crate"]
        );
        let wanted = "towline-new is not in the table; add it to ARCHITECTURE.md";
        assert_eq!(faults(&[json!({ "name": "towline-new", "dependencies": [] })], &table()), [wanted]);
    }
}
