//! Rules for the project's Markdown: the words of [`super::words`], the length of lines, and links to files.
//! Code is left out.

use std::path::Path;

use super::words;

/// Longest line of prose, in characters.
const COLUMNS_MAX: usize = 100;
/// The page that has to spell the words that are not to be used.
const VOCABULARY: &str = "docs/vocabulary.md";

/// Faults in the prose of a file, one line each. `exists` says whether there is a file of that name, seen
/// from this one.
pub(super) fn faults_of(file: &Path, source: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let prose = without_code_blocks(source);
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
    let prose = without_code_spans(&prose);
    let dangling = links(&prose).filter(|link| !exists(link));
    faults.extend(dangling.map(|link| format!("{}: there is no {link}", file.display())));
    if file != Path::new(VOCABULARY) {
        faults.extend(wording(file, &prose));
    }
    faults
}

/// The files that a page refers to.
fn links(prose: &str) -> impl Iterator<Item = &str> {
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    targets.filter(|target| !target.is_empty() && !target.contains("://"))
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

/// `source` with empty lines instead of its blocks of code: fenced ones, and those that are indented after an
/// empty line.
fn without_code_blocks(source: &str) -> String {
    let mut prose = String::with_capacity(source.len());
    let (mut is_fenced, mut follows_code_or_gap) = (false, true);
    for line in source.lines() {
        let is_fence = line.trim_start().starts_with("```");
        is_fenced ^= is_fence;
        let is_indented = line.starts_with("    ") && follows_code_or_gap;
        if !is_fence && !is_fenced && !is_indented {
            prose.push_str(line);
            follows_code_or_gap = line.trim().is_empty();
        }
        prose.push('\n');
    }
    prose
}

/// `prose` without the spans of code in its paragraphs, line for line.
fn without_code_spans(prose: &str) -> String {
    let mut plain = String::with_capacity(prose.len());
    let mut rest = prose;
    while let Some(start) = rest.find('`') {
        plain.push_str(&rest[..start]);
        let behind = rest[start..].trim_start_matches('`');
        let mark = &rest[start..rest.len() - behind.len()];
        let paragraph = behind.find("\n\n").unwrap_or(behind.len());
        match span_end(&behind[..paragraph], mark.len()) {
            Some(end) => {
                plain.extend(behind[..end].chars().filter(|character| *character == '\n'));
                rest = &behind[end + mark.len()..];
            }
            None => rest = behind,
        }
    }
    plain.push_str(rest);
    plain
}

/// Start of the first run of exactly `length` backquotes in `text`.
fn span_end(text: &str, length: usize) -> Option<usize> {
    let mut at = 0;
    while let Some(found) = text[at..].find('`') {
        let start = at + found;
        let run = text[start..].len() - text[start..].trim_start_matches('`').len();
        if run == length {
            return Some(start);
        }
        at = start + run;
    }
    None
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
            "a.md:5: \"was told\": write received, was notified, was asked to",
            "a.md:6: \"so many pages\": write the number: `count` pages",
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
