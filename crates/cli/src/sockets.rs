//! Unix sockets of this process: their permissions, and descriptors that are sent on one.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::umask;
use towline_channel::{Address, Listener};

use crate::exit::UsageError;

/// Permissions with `--socket-group`.
const GROUP_MODE: Mode = Mode::from_raw_mode(0o660);

/// Permissions of the sockets of devices.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct SocketArgs {
    /// Group of the socket at --socket, by name or number; its mode is then 660, else the umask's
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
}

impl SocketArgs {
    /// Refuses a device for which neither the command line nor a service manager provides a socket, and the group without a path to
    /// listen on.
    pub(crate) fn check(&self, path: Option<&Path>, fd: Option<i32>) -> Result<(), UsageError> {
        let text = if path.is_none() && fd.is_none() && std::env::var_os("LISTEN_FDS").is_none() {
            "no socket: give --socket PATH or --fd N, or use socket activation (LISTEN_FDS)"
        } else if self.socket_group.is_some() && path.is_none() {
            "--socket-group is for a socket at --socket PATH; an inherited one has its owner's"
        } else {
            return Ok(());
        };
        Err(UsageError(text.into()))
    }

    /// Listens at a path. At no moment does the socket have wider permissions than requested.
    pub(crate) fn listen(&self, path: &Path) -> Result<Listener> {
        let address = Address::Unix(path.to_owned());
        let Some(group) = &self.socket_group else { return Ok(Listener::bind(&address)?) };
        let gid = gid(group)?;
        let listener = private(|| Ok(Listener::bind(&address)?))?;
        open_to_group(path, gid).with_context(|| format!("--socket-group {group}: {}", path.display()))?;
        Ok(listener)
    }
}

/// Creates sockets that only their owner may connect to, by the umask. It applies to all threads, of which no
/// other creates files then.
pub(crate) fn private<T>(create: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = umask(Mode::from_raw_mode(0o177));
    let created = create();
    umask(before);
    created
}

/// Sends bytes with a descriptor.
pub(crate) fn send_with(socket: impl AsFd, bytes: &[u8], descriptor: BorrowedFd<'_>) -> Result<(), Errno> {
    let fds = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fits = control.push(SendAncillaryMessage::ScmRights(&fds));
    assert!(fits, "the space is for one descriptor");
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Changes the group of an existing socket, and then its permissions.
fn open_to_group(path: &Path, gid: Gid) -> Result<(), Errno> {
    // By a descriptor, so both apply to the same file, and symbolic links are not followed.
    let file =
        rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::chownat(&file, c"", None, Some(gid), AtFlags::EMPTY_PATH)?;
    let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::chmodat(CWD, opened, GROUP_MODE, AtFlags::empty())
}

/// Finds a group by name or number.
fn gid(group: &str) -> Result<Gid> {
    let by_name = || Some(uzers::get_group_by_name(group)?.gid());
    let number = group.parse().ok().or_else(by_name).filter(|number| *number != u32::MAX);
    number.map(Gid::from_raw).with_context(|| format!("--socket-group {group}: no such group"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::sync::Mutex;

    use rustix::process::geteuid;

    use super::*;
    use crate::lock::lock;

    fn found(path: &Path) -> (u32, u32) {
        let found = path.symlink_metadata().unwrap();
        (found.permissions().mode() & 0o777, found.gid())
    }

    /// The umask is the whole process's, so tests that change it take turns.
    static UMASK: Mutex<()> = Mutex::new(());

    #[test]
    fn sockets_have_the_requested_permissions_and_group() {
        let _turn = lock(&UMASK);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let own = rustix::process::getegid().as_raw();
        let args = |group: &str| SocketArgs { socket_group: Some(group.to_owned()) };
        let other = if geteuid().is_root() { 12345 } else { own };
        let listener = args(&other.to_string()).listen(&path).unwrap();
        assert_eq!(found(&path), (0o660, other));
        drop(listener);
        assert!(!path.exists());
        let listener = private(|| Ok(Listener::bind(&Address::Unix(path.clone()))?)).unwrap();
        assert_eq!(found(&path).0, 0o600);
        drop(listener);
        let error = args("no-such-group").listen(&path).unwrap_err();
        assert!(error.to_string().contains("no such group"), "{error}");
    }
}
