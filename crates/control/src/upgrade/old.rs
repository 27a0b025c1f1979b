//! The QEMU to replace: its process, its command line, its memory, none of which is changed; the memory of the new QEMU, shared with the
//! old one, or mapped from the image that the guest runs on; and the QEMUs that earlier upgrades of its guest have left.

use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, geteuid, pidfd_send_signal};
use towline_channel::Cancel;
use towline_compat::facts::IncomingState;
use towline_image::Image;
use towline_launch::{
    CommandLine, Confinement, MappedMemory, QemuVersion, RunningGuest, RuntimeRoot, Sharing,
};
use towline_qmp::commands::{MigrationStatus, QueryStatus, RunState};
use towline_qmp::{self as qmp, Client, Options};

use super::error::Error;
use crate::generations::ManagedGuest;
use crate::in_place::{self, GuestBackends};
use crate::moves::{self, MoveEnd};
use crate::plan::{self, UpgradeMemory};
use crate::qemu::{Qemu, QemuState, generation_id, is_live};
use crate::temporary_names::{self, StagingName};

/// Namespaces in which `/proc` and the paths of the old QEMU have the same meaning here. The others are
/// compared with the rest of its confinement.
const NAMESPACES: [&str; 4] = ["mnt", "net", "pid", "user"];
/// Suffix that the kernel appends to the name of a replaced program.
const DELETED: &str = " (deleted)";
/// The first QEMU that reports the addresses of its memory, without which nothing proves what it maps.
const PROVES_SINCE: QemuVersion = QemuVersion { major: 8, minor: 2 };
/// Time limit of the greeting and of each reply, where another client may have the monitor.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// The same after a failure, which a user may have caused by Ctrl-C.
const FAILED_REPLY_TIMEOUT: Duration = Duration::from_millis(500);

/// See the module's text.
#[derive(Debug)]
pub(super) struct OldQemu {
    /// The monitor's socket.
    pub(super) socket: String,
    /// Version, for messages.
    pub(super) version: String,
    /// The program; `None` if its name is not that of a QEMU.
    pub(super) program: Option<PathBuf>,
    /// The program's name, for messages.
    pub(super) program_text: String,
    pub(super) pid: i32,
    /// Confinement that the new QEMU must have as well.
    pub(super) confinement: Confinement,
    pub(super) working_directory: PathBuf,
    pub(super) command_line: CommandLine,
    /// Machine type, with its version.
    pub(super) machine: String,
    pub(super) backends: GuestBackends,
    /// True if it has the guest, and no other QEMU has run it since.
    pub(super) has_guest: bool,
    /// The guest's vmgenid, if it has one.
    pub(super) generation_id: Option<String>,
    /// Chardevs of its vsocks.
    pub(super) vsock_chardevs: Vec<String>,
}

impl OldQemu {
    /// Examines the QEMU whose monitor is at `path`.
    pub(super) fn examine(path: &Path, cancel: &Cancel) -> Result<Self, Error> {
        let interrupt = Some(cancel.descriptor());
        let mut qemu = Qemu::inspect(path, &Options { interrupt, ..Options::default() })?;
        let socket = qemu.socket().to_owned();
        if let Some(guest) = ManagedGuest::of_qemu(&qemu)? {
            return Err(guest.refuse().into());
        }
        let unknown =
            |reason: &str| Error::UnknownProcess { socket: socket.clone(), reason: reason.to_owned() };
        let pid = qemu.process().known_pid().map_err(unknown)?;
        let confinement = confinement(pid.cast_unsigned())?;
        check_user(pid, &confinement)?;
        NAMESPACES.into_iter().try_for_each(|namespace| check_namespace(pid, namespace))?;
        let program_text = read(pid, "exe", fs::read_link)?.to_string_lossy().into_owned();
        let program = PathBuf::from(program_text.strip_suffix(DELETED).unwrap_or(&program_text));
        let program = Some(program).filter(|program| program.file_name().is_some_and(is_qemu));
        let words = read(pid, "cmdline", fs::read)?;
        let mut command_line =
            CommandLine::parse_proc(&words).map_err(|source| Error::CommandLine { pid, source })?;
        let working_directory = read(pid, "cwd", fs::read_link)?;
        let drives: Vec<_> = qemu.drives()?.into_iter().map(|drive| drive.files).collect();
        command_line.use_current_files(&drives, &working_directory);
        Ok(Self {
            version: qemu.version_text(),
            has_guest: has_guest(qemu.facts()),
            machine: qemu.facts().machine.clone(),
            backends: in_place::guest_backends(&mut qemu)?,
            generation_id: generation_id(qemu.client())?,
            vsock_chardevs: plan::vsock_chardevs(&mut qemu),
            confinement,
            working_directory,
            socket,
            program,
            program_text,
            pid,
            command_line,
        })
    }
}

