//! `cargo xtask api`: the public API of each published library as text, `public-api.txt` beside its manifest, so that a
//! change of it is seen in a diff.
//!
//! The text is made of rustdoc's JSON, whose format changes between compilers: with a compiler of another format the check
//! is skipped, with the reason.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::packages;
use crate::command::{cargo, output, root, run as run_command, target_directory};

const FILE: &str = "public-api.txt";
/// Formats of rustdoc's JSON that are read here: Rust 1.94 and 1.95.
const FORMATS: std::ops::RangeInclusive<u64> = 56..=57;
/// JSON is an unstable output of rustdoc. Only rustdoc gets the permission: for cargo it would be another compiler, and all
/// dependencies would be compiled again.
const RUSTDOC: &str = "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec \"$TOWLINE_RUSTDOC\" \"$@\"\n";

/// Text of a library's public API; `None` if the compiler's format is unknown here.
type Text = Option<String>;

/// Writes the texts.
pub(crate) fn write() -> Result<()> {
    for library in libraries()? {
        let Some(text) = text(&library)? else { bail!("rustdoc's JSON has a format that is unknown here") };
        fs::write(file(&library), text).with_context(|| file(&library).display().to_string())?;
    }
    Ok(())
}

/// Compares the texts with the sources.
pub(crate) fn check() -> Result<()> {
    let mut changed = Vec::new();
    for library in libraries()? {
        let Some(text) = text(&library)? else {
            println!(
                "lint: public API: skipped: rustdoc's JSON of this compiler has a format that is unknown here"
            );
            return Ok(());
        };
        let path = file(&library);
        let found = fs::read_to_string(&path).unwrap_or_default();
        if let Some(line) = first_difference(&found, &text) {
            changed.push(format!("{}: {line}", path.display()));
        }
    }
    if changed.is_empty() {
        return Ok(());
    }
    bail!(
        "the public API is not as recorded; if that is meant, run `cargo xtask api`:\n  {}",
        changed.join("\n  ")
    );
}

/// The first line that one has and the other has not.
fn first_difference(recorded: &str, found: &str) -> Option<String> {
    let removed = recorded.lines().find(|line| !found.lines().any(|other| other == *line));
    let added = found.lines().find(|line| !recorded.lines().any(|other| other == *line));
    removed.map(|line| format!("-{line}")).or_else(|| added.map(|line| format!("+{line}")))
}

/// Names of the published libraries, documented as JSON.
fn libraries() -> Result<Vec<String>> {
    let libraries: Vec<_> = packages()?.into_iter().filter(|package| package.has_library).collect();
    let wrapper = target_directory()?.join("rustdoc-json");
    fs::write(&wrapper, RUSTDOC).with_context(|| wrapper.display().to_string())?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))?;
    let mut doc = cargo(["doc", "--quiet", "--no-deps", "--lib", "--all-features"]);
    doc.env("RUSTDOC", wrapper).env("TOWLINE_RUSTDOC", rustdoc()?);
    doc.env("RUSTDOCFLAGS", "-Z unstable-options --output-format json");
    doc.args(libraries.iter().flat_map(|library| ["--package", &library.name]));
    run_command(&mut doc)?;
    Ok(libraries.into_iter().map(|library| library.name).collect())
}

/// The rustdoc of the toolchain that runs us.
fn rustdoc() -> Result<PathBuf> {
    let sysroot =
        output(std::process::Command::new("rustc").args(["--print", "sysroot"]).current_dir(root()))?;
    Ok(Path::new(sysroot.trim()).join("bin/rustdoc"))
}

/// Text of a documented library.
fn text(library: &str) -> Result<Text> {
    let json = target_directory()?.join("doc").join(format!("{}.json", library.replace('-', "_")));
    let format = {
        let text = fs::read_to_string(&json).with_context(|| json.display().to_string())?;
        let document: serde_json::Value = serde_json::from_str(&text).context("rustdoc's JSON")?;
        document["format_version"].as_u64().context("rustdoc's JSON without format_version")?
    };
    if !FORMATS.contains(&format) {
        return Ok(None);
    }
    let api = public_api::Builder::from_rustdoc_json(&json);
    let api = api.omit_blanket_impls(true).omit_auto_trait_impls(true).omit_auto_derived_impls(true);
    let api = api.build().with_context(|| json.display().to_string())?;
    Ok(Some(format!("{api}\n")))
}

fn file(library: &str) -> PathBuf {
    let directory = library.strip_prefix("towline-").unwrap_or(library);
    root().join("crates").join(directory).join(FILE)
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
