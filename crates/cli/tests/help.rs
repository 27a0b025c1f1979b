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
    for option in ["--verify ", "--verify\n", "--stream", "--recover\n"] {
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

#[test]
fn an_invalid_number_is_refused_with_the_unit_of_its_option() {
    let copy = ["copy", "a.img", "null:"];
    let vsock = ["vsock", "--cid", "3", "--socket", "v.sock"];
    let net = ["net", "--tap", "tap0", "--socket", "n.sock"];
    for (command, option, value, expected) in [
        (
            &copy[..],
            "--downtime-limit",
            "300x",
            "a whole number of milliseconds or a time such as 300ms or 2s, such as 300",
        ),
        (&copy, "--max-bandwidth", "1X", "unknown suffix \"X\": expected bytes, or K, M, G or T"),
        (&copy, "--multifd-channels", "4x", "a whole number without a suffix, such as 4"),
        (&copy, "--compression", "zlib:10", "a whole number from 0 to 9"),
        (&copy, "--connect-timeout", "10x", "a number of seconds, or a time such as 300ms or 2min"),
        (
            &["upgrade", "qmp:a"],
            "--downtime-limit",
            "1u",
            "a whole number of milliseconds or a time such as 300ms or 2s, such as 1",
        ),
        (
            &vsock,
            "--poll-us",
            "1ns",
            "a whole number of microseconds or a time such as 300ms or 2s, such as 1",
        ),
        (&net, "--poll-us", "1000001", "a whole number of microseconds from 0 to 1000000"),
        (&net, "--cpus", "0-3", "a whole number without a suffix"),
        (&["run", "a.img"], "--count", "0", "a whole number from 1 to 1024"),
    ] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_towline")).args(command).args([option, value]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(expected) && text.contains(option), "{option} {value}: {text}");
        assert!(!text.contains("invalid digit"), "{text}");
        assert_eq!(output.status.code(), Some(2), "{text}");
    }
}