/// Returns true if the QEMU of this monitor has ended: whatever has failed, its guest is not there any more.
pub fn has_ended(monitor: &Path) -> bool {
    // A QEMU that is ending may still be connected to.
    let options = options(FAILED_REPLY_TIMEOUT);
    let status = Client::connect(monitor, &options).and_then(|mut qemu| qemu.execute(&QueryStatus));
    matches!(
        status,
        Err(qmp::Error::Missing { .. } | qmp::Error::Refused { .. } | qmp::Error::Disconnected { .. })
    )
}

fn options(timeout: Duration) -> Options {
    Options { deadline: timeout, greeting_deadline: timeout, ..Options::default() }
}

/// Returns true if no other QEMU can have run the guest: it runs here, or is paused and was not sent.
fn has_guest(facts: &QemuState) -> bool {
    let is_sent = facts.migration.status == Some(MigrationStatus::COMPLETED);
    is_live(&facts.status) || facts.status.status == RunState::PAUSED && !is_sent
}

fn is_qemu(name: &OsStr) -> bool {
    name.as_bytes().starts_with(b"qemu")
}

/// Confinement of a process.
pub(super) fn confinement(pid: u32) -> Result<Confinement, Error> {
    Confinement::of(pid).map_err(|source| Error::Proc { path: format!("/proc/{pid}").into(), source })
}

/// The new QEMU must have no other rights than the old one.
fn check_user(pid: i32, confinement: &Confinement) -> Result<(), Error> {
    let expected = geteuid().as_raw();
    match confinement.user().unwrap_or(u32::MAX) {
        found if found == expected => Ok(()),
        found => Err(Error::OtherUser { pid, found, expected }),
    }
}

fn check_namespace(pid: i32, namespace: &'static str) -> Result<(), Error> {
    let name = format!("ns/{namespace}");
    let is_own = read(pid, &name, fs::read_link)? == read("self", &name, fs::read_link)?;
    if is_own { Ok(()) } else { Err(Error::OtherNamespace { pid, namespace }) }
}

/// A file or a link of a process in `/proc`, read like this.
fn read<T>(
    process: impl Display,
    name: &str,
    read: impl FnOnce(PathBuf) -> io::Result<T>,
) -> Result<T, Error> {
    let path = PathBuf::from(format!("/proc/{process}/{name}"));
    read(path.clone()).map_err(|source| Error::Proc { path, source })
}

/// The image that the old QEMU maps copy-on-write, locked as its readers do. The new one maps it by the same option.
pub(super) fn image(old: &OldQemu) -> Result<Option<(Arc<Image>, File)>, Error> {
    let mut private = old.backends.private.iter();
    let Some((backend, file)) = private.find_map(|one| Some((&one.backend, one.path.as_ref()?))) else {
        return Ok(None);
    };
    let refused = |backend: &str, path: &str, reason: String| Error::PrivateFile {
        backend: backend.to_owned(),
        path: path.to_owned(),
        reason,
    };
    if let Some(other) = private.find(|other| other.path.as_ref().is_some_and(|path| path != file)) {
        let reason = format!("memory of backend {backend:?} is in {file}");
        return Err(refused(&other.backend, other.path.as_deref().unwrap_or_default(), reason));
    }
    let opened = Image::open(&old.working_directory.join(file));
    let image = Arc::new(opened.map_err(|error| refused(backend, file, error.to_string()))?);
    let lock = in_place::locked(&image).map_err(|reason| refused(backend, file, reason.to_string()))?;
    Ok(Some((image, lock)))
}

/// The shared memory that the new QEMU maps.
pub(super) fn shared_memory(
    backends: &GuestBackends,
    requested: UpgradeMemory,
    version: QemuVersion,
) -> Result<MappedMemory, Error> {
    let anonymous = backends.private.iter().find(|private| private.path.is_none());
    if let Some(private) = anonymous.filter(|_| requested == UpgradeMemory::InPlace) {
        let (backend, kind) = (private.backend.clone(), private.kind.clone());
        return Err(Error::PrivateMemory { backend, kind, reason: private.reason.clone() });
    }
    let blocks = match requested {
        UpgradeMemory::Copied => Vec::new(),
        UpgradeMemory::InPlace if version < PROVES_SINCE => {
            return Err(Error::OldTarget { found: version });
        }
        UpgradeMemory::InPlace => backends.shared.clone(),
    };
    Ok(MappedMemory { blocks, sharing: Sharing::Shared })
}

