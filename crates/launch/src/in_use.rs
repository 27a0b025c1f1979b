//! Ports, taps, sockets and MAC addresses that new guests would share with each other or with this host.
//!
//! The check is for messages: another process may take a port between the check and the start, and then QEMU
//! reports it.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, TcpListener, UdpSocket};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::command_line::{Properties, QemuOption};
use crate::policy::AllowedCommandLine;

/// Processes that are examined to find the one that has a tap.
const PROCESSES_MAX: usize = 32_768;

/// A guest that is about to start.
#[derive(Debug, Clone, Copy)]
pub struct Start<'a> {
    /// Name of the guest.
    pub name: &'a str,
    /// Command line of the guest.
    pub command_line: &'a AllowedCommandLine,
}

/// A resource that only one guest can have. Each error names the setting that changes it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InUse {
    /// Two guests would have the same.
    #[error("{first} and {second} would both use {what}; set {setting} with {{n}} in its value")]
    Shared { what: String, first: String, second: String, setting: String },
    /// A port on which a process of this host listens.
    #[error("{what} is in use on this host; set {setting} to a free port")]
    Port { what: String, setting: String },
    /// A tap that a process has open.
    #[error("tap {interface} is in use by {holder}; set {setting} to another")]
    Tap {
        interface: String,
        /// The process, if known.
        holder: String,
        setting: String,
    },
    /// The path of a socket to listen on exists.
    #[error("socket {path} exists already; remove it, or set {setting} to another path")]
    SocketExists { path: String, setting: String },
    /// The path of a socket to connect to does not exist.
    #[error(
        "socket {path} does not exist; start the process that listens on it, or set {setting} to its path"
    )]
    SocketMissing { path: String, setting: String },
}

/// Something of which there is one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Resource {
    Tcp(IpAddr, u16),
    Udp(IpAddr, u16),
    Tap(String),
    Listening(String),
    Connecting(String),
    Mac(String),
}

/// A resource, and the key of the setting that changes it.
struct Use {
    resource: Resource,
    setting: String,
}

