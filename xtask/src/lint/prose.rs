//! Rules for the project's Markdown: the words of [`super::words`], the length of lines, and links to files.
//! Code is left out.

use std::ops::Range;
use std::path::Path;

use pulldown_cmark::{Event, Parser, Tag};

use super::words;

/// Longest line of prose, in characters.
const COLUMNS_MAX: usize = 100;
/// The page that has to spell the words that are not to be used.
const VOCABULARY: &str = "docs/vocabulary.md";

/// Faults in the prose of a file, one line each. `exists` says whether there is a file of that name, seen
/// from this one.
pub(super) fn faults_of(file: &Path, source: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let (mut blocks, mut spans, mut links) = (Vec::new(), Vec::new(), Vec::new());
    for (event, range) in Parser::new(source).into_offset_iter() {
        match event {
            Event::Start(Tag::CodeBlock(_)) => blocks.push(range),
            Event::Code(_) => spans.push(range),
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => links.push(dest_url),
            _ => {}
        }
    }
    let prose = without(source, blocks);
    let mut faults = Vec::new();
    for (number, line) in prose.lines().enumerate() {
        let columns = line.chars().count();
        if columns > COLUMNS_MAX && !may_be_long(line) {
            faults.push(format!(
                "{}:{}: {columns} columns, expected at most {COLUMNS_MAX}; wrap the paragraph",
                file.display(),
                number + 1
            ));
        }
    }
    let files = links.iter().filter_map(|link| link.split('#').next());
    let dangling = files.filter(|file| !file.is_empty() && !file.contains("://") && !exists(file));
    faults.extend(dangling.map(|link| format!("{}: there is no {link}", file.display())));
    let prose = without(&prose, spans);
    if file != Path::new(VOCABULARY) {
        faults.extend(wording(file, &prose));
    }
    faults
}

/// Faults of wording, at most one for each line. A phrase may be on two lines of a paragraph, and is reported
/// for the second one, unless the first one has a fault of its own.
fn wording(file: &Path, prose: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut before = "";
    for (number, line) in prose.lines().enumerate() {
        let joined =
            || words::phrase(&format!("{before} {line}")).filter(|_| words::phrase(before).is_none());
        if let Some((phrase, instead)) = words::phrase(line).or_else(joined) {
            faults.push(format!("{}:{}: \"{phrase}\": write {instead}", file.display(), number + 1));
        }
        before = line;
    }
    faults
}

/// Returns true for the row of a table, and for one word, such as an address.
fn may_be_long(line: &str) -> bool {
    line.trim_start().starts_with('|') || !line.trim().contains(' ')
}

/// `text` with spaces in place of these ranges, line for line.
fn without(text: &str, ranges: Vec<Range<usize>>) -> String {
    let mut plain = text.to_owned();
    for range in ranges {
        let blank: String =
            text[range.clone()].bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect();
        plain.replace_range(range, &blank);
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(source: &str) -> Vec<String> {
        faults_of(Path::new("a.md"), source, |link| link == "b.md")
    }

    #[test]
    fn words_are_found_in_prose_and_across_its_lines() {
        let source = "# Nobody\n\nIt begins anew.\nIt was\ntold so\nmany pages.\n";
        let wanted = [
            "a.md:1: \"nobody\": write no thread, no peer, none; or the passive: `is not read`",
            "a.md:3: \"anew\": write again, or the verb with re-: resend, rewrite",
            "a.md:5: \"was told\": write receive, be notified, be reported",
            "a.md:6: \"so many\": write the number: `count` pages; or the limit by its name",
        ];
        assert_eq!(faults(source), wanted);
        assert_eq!(faults_of(Path::new(VOCABULARY), source, |_| true), [""; 0]);
    }

    #[test]
    fn code_is_left_out_and_lines_are_counted() {
        let source =
            "Use `nobody`, ``a ` anew`` and `shall\nnot` here.\n\n    nobody\n\n```\nanew\n```\nIt shall.\n";
        assert_eq!(faults(source), ["a.md:9: \"shall\": write must, will, or the plain present"]);
        // A span ends with its paragraph, and a lone backquote is a character.
        assert_eq!(faults("A ` alone\n\nshall `x`.\n").len(), 1);
        // An indented line that continues a paragraph is prose.
        assert_eq!(faults("- one\n    shall\n").len(), 1);
    }

    #[test]
    fn long_lines_are_for_tables_addresses_and_code() {
        let long = "wide word ".repeat(11);
        let wanted = [format!("a.md:1: {} columns, expected at most 100; wrap the paragraph", long.len())];
        assert_eq!(faults(&long), wanted);
        let free = format!("| {long} |\n```\n{long}\n```\n\n    {long}\n\nhttps://{}\n", "a".repeat(100));
        assert_eq!(faults(&free), [""; 0]);
        assert_eq!(faults(&"ä b ".repeat(25)), [""; 0]);
    }

    #[test]
    fn links_lead_to_files() {
        assert_eq!(
            faults("[a](b.md#c) [d](#e) [f](https://g) `[h](i)` ![j](k.svg)\n"),
            ["a.md: there is no k.svg"]
        );
    }
}
