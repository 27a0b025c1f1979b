//! Helpers of these tests: directories whose remaining files can be checked, and guests that count.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
pub(crate) use towline_lab::expect::{qmp, waiting};
pub(crate) use towline_lab::signal;
use towline_lab::{
    BootSector, Builder, Finished, Qemu, Towline, Version, expect, towline_binary, wait_until,
};

/// Timeout of anything that must happen. Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
/// Time limit of towline to notice that a process at either end was killed.
pub(crate) const NOTICES_WITHIN: Duration = Duration::from_secs(20);
/// Bandwidth limit: the guests here take seconds.
pub(crate) const SLOW: &str = "--max-bandwidth 4M";

/// Error of QEMU 10.0 when it accepts a lane that was closed before it could peek at its type; QEMU exits
/// then. It depends on timing.
const CLOSED_TOO_SOON: &str = "Failed to peek at channel";

pub(crate) const SAFE: i32 = 1;
pub(crate) const UNCERTAIN: i32 = 3;

/// A working directory for images and sockets, and one for towline's temporary files.
pub(crate) struct Fixture {
    directory: TempDir,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::of(&std::env::temp_dir())
    }

    /// Without a disk, which others may keep busy.
    pub(crate) fn in_memory() -> Self {
        Self::of(Path::new("/dev/shm"))
    }

    fn of(parent: &Path) -> Self {
        let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir_in(parent).unwrap();
        for name in ["work", "tmp"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        Self { directory }
    }

    /// Lets QEMUs of other users reach sockets in the directory of temporary files, as in `/tmp`.
    pub(crate) fn admit_all_users(&self) {
        for (path, mode) in
            [(self.directory.path().to_owned(), 0o711), (self.directory.path().join("tmp"), 0o1777)]
        {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    }

    /// Path of a file in the working directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("work").join(name)
    }

    /// The same, for a command line.
    pub(crate) fn name(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Starts `towline` with these space-separated arguments.
    pub(crate) fn towline(&self, arguments: &str) -> Towline {
        self.start(&[], arguments)
    }

    /// Starts towline by another command, which receives its command line as the last arguments.
    pub(crate) fn start(&self, by: &[&str], arguments: &str) -> Towline {
        let tmp = format!("TMPDIR={}", self.directory.path().join("tmp").display());
        let binary = towline_binary().unwrap().display().to_string();
        let line: Vec<&str> =
            [tmp.as_str()].into_iter().chain(by.iter().copied()).chain([binary.as_str()]).collect();
        Towline::start(Path::new("/usr/bin/env"), line.into_iter().chain(arguments.split(' '))).unwrap()
    }

    /// Runs `towline` until it exits.
    pub(crate) fn run(&self, arguments: &str) -> Finished {
        self.towline(arguments).wait(WITHIN).unwrap()
    }

    /// Asserts that the working directory contains exactly these files, and that there are no temporary ones.
    #[track_caller]
    pub(crate) fn assert_holds(&self, names: &[&str]) {
        assert_eq!(self.files("work"), names, "what was left");
        assert_eq!(self.files("tmp"), [""; 0], "temporary files that were left");
    }

    /// Sorted names of the files in one of the two directories.
    pub(crate) fn files(&self, directory: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.path().join(directory)).unwrap();
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<_> = entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

/// Asserts the exit status, and that all of `texts` are in the standard error, in this order and once.
#[track_caller]
pub(crate) fn assert_ended(finished: &Finished, code: i32, texts: &[&str]) {
    let Finished { status, stderr, .. } = finished;
    assert_eq!(status.code(), Some(code), "{status}: {stderr}");
    let mut at = 0;
    for text in texts {
        match stderr[at..].find(text) {
            Some(found) => at += found + text.len(),
            None => panic!("{text:?} is not in (or not in this order): {stderr}"),
        }
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
    // Warnings in the log may be identical: one for each dropped connection.
    let lines: Vec<_> = stderr.lines().filter(|line| line.starts_with("towline: ")).collect();
    for (index, line) in lines.iter().enumerate() {
        assert!(!lines[..index].contains(line), "printed twice: {line}\n{stderr}");
    }
}

/// As [`assert_ended`], for a refusal or failure after which the guest is safe at its source.
#[track_caller]
pub(crate) fn assert_safe(finished: &Finished, texts: &[&str]) {
    assert_ended(finished, SAFE, texts);
    let guest = finished.stderr.lines().find_map(|line| line.strip_prefix("towline: the guest: ")).unwrap();
    let words = [
        "safe at its source",
        "in its image, which is as it was",
        "not touched; its QEMU was not reached",
        "not touched; its image could not be opened",
        "none at this source; nothing was changed",
    ];
    assert!(words.contains(&guest), "{}", finished.stderr);
}

/// A guest of 64 MiB, 16 of them filled, one of which is dirtied forever.
pub(crate) fn guest() -> Builder {
    Qemu::builder(Version::V10_0).memory_mib(64).boot_sector(BootSector::default())
}

/// A guest that is moved fast: a single MiB is filled.
pub(crate) fn small_guest() -> Builder {
    small_guest_of(Version::V10_0)
}

/// The same, of another QEMU.
pub(crate) fn small_guest_of(version: Version) -> Builder {
    let boot_sector = BootSector { fill_mib: 1, sweep_pages: 16, ..BootSector::default() };
    Qemu::builder(version).memory_mib(16).boot_sector(boot_sector)
}

/// Starts a guest and waits until it counts.
pub(crate) fn counting(builder: Builder) -> Qemu {
    let qemu = builder.start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu
}

/// Asserts that the guest runs and counts.
#[track_caller]
pub(crate) fn assert_runs(qemu: &Qemu) {
    qemu.qmp().wait_status("running", WITHIN).unwrap();
    qemu.wait_counting(WITHIN).unwrap();
}

/// Asserts that this QEMU lives and runs no guest.
#[track_caller]
pub(crate) fn assert_waits(qemu: &Qemu) {
    let status = qemu.qmp().status().unwrap();
    assert!(["inmigrate", "paused", "prelaunch"].contains(&status.as_str()), "{status}");
}

/// Asserts that this QEMU runs no guest: it waits, or has exited because a lane was closed.
#[track_caller]
pub(crate) fn assert_runs_nothing(destination: &Qemu) {
    match destination.qmp().execute("query-status", Value::Null) {
        Ok(status) => assert_eq!(status["running"], false, "{status}"),
        Err(error) => {
            destination.wait_exit(WITHIN).unwrap();
            let output = destination.stderr();
            assert!(output.contains(CLOSED_TOO_SOON), "{error:#}: {output}");
        }
    }
}

/// Stores a running guest, and ends its QEMU.
pub(crate) fn save(fixture: &Fixture, builder: Builder, name: &str) {
    let source = counting(builder);
    let finished = fixture.run(&format!("copy {} {}", qmp(&source), fixture.name(name)));
    assert_ended(&finished, 0, &[]);
}

/// Sets capabilities (`+name`, `-name`) and parameters of a QEMU that towline does not drive.
pub(crate) fn set(qemu: &Qemu, capabilities: &[&str], parameters: Value) {
    let capabilities: Vec<_> = capabilities
        .iter()
        .map(|name| json!({ "capability": name[1..], "state": name.starts_with('+') }))
        .collect();
    qemu.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).unwrap();
    qemu.qmp().execute("migrate-set-parameters", parameters).unwrap();
}

/// Starts QEMU's own migration, once QEMU has cleaned up after the last one.
pub(crate) fn migrate(qemu: &Qemu, uri: &str) {
    wait_until("a QEMU that can migrate", WITHIN, || {
        let instances = qemu.qmp().execute("query-yank", Value::Null)?;
        let busy = instances.as_array().unwrap().iter().any(|instance| instance["type"] == "migration");
        Ok((!busy).then_some(()))
    })
    .unwrap();
    qemu.qmp().execute("migrate", json!({ "uri": uri })).unwrap();
}

/// Waits until a towline listens, and returns its address.
pub(crate) fn listens_at(towline: &mut Towline) -> String {
    towline.listens_at(WITHIN).unwrap()
}

/// Waits until towline's standard error contains this text; towline must not exit before.
pub(crate) fn wait_stderr(towline: &mut Towline, text: &str) {
    wait_until(text, WITHIN, || {
        assert!(towline.runs()?, "towline ended: {}", towline.stderr());
        Ok(towline.stderr().contains(text).then_some(()))
    })
    .unwrap();
}

/// Waits until a towline with `--json` has transferred this much.
pub(crate) fn wait_transferred(towline: &mut Towline, bytes: u64) {
    expect::wait_transferred(towline, bytes, WITHIN);
}

/// Waits until towline exits after a process was killed; fails if it took too long to notice.
#[track_caller]
pub(crate) fn wait_soon(towline: Towline, since: Instant) -> Finished {
    let finished = towline.wait(WITHIN).unwrap();
    let took = since.elapsed();
    println!("towline ended after {took:?}: {}", finished.stderr.trim());
    assert!(took <= NOTICES_WITHIN, "took {took:?}: {}", finished.stderr);
    finished
}