/// Checks that these guests can run beside each other and on this host.
///
/// # Errors
/// The first thing that is in use.
pub fn check_in_use(starts: &[Start<'_>]) -> Result<(), InUse> {
    let mut seen: BTreeMap<Resource, &str> = BTreeMap::new();
    for start in starts {
        let line = start.command_line.whole();
        let options = line.options().iter().zip(line.setting_keys());
        for Use { resource, setting } in options.flat_map(|(option, key)| uses_of(option, &key)) {
            if let Some(first) = seen.get(&resource) {
                let (first, second) = ((*first).to_owned(), start.name.to_owned());
                return Err(InUse::Shared { what: resource.describe(), first, second, setting });
            }
            resource.check(&setting)?;
            // Several guests may be clients of one process.
            if !matches!(resource, Resource::Connecting(_)) {
                seen.insert(resource, start.name);
            }
        }
    }
    Ok(())
}

fn uses_of(option: &QemuOption, address: &str) -> Vec<Use> {
    let Some(properties) = option.properties() else { return Vec::new() };
    let value = |key: &str| properties.value(key).unwrap_or_default();
    let mut uses = Vec::new();
    let mut add = |resource: Option<Resource>, key: &str| {
        uses.extend(resource.map(|resource| Use { resource, setting: format!("{address}.{key}") }));
    };
    match value("type").as_str() {
        "user" if option.name.is_network() => {
            for (key, value) in properties.pairs() {
                if key == "hostfwd" {
                    add(forwarded_port(&value), key);
                }
            }
        }
        "tap" if option.name.is_network() => add(some(value("ifname")).map(Resource::Tap), "ifname"),
        _ => {}
    }
    if option.name.as_str() == "chardev" && value("backend") == "socket" {
        add(unix_socket(properties), "path");
        add(tcp_server(properties), "port");
    }
    for key in ["mac", "macaddr"] {
        add(some(value(key)).map(|mac| Resource::Mac(mac.to_ascii_lowercase())), key);
    }
    uses
}

fn some(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

fn unix_socket(properties: &Properties) -> Option<Resource> {
    let path = properties.value("path").and_then(some)?;
    Some(if properties.is_on("server") { Resource::Listening(path) } else { Resource::Connecting(path) })
}

fn tcp_server(properties: &Properties) -> Option<Resource> {
    let port = properties.value("port")?.parse().ok().filter(|_| properties.is_on("server"))?;
    Some(Resource::Tcp(parse_address(&properties.value("host").unwrap_or_default())?, port))
}

/// Parses `tcp:[ADDRESS]:PORT-…`, a rule of QEMU's own network.
fn forwarded_port(rule: &str) -> Option<Resource> {
    let (host, _) = rule.split_once('-')?;
    let (protocol, rest) = host.split_once(':')?;
    let (address, port) = rest.rsplit_once(':')?;
    let (address, port) = (parse_address(address.trim_matches(['[', ']']))?, port.parse().ok()?);
    match protocol {
        "tcp" | "" => Some(Resource::Tcp(address, port)),
        "udp" => Some(Resource::Udp(address, port)),
        _ => None,
    }
}

/// No address means every address. QEMU resolves names.
fn parse_address(text: &str) -> Option<IpAddr> {
    if text.is_empty() { Some(Ipv4Addr::UNSPECIFIED.into()) } else { text.parse().ok() }
}

impl Resource {
    fn describe(&self) -> String {
        match self {
            Self::Tcp(address, port) => format!("TCP port {port} of {address}"),
            Self::Udp(address, port) => format!("UDP port {port} of {address}"),
            Self::Tap(interface) => format!("tap {interface}"),
            Self::Listening(path) | Self::Connecting(path) => format!("socket {path}"),
            Self::Mac(mac) => format!("MAC address {mac}"),
        }
    }

    /// Fails if another process on this host has it.
    fn check(&self, setting: &str) -> Result<(), InUse> {
        let setting = setting.to_owned();
        let is_taken = |error: std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse;
        match self {
            // Port 0 is any free one.
            Self::Tcp(address, port) if TcpListener::bind((*address, *port)).is_err_and(is_taken) => {
                Err(InUse::Port { what: self.describe(), setting })
            }
            Self::Udp(address, port) if UdpSocket::bind((*address, *port)).is_err_and(is_taken) => {
                Err(InUse::Port { what: self.describe(), setting })
            }
            Self::Tap(interface) => match tap_holder(interface) {
                Some(holder) => Err(InUse::Tap { interface: interface.clone(), holder, setting }),
                None => Ok(()),
            },
            Self::Listening(path) if fs::symlink_metadata(path).is_ok() && !is_left(path) => {
                Err(InUse::SocketExists { path: path.clone(), setting })
            }
            Self::Connecting(path)
                if !fs::metadata(path).is_ok_and(|found| found.file_type().is_socket()) =>
            {
                Err(InUse::SocketMissing { path: path.clone(), setting })
            }
            _ => Ok(()),
        }
    }
}

/// Returns true for a socket on which no process listens, left by a QEMU that was killed. The next QEMU
/// replaces it.
fn is_left(path: &str) -> bool {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    // A blocking call waits while the queue of a process that listens is full: QEMU has one client at a time.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = SocketAddrUnix::new(path).and_then(|address| {
        connect(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?, &address)
    });
    is_socket && connected == Err(Errno::CONNREFUSED)
}

/// The process that has a tap open. `fdinfo` of its descriptor has a line `iff:` with the interface's name; a
/// process of another user is known only by the carrier, which a tap has while it is open.
fn tap_holder(interface: &str) -> Option<String> {
    let directory = Path::new("/sys/class/net").join(interface);
    // QEMU creates a tap that does not exist, and refuses a name with a slash.
    if interface.contains('/') || !directory.join("tun_flags").exists() {
        return None;
    }
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().take(PROCESSES_MAX);
    let mut pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
    if let Some(pid) = pids.find(|pid| has_tap(*pid, interface)) {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        return Some(format!("process {pid} ({})", name.trim()));
    }
    let has_carrier =
        fs::read_to_string(directory.join("carrier")).is_ok_and(|carrier| carrier.trim() == "1");
    has_carrier.then(|| "another process".to_owned())
}

