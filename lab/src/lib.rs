//! The lab: stock QEMU guests for towline's tests.
//!
//! ```text
//! Qemu::builder(Version::V10_0).memory_mib(256).linux().start()?
//!   ├─ qmp()        the lab's own QMP client, on a socket of its own
//!   ├─ qmp_path()   a second QMP socket, for towline
//!   ├─ linux()      the agent in the guest: tick, fill, hash, dirty, check
//!   └─ memory_hash(), read_memory(), ram_blocks()   the guest's memory as QEMU reports it
//! ```
//! The lab's QMP client and its reading of memory are independent of towline's crates on purpose: a test that
//! measured towline with towline would agree with itself. Every wait has a deadline, and every process and
//! file is removed when its value is dropped.
//!
//! QEMUs are Debian 12's (7.2), its backports' (10.0), Debian 13's (10.0 with later fixes) and its backports'
//! (11.1).
//!
//! The lab is for Debian 12 on x86-64, and its guests are emulated (TCG). `cargo xtask setup`
//! installs the parts that it needs; see [`require_lab`].

#[cfg(feature = "certificates")]
pub mod certificates;
pub mod counting;
pub mod demo;
pub mod downtime;
pub mod expect;
mod exposition;
mod guest_programs;
mod huge_pages;
mod lines;
mod linux;
mod memory;
mod namespace;
mod network;
pub mod paths;
mod process;
mod proxy;
mod qemu;
mod qmp;
#[cfg(feature = "schema")]
pub mod schema;
mod ssh;
mod sys;
mod terminal;
mod towline;
mod wait;

pub use exposition::{Exposition, scrape};
pub use huge_pages::HugePages;
pub use linux::LinuxGuest;
pub use memory::RamBlock;
pub use namespace::Namespace;
pub use network::Network;
pub use paths::Kernel;
pub use process::{
    child, command_after, is_asleep, kill, running_qemu, running_qemus, signal, signal_if_any,
};
pub use proxy::{Action, Flow, Proxy, Trigger};
pub use qemu::{BootSector, Builder, MemoryBackend, Qemu, Version};
pub use qmp::Qmp;
pub use ssh::{SshHost, Sshd, host_networks, ssh_key};
pub use terminal::Terminal;
pub use towline::{Finished, Towline, towline, towline_binary};
pub use wait::{wait_removed, wait_until};

use std::io::Write as _;
use std::path::Path;

/// Prints `SKIPPED name: reason`, past the test harness's capture, so `cargo xtask test` counts it.
pub fn skip(name: &str, reason: &str) {
    let mut stdout = std::io::stdout().lock();
    // A closed standard output is ignored: the skip cannot be reported then.
    let _ = writeln!(stdout, "\nSKIPPED {name}: {reason}");
}

/// Returns true if the set-up has run; if not, prints the skip of `name` with its reason.
///
/// ```no_run
/// if !towline_lab::require_lab("restores_a_guest") {
///     return;
/// }
/// ```
#[must_use]
pub fn require_lab(name: &str) -> bool {
    is_complete(name, paths::missing().as_deref())
}

/// As [`require_lab`], and these QEMUs are installed: not every machine can have those of Debian 13.
#[must_use]
pub fn require_qemu(name: &str, versions: &[Version]) -> bool {
    let missing = paths::missing().or_else(|| versions.iter().find_map(|version| version.missing()));
    is_complete(name, missing.as_deref())
}

/// As [`require_lab`], and this kernel is installed.
#[must_use]
pub fn require_kernel(name: &str, kernel: Kernel) -> bool {
    let archive = paths::initramfs(&paths::lab_directory(), kernel);
    is_complete(name, paths::missing().or_else(|| (!archive.is_file()).then_some(archive)).as_deref())
}

/// Returns true if nothing is missing; if not, prints the skip of `name`.
fn is_complete(name: &str, missing: Option<&Path>) -> bool {
    if let Some(part) = missing {
        let remedy = "`cargo xtask setup` brings it or says why not";
        skip(name, &format!("{} is missing; {remedy}", part.display()));
    }
    missing.is_none()
}
