//! Stock QEMUs for tests: each found one, started small, killed on drop.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use towline_qmp::{Client, Error, Options};

/// Timeout of anything that must happen. Generous: a QEMU that starts on a busy host may take half a minute.
pub(crate) const WAIT: Duration = Duration::from_secs(120);

/// A QEMU binary and where its firmware lies.
#[derive(Clone, Debug)]
pub(crate) struct Binary {
    pub(crate) path: PathBuf,
    pub(crate) firmware: Vec<PathBuf>,
    /// `LD_LIBRARY_PATH` of its own libraries, where the system's are another release's.
    pub(crate) libraries: Option<OsString>,
    /// Version of the binary, if its directory is only for that version.
    pub(crate) expected_major: Option<u32>,
}

/// The QEMUs on this machine; missing ones are printed as skipped.
pub(crate) fn binaries(test: &str) -> Vec<Binary> {
    let mut found = Vec::new();
    let paths = std::env::var_os("PATH").unwrap_or_default();
    match std::env::split_paths(&paths).map(|dir| dir.join("qemu-system-x86_64")).find(|path| path.exists()) {
        Some(path) => {
            found.push(Binary { path, firmware: Vec::new(), libraries: None, expected_major: None });
        }
        None => skipped(test, "no qemu-system-x86_64 on PATH"),
    }
    let lab = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/lab/qemu-7.2/usr");
    let path = lab.join("bin/qemu-system-x86_64");
    if path.exists() {
        let firmware = ["share/qemu", "share/seabios", "lib/ipxe/qemu"].map(|dir| lab.join(dir)).into();
        let libraries = ["lib/x86_64-linux-gnu", "../lib/x86_64-linux-gnu"].map(|dir| lab.join(dir));
        let libraries = Some(std::env::join_paths(libraries).unwrap());
        found.push(Binary { path, firmware, libraries, expected_major: Some(7) });
    } else {
        skipped(&format!("{test} with QEMU 7.2"), "not in target/lab/qemu-7.2; run `cargo xtask setup`");
    }
    for name in ["qemu-stable", "qemu-newest"] {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/lab").join(name);
        match std::fs::read_to_string(directory.join("version")) {
            Ok(version) => {
                let expected_major = version.split('.').next().and_then(|major| major.parse().ok());
                let path = directory.join("qemu-system-x86_64");
                found.push(Binary { path, firmware: Vec::new(), libraries: None, expected_major });
            }
            Err(_) => skipped(
                &format!("{test} with {name}"),
                "not in target/lab; `cargo xtask setup` installs it or prints the reason",
            ),
        }
    }
    found
}

/// Prints it past the test harness, which hides the output of a passing test.
pub(crate) fn skipped(test: &str, reason: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
}

/// A QEMU under test, and a directory for its sockets and files.
pub(crate) struct TestQemu {
    pub(crate) child: Child,
    pub(crate) dir: tempfile::TempDir,
}

impl TestQemu {
    /// A paused q35 with 64 MiB. `{dir}` in an argument is its directory.
    pub(crate) fn q35(binary: &Binary, args: &[&str]) -> Self {
        Self::start(binary, &[&["-machine", "q35", "-m", "64", "-S"], args].concat())
    }

    pub(crate) fn start(binary: &Binary, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path().to_str().unwrap();
        let mut command = Command::new(&binary.path);
        if let Some(libraries) = &binary.libraries {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        for firmware in &binary.firmware {
            command.arg("-L").arg(firmware);
        }
        command.args(["-nodefaults", "-display", "none", "-accel", "tcg", "-qmp"]);
        command.arg(format!("unix:{here}/qmp,server=on,wait=off"));
        command.args(args.iter().map(|arg| OsString::from(arg.replace("{dir}", here))));
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        Self { child, dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Waits for the monitor, which QEMU makes early: its first reply comes once QEMU has started.
    pub(crate) fn client(&self) -> Client {
        self.client_with(&Options { deadline: WAIT, greeting_deadline: WAIT, ..Options::default() })
    }

    pub(crate) fn client_with(&self, options: &Options) -> Client {
        until("QEMU's monitor", || match Client::connect(self.path("qmp"), options) {
            Ok(client) => Some(client),
            Err(Error::Missing { .. } | Error::Refused { .. }) => None,
            Err(other) => panic!("{other}"),
        })
    }

    pub(crate) fn signal(&self, signal: &str) {
        let status = Command::new("sh")
            .args(["-c", "kill \"$@\"", "sh", signal, &self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(status.success());
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for TestQemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(started.elapsed() < WAIT, "{what} did not come within {WAIT:?}");
        thread::sleep(Duration::from_millis(10));
    }
}
