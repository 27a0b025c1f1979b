//! `towline moves` and `towline resume` on the command line.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::process::{Command, Output};

use serde_json::Value;

/// Runs towline with its own runtime directory, unless this user's is /run.
fn towline(arguments: &[&str]) -> Output {
    let run = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(arguments).env("XDG_RUNTIME_DIR", run.path()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn help_has_examples_and_exit_status() {
    for (command, wanted) in [
        ("moves", ["towline moves --json", "Exit status: 0"]),
        ("resume", ["towline resume 3f2a --run-here", "3 still undecided"]),
    ] {
        let output = towline(&[command, "--help"]);
        assert!(output.status.success());
        // Undoes the line breaks.
        let help = text(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        for wanted in ["Examples:"].into_iter().chain(wanted) {
            assert!(help.contains(wanted), "{wanted:?} is not in {help}");
        }
    }
    let help = text(&towline(&["--help"]).stdout);
    assert!(help.contains("\n  moves ") && help.contains("\n  resume "), "{help}");
}

#[test]
fn the_list_ends_with_a_count_in_json() {
    let output = towline(&["moves", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let lines: Vec<Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (last, moves) = lines.split_last().unwrap();
    assert_eq!((&last["event"], &last["moves"]), (&"moves".into(), &moves.len().into()));
    assert!(moves.iter().all(|one| one["event"] == "move" && one["id"].is_string()), "{moves:?}");
}

#[test]
fn an_unknown_id_is_a_usage_error() {
    for (id, json) in [("zzzz", false), ("", false), ("0/../0", true)] {
        let words: &[&str] = if json { &["resume", id, "--json"] } else { &["resume", id] };
        let output = towline(words);
        assert_eq!(output.status.code(), Some(2));
        let error = text(&output.stderr);
        assert!(error.contains(&format!("no move {id} is recorded on this host")), "{error}");
        if json {
            let event: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
            assert_eq!((&event["event"], &event["exit"]), (&"failed".into(), &2.into()));
        }
    }
}

#[test]
fn choices_exclude_each_other() {
    for choices in
        [["--run-here", "--discard"], ["--discard=source", "--forget"], ["--run-here=nowhere", "--quiet"]]
    {
        let output = towline(&["resume", "3f2a", choices[0], choices[1]]);
        assert_eq!(output.status.code(), Some(2), "{choices:?}");
    }
}
