//! The guest that is recorded: which QEMU has it, whether it can be recorded now, and the lock by which one process records it.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::Pid;
use towline_channel::Cancel;
use towline_qmp as qmp;
use towline_qmp::commands::RunState;

use super::error::Error;
use crate::in_place;
use crate::journal;
use crate::process::{Process, ProcessState};
use crate::qemu::{self, Drive, Qemu};

/// The QEMU of a guest that is recorded.
#[derive(Debug)]
pub(super) struct RecordedGuest {
    pub(super) process: Arc<Process>,
    /// The image on which it runs.
    pub(super) image: Option<PathBuf>,
    /// Bound as long as this process records it.
    _lock: UnixListener,
}

/// State of a guest at the beginning of an interval.
#[derive(Debug)]
pub(super) enum GuestState {
    /// It runs, and writes to these drives.
    Runs(Vec<Drive>),
    /// It changes nothing, or cannot be recorded now, for this reason.
    Waits(String),
    /// Its QEMU has ended.
    Ended,
    /// Another QEMU has the monitor's name now.
    Replaced,
}

impl RecordedGuest {
    pub(super) fn connect(socket: &Path, cancel: &Cancel) -> Result<Self, Error> {
        let mut qemu = repaired(socket, cancel)?;
        let process = qemu.shared_process();
        let lock = lock(&process, socket)?;
        let image =
            in_place::mapped_image(&mut qemu).map_err(|error| Error::Guest(Box::new(error.into())))?;
        Ok(Self { process, image, _lock: lock })
    }

    /// Returns true if its QEMU has exited, and no other one has its monitor.
    pub(super) fn has_ended(&self, socket: &Path, cancel: &Cancel) -> bool {
        self.process.state() == ProcessState::Exited
            && inspect(socket, cancel).is_err_and(|error| error.has_no_listener())
    }

    /// The guest's state.
    pub(super) fn state(&self, socket: &Path, cancel: &Cancel) -> Result<GuestState, qemu::Error> {
        let mut qemu = match inspect(socket, cancel) {
            Err(error) if error.has_no_listener() => return Ok(GuestState::Ended),
            qemu => qemu?,
        };
        if !self.is_in(&qemu) {
            return Ok(GuestState::Replaced);
        }
        let (migration, mut status) = qemu.migration_and_status()?;
        if let Some(migration) = migration.status.filter(|migration| !migration.is_idle()) {
            return Ok(GuestState::Waits(format!("it is being migrated ({})", migration.as_str())));
        }
        if status.status == RunState::PAUSED {
            // Perhaps by a towline that was killed, or that had no reply to its `cont`. A monitor serves one connection.
            drop(qemu);
            qemu = repaired(socket, cancel)?;
            status = qemu.status()?;
        }
        if status.status != RunState::RUNNING {
            return Ok(GuestState::Waits(format!("its state is `{}`", status.status.as_str())));
        }
        Ok(GuestState::Runs(qemu.written_drives()?))
    }

    /// Returns true unless this is another QEMU.
    pub(super) fn is_in(&self, qemu: &Qemu) -> bool {
        !self.process.is_known() || self.process.is_same(qemu.process())
    }
}

/// Connects to the monitor, without changes.
pub(super) fn inspect(socket: &Path, cancel: &Cancel) -> Result<Qemu, qemu::Error> {
    Qemu::inspect(socket, &options(cancel))
}

/// As [`inspect`]; undoes what a killed towline has left, such as a pause. Not while another towline is at work there.
fn repaired(socket: &Path, cancel: &Cancel) -> Result<Qemu, qemu::Error> {
    let qemu = match Qemu::connect(socket, &options(cancel)) {
        Err(qemu::Error::Journal(journal::Error::InUse { .. })) => return inspect(socket, cancel),
        qemu => qemu?,
    };
    if let Some(repaired) = qemu.repaired() {
        tracing::warn!("{repaired}");
    }
    Ok(qemu)
}

fn options(cancel: &Cancel) -> qmp::Options {
    qmp::Options { interrupt: Some(cancel.descriptor()), ..qmp::Options::default() }
}

/// Binds the name of the guest, which the kernel releases with this process.
fn lock(process: &Process, socket: &Path) -> Result<UnixListener, Error> {
    let guest = match process.identity() {
        Some((pid, start_time)) => format!("{pid}-{start_time}"),
        None => socket.display().to_string(),
    };
    let failed = |source| Error::Lock { socket: socket.to_owned(), source };
    let name = format!("towline-record-{guest}");
    let address = SocketAddr::from_abstract_name(&name).map_err(failed)?;
    match UnixListener::bind_addr(&address) {
        Ok(lock) => Ok(lock),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            let pid = holder(&name).ok().map(Pid::as_raw_pid);
            Err(Error::GuestInUse { socket: socket.to_owned(), pid })
        }
        Err(source) => Err(failed(source)),
    }
}

/// The process that has this name. It accepts no connections: in its queue there may be no room for this one.
fn holder(name: &str) -> rustix::io::Result<Pid> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket_peercred(&socket)?.pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each attempt stays in the queue of the one that has the guest.
    #[test]
    fn a_guest_that_is_recorded_is_refused_however_often() {
        let own = i32::try_from(std::process::id()).unwrap();
        let socket = &PathBuf::from(format!("/run/vm/of-test-{own}.qmp"));
        let unknown = Process::Unknown { reason: "of a test".into() };
        let _lock = lock(&unknown, socket).unwrap();
        let refused = || lock(&unknown, socket).unwrap_err();
        assert!(matches!(refused(), Error::GuestInUse { pid: Some(pid), .. } if pid == own));
        for _ in 0..1 << 13 {
            assert!(matches!(refused(), Error::GuestInUse { .. }));
        }
    }
}
