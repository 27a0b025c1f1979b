//! Python's `websockets`, the other end of the WebSocket tests, `moto`, the S3 server of the store tests, and `qemu.qmp`, QEMU's own
//! client of control sockets, each in an environment of its own.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use towline_lab::paths;

use super::unpack::{into_place, scratch};
use crate::command::output;

/// Not `moto[server]`, which brings every service's packages.
const S3_PACKAGES: [&str; 3] = ["moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5"];

/// The environment of the WebSocket tests. True if it was made now. Without Python's `venv`, or without its package index, the
/// tests that want it are skipped, with the reason printed.
pub(super) fn websockets(lab: &Path) -> Result<bool> {
    let (python, packages) = (paths::python(lab), ["websockets==15.0.1"]);
    environment(lab, &python, "python", &packages, "import websockets", "WebSocket")
}

/// The environment of the store tests; as [`websockets`].
pub(super) fn s3(lab: &Path) -> Result<bool> {
    let python = paths::s3_python(lab);
    environment(lab, &python, "python-s3", &S3_PACKAGES, "import moto.server", "S3")
}

/// The environment of the control socket's tests; as [`websockets`].
pub(super) fn qmp(lab: &Path) -> Result<bool> {
    let python = paths::qmp_python(lab);
    environment(lab, &python, "python-qmp", &["qemu.qmp==0.0.6"], "import qemu.qmp", "QMP")
}

fn environment(
    lab: &Path,
    python: &Path,
    name: &str,
    packages: &[&str],
    probe: &str,
    tests: &str,
) -> Result<bool> {
    if python.is_file() {
        return Ok(false);
    }
    let scratch = scratch(lab)?;
    let place = scratch.path().join(name);
    let made = output(Command::new("python3").args(["-m", "venv"]).arg(&place)).and_then(|_| {
        let python = place.join("bin/python");
        output(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(packages))?;
        output(Command::new(&python).args(["-c", probe]))
    });
    match made {
        Ok(_) => into_place(&place, &lab.join(name)).map(|()| true),
        Err(error) => {
            let packages = packages.join(", ");
            println!("setup: no {packages} for the {tests} tests, which are skipped: {error:#}");
            Ok(false)
        }
    }
}
