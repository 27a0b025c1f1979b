//! Connections of a towline to the two QEMUs, cut from outside: its descriptors are duplicated through a
//! pidfd, and shut down.

use std::os::fd::OwnedFd;

use rustix::net::{Shutdown, SocketAddrAny, SocketAddrUnix, getpeername, getsockname, shutdown};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Names of the stream's sockets in towline's private directories.
const STREAMS: [&str; 2] = ["source.sock", "destination.sock"];

/// Connections of process `pid` that carry a stream: main channels and lanes, at both sides. May be empty.
pub(super) fn streams(pid: u32) -> Vec<OwnedFd> {
    let Ok(pid) = i32::try_from(pid) else { return Vec::new() };
    let Some(process) = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else {
        return Vec::new();
    };
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let taken =
        numbers.filter_map(|number: i32| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok());
    taken.filter(is_stream).collect()
}

/// Shuts it down: both sides see it end.
pub(super) fn cut(connection: &OwnedFd) {
    // It may have ended already.
    let _ = shutdown(connection, Shutdown::Both);
}

fn is_stream(socket: &OwnedFd) -> bool {
    // A listener has a name as well, but no peer.
    let Ok(peer) = getpeername(socket) else { return false };
    let names = [getsockname(socket).ok(), peer];
    names.into_iter().flatten().any(|name| {
        let path = unix_path(name);
        STREAMS.iter().any(|stream| path.ends_with(stream))
    })
}

fn unix_path(name: SocketAddrAny) -> String {
    let name = SocketAddrUnix::try_from(name).ok();
    let path = name.as_ref().and_then(SocketAddrUnix::path);
    path.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
}
