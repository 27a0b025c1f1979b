//! Two hosts as network namespaces: one on the backend's tap, and the "guest" on the driver's.
//!
//! ```text
//!   namespace outside                          this process                        namespace inside
//!   applications ── kernel ── tap0 ── backend ── rings ── Pump (driver) ── tap1 ── kernel ── applications
//! ```

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use towline_lab::Network;

/// Tap of the backend.
pub(super) const TAP: &str = "tap0";
/// Tap of the driver.
pub(super) const GUEST_TAP: &str = "tap1";
pub(super) const OUTSIDE: &str = "10.99.0.1";
pub(super) const INSIDE: &str = "10.99.0.2";

/// A namespace.
pub(super) struct Host {
    network: Network,
}

impl Host {
    pub(super) fn new() -> Result<Self> {
        let host = Self { network: Network::new()? };
        // The kernel must not send frames of its own.
        host.run(&[
            "sysctl",
            "-qw",
            "net.ipv6.conf.all.disable_ipv6=1",
            "net.ipv6.conf.default.disable_ipv6=1",
        ])?;
        Ok(host)
    }

    /// Returns the command that executes a program in this namespace.
    pub(super) fn prefix(&self) -> Vec<String> {
        self.network.prefix()
    }

    pub(super) fn run(&self, line: &[&str]) -> Result<()> {
        let prefix = self.prefix();
        let output = Command::new(&prefix[0]).args(&prefix[1..]).args(line).output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`{}` failed: {}", line.join(" "), stderr.trim());
        Ok(())
    }

    /// Runs `body` in a thread in this namespace, which threads that it starts inherit.
    pub(super) fn within<T: Send>(&self, body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let path = format!("/proc/{}/ns/net", self.holder()?);
        std::thread::scope(|scope| {
            scope
                .spawn(|| enter(Path::new(&path)).and_then(|()| body()))
                .join()
                .expect("the thread does not panic")
        })
    }

    /// Returns the path of the namespace, for [`enter`].
    pub(super) fn path(&self) -> Result<String> {
        Ok(format!("/proc/{}/ns/net", self.holder()?))
    }

    /// Returns the process of the namespace.
    fn holder(&self) -> Result<String> {
        let prefix = self.prefix();
        let at = prefix.iter().position(|word| word == "--target");
        at.and_then(|at| prefix.get(at + 1)).cloned().context("the namespace has no process")
    }
}

/// Moves this thread into a network namespace.
pub(super) fn enter(path: &Path) -> Result<()> {
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let kind = Some(LinkNameSpaceType::Network);
    move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), kind).context("setns (root is needed)")
}

/// Returns the received and sent frames of an interface of this thread's namespace.
pub(super) fn frames(interface: &str) -> Result<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev")?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix(interface)?.strip_prefix(':'));
    let line = line.with_context(|| format!("no interface {interface}"))?;
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    ensure!(numbers.len() >= 10, "`{line}` in /proc/net/dev");
    Ok((numbers[1], numbers[9]))
}
