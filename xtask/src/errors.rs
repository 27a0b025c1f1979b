//! `cargo xtask errors`: `docs/errors.md`, generated from the sources, so that table and code cannot drift apart.
//!
//! Every `#[error("…")]` of the crates that are shipped is a row: its text, with its arguments in braces, the variant's
//! documentation, and the remedy or the reason for which there is none. A remedy that is not in the text follows `Remedy:`
//! in the documentation of the variant, or of its type for all variants. `cargo xtask lint` prints a note when the file is
//! older than the sources, and fails if a row has no remedy.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::root;

const PAGE: &str = "docs/errors.md";
/// Crates whose errors a user can see, from the wire up.
const CRATES: [&str; 11] = [
    "channel",
    "protocol",
    "migration",
    "image",
    "compat",
    "vhost-user",
    "net",
    "vsock",
    "qmp",
    "launch",
    "control",
];
const HEAD: &str = "\
# Errors

Error messages of towline, by the crate that reports them. Words in braces are replaced: the thing,
its place, the value found, the value expected. `{source}` is an error of the operating system or
another error of this page. Exit status: 1 refused or failed, with the guest safe at its source; 2
usage; 3 failed, and the guest's state must be looked at; 4 (`check`) could not tell
([copy](copy.md)).

The last column is the remedy, or the reason for which there is none that this host can apply.
This page is generated from the sources (`cargo xtask errors`).
";

/// Beginning of the remedy in documentation.
const REMEDY: &str = "Remedy:";
/// First words of a remedy that follows a colon in a text.
const IMPERATIVES: [&str; 29] = [
    "add", "check", "choose", "close", "convert", "copy", "correct", "detach", "do", "end", "enlarge",
    "give", "install", "leave", "let", "load", "look", "make", "map", "move", "name", "raise", "resume",
    "run", "set", "start", "try", "use", "wait",
];
/// Arguments that are errors themselves, with remedies of their own.
const INNER: [&str; 5] = ["{source}", "{error}", "{cause}", "{0}", "{fault}"];

/// One error.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    text: String,
    meaning: String,
    /// The remedy, or the reason for which there is none; empty if neither is stated.
    remedy: String,
}

/// Writes the page.
pub(crate) fn write() -> Result<()> {
    fs::write(root().join(PAGE), page()?).context(PAGE)
}

/// Checks that every error has a remedy, and prints a note if the page is older than the sources.
pub(crate) fn check() -> Result<()> {
    let found = fs::read_to_string(root().join(PAGE)).context(PAGE)?;
    if found != page()? {
        println!("lint: note: {PAGE} is older than the sources; `cargo xtask errors` regenerates it");
    }
    let mut missing = Vec::new();
    for name in CRATES {
        missing.extend(rows(name)?.into_iter().filter(|row| row.remedy.is_empty()).map(|row| row.text));
    }
    if !missing.is_empty() {
        bail!(
            "no remedy; add it to the text, or `{REMEDY} …` to the documentation of the variant or its type:\n  {}",
            missing.join("\n  ")
        );
    }
    Ok(())
}

fn page() -> Result<String> {
    let mut page = HEAD.to_owned();
    for name in CRATES {
        let rows = rows(name)?;
        if rows.is_empty() {
            continue;
        }
        write!(page, "\n## towline-{name}\n\n| text | meaning | remedy |\n|---|---|---|\n")?;
        for Row { text, meaning, remedy } in rows {
            let [text, meaning, remedy] = [text, meaning, remedy].map(|cell| cell.replace('|', "\\|"));
            writeln!(page, "| ``{text}`` | {meaning} | {remedy} |")?;
        }
    }
    Ok(page)
}

/// The errors of a crate, in the order of its files.
fn rows(name: &str) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for file in sources(&root().join("crates").join(name).join("src"))? {
        let source = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        rows.extend(rows_of(&source));
    }
    Ok(rows)
}

fn sources(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(found)
}

