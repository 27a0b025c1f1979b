//! Licences, advisories, sources and bans of third-party crates, by cargo-deny and `deny.toml`.
//!
//! cargo-deny is not built for this: it has more crates than towline. Where it is missing, or its database of advisories cannot be
//! fetched, the check is skipped, with the reason printed.

use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use crate::command::{cargo, run as run_command};

/// Beginnings of cargo-deny's errors when the database of advisories cannot be fetched.
const UNREACHABLE: [&str; 2] = ["failed to fetch advisory database", "failed to load advisory database"];

/// Runs cargo-deny, if it is installed.
pub(super) fn check() -> Result<()> {
    let mut version = cargo(["deny", "--version"]);
    if !version.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
        println!("lint: skipped: cargo-deny is not installed (cargo install --locked cargo-deny)");
        return Ok(());
    }
    run_command(&mut cargo(["deny", "--log-level", "error", "check", "bans", "licenses", "sources"]))?;
    advisories(&mut cargo(["deny", "--log-level", "error", "check", "advisories"]))
}

fn advisories(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    match (output.status.success(), unreachable(&text)) {
        (true, _) => Ok(()),
        (false, Some(reason)) => {
            println!("lint: skipped: advisories: {reason}");
            Ok(())
        }
        (false, None) => bail!("cargo deny check advisories failed with {}:\n{text}", output.status),
    }
}

/// Returns cargo-deny's line that its database cannot be fetched, if that is the reason of a failure.
fn unreachable(text: &str) -> Option<&str> {
    text.lines().find(|line| UNREACHABLE.iter().any(|reason| line.contains(reason))).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_database_skips_the_advisories() {
        let missing = "2026-01-02 [ERROR] failed to fetch advisory database: connection refused";
        assert_eq!(unreachable(missing), Some(missing));
        assert_eq!(unreachable("error[vulnerability]: a crate has a fault"), None);
        let failing = |text: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo \"$0\" >&2; exit 1", text]);
            advisories(&mut command)
        };
        assert!(failing(missing).is_ok());
        let error = failing("error[vulnerability]: a crate has a fault").unwrap_err().to_string();
        assert!(error.contains("a crate has a fault"), "{error}");
    }
}
