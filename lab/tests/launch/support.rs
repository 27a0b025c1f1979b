//! Helpers of the launcher's tests: a directory of guests, and the QEMU of each version.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use towline_lab::{Version, require_qemu};
use towline_launch::{
    CommandLine, EnvironmentVariable, HostArguments, LaunchError, Launcher, RunningQemu, RuntimeRoot,
};

pub(crate) const WITHIN: Duration = Duration::from_secs(60);
pub(crate) const VERSIONS: [Version; 3] = [Version::V7_2, Version::V10_0, Version::Newest];

/// Returns those of the versions that this machine has; prints a skip for the others.
pub(crate) fn versions(test: &str, versions: &[Version]) -> Vec<Version> {
    versions.iter().copied().filter(|version| require_qemu(test, &[*version])).collect()
}

/// Directories of one test, and the QEMU that it starts.
pub(crate) struct Place {
    directory: TempDir,
    pub(crate) root: RuntimeRoot,
    version: Version,
}

impl Place {
    pub(crate) fn new(version: Version) -> Self {
        let directory = TempDir::with_prefix("towline-lab-").unwrap();
        let root = RuntimeRoot::at(directory.path().join("run"));
        Self { directory, root, version }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The machine's part of the command line.
    pub(crate) fn host(&self) -> HostArguments {
        host(self.version)
    }

    pub(crate) fn launcher(&self, name: &str) -> Launcher {
        Launcher::new(self.root.claim(&name.parse().unwrap()).unwrap())
    }

    /// Starts a QEMU with these arguments.
    pub(crate) fn start(&self, launcher: Launcher, arguments: &[&str]) -> Result<RunningQemu, LaunchError> {
        let host = self.host();
        launcher.start(&CommandLine::parse(arguments).unwrap().trust(&host).unwrap(), &host)
    }
}

/// The program of a version, with the directories and variables that it needs.
pub(crate) fn host(version: Version) -> HostArguments {
    let command = version.command();
    let directories = command.get_args().filter(|argument| *argument != "-L").map(PathBuf::from);
    let variables = command.get_envs().filter_map(|(name, value)| {
        Some(EnvironmentVariable { name: name.to_owned(), value: value?.to_owned() })
    });
    HostArguments {
        binary: command.get_program().into(),
        firmware_directories: directories.collect(),
        environment: variables.collect(),
        ..HostArguments::default()
    }
}

/// Returns true if the process exists.
pub(crate) fn is_there(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// The regular files that a process has open, without its log.
pub(crate) fn inherited(pid: u32) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|target| target.is_file() && !target.ends_with("qemu.log")).collect()
}

/// The command line of a running QEMU. One of another Debian is started by that one's dynamic linker.
pub(crate) fn command_line(pid: u32) -> CommandLine {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    let words: Vec<&str> =
        bytes.split(|byte| *byte == 0).map(|word| std::str::from_utf8(word).unwrap()).collect();
    let program = words.iter().position(|word| word.ends_with("/qemu-system-x86_64")).unwrap();
    if program == 0 {
        return CommandLine::of_process(pid).unwrap();
    }
    CommandLine::parse(&words[program + 1..words.len() - 1]).unwrap()
}
