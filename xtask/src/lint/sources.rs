//! Rules of the project that no other tool checks: the length of files, the place of unsafe code, module files, and wording.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::lexer::{TokenKind, tokens};
use super::{prose, words};

/// Longest source file, in lines.
const LINES_MAX: usize = 600;
/// Directories that contain the project's sources and documents.
const DIRECTORIES: [&str; 7] = ["bench", "crates", "docs", "fuzz", "lab", "packaging", "xtask"];
/// Directories below them that tools generate.
const GENERATED: [&str; 4] = ["target", "artifacts", "corpus", "coverage"];

/// Faults of the sources below `root`, one line each.
pub(crate) fn faults(root: &Path) -> Result<Vec<String>> {
    let mut files = files_of(root)?;
    for directory in DIRECTORIES.iter().map(|name| root.join(name)).filter(|path| path.is_dir()) {
        find(&directory, &mut files)?;
    }
    files.sort();
    let mut faults = Vec::new();
    for file in files {
        let source = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let file = file.strip_prefix(root).unwrap_or(&file);
        if file.extension().is_some_and(|extension| extension == "md") {
            faults.extend(prose::faults_of(file, &source));
            continue;
        }
        if has_hash_comments(file) {
            faults.extend(words::faults_of_hash_comments(file, &source));
            continue;
        }
        faults.extend(faults_of(file, &source));
        if words::applies_to(file) {
            faults.extend(words::faults_of(file, &source));
        }
    }
    Ok(faults)
}

fn faults_of(file: &Path, source: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let lines = source.lines().count();
    if lines > LINES_MAX {
        faults.push(format!("{}: {lines} lines, expected at most {LINES_MAX}; split it", file.display()));
    }
    if is_misnamed(file) {
        let name = file.with_file_name("").with_extension("rs");
        faults.push(format!("{}: name the file {}", file.display(), name.display()));
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

/// Returns true for a module file that is not named after its module. Only the modules that several test programs share are
/// in a `mod.rs`, because cargo takes any other file beside them for a test program.
fn is_misnamed(file: &Path) -> bool {
    let is_shared_by_tests =
        || file.parent().and_then(Path::parent).is_some_and(|above| above.ends_with("tests"));
    file.ends_with("mod.rs") && !is_shared_by_tests()
}

fn below_sys(file: &Path) -> bool {
    file.iter().any(|part| part == "sys" || part == "sys.rs")
}

/// Finds sources and documents below a directory.
fn find(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    files.extend(files_of(directory)?);
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && !GENERATED.iter().any(|name| entry.file_name() == *name) {
            find(&entry.path(), files)?;
        }
    }
    Ok(())
}

/// Returns the sources and documents in a directory itself.
fn files_of(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let is_source =
        |path: &Path| path.extension().is_some_and(|extension| extension == "rs" || extension == "md");
    let is_read = |path: &PathBuf| path.is_file() && (is_source(path) || has_hash_comments(path));
    Ok(paths.into_iter().filter(is_read).collect())
}

/// Returns true for build files and scripts, whose comments begin with `#`.
fn has_hash_comments(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "toml" || extension == "sh")
        || ["Makefile", "Containerfile"].iter().any(|name| file.ends_with(name))
}

/// `source` without comments and the contents of strings, line for line.
fn code(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    for (kind, token) in tokens(source) {
        if kind == TokenKind::Code {
            code.push_str(token);
        } else {
            code.extend(token.chars().filter(|character| *character == '\n'));
            code.push(' ');
        }
    }
    code
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
    fn a_module_file_has_the_name_of_its_module() {
        let wanted = ["crates/a/src/b/mod.rs: name the file crates/a/src/b.rs"];
        assert_eq!(faults_of(Path::new("crates/a/src/b/mod.rs"), ""), wanted);
        assert!(faults_of(Path::new("crates/a/tests/common/mod.rs"), "").is_empty());
        assert!(faults_of(Path::new("crates/a/src/b.rs"), "").is_empty());
    }

    #[test]
    fn files_are_short() {
        let source = "\n".repeat(LINES_MAX + 1);
        let wanted = ["crates/a.rs: 601 lines, expected at most 600; split it"];
        assert_eq!(faults_of(Path::new("crates/a.rs"), &source), wanted);
        assert!(faults_of(Path::new("crates/a.rs"), &source[1..]).is_empty());
    }
}
