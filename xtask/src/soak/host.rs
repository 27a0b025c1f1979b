//! Debian 13 as a host: `make demo` and `make test` from a clone of the last commit, in a root of it.
//!
//! ```text
//!   mmdebstrap trixie ─► clone ─► a mount namespace with this machine's Rust ─► chroot: make demo, which installs the rest
//! ```
//! The root is below `target/` and removed afterwards. Out of scope: the kernel, which is this machine's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::command::{root, run as run_command, target_directory};
use crate::setup::{self, apt};

/// Tools for the root itself.
const TOOLS: [&str; 1] = ["mmdebstrap"];
/// Programs that README expects of a user, besides rustup's.
const EXPECTED: &str = "ca-certificates,git,make";
/// Place of the clone in the root.
const CLONE: &str = "srv/towline";
/// Certificate authorities of this machine, for instance a proxy's.
const AUTHORITIES: &str = "/usr/local/share/ca-certificates";
/// Settings of pip on this machine.
const PIP: &str = "/etc/pip.conf";
/// Runs `make "$2"` in the root `$1`, with Rust from `$3` (cargo) and `$4` (rustup). All mounts end with the namespace.
const SCRIPT: &str = r#"
set -eu
# Only a mount can be a root in which namespaces change the propagation of mounts.
mount --bind "$1" "$1"
mkdir -p "$1/root/.cargo" "$1/root/.rustup"
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o mode=755 tmpfs "$1/run"
mount --bind "$3" "$1/root/.cargo"
mount --bind "$4" "$1/root/.rustup"
exec chroot "$1" env -i HOME=/root LANG=C.UTF-8 \
    PATH=/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin make -C /srv/towline "$2"
"#;

/// Runs `make TARGET` there.
pub(super) fn run(target: &str) -> Result<()> {
    apt::require(&TOOLS)?;
    let directory = target_directory()?.join("debian-13");
    let place = directory.join("root");
    remove(&place)?;
    fs::create_dir_all(&directory)?;
    let sources = setup::sources_of(setup::RELEASES[1], &directory)?;
    let mut bootstrap = Command::new("timeout");
    bootstrap.args(["--kill-after=30", "1800", "mmdebstrap", "--mode=root", "--variant=apt"]);
    bootstrap.arg(format!("--include={EXPECTED}")).arg(setup::RELEASES[1]).arg(&place).arg(&sources);
    run_command(&mut bootstrap)?;
    connect(&place)?;
    run_command(Command::new("git").args(["clone", "--quiet"]).arg(root()).arg(place.join(CLONE)))?;
    let made = run_command(&mut in_root(&place, target)?);
    remove(&place)?;
    made?;
    println!("debian-13: make {target}: done");
    Ok(())
}

/// Gives the root this machine's way to the network: name servers, its own certificate authorities, and pip's settings.
fn connect(place: &Path) -> Result<()> {
    fs::copy("/etc/resolv.conf", place.join("etc/resolv.conf")).context("/etc/resolv.conf")?;
    if Path::new(AUTHORITIES).is_dir() {
        let mut copy = Command::new("cp");
        run_command(copy.args(["-rLT", AUTHORITIES]).arg(place.join(&AUTHORITIES[1..])))?;
        run_command(Command::new("chroot").arg(place).arg("update-ca-certificates"))?;
    }
    if Path::new(PIP).is_file() {
        fs::copy(PIP, place.join(&PIP[1..])).context(PIP)?;
    }
    Ok(())
}

fn in_root(place: &Path, target: &str) -> Result<Command> {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=30", "5400", "unshare", "--mount", "--pid", "--fork", "--kill-child"]);
    command.args(["sh", "-c", SCRIPT, "sh"]).arg(place).arg(target);
    command.arg(home("CARGO_HOME", ".cargo")?).arg(home("RUSTUP_HOME", ".rustup")?);
    Ok(command)
}

/// A directory of Rust's tools on this machine.
fn home(variable: &str, name: &str) -> Result<PathBuf> {
    let place = match (std::env::var_os(variable), std::env::var_os("HOME")) {
        (Some(place), _) => PathBuf::from(place),
        (None, home) => PathBuf::from(home.context("HOME is not set")?).join(name),
    };
    ensure!(place.is_dir(), "{}: no directory; install Rust with rustup", place.display());
    Ok(place)
}

/// Removes the root; refuses while anything is mounted there.
fn remove(place: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    let prefix = format!(" {}/", place.display());
    if let Some(mount) = mounts.lines().find(|line| line.contains(&prefix)) {
        anyhow::bail!("{}: something is mounted there: {mount}; unmount it first", place.display());
    }
    match fs::remove_dir_all(place) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| place.display().to_string())
        }
        _ => Ok(()),
    }
}
