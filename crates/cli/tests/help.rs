//! The help of every command, which is part of the interface.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

#[path = "common/snapshot.rs"]
mod snapshot;

use std::process::Command;

/// Returns the help of a command; of all without one.
fn help(command: Option<&str>) -> String {
    let mut towline = Command::new(env!("CARGO_BIN_EXE_towline"));
    // The width of lines depends on it.
    towline.env_remove("COLUMNS");
    let output = towline.args(command).arg("--help").output().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the names of the commands.
fn commands(help: &str) -> Vec<String> {
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let lines = commands.take_while(|line| !line.is_empty());
    let name = |line: &str| line.strip_prefix("  ")?.split(' ').next().map(str::to_owned);
    lines.filter_map(name).filter(|name| !name.is_empty() && name != "help").collect()
}

/// Returns the short help of a command.
fn short_help(command: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_towline")).args([command, "-h"]).output().unwrap();
    assert!(output.status.success(), "{command}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_long_help_is_complete_and_the_short_one_is_short() {
    for command in ["copy", "move"] {
        let (long, short) = (help(Some(command)), short_help(command));
        for part in
            ["Endpoints:", "  qmp:PATH ", "Exit status:", "  3  failed", "Examples:", "Lanes:", "Output:"]
        {
            assert!(long.contains(part), "{command} --help: {part}");
        }
        assert!(!short.contains("Endpoints:") && !short.contains("Examples:"), "{short}");
        assert!(
            short.lines().count() <= 75 && short.contains("--help"),
            "{}: {short}",
            short.lines().count()
        );
        assert!(long.lines().all(|line| line.chars().count() <= 100), "{command} --help has long lines");
    }
    let long = help(Some("move"));
    for option in ["--verify", "--stream", "--recover", "--record-working-set"] {
        assert!(!long.contains(option), "move has {option}, which is for images");
    }
}

#[test]
fn the_help_of_every_command_is_as_recorded() {
    let mut snapshots = snapshot::Snapshots::open("help");
    let all = help(None);
    snapshots.compare("towline.txt", &all);
    let commands = commands(&all);
    assert!(commands.len() >= 11, "{commands:?}");
    for command in &commands {
        let text = help(Some(command));
        assert!(text.contains("Examples:"), "{command}: no examples");
        snapshots.compare(&format!("{command}.txt"), &text);
    }
    snapshots.finish();
}
