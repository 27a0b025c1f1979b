//! A network namespace that is removed when its [`Network`] is dropped, taps and all.
//!
//! A QEMU ([`Builder::within`](crate::Builder::within)) or a towline runs inside it. The network is isolated from those of the host.
//! Limits: needs root.

use std::os::fd::AsFd as _;

use anyhow::{Context as _, Result, anyhow};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::namespace::Namespace;

/// A network namespace.
pub struct Network {
    namespace: Namespace,
}

impl Network {
    /// Creates a namespace whose loopback is up.
    pub fn new() -> Result<Self> {
        let network = Self { namespace: Namespace::new("--net", &["--net"], "true")? };
        network.run(&["ip", "link", "set", "lo", "up"])?;
        Ok(network)
    }

    /// Command that runs a program in this namespace; the program and its arguments follow.
    pub fn prefix(&self) -> Vec<String> {
        self.namespace.prefix()
    }

    /// Creates a veth pair between this namespace and `other`, both ends up.
    pub fn connect(&self, name: &str, other: &Self, other_name: &str) -> Result<()> {
        let holder = other.namespace.pid().to_string();
        self.run(&["ip", "link", "add", name, "type", "veth", "peer", "name", other_name, "netns", &holder])?;
        self.run(&["ip", "link", "set", name, "up"])?;
        other.run(&["ip", "link", "set", other_name, "up"])
    }

    /// Limits what an interface sends to this rate, as `tc` has it.
    pub fn limit(&self, interface: &str, rate: &str) -> Result<()> {
        let limit = ["root", "tbf", "rate", rate, "burst", "512k", "latency", "50ms"];
        self.run(&[&["tc", "qdisc", "add", "dev", interface][..], &limit].concat())
    }

    /// Creates two namespaces with one link between them, `link0` in both, and these addresses, as `10.0.2.1`.
    pub fn pair(addresses: [&str; 2]) -> Result<[Self; 2]> {
        let networks = [Self::new()?, Self::new()?];
        networks[0].connect("link0", &networks[1], "link0")?;
        for (network, address) in networks.iter().zip(addresses) {
            network.run(&["ip", "address", "add", &format!("{address}/24"), "dev", "link0"])?;
        }
        Ok(networks)
    }

    /// Processes in this namespace, without the one that holds it.
    pub fn processes(&self) -> Result<Vec<u32>> {
        let holder = self.namespace.pid();
        let network = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let own = network(holder).context("the process that holds the network is gone")?;
        let names =
            std::fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let pids = names.filter_map(|name| name.parse().ok());
        // One that has ended, and was not waited for, is in no network.
        Ok(pids.filter(|pid| *pid != holder && network(*pid).as_ref() == Some(&own)).collect())
    }

    /// Bytes that were sent over an interface of this namespace, with all headers.
    pub fn sent_bytes(&self, interface: &str) -> Result<u64> {
        self.counter(interface, 8)
    }

    /// Packets that were received by an interface of this namespace.
    pub fn received_packets(&self, interface: &str) -> Result<u64> {
        self.counter(interface, 1)
    }

    /// This column of `/proc/net/dev`.
    fn counter(&self, interface: &str, column: usize) -> Result<u64> {
        let table = self.enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))??;
        let columns =
            table.split_once(&format!("{interface}:")).map(|(_, columns)| columns.split_whitespace());
        let count = columns.and_then(|mut columns| columns.nth(column));
        Ok(count.with_context(|| format!("no interface {interface}"))?.parse()?)
    }

    /// Runs `work` in this namespace, on a separate thread: the sockets that it creates belong to this
    /// network.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let namespace = std::fs::File::open(format!("/proc/{}/ns/net", self.namespace.pid()))?;
        let entered = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(work())
        };
        std::thread::scope(|scope| scope.spawn(entered).join())
            .map_err(|_| anyhow!("what was done in a network panicked"))?
    }

    /// Runs a command in this namespace, as `["ip", "link"]`.
    pub fn run(&self, line: &[&str]) -> Result<()> {
        self.namespace.run(line)
    }
}
