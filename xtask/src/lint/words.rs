//! Refuses words of the old dialect in comments, strings and prose; docs/vocabulary.md has the terms to use.

use std::path::Path;
use std::sync::LazyLock;

/// Files that have to spell the words.
const EXEMPT: [&str; 2] = ["xtask/src/lint/words.rs", "xtask/src/lint/prose.rs"];

/// Has the table of phrases, which match whole words, and the wording to use.
const VOCABULARY: &str = include_str!("../../../docs/vocabulary.md");
/// Heading of that table.
const REFUSED: &str = "## Refused\n";
/// The phrases of the table.
static PHRASES: LazyLock<Vec<(&str, &str)>> = LazyLock::new(phrases);
/// Phrases that contain one of those and are good English.
const ALLOWED: &[&str] =
    &["that is not", "which is not", "that is now", "which is now", "there is none", "there are none"];
/// First words that a documentation comment must not have.
const HEADS: [(&str, &str); 5] = [
    ("Whether", "`Returns true if` (function), `True if` (value)"),
    ("What", "a noun: `State of`, `Result of`, `Error of`"),
    ("How", "a noun: `Number of`, `Time limit of`, `Options of`"),
    ("Who", "a noun: `The peer that`"),
    ("Why", "`Reason for`"),
];

/// A line of Rust.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Line {
    /// Without comments and what is in strings.
    pub(super) code: String,
    /// Its comment and what is in strings.
    prose: String,
}

/// Splits a line, which begins `in_string` or not. A string that goes on in the next line does so after a
/// backslash.
pub(super) fn split(line: &str, in_string: &mut bool) -> Line {
    let mut split = Line::default();
    let mut letters = line.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' if *in_string || !line[..at].ends_with('\'') => {
                *in_string = !*in_string;
                split.prose.push(' ');
                split.code.push(' ');
            }
            // An escape.
            '\\' if *in_string => split.prose.extend(letters.next().map(|_| ' ')),
            _ if *in_string => split.prose.push(letter),
            '/' if line[at..].starts_with("//") => {
                split.prose.push_str(&line[at..]);
                break;
            }
            _ => split.code.push(letter),
        }
    }
    *in_string &= line.ends_with('\\');
    split
}

/// Faults in the comments and strings of a file, one line each.
pub(super) fn faults_of(file: &Path, source: &str) -> Vec<String> {
    if EXEMPT.iter().any(|exempt| file == Path::new(exempt)) {
        return Vec::new();
    }
    let place = file.display();
    let mut faults = Vec::new();
    let (mut in_string, mut follows_documentation) = (false, false);
    for (number, line) in source.lines().enumerate() {
        let number = number + 1;
        if let Some((phrase, instead)) = phrase(&split(line, &mut in_string).prose) {
            faults.push(format!("{place}:{number}: \"{phrase}\": write {instead}"));
        }
        let text = line.trim_start();
        let documentation = text.strip_prefix("///").or_else(|| text.strip_prefix("//!"));
        if let Some((head, instead)) = documentation.and_then(head).filter(|_| !follows_documentation) {
            faults.push(format!("{place}:{number}: documentation begins with {head}: write {instead}"));
        }
        follows_documentation = documentation.is_some();
    }
    faults
}

/// Faults in comments that begin with `#` and have a line of their own, one line each.
pub(super) fn faults_of_hash_comments(file: &Path, source: &str) -> Vec<String> {
    let comments = source.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with('#'));
    let faults = comments.filter_map(|(index, line)| {
        let (phrase, instead) = phrase(line)?;
        Some(format!("{}:{}: \"{phrase}\": write {instead}", file.display(), index + 1))
    });
    faults.collect()
}

/// The first phrase in `text` that is to be replaced. Identifiers and quoted code are words of their own.
pub(super) fn phrase(text: &str) -> Option<(&'static str, &'static str)> {
    let words = text.split(|c: char| !c.is_alphanumeric() && !"-_'`".contains(c));
    let words: Vec<_> = words.filter(|word| !word.is_empty()).map(str::to_lowercase).collect();
    let text = format!(" {} ", words.join(" "));
    let text = ALLOWED.iter().fold(text, |text, allowed| text.replace(&format!(" {allowed} "), " "));
    PHRASES.iter().find(|(phrase, _)| text.contains(&format!(" {phrase} "))).copied()
}

/// The phrases of the table, each with the wording to use.
fn phrases() -> Vec<(&'static str, &'static str)> {
    let (_, table) = VOCABULARY.split_once(REFUSED).expect("the vocabulary has it");
    let rows =
        table.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
    // After the heads of the columns.
    rows.skip(1)
        .flat_map(|(phrases, instead)| phrases.split(", ").map(move |phrase| (phrase, instead)))
        .collect()
}

/// The first word of a documentation comment, if it is one to be replaced.
fn head(text: &str) -> Option<(&'static str, &'static str)> {
    let first = text.split_whitespace().next()?;
    let first = first.trim_end_matches(['.', ',', ':', '?']);
    HEADS.into_iter().find(|(head, _)| *head == first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(source: &str) -> Vec<String> {
        faults_of(Path::new("a.rs"), source)
    }

    #[test]
    fn phrases_are_found_in_comments_and_strings_with_their_lines() {
        let source = "let nobody = 1; // Nobody reads it.\nf(\"it begins\\nanew\", '\"', nobody);\nf(\"the peer \\\n was told\", \"//\", nobody);\n";
        let wanted = [
            "a.rs:1: \"nobody\": write no thread, no peer, none; or the passive: `is not read`",
            "a.rs:2: \"anew\": write again, or the verb with re-: resend, rewrite",
            "a.rs:4: \"was told\": write receive, be notified, be reported",
        ];
        assert_eq!(faults(source), wanted);
    }

    #[test]
    fn phrases_are_found_in_comments_of_build_files() {
        let source = "# Nobody reads it.\nnobody = 1\n  # It is read oftener.\n";
        let wanted = [
            "a.toml:1: \"nobody\": write no thread, no peer, none; or the passive: `is not read`",
            "a.toml:3: \"oftener\": write more often",
        ];
        assert_eq!(faults_of_hash_comments(Path::new("a.toml"), source), wanted);
    }

    #[test]
    fn only_whole_words_match() {
        assert_eq!(
            faults("// It shallow-copies, unheard, and there is none; that is not anewed.\n"),
            [""; 0]
        );
        assert_eq!(faults("// Skipped by `is_none`, as all are `None`.\n"), [""; 0]);
        assert_eq!(faults("// The caller shall not.\n").len(), 1);
    }

    #[test]
    fn documentation_begins_with_a_noun_or_a_verb() {
        let source = "//! A module.\n\n/// Whether it runs.\nfn f() {}\n\n/// Returns it.\n/// What follows a first line \
                      is free.\nfn g() {}\n// Why: a plain comment.\n";
        let wanted = [
            "a.rs:3: documentation begins with Whether: write `Returns true if` (function), `True if` (value)",
        ];
        assert_eq!(faults(source), wanted);
    }
}
