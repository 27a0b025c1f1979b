//! Rules of the house that no tool checks: the length of files, and where unsafe code may be.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Longest source file, in lines.
const LINES_MAX: usize = 600;
/// Directories with sources of ours.
const DIRECTORIES: [&str; 5] = ["bench", "crates", "fuzz", "lab", "xtask"];
/// What tools put below them.
const GENERATED: [&str; 4] = ["target", "artifacts", "corpus", "coverage"];

/// What is wrong with the sources below `root`, one line each.
pub(crate) fn faults(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for directory in DIRECTORIES.iter().map(|name| root.join(name)).filter(|path| path.is_dir()) {
        find(&directory, &mut files)?;
    }
    files.sort();
    let mut faults = Vec::new();
    for file in files {
        let source = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let file = file.strip_prefix(root).unwrap_or(&file);
        faults.extend(faults_of(file, &source));
    }
    Ok(faults)
}

fn faults_of(file: &Path, source: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let lines = source.lines().count();
    if lines > LINES_MAX {
        faults.push(format!("{}: {lines} lines, expected at most {LINES_MAX}; split it", file.display()));
    }
    if !below_sys(file) {
        for (number, line) in code(source).lines().enumerate() {
            let mut words = line.split(|character: char| !character.is_alphanumeric() && character != '_');
            if words.any(|word| word == "unsafe") {
                faults.push(format!("{}:{}: unsafe code outside a sys module", file.display(), number + 1));
            }
        }
    }
    faults
}

fn below_sys(file: &Path) -> bool {
    file.iter().any(|part| part == "sys" || part == "sys.rs")
}

fn find(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if !GENERATED.iter().any(|name| entry.file_name() == *name) {
                find(&path, files)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// `source` without comments and the contents of strings, line for line.
fn code(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let after = &rest[first.len_utf8()..];
        let word_before = code.ends_with(|character: char| character.is_alphanumeric() || character == '_');
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            comment(rest)
        } else if first == '"' {
            string(rest)
        } else if (first == 'r' || rest.starts_with("br")) && !word_before {
            raw_string(rest)
        } else if first == '\'' {
            character(rest)
        } else {
            0
        };
        if skipped > 0 {
            code.extend(rest[..skipped].chars().filter(|character| *character == '\n'));
            code.push(' ');
            rest = &rest[skipped..];
        } else {
            code.push(first);
            rest = after;
        }
    }
    code
}

/// Length of a block comment, which may hold others.
fn comment(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// Length of a string with escapes.
fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a raw string, 0 if there is none.
fn raw_string(text: &str) -> usize {
    let body = text.trim_start_matches('b');
    let Some(body) = body.strip_prefix('r') else { return 0 };
    let hashes = body.len() - body.trim_start_matches('#').len();
    if !body[hashes..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    let start = text.len() - body.len() + hashes + 1;
    text[start..].find(&end).map_or(text.len(), |at| start + at + end.len())
}

/// Length of a character literal, 0 if the quote begins a lifetime.
fn character(text: &str) -> usize {
    let mut characters = text.char_indices().skip(1);
    match characters.next() {
        Some((_, '\\')) => {
            text[2..].char_indices().skip(1).find(|(_, c)| *c == '\'').map_or(0, |(at, _)| at + 3)
        }
        Some(_) => characters.next().filter(|(_, c)| *c == '\'').map_or(0, |(at, _)| at + 1),
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_not_code() {
        let source = "let a = \"unsafe \\\" unsafe\"; // unsafe\n/* unsafe /* unsafe */\nunsafe */ let b = 'x';\n\
                      let c = r#\"unsafe \" \"#; let d: &'static str = br\"unsafe\"; let q = '\"'; let e = '\\'';\n";
        let code = code(source);
        assert!(!code.contains("unsafe"), "{code}");
        assert_eq!(code.lines().count(), source.lines().count());
        assert!(code.contains("let e") && code.contains("'static"), "{code}");
    }

    #[test]
    fn unsafe_code_is_for_sys() {
        let source = "#![deny(unsafe_op_in_unsafe_fn)]\nfn f() {\n    unsafe { g() }\n}\n";
        let wanted = ["crates/a/src/b.rs:3: unsafe code outside a sys module"];
        assert_eq!(faults_of(Path::new("crates/a/src/b.rs"), source), wanted);
        assert!(faults_of(Path::new("crates/a/src/sys/b.rs"), source).is_empty());
        assert!(faults_of(Path::new("crates/a/src/sys.rs"), source).is_empty());
        assert!(faults_of(Path::new("crates/a/src/b.rs"), "#![forbid(unsafe_code)]").is_empty());
    }

    #[test]
    fn files_are_short() {
        let source = "\n".repeat(LINES_MAX + 1);
        let wanted = ["crates/a.rs: 601 lines, expected at most 600; split it"];
        assert_eq!(faults_of(Path::new("crates/a.rs"), &source), wanted);
        assert!(faults_of(Path::new("crates/a.rs"), &source[1..]).is_empty());
    }
}