// New QEMUs of upgrades whose towline was killed before it recorded a decision.
//
// ```text
//   numbered, of no towline, in no record ─┬─ waits, or has a part of the guest ────────────────────────► ended
//                                          ├─ paused, with the memory of the old QEMU, which has the guest ─► ended
//                                          └─ anything else: it may have a guest ────────────────────────► left alone
// ```

/// Ends the QEMUs of that name that hold no guest: nothing else would, and they map the guest's memory. One
/// that a record of a move names is left to `towline resume`.
pub(super) fn end_leftovers(root: &RuntimeRoot, base: &str, old: &OldQemu) {
    let Ok(guests) = root.guests() else { return };
    for guest in guests.iter().flatten().filter(|guest| is_leftover(guest, base)) {
        if is_useless(guest, old) {
            tracing::info!(name = guest.name, pid = guest.pid, "ending a QEMU of a killed towline");
            kill(guest);
        }
    }
}

fn is_leftover(guest: &RunningGuest, base: &str) -> bool {
    let number = guest.name.strip_prefix(base).and_then(|rest| rest.strip_prefix('.'));
    let is_numbered = number.is_some_and(|number| number.parse::<u32>().is_ok());
    let has_owner = Path::new("/proc").join(guest.owner_pid.to_string()).exists();
    is_numbered && guest.is_detached && !has_owner
}

/// See the picture above.
fn is_useless(guest: &RunningGuest, old: &OldQemu) -> bool {
    let Ok(qemu) = Qemu::inspect(&guest.qmp, &options(REPLY_TIMEOUT)) else { return false };
    let facts = qemu.facts();
    match facts.incoming {
        IncomingState::Deferred => true,
        IncomingState::Listening | IncomingState::Loading => !may_be_recorded(guest.pid),
        IncomingState::No => {
            let is_paused = facts.status.status == RunState::PAUSED && !facts.status.running;
            is_paused && old.has_guest && maps_memory_of(guest.pid, old) && !may_be_recorded(guest.pid)
        }
    }
}

/// Returns true if the record of a move names this process, or may do so, as it cannot be read.
fn may_be_recorded(pid: u32) -> bool {
    let Ok((moves, bad)) = moves::list() else { return true };
    let is_it = |end: &MoveEnd| matches!(end, MoveEnd::Qemu { pid: Some(recorded), .. } if recorded.cast_unsigned() == pid);
    bad.iter().any(|error| error.may_be_of(is_it))
        || moves.iter().any(|listed| is_it(&listed.record.source) || is_it(&listed.record.destination))
}

/// Returns true if the process has a file open that is memory of the old QEMU.
fn maps_memory_of(pid: u32, old: &OldQemu) -> bool {
    let numbers = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let memory: Vec<_> = old.backends.shared.iter().filter_map(|shared| numbers(&shared.path)).collect();
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let mut open = descriptors.filter_map(|entry| numbers(&entry.ok()?.path()));
    open.any(|file| memory.contains(&file))
}

fn kill(guest: &RunningGuest) {
    let Ok(Some(process)) = guest.process() else { return };
    let names = temporary_names::staging_names_of_process(guest.pid);
    if let Err(errno) = pidfd_send_signal(&process, Signal::KILL) {
        tracing::debug!(pid = guest.pid, %errno, "it has ended");
    }
    names.iter().for_each(StagingName::remove);
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc::channel;
    use std::thread;

    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, listen, socket_with};

    use super::*;

    /// As QEMU's, which accepts one client, and lets one more wait.
    #[test]
    fn a_monitor_with_a_full_queue_has_not_ended() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.qmp");
        let listener = UnixListener::bind(&path).unwrap();
        listen(&listener, 1).unwrap();
        let address = SocketAddrUnix::new(&path).unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let mut waiting: Vec<OwnedFd> = Vec::new();
        loop {
            let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
            match connect(&client, &address) {
                Ok(()) => waiting.push(client),
                Err(errno) => break assert_eq!(errno, Errno::AGAIN),
            }
        }
        let (sender, answer) = channel();
        let monitor = path.clone();
        thread::spawn(move || sender.send(has_ended(&monitor)));
        assert_eq!(answer.recv_timeout(Duration::from_secs(60)), Ok(false));
        drop((listener, waiting));
        assert!(has_ended(&path));
        std::fs::remove_file(&path).unwrap();
        assert!(has_ended(&path));
    }
}