/// The errors of one file, in their order. A `transparent` one has no text of its own and is skipped.
fn rows_of(source: &str) -> Vec<Row> {
    const MARK: &str = "#[error(";
    let starts = source.match_indices(MARK).filter(|(at, _)| {
        let line = source[..*at].rfind('\n').map_or(0, |end| end + 1);
        source[line..*at].trim().is_empty()
    });
    starts
        .filter_map(|(at, _)| {
            let (text, rest) = literal(source[at + MARK.len()..].trim_start())?;
            let text = filled(&text, &arguments(rest));
            let (meaning, own) = split_remedy(&documentation(&source[..at]));
            let remedy = own.or_else(|| remedy_in(&text)).or_else(|| remedy_of_type(&source[..at]));
            Some(Row { text, meaning, remedy: remedy.unwrap_or_default() })
        })
        .collect()
}

/// Splits documentation into the meaning and the remedy.
fn split_remedy(documentation: &str) -> (String, Option<String>) {
    match documentation.split_once(REMEDY) {
        Some((meaning, remedy)) => (meaning.trim().to_owned(), Some(capitalized(remedy.trim()))),
        None => (documentation.to_owned(), None),
    }
}

fn capitalized(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map_or_else(String::new, |first| first.to_uppercase().chain(characters).collect())
}

/// A remedy that the text has: what follows a semicolon, a question, an instruction behind a colon or in parentheses, or
/// that of the error within.
fn remedy_in(text: &str) -> Option<String> {
    let instructs = |part: &str| {
        let first = part.split(|c: char| !c.is_alphabetic()).next().unwrap_or_default();
        IMPERATIVES.contains(&first)
    };
    if text.contains("; ")
        || text.ends_with('?')
        || [": ", ", ", "("].iter().any(|mark| text.split(mark).skip(1).any(instructs))
    {
        return Some("In the text.".into());
    }
    INNER.into_iter().find(|inner| text.contains(inner)).map(|inner| format!("That of `{inner}`."))
}

/// The remedy of all variants of the type that is open at the end of `before`.
fn remedy_of_type(before: &str) -> Option<String> {
    let declared = before.rfind("\npub enum ").or_else(|| before.rfind("\nenum "));
    let declared =
        declared.max(before.rfind("\npub(crate) enum ")).max(before.rfind("\npub(super) enum "))?;
    split_remedy(&documentation(&before[..=declared])).1
}

/// A string literal at the beginning of `source`, and what is behind it.
fn literal(source: &str) -> Option<(String, &str)> {
    let inner = source.strip_prefix('"')?;
    let mut text = String::new();
    let mut characters = inner.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((text, &inner[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => text.push(' '),
                '\n' => {
                    let rest = characters.as_str();
                    let blanks = rest.len() - rest.trim_start().len();
                    characters.by_ref().take(rest[..blanks].chars().count()).for_each(drop);
                }
                escaped => text.push(escaped),
            },
            character => text.push(character),
        }
    }
    None
}

