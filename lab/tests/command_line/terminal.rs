//! Each command on a terminal: nothing but its own output.

use std::time::Duration;

use towline_lab::expect::Scratch;
use towline_lab::{Terminal, Towline, towline_binary};

const WITHIN: Duration = Duration::from_secs(60);

/// Runs the program on a terminal; `None` for a status that a signal has.
fn on_terminal(arguments: &str) -> (Option<i32>, String) {
    let terminal = Terminal::open().unwrap();
    let output = [terminal.output().unwrap(), terminal.output().unwrap()];
    let words = arguments.split(' ');
    let towline = Towline::start_with(&towline_binary().unwrap(), words, Some(output), &[]).unwrap();
    // Read at the same time: a terminal holds a few KiB.
    let text = std::thread::spawn(move || terminal.into_output().unwrap());
    let status = towline.wait(WITHIN).unwrap().status;
    (status.code(), text.join().unwrap())
}

fn without_colours(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let first = parts.next().unwrap_or_default().to_owned();
    // A control sequence ends with its first letter.
    let text = |part: &str| {
        part.find(|end: char| end.is_ascii_alphabetic())
            .map_or(String::new(), |end| part[end + 1..].to_owned())
    };
    parts.fold(first, |plain, part| plain + &text(part))
}

#[test]
fn every_command_starts_without_noise_on_a_terminal() {
    let scratch = Scratch::new();
    let nowhere = scratch.text("nowhere");
    for (arguments, code, part) in [
        (format!("copy {nowhere} null:"), 2, "towline: null: takes a stream"),
        (format!("copy {nowhere} {nowhere}.img"), 1, "towline: "),
        (format!("move --connect-timeout 0.1 qmp:{nowhere} {nowhere}.img"), 1, "towline: no QMP socket at"),
        (format!("run {nowhere}"), 1, "towline: "),
        ("ps".into(), 0, ""),
        (format!("upgrade qmp:{nowhere}"), 1, "towline: "),
        (format!("check {nowhere} {nowhere}"), 4, "towline: "),
        (format!("inspect {nowhere}"), 1, "towline: "),
        (format!("store ls {}", scratch.text("")), 0, ""),
        (format!("repair qmp:{nowhere}"), 1, "towline: "),
        ("moves".into(), 0, ""),
        ("resume nothing".into(), 2, "towline: "),
        (format!("net --socket {nowhere}/a --tap lo"), 1, "towline: "),
        (format!("ctl {nowhere}"), 1, "towline: "),
        (format!("vsock --socket {nowhere}/a --cid 9"), 1, "towline: "),
        ("completions bash".into(), 0, "_towline() {"),
        ("man".into(), 2, "error: the following required"),
        ("nothing".into(), 2, "error: unrecognized subcommand"),
    ] {
        let (found, text) = on_terminal(&arguments);
        assert_eq!(found, Some(code), "{arguments}: {text}");
        assert!(without_colours(&text).contains(part), "{arguments}: {text}");
        for noise in ["tracing-subscriber", "panicked", "ansi"] {
            assert!(!text.contains(noise), "{arguments}: {text}");
        }
    }
}

#[test]
fn log_lines_have_colours_on_a_terminal_alone() {
    let arguments = "copy --log debug mem:1M mem:";
    let (_, text) = on_terminal(arguments);
    assert!(text.contains("\u{1b}[34mDEBUG"), "{text}");
    let finished = towline_lab::towline(arguments.split(' ')).unwrap().wait(WITHIN).unwrap();
    assert!(finished.stderr.contains("DEBUG") && !finished.stderr.contains('\u{1b}'), "{}", finished.stderr);
}
