//! The recipe of the container image (`Containerfile`): parsed, and its steps run in a root of the release that it names.
//!
//! This needs no container engine. Out of scope: layers, and everything else that an engine adds.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::command::{root, run as run_command};
use crate::setup;

/// Release that the recipe starts from, as mmdebstrap names it.
const RELEASE: &str = "bookworm";

/// An instruction: `RUN apt-get update`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Instruction {
    name: String,
    arguments: String,
}

/// Runs the recipe's steps on `package`, and the program that an image starts.
pub(super) fn run(package: &Path, directory: &Path) -> Result<()> {
    let recipe = recipe()?;
    let sources = setup::sources_of(RELEASE, &directory.join("container"))?;
    let package_name = package.file_name().context("a package's name")?.to_string_lossy();
    let mut command = Command::new("timeout");
    command.args(["--kill-after=30", "1800", "mmdebstrap", "--mode=root", "--format=null", "--variant=apt"]);
    for (index, Instruction { name, arguments }) in recipe.iter().enumerate() {
        match name.as_str() {
            "COPY" => {
                let to = arguments.split_whitespace().next_back().context("a place to copy to")?;
                ensure!(arguments.starts_with("towline_"), "COPY {arguments}: expected the package");
                command.arg(format!("--customize-hook=copy-in {} {to}", package.display()));
                command.arg(format!("--customize-hook=test -f \"$1{to}{package_name}\""));
            }
            "RUN" => {
                let script = directory.join(format!("container-{index}.sh"));
                fs::write(&script, arguments).with_context(|| script.display().to_string())?;
                command.arg(format!("--customize-hook=chroot \"$1\" sh -e < {}", script.display()));
            }
            "ENTRYPOINT" => {
                let words: Vec<String> = serde_json::from_str(arguments)?;
                command.arg(format!("--customize-hook=chroot \"$1\" {} --version", words.join(" ")));
            }
            _ => {}
        }
    }
    command.arg(
        "--customize-hook=! ls \"$1\"/tmp/towline_*.deb \"$1\"/var/lib/apt/lists/*_Packages 2>/dev/null",
    );
    run_command(command.args([RELEASE, "-"]).arg(sources))
}

fn recipe() -> Result<Vec<Instruction>> {
    let path = root().join("Containerfile");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    parse(&text).with_context(|| path.display().to_string())
}

/// Parses a recipe: comments, and instructions that `\` continues.
fn parse(text: &str) -> Result<Vec<Instruction>> {
    const KNOWN: [&str; 6] = ["FROM", "LABEL", "COPY", "RUN", "ENTRYPOINT", "CMD"];
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let joined = lines.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    let instruction = |line: &str| {
        let (name, arguments) =
            line.trim().split_once(' ').with_context(|| format!("{line}: no arguments"))?;
        ensure!(KNOWN.contains(&name), "{name}: unknown instruction, expected one of {}", KNOWN.join(", "));
        Ok(Instruction { name: name.into(), arguments: arguments.trim().into() })
    };
    joined.lines().filter(|line| !line.trim().is_empty()).map(instruction).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(name: &str) -> Vec<String> {
        let recipe = recipe().unwrap().into_iter();
        recipe.filter(|instruction| instruction.name == name).map(|found| found.arguments).collect()
    }

    #[test]
    fn instructions_are_parsed_with_their_continuations() {
        let parsed = parse("# comment\nFROM a:1\n\nRUN x \\\n    # why\n && y\n").unwrap();
        let words = |found: &Instruction| {
            let arguments: Vec<_> = found.arguments.split_whitespace().collect();
            format!("{} {}", found.name, arguments.join(" "))
        };
        assert_eq!(parsed.iter().map(words).collect::<Vec<_>>(), ["FROM a:1", "RUN x && y"]);
        let error = parse("FORM a:1\n").unwrap_err().to_string();
        assert!(error.starts_with("FORM: unknown instruction"), "{error}");
    }

    /// The rules that a linter of recipes checks.
    #[test]
    fn the_recipe_names_a_version_and_leaves_nothing_of_apt_behind() {
        assert_eq!(arguments("FROM"), [format!("debian:{RELEASE}-slim")]);
        for run in arguments("RUN") {
            assert!(
                run.contains("apt-get update") && run.contains("install -y --no-install-recommends"),
                "{run}"
            );
            assert!(run.contains("rm -rf") && run.contains("/var/lib/apt/lists/*"), "{run}");
        }
        for name in ["ENTRYPOINT", "CMD"] {
            let words: Vec<String> = serde_json::from_str(&arguments(name).concat()).unwrap();
            assert!(!words.is_empty(), "{name}: expected the JSON form, which signals reach");
        }
        assert_eq!(arguments("ENTRYPOINT"), ["[\"towline\"]"]);
    }
}
