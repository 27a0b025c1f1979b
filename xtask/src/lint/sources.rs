//! Rules of the project that no other tool checks: the length of files, the place of unsafe code, module
//! files, and wording.

use std::path::Path;

use anyhow::{Context, Result};
use walkdir::{DirEntry, WalkDir};

use super::{prose, words};

/// Longest source file, in lines.
const LINES_MAX: usize = 600;
/// Directories that contain the project's sources and documents.
const DIRECTORIES: [&str; 7] = ["bench", "crates", "docs", "fuzz", "lab", "packaging", "xtask"];
/// Directories below them that tools generate.
const GENERATED: [&str; 4] = ["target", "artifacts", "corpus", "coverage"];

/// Faults of the sources below `root`, one line each.
pub(crate) fn faults(root: &Path) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    let entries = WalkDir::new(root).sort_by_file_name().into_iter();
    for entry in entries.filter_entry(is_file_or_wanted) {
        let entry = entry?;
        if !entry.file_type().is_file() {
            continue;
        }
        let file = entry.into_path();
        let name = file.strip_prefix(root).unwrap_or(&file);
        let source = || std::fs::read_to_string(&file).with_context(|| file.display().to_string());
        match name.extension().or(name.file_name()).and_then(|kind| kind.to_str()) {
            Some("rs") => {
                let source = source()?;
                faults.extend(faults_of(name, &source));
                faults.extend(words::faults_of(name, &source));
            }
            Some("md") => {
                let exists = |link: &str| file.with_file_name(link).exists();
                faults.extend(prose::faults_of(name, &source()?, exists));
            }
            Some("toml" | "sh" | "py" | "Makefile" | "Containerfile") => {
                faults.extend(words::faults_of_hash_comments(name, &source()?));
            }
            _ => {}
        }
    }
    Ok(faults)
}

/// Returns true for a file, the root, and a directory with sources and documents.
fn is_file_or_wanted(entry: &DirEntry) -> bool {
    let name = entry.file_name().to_string_lossy();
    match entry.depth() {
        0 => true,
        1 => entry.path().is_file() || DIRECTORIES.contains(&&*name),
        _ => !GENERATED.contains(&&*name),
    }
}

fn faults_of(file: &Path, source: &str) -> Vec<String> {
    let place = file.display();
    let mut faults = Vec::new();
    let lines = source.lines().count();
    if lines > LINES_MAX {
        faults.push(format!("{place}: {lines} lines, expected at most {LINES_MAX}; split it"));
    }
    // Only the modules that several test programs share are in a `mod.rs`: cargo takes any other file beside
    // them for a program.
    let above = file.parent().and_then(Path::parent);
    if file.ends_with("mod.rs") && !above.is_some_and(|above| above.ends_with("tests")) {
        faults.push(format!(
            "{place}: name the file {}",
            file.with_file_name("").with_extension("rs").display()
        ));
    }
    if file.iter().any(|part| part == "sys" || part == "sys.rs") {
        return faults;
    }
    let mut in_string = false;
    for (number, line) in source.lines().enumerate() {
        let code = words::split(line, &mut in_string).code;
        let mut words = code.split(|character: char| !character.is_alphanumeric() && character != '_');
        if words.any(|word| word == "unsafe") {
            faults.push(format!("{place}:{}: unsafe code outside a sys module", number + 1));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_code_is_for_sys() {
        let source = "#![deny(unsafe_op_in_unsafe_fn)]\nf(\"unsafe\", '\"'); // unsafe\n    unsafe { g() }\n";
        let wanted = ["crates/a/src/b.rs:3: unsafe code outside a sys module"];
        assert_eq!(faults_of(Path::new("crates/a/src/b.rs"), source), wanted);
        assert!(faults_of(Path::new("crates/a/src/sys/b.rs"), source).is_empty());
        assert!(faults_of(Path::new("crates/a/src/sys.rs"), source).is_empty());
    }

    #[test]
    fn a_module_file_has_the_name_of_its_module() {
        let wanted = ["crates/a/src/b/mod.rs: name the file crates/a/src/b.rs"];
        assert_eq!(faults_of(Path::new("crates/a/src/b/mod.rs"), ""), wanted);
        assert!(faults_of(Path::new("crates/a/tests/common/mod.rs"), "").is_empty());
    }

    #[test]
    fn files_are_short() {
        let source = "\n".repeat(LINES_MAX + 1);
        let wanted = ["crates/a.rs: 601 lines, expected at most 600; split it"];
        assert_eq!(faults_of(Path::new("crates/a.rs"), &source), wanted);
        assert!(faults_of(Path::new("crates/a.rs"), &source[1..]).is_empty());
    }
}
