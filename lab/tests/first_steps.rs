//! README's first steps, pasted into a shell unchanged.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::time::Duration;

use towline_lab::{Towline, Version, paths, require_lab, towline_binary};

const WITHIN: Duration = Duration::from_secs(120);
/// Line of README.md before the block.
const MARK: &str = "<!-- first steps:";

/// The block as a script that fails with the first command that fails, and ends its QEMUs.
fn first_steps() -> String {
    let readme = std::fs::read_to_string(paths::workspace().join("README.md")).unwrap();
    let (_, rest) = readme.split_once(MARK).unwrap();
    let block = rest.split("```").nth(1).unwrap();
    // A paste into an interactive shell would continue.
    format!("set -e\ntrap 'kill $(jobs -p) 2>/dev/null' EXIT\n{block}wait\ntrap - EXIT\n")
}

/// A script that runs this QEMU with its environment.
fn script(version: Version) -> String {
    let command = version.command();
    let mut script = "#!/bin/sh\n".to_owned();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            script += &format!("export {}='{}'\n", name.display(), value.display());
        }
    }
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let words: String = words.map(|word| format!("'{}' ", word.display())).collect();
    script + &format!("exec {words}\"$@\"\n")
}

/// Pastes the block with this QEMU as `qemu-system-x86_64`. Returns standard output and standard error.
fn paste(version: Version) -> String {
    let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
    let programs = directory.path().join("bin");
    std::fs::create_dir(&programs).unwrap();
    symlink(towline_binary().unwrap(), programs.join("towline")).unwrap();
    let qemu = programs.join("qemu-system-x86_64");
    std::fs::write(&qemu, script(version)).unwrap();
    std::fs::set_permissions(&qemu, std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = first_steps();
    let path = format!("PATH={}:/usr/bin:/bin", programs.display());
    let temporary = format!("TMPDIR={}", directory.path().display());
    let words = [path.as_str(), &temporary, "bash", "-c", &script];
    let finished = Towline::start(Path::new("/usr/bin/env"), words).unwrap().wait(WITHIN).unwrap();
    let output = format!("{}{}", finished.stdout, finished.stderr);
    assert_eq!(finished.status.code(), Some(0), "{output}");
    output
}

#[test]
fn the_first_steps_of_the_readme_work_as_pasted() {
    if !require_lab("the_first_steps_of_the_readme_work_as_pasted") {
        return;
    }
    for version in [Version::V7_2, Version::V10_0] {
        let output = paste(version);
        for part in [
            "copied qmp:a.qmp to file:guest.img",
            "every checksum matches",
            "copied file:guest.img to qmp:b.qmp",
            "\"status\": \"running\"",
            "1 image in",
        ] {
            assert!(output.contains(part), "{version:?}: {part} is missing in {output}");
        }
    }
}