/// Arguments behind the text, up to the attribute's end.
fn arguments(rest: &str) -> Vec<String> {
    let (mut depth, mut arguments, mut one) = (0, Vec::new(), String::new());
    for character in rest.chars() {
        match character {
            ')' if depth == 0 => break,
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        match character {
            ',' if depth == 0 => arguments.push(std::mem::take(&mut one)),
            character => one.push(character),
        }
    }
    arguments.push(one);
    let arguments = arguments.iter().map(|one| one.trim().to_owned());
    arguments.filter(|one| !one.is_empty()).collect()
}

/// The text with names for what has none.
fn filled(text: &str, arguments: &[String]) -> String {
    let is_named =
        |one: &&String| one.split_once('=').is_some_and(|(name, _)| name.trim().chars().all(is_of_name));
    let mut unnamed = arguments.iter().filter(|one| !is_named(one));
    let mut filled = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('{') {
        let (before, behind) = rest.split_at(at);
        filled.push_str(before);
        if let Some(behind) = behind.strip_prefix("{{") {
            filled.push('{');
            rest = behind;
            continue;
        }
        let Some(end) = behind.find('}') else { break };
        let name = behind[1..end].split(':').next().unwrap_or_default();
        match name {
            "" => filled.push_str(&format!("{{{}}}", unnamed.next().map_or("…", |one| name_of(one)))),
            name => filled.push_str(&format!("{{{name}}}")),
        }
        rest = &behind[end + 1..];
    }
    filled.push_str(rest);
    filled.replace("}}", "}")
}

fn is_of_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// The first name in an expression that is a value: of `path.display()` it is `path`, of `list(found)` `found`.
fn name_of(expression: &str) -> &str {
    let inner = match expression.split_once('(') {
        Some((function, inner))
            if function.chars().all(|c| is_of_name(c) || c == ':') && !inner.starts_with(')') =>
        {
            inner
        }
        _ => expression,
    };
    let start = inner.find(is_of_name).unwrap_or(0);
    let end = inner[start..].find(|c| !is_of_name(c)).map_or(inner.len(), |end| start + end);
    &inner[start..end]
}

/// The documentation that ends `before`, as one line.
fn documentation(before: &str) -> String {
    let mut lines: Vec<&str> = Vec::new();
    for line in before.lines().rev().skip_while(|line| line.trim().is_empty()) {
        match line.trim() {
            line if line.starts_with("///") => lines.push(line.trim_start_matches('/').trim()),
            line if line.starts_with("#[") => {}
            _ => break,
        }
    }
    lines.reverse();
    unlinked(&lines.join(" "))
}

/// Without links, which lead into the sources: of ``[`A`](b)`` and ``[`A`]`` stays `A`.
fn unlinked(text: &str) -> String {
    let mut parts = text.split("[`");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once("`]").unwrap_or((part, ""));
        let behind = rest.strip_prefix('(').and_then(|link| link.split_once(')'));
        plain.push_str(&format!("`{name}`{}", behind.map_or(rest, |(_, behind)| behind)));
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_text_and_documentation() {
        let source = "enum E {\n    /// It is locked\n    /// by another.\n    #[error(\"{}: {op}: found {found:?}, \\\n         expected {}\", path.display(), list(wanted), n = 3)]\n    Locked {},\n    #[error(transparent)]\n    Io(io::Error),\n    // #[error(\"none\")]\n}";
        let text = "{path}: {op}: found {found}, expected {wanted}".to_owned();
        let remedy = String::new();
        assert_eq!(rows_of(source), [Row { text, meaning: "It is locked by another.".into(), remedy }]);
    }

    #[test]
    fn a_remedy_is_in_the_text_the_documentation_or_the_type() {
        let source = r#"
/// Errors.
///
/// Remedy: none here.
#[derive(Debug)]
pub enum E {
    /// Locked. Remedy: wait.
    #[error("locked")]
    A,
    #[error("full: enlarge it")]
    B,
    #[error("file: {source}")]
    C,
    /// Other.
    #[error("other: found it")]
    D,
}

pub enum F {
    #[error("bare")]
    A,
}"#;
        let remedies: Vec<_> = rows_of(source).into_iter().map(|row| (row.meaning, row.remedy)).collect();
        let wanted = [
            ("Locked.", "Wait."),
            ("", "In the text."),
            ("", "That of `{source}`."),
            ("Other.", "None here."),
            ("", ""),
        ];
        assert_eq!(remedies, wanted.map(|(meaning, remedy)| (meaning.to_owned(), remedy.to_owned())));
    }

    #[test]
    fn links_become_names() {
        assert_eq!(unlinked("as [`A::b`](crate::A::b) or [`C`], (d)"), "as `A::b` or `C`, (d)");
    }

    #[test]
    fn braces_and_quotation_marks_are_kept() {
        let rows = rows_of("#[error(\"a \\\"{0}\\\" in {{}}\")]\nstruct S(u8);");
        assert_eq!(rows[0].text, "a \"{0}\" in {}");
    }
}
