//! `cargo xtask api`: the public API of each published library as text, `public-api.txt` beside its manifest:
//! a diff shows every change.
//!
//! The text is made of rustdoc's JSON, whose format changes between compilers: with a compiler of another
//! format the check is skipped, with the reason.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::published;
use crate::command::{cargo, refuse, root, run as run_command, target_directory};

/// Formats of rustdoc's JSON that are read here: Rust 1.94 and 1.95.
const FORMATS: std::ops::RangeInclusive<u64> = 56..=57;
const UNKNOWN: &str = "rustdoc's JSON of this compiler has a format that is unknown here";

/// Writes the texts.
pub(crate) fn write() -> Result<()> {
    for (file, text) in texts()?.context(UNKNOWN)? {
        fs::write(&file, text).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

/// Compares the texts with the sources.
pub(crate) fn check() -> Result<()> {
    let Some(texts) = texts()? else {
        println!("lint: public API: skipped: {UNKNOWN}");
        return Ok(());
    };
    let mut changed = Vec::new();
    for (file, text) in texts {
        let recorded = fs::read_to_string(&file).unwrap_or_default();
        if let Some(line) = first_difference(&recorded, &text) {
            changed.push(format!("{}: {line}", file.display()));
        }
    }
    refuse("the public API is not as recorded; if that is meant, run `cargo xtask api`:", &changed)
}

/// The first line that one has and the other has not.
fn first_difference(recorded: &str, found: &str) -> Option<String> {
    let only = |one: &str, other: &str| {
        one.lines().find(|line| !other.lines().any(|known| known == *line)).map(str::to_owned)
    };
    let removed = only(recorded, found).map(|line| format!("-{line}"));
    removed.or_else(|| only(found, recorded).map(|line| format!("+{line}")))
}

/// The file of each published library, with its text. `None`: the compiler's format is unknown here.
fn texts() -> Result<Option<Vec<(PathBuf, String)>>> {
    let target = target_directory()?;
    let libraries = published()?;
    let mut doc = cargo(["doc", "--quiet", "--no-deps", "--lib", "--all-features"]);
    doc.env("RUSTDOC", root().join("xtask/rustdoc.sh"));
    doc.env("RUSTDOCFLAGS", "-Z unstable-options --output-format json");
    run_command(doc.args(libraries.iter().flat_map(|library| ["--package", library])))?;
    let mut texts = Vec::new();
    for library in libraries {
        let json = target.join("doc").join(format!("{}.json", library.replace('-', "_")));
        let Some(text) = text(&json).with_context(|| json.display().to_string())? else { return Ok(None) };
        let directory = library.strip_prefix("towline-").unwrap_or(&library);
        texts.push((root().join("crates").join(directory).join("public-api.txt"), text));
    }
    Ok(Some(texts))
}

/// Text of a documented library.
fn text(json: &Path) -> Result<Option<String>> {
    let document: serde_json::Value = serde_json::from_str(&fs::read_to_string(json)?)?;
    let format = document["format_version"].as_u64().context("no format_version")?;
    if !FORMATS.contains(&format) {
        return Ok(None);
    }
    let api = public_api::Builder::from_rustdoc_json(json);
    let api = api.omit_blanket_impls(true).omit_auto_trait_impls(true).omit_auto_derived_impls(true);
    Ok(Some(format!("{}\n", api.build()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_was_removed_or_added_is_named() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n").as_deref(), Some("-b"));
        assert_eq!(first_difference("a\n", "a\nc\n").as_deref(), Some("+c"));
    }
}
