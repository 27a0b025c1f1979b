//! Verdicts compared with outcomes: each pair of QEMUs is judged by `towline check`, then migrated by stock
//! QEMU itself, then moved by `towline move`.
//!
//! For each pair three things are asserted. The verdict on a `migrate` by hand agrees with its outcome: the
//! guest runs on at its destination, or does not ("could not tell" agrees with neither). towline's own
//! verdict agrees with the end of its move. And after the move the guest runs: at the destination if it was
//! moved, else at the source.
//!
//! `make test` runs one pair of each kind; `cargo xtask soak pairs` runs all of them, and prints the table.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod ends;
mod files;
mod linux;
mod run;
mod table;

use towline_lab::{Sshd, Version, require_lab, require_qemu, skip};

use run::{Hosts, Row, judge, judge_between};

/// Runs these pairs, prints the table, and fails with all disagreements.
fn run(pairs: &[table::Pair], judge: &dyn Fn(&table::Pair) -> Row) {
    println!("{}", Row::HEADING);
    let rows: Vec<Row> = pairs.iter().map(judge).inspect(|row| println!("{row}")).collect();
    let wrong: Vec<_> = rows.iter().filter_map(|row| row.wrong.as_deref()).collect();
    assert!(wrong.is_empty(), "{} of {} pairs:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
}

/// Selects all pairs in the soak, or one by name, or those of `make test`.
fn wanted(pairs: Vec<table::Pair>) -> Vec<table::Pair> {
    let all = std::env::var_os("TOWLINE_SOAK_PAIRS").is_some();
    let only = std::env::var("TOWLINE_PAIR").ok();
    let is_wanted = |pair: &table::Pair| match &only {
        Some(only) => pair.name.contains(only.as_str()),
        None => all || pair.is_short,
    };
    pairs.into_iter().filter(is_wanted).collect()
}

#[test]
fn verdicts_agree_with_what_happens() {
    if require_lab("verdicts_agree_with_what_happens") {
        let disks = files::Disks::new();
        run(&wanted(table::pairs(&disks)), &judge);
    }
}

#[test]
fn verdicts_on_the_newest_qemu_agree_with_what_happens() {
    let name = "verdicts_on_the_newest_qemu_agree_with_what_happens";
    if require_qemu(name, &[Version::Stable, Version::Newest]) {
        run(&wanted(table::newest()), &judge);
    }
}

/// The same of `check` and `move` to a QEMU on another host.
#[test]
#[ignore = "nightly"]
fn verdicts_between_hosts_agree_with_what_happens() {
    let name = "verdicts_between_hosts_agree_with_what_happens";
    if !require_lab(name) {
        return;
    }
    let Some(sshd) = Sshd::find(name) else { return };
    let hosts = match Hosts::new(&sshd) {
        Ok(hosts) => hosts,
        Err(error) => return skip(name, &format!("no network namespaces can be made here: {error:#}")),
    };
    let disks = files::Disks::new();
    // A guest with taps has a network of its own.
    let pairs = wanted(table::pairs(&disks)).into_iter().filter(|pair| !pair.taps);
    run(&pairs.collect::<Vec<_>>(), &|pair| judge_between(pair, &hosts));
}
