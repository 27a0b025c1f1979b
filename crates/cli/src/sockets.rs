//! Unix sockets of this process: their permissions, and descriptors that are sent on one.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::umask;
use towline_channel::{Address, Listener};
use towline_vhost_user::FrontendSource;

use crate::exit::UsageError;

/// Error of a process that inherited LISTEN_FDS of another one.
const NO_ACTIVATION: &str = "socket activation: LISTEN_FDS is for another process (LISTEN_PID); give --socket PATH or --fd N, or start the unit";
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
    /// Listens at the path of a device, or takes the socket over that its command line or a service manager provides.
    pub(crate) fn frontends(&self, path: Option<&Path>, fd: Option<i32>) -> Result<FrontendSource> {
        let text = match (path, fd) {
            (Some(path), _) => return self.listen(path),
            (None, None) if std::env::var_os("LISTEN_FDS").is_none() => {
                "no socket: give --socket PATH or --fd N, or use socket activation (LISTEN_FDS)"
            }
            _ if self.socket_group.is_some() => {
                "--socket-group is for a socket at --socket PATH; an inherited one has its owner's"
            }
            (None, Some(number)) => {
                let fd = inherited(&[number])?.pop().context("one descriptor")?;
                return Ok(FrontendSource::from_fd(fd)?);
            }
            (None, None) => return FrontendSource::from_service_manager()?.context(NO_ACTIVATION),
        };
        Err(UsageError(text.into()).into())
    }

    /// Listens at a path. At no moment does the socket have wider permissions than requested.
    pub(crate) fn listen(&self, path: &Path) -> Result<FrontendSource> {
        let listen = || Ok(FrontendSource::Listen(Listener::bind(&Address::Unix(path.to_owned()))?));
        let Some(group) = &self.socket_group else { return listen() };
        let gid = gid(group)?;
        let listener = private(listen)?;
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

/// Takes ownership of inherited descriptors.
pub(crate) fn inherited(numbers: &[i32]) -> Result<Vec<OwnedFd>> {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!("descriptor {} is given twice: give each queue a separate one", pair[0]);
    }
    if let Some(number) = sorted.first().filter(|number| **number <= 2) {
        bail!("descriptor {number} is standard input, output or error: give one above 2");
    }
    let own = |number: &i32| {
        towline_channel::take_over(*number).with_context(|| {
            format!("descriptor {number} is not open: start towline without close-on-exec on it")
        })
    };
    numbers.iter().map(own).collect()
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
