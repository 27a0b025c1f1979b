//! The policy of a process.

use std::path::{Path, PathBuf};

/// TCP ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedPorts {
    /// Every port.
    Any,
    /// Only these ports.
    Only(Vec<u16>),
}

/// Permissions that remain. The default is a device that needs only its open descriptors.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    /// Readable files, and directories with everything below them.
    pub read: Vec<PathBuf>,
    /// Directories in which files are created, written and removed.
    pub write: Vec<PathBuf>,
    /// Sockets that exist, and are removed at the end.
    pub remove: Vec<PathBuf>,
    /// Sockets that are created between the two steps, and removed at the end.
    pub listen: Vec<PathBuf>,
    /// Ports to listen on.
    pub bind: AllowedPorts,
    /// Ports to connect to.
    pub connect: AllowedPorts,
    /// True if Unix sockets are connected to.
    pub connects_unix: bool,
    /// True if the host's own vsock is connected to.
    pub connects_vsock: bool,
    /// True if requests are submitted to io_urings that exist before, are restricted to operations on open
    /// descriptors (`IORING_REGISTER_RESTRICTIONS`), and are not forwarded. None can be created.
    pub submits_to_rings: bool,
    /// True if the MTU of network interfaces is set, with the privilege for it.
    pub sets_mtu: bool,
    /// True if files are opened and sockets created: a copy, as opposed to a device.
    pub opens: bool,
    /// True if other processes' files and memory are read, which landlock forbids: only system calls are
    /// filtered then.
    pub inspects_processes: bool,
    /// A process that was started before, and whose end is awaited.
    pub child: Option<u32>,
    /// True if host names are resolved, for which the C library loads plugins and uses UDP.
    pub resolves_names: bool,
}

/// Returns the directory of a file; that of a bare name is `.`.
pub fn parent_directory(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

impl Default for AllowedPorts {
    fn default() -> Self {
        Self::Only(Vec::new())
    }
}

impl AllowedPorts {
    /// Permits a port.
    pub fn add(&mut self, port: u16) {
        if let Self::Only(ports) = self {
            ports.push(port);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