fn has_tap(pid: u32, interface: &str) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    descriptors
        .filter(|entry| fs::read_link(entry.path()).is_ok_and(|target| target == Path::new("/dev/net/tun")))
        .any(|entry| {
            let info = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(entry.file_name());
            let info = fs::read_to_string(info).unwrap_or_default();
            info.lines().any(|line| line.strip_prefix("iff:").is_some_and(|found| found.trim() == interface))
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::time::Duration;

    use super::*;
    use crate::command_line::CommandLine;
    use crate::host::HostArguments;

    fn allowed(words: &str) -> AllowedCommandLine {
        CommandLine::parse(words.split(' ')).unwrap().trust(&HostArguments::default()).unwrap()
    }

    fn check(lines: &[&str]) -> Result<(), InUse> {
        let lines: Vec<_> = lines.iter().map(|words| allowed(words)).collect();
        let names = ["a", "b", "c"];
        let starts: Vec<_> =
            lines.iter().zip(names).map(|(command_line, name)| Start { name, command_line }).collect();
        check_in_use(&starts)
    }

    /// Ends a listener, also for a process that another test is starting, which has it until it executes its program.
    fn ended(listener: impl std::os::fd::AsFd) {
        rustix::net::shutdown(listener, rustix::net::Shutdown::Both).unwrap();
    }

    #[test]
    fn a_port_that_is_listened_on_is_in_use() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let words = format!("-netdev user,id=n0,hostfwd=tcp::0-:22,hostfwd=tcp:127.0.0.1:{port}-:80");
        let error = check(&[&words]).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "TCP port {port} of 127.0.0.1 is in use on this host; set netdev.n0.hostfwd to a free port"
            )
        );
        ended(listener);
        check(&[&words]).unwrap();
    }

    #[test]
    fn clones_do_not_share_a_mac_or_a_tap() {
        let line = "-device virtio-net-pci,id=net0,netdev=n0,mac=52:54:00:AA:00:01";
        let other = line.replace("AA", "aa");
        let error = check(&[line, &other]).unwrap_err().to_string();
        assert_eq!(
            error,
            "a and b would both use MAC address 52:54:00:aa:00:01; set device.net0.mac with {n} in its value"
        );
        let taps = ["-netdev tap,id=n0,ifname=towline-no0", "-netdev tap,id=n0,ifname=towline-no1"];
        check(&taps).unwrap();
        assert!(matches!(check(&[taps[0], taps[0]]), Err(InUse::Shared { .. })));
    }

    #[test]
    fn sockets_are_there_for_clients_and_not_for_servers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let server = format!("-chardev socket,id=c0,server=on,wait=off,path={}", path.display());
        let client = format!("-chardev socket,id=c0,path={}", path.display());
        check(&[&server]).unwrap();
        assert!(
            matches!(check(&[&client]), Err(InUse::SocketMissing { setting, .. }) if setting == "chardev.c0.path")
        );
        let listener = UnixListener::bind(&path).unwrap();
        assert!(matches!(check(&[&server]), Err(InUse::SocketExists { .. })));
        check(&[&client, &client]).unwrap();
        // Left by a QEMU that was killed.
        ended(listener);
        check(&[&server]).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "a file").unwrap();
        assert!(matches!(check(&[&server]), Err(InUse::SocketExists { .. })));
    }

    #[test]
    fn a_server_with_a_full_queue_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _waiting = UnixStream::connect(&path).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let server = format!("-chardev socket,id=c0,server=on,wait=off,path={}", path.display());
            sender.send(check(&[&server]))
        });
        let checked = receiver.recv_timeout(Duration::from_secs(60));
        assert!(matches!(checked, Ok(Err(InUse::SocketExists { .. }))), "{checked:?}");
    }

    #[test]
    fn rules_of_the_user_network_have_ports() {
        let any = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        assert_eq!(forwarded_port("tcp::2222-:22"), Some(Resource::Tcp(any, 2222)));
        assert_eq!(
            forwarded_port("udp:127.0.0.1:53-10.0.2.15:53"),
            Some(Resource::Udp([127, 0, 0, 1].into(), 53))
        );
        assert_eq!(forwarded_port("unix:/run/a-:22"), None);
        assert_eq!(forwarded_port("tcp:a"), None);
    }
}
