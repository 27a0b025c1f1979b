//! Output of the demonstration: headings, commands, steps with their durations, output.

use std::fmt::Display;
use std::io::Write as _;
use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use crate::paths;

/// Width of a line; the terminal of the recording has a few columns more.
const COLUMNS: usize = 96;
const COMMAND_INDENT: &str = "  ";
const CONTINUED_INDENT: &str = "      ";

/// Prints a heading.
pub(super) fn heading(text: &str) {
    println!("\n{text}");
}

/// Prints a fact below a command.
pub(super) fn fact(text: &str) {
    println!("{CONTINUED_INDENT}{text}");
}

/// Prints a command before it is run.
pub(super) fn command(words: impl IntoIterator<Item: AsRef<str>>) {
    let words: Vec<String> = words.into_iter().map(|word| quoted(word.as_ref())).collect();
    print!("{}", command_text(&words));
    // A reader of a pipe should see it before it has an effect.
    let _ = std::io::stdout().flush();
}

/// Prints the command of a process that is started in the background. It runs in the workspace's directory,
/// whose name is left out.
pub(super) fn background(process: &Command) {
    let words = std::iter::once(process.get_program()).chain(process.get_args());
    command(words.map(|word| relative(&word.display())).chain(["&".to_owned()]));
}

/// Prints a step as it begins, runs it, and prints its duration.
pub(super) fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    print!("{COMMAND_INDENT}{what} … ");
    std::io::stdout().flush()?;
    let started = Instant::now();
    let outcome = work();
    let mark = if outcome.is_ok() { "" } else { "FAILED after " };
    println!("{mark}{:.1} s", started.elapsed().as_secs_f64());
    outcome
}

/// Prints the output of a command.
pub(super) fn output(text: &str) {
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        let indent = " ".repeat(CONTINUED_INDENT.len() + indent);
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        // A line that fits keeps its columns.
        if line.chars().count() + CONTINUED_INDENT.len() <= COLUMNS {
            println!("{CONTINUED_INDENT}{line}");
        } else {
            folded(&words, &indent, &indent, "").iter().for_each(|line| println!("{line}"));
        }
    }
}

/// Returns a text whose paths are relative to the workspace.
pub(super) fn relative(text: &dyn Display) -> String {
    text.to_string().replace(&format!("{}/", paths::workspace().display()), "")
}

fn command_text(words: &[String]) -> String {
    let first = format!("{COMMAND_INDENT}$ ");
    folded(&with_values(words), &first, CONTINUED_INDENT, " \\").join("\n") + "\n"
}

/// Joins each option with its value, which stay in one line.
fn with_values(words: &[String]) -> Vec<String> {
    let is_option = |word: &str| word.starts_with('-');
    let mut joined: Vec<String> = Vec::new();
    for word in words {
        match joined.last_mut() {
            Some(last) if is_option(last) && !last.contains(' ') && !is_option(word) && word != "&" => {
                last.push(' ');
                last.push_str(word);
            }
            _ => joined.push(word.clone()),
        }
    }
    joined
}

/// Folds words into lines; every line but the last ends with `continued`.
fn folded(words: &[String], first: &str, indent: &str, continued: &str) -> Vec<String> {
    let mut lines = vec![first.to_owned()];
    for word in words {
        let line = lines.last_mut().expect("it has one");
        let is_begin = *line == first || *line == indent;
        let needed = line.chars().count() + 1 + word.chars().count() + continued.len();
        if is_begin || needed <= COLUMNS {
            if !is_begin {
                line.push(' ');
            }
            line.push_str(word);
        } else {
            line.push_str(continued);
            lines.push(format!("{indent}{word}"));
        }
    }
    lines
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=,+@%&".contains(letter);
    match word {
        "&" | "|" | "&&" => word.to_owned(),
        _ if !word.is_empty() && word.chars().all(is_plain) => word.to_owned(),
        _ => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(words: &[&str]) -> String {
        command_text(&words.iter().map(|word| quoted(word)).collect::<Vec<_>>())
    }

    #[test]
    fn a_command_is_one_that_a_shell_reads_as_it_is_run() {
        assert_eq!(text(&["ip", "link", "&"]), "  $ ip link &\n");
        let append = "console=ttyS0 'quiet'";
        let words = ["qemu", "-append", append, &"x".repeat(90), "-m", "512M"];
        let shown = text(&words);
        assert!(shown.lines().count() > 2 && shown.lines().all(|line| line.chars().count() <= COLUMNS + 2));
        let options: Vec<String> = ["a", "-m", "1", "-s", "-x", "2", "&"].map(String::from).to_vec();
        assert_eq!(with_values(&options), ["a", "-m 1", "-s", "-x 2", "&"]);
        let script = format!("printf '%s\\n' {}", shown.trim_start_matches("  $ "));
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), words.join("\n") + "\n");
    }
}
