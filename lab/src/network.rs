//! A network namespace that is removed when its [`Network`] is dropped.
//!
//! ```text
//!   unshare --net sleep     holds the namespace; dies with this process, and the namespace, taps and all, with its last user
//!   nsenter --net PROGRAM   a QEMU (Builder::within) or a towline inside it
//! ```
//! The network is isolated from those of the host. Limits: needs root.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::process;
use crate::wait::wait_until;

const MADE_WITHIN: Duration = Duration::from_secs(60);

/// A network namespace; see the module's picture.
pub struct Network {
    holder: Child,
}

impl Network {
    /// Creates a namespace whose loopback is up.
    pub fn new() -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--net", "sleep", "infinity"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let holder = process::spawn(command).context("unshare cannot be started")?;
        let mut network = Self { holder };
        let ours = std::fs::read_link("/proc/self/ns/net")?;
        let theirs = PathBuf::from(format!("/proc/{}/ns/net", network.holder.id()));
        wait_until("network namespace", MADE_WITHIN, || {
            let ended = network.holder.try_wait()?;
            ensure!(ended.is_none(), "no network namespace can be made here (root is needed)");
            Ok(std::fs::read_link(&theirs).is_ok_and(|theirs| theirs != ours).then_some(()))
        })?;
        network.run(&["ip", "link", "set", "lo", "up"])?;
        Ok(network)
    }

    /// Creates a tap for one QEMU (`-netdev tap,ifname=NAME,script=no,downscript=no`) with this address, as
    /// `10.0.2.2/24`. It accepts packets of any size without checksums, so the guest's card offers
    /// scatter-gather.
    pub fn add_tap(&self, name: &str, address: &str) -> Result<()> {
        self.run(&["ip", "tuntap", "add", "dev", name, "mode", "tap", "vnet_hdr"])?;
        self.run(&["ip", "address", "add", address, "dev", name])?;
        self.run(&["ip", "link", "set", name, "up"])
    }

    /// Command that runs a program in this namespace; the program and its arguments follow.
    pub fn prefix(&self) -> Vec<String> {
        let holder = self.holder.id().to_string();
        ["nsenter", "--target", &holder, "--net", "--"].map(str::to_owned).to_vec()
    }

    /// Creates a veth pair between this namespace and `other`, both ends up.
    pub fn connect(&self, name: &str, other: &Self, other_name: &str) -> Result<()> {
        let holder = other.holder.id().to_string();
        self.run(&["ip", "link", "add", name, "type", "veth", "peer", "name", other_name, "netns", &holder])?;
        self.run(&["ip", "link", "set", name, "up"])?;
        other.run(&["ip", "link", "set", other_name, "up"])
    }

    /// Runs `work` in this namespace, on a separate thread: the sockets that it creates belong to this
    /// network.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let namespace = std::fs::File::open(format!("/proc/{}/ns/net", self.holder.id()))?;
        let entered = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(work())
        };
        std::thread::scope(|scope| scope.spawn(entered).join())
            .map_err(|_| anyhow!("what was done in a network panicked"))?
    }

    /// Runs a command in this namespace, as `["ip", "link"]`.
    pub fn run(&self, line: &[&str]) -> Result<()> {
        let prefix = self.prefix();
        let output = Command::new(&prefix[0]).args(&prefix[1..]).args(line).output();
        let output = output.with_context(|| format!("{prefix:?} cannot be started"))?;
        let message = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`{}` fails: {}", line.join(" "), message.trim());
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The process may have exited already, and a destructor cannot return an error.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
