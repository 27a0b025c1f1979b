//! Another QEMU under a running guest of this host, with the guest's memory left where it is.
//!
//! ```text
//!   prepare ─► Prepared ─ start ─► Reversible ─ check ─ switch_over ─────────────────► Upgraded
//!   old QEMU examined,             new QEMU waits,                   it has the guest, and the old one has exited:
//!   command line rewritten         its sockets under staging names   sockets get their names
//!                                  └─ dropped: the new QEMU is killed, and nothing of it is left
//! ```
//! Until the decision to run the guest in the new QEMU is recorded, everything is undone after a failure, and the guest continues in
//! the old QEMU: [`Reversible`] is that state as a type. `plan::upgrade` switches over, by the state machine of every move. From
//! then on the old QEMU never runs the guest again, because the new one writes to the memory that both map.
//!
//! If towline is killed, its move record says which of the two it was, and `towline resume` finishes the move. A new QEMU that
//! waited for a towline that was killed is ended by the next upgrade of the guest (`old`).
//!
//! Out of scope: devices of other processes, except vsocks that are detached meanwhile, and cards whose process serves both QEMUs. Limits: Linux, QEMUs of one user on one host.

mod command_line;
mod error;
mod old;

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use towline_channel::Cancel;
use towline_launch::{
    AllowedCommandLine, Confinement, GuestDirectory, GuestName, HostArguments, IncomingOption, Launcher,
    Lifetime, ProcessSandbox, QemuVersion, RunningQemu, RuntimeError, RuntimeRoot, Setting,
};

use crate::plan::{self, CopyReport, Failure, GuestAfterFailure, Observer, UpgradeMemory, UpgradeRequest};
use crate::temporary_names::StagingName;
use command_line::{OldQemuFacts, Rewritten, refuse_end_with_parent, rewrite};
use old::OldQemu;

pub use command_line::{Cards, Vsocks};
pub use error::{Error, IncompatibleSetting};
pub use old::has_ended;

/// Time limit for the end of a new QEMU that is killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Runtime directories (`NAME.1`, `NAME.2`, …) tried before giving up.
const NAMES_MAX: u32 = 64;

/// Request for an upgrade.
#[derive(Debug, Clone)]
pub struct UpgradeOptions {
    /// QMP socket of the QEMU that runs the guest.
    pub old: PathBuf,
    /// The new QEMU; `None` for the program of the old one, as it is on disk now.
    pub binary: Option<PathBuf>,
    /// Values for its options.
    pub settings: Vec<Setting>,
    /// Further arguments of it.
    pub arguments: Vec<OsString>,
    /// Memory that cannot be left where it is.
    pub memory: UpgradeMemory,
    /// Devices that QEMU does not migrate.
    pub vsocks: Vsocks,
    /// Network cards of other processes.
    pub cards: Cards,
    /// Maximum downtime, where memory is sent.
    pub downtime_limit: Duration,
    /// Directory of the guests that towline starts.
    pub root: RuntimeRoot,
}

/// An upgrade of which nothing was started.
#[derive(Debug)]
pub struct Prepared {
    request: UpgradeRequest,
    old: String,
    directory: GuestDirectory,
    host: HostArguments,
    guest: AllowedCommandLine,
    names: Vec<StagingName>,
    confinement: Confinement,
    /// Lock of the image that the guest runs on, for the new QEMU.
    image_lock: Option<File>,
}

/// A new QEMU that waits for the guest, which the old one runs. Dropping it ends the new QEMU and removes its files.
#[derive(Debug)]
#[must_use]
pub struct Reversible {
    request: UpgradeRequest,
    // `None` once it is irreversible.
    new: Option<RunningQemu>,
    names: Vec<StagingName>,
}

/// A guest that continues in another QEMU.
#[derive(Debug)]
pub struct Upgraded {
    /// Report of the move.
    pub report: CopyReport,
    /// Process of the new QEMU.
    pub pid: u32,
    /// Its name for `towline ps`.
    pub name: GuestName,
    /// The monitor that towline started it with.
    pub monitor: PathBuf,
    /// Sockets and files of the old QEMU that are the new one's now.
    pub published: Vec<PathBuf>,
    /// Those that could not be renamed, with the reason.
    pub not_published: Vec<String>,
}

/// Examines the old QEMU and makes the command line of the new one. Nothing is started or changed, except for new QEMUs that
/// killed towlines have left waiting, which are ended.
///
/// # Errors
/// Everything of the old QEMU's command line, process or memory that excludes an upgrade.
pub fn prepare(options: &UpgradeOptions, cancel: &Cancel) -> Result<Prepared, Error> {
    let old = OldQemu::examine(&options.old, cancel)?;
    let host = host_arguments(options, &old)?;
    let version = QemuVersion::of_binary(&host)?;
    let (image, image_lock) = old::image(&old)?.unzip();
    let memory = old::shared_memory(&old.backends, options.memory, version)?;
    let number = fastrand::u32(..);
    let context = OldQemuFacts {
        version,
        working_directory: &old.working_directory,
        machine: &old.machine,
        generation_id: old.generation_id.as_deref(),
        settings: &old.command_line.canonical(&options.settings),
        vsocks: options.vsocks,
        vsock_chardevs: &old.vsock_chardevs,
        cards: options.cards,
        number,
    };
    let Rewritten { command_line, name, names, cards } =
        rewrite(&old.command_line, &context).map_err(Error::Refused)?;
    let base = base_name(name.as_deref(), &options.old);
    let mut host = host;
    if let Some(name) = name {
        // Behind the launcher's own, which is that of the directory.
        host.arguments.splice(0..0, ["-name".into(), name.into()]);
    }
    let mut guest = command_line.accept(&host)?;
    if !memory.blocks.is_empty() {
        memory.apply(&mut guest, version)?;
    }
    if let Some(refusal) = refuse_end_with_parent(&guest.whole()) {
        return Err(Error::Refused(vec![refusal]));
    }
    old::end_leftovers(&options.root, &base, &old);
    cards.iter().try_for_each(|card| command_line::check_second_frontend(&card.socket, cancel))?;
    let directory = claim(&options.root, &base)?;
    let request = UpgradeRequest {
        old: options.old.clone(),
        new: directory.qmp_path(),
        detach_vsock: options.vsocks == Vsocks::Detached,
        card_chardevs: cards.into_iter().map(|card| card.chardev).collect(),
        memory: options.memory,
        image,
        downtime_limit: options.downtime_limit,
    };
    tracing::info!(old = old.socket, pid = old.pid, version = old.version, to = %version, "prepared an upgrade");
    let text = format!("QEMU {} (process {})", old.version, old.pid);
    let confinement = old.confinement;
    Ok(Prepared { request, old: text, directory, host, guest, names, confinement, image_lock })
}

impl Prepared {
    /// The old QEMU, for people.
    pub fn old(&self) -> &str {
        &self.old
    }

    /// Program and arguments of the new QEMU for people, without secrets.
    pub fn shown_command(&self) -> Vec<OsString> {
        let program = self.host.binary.clone().into_os_string();
        std::iter::once(program).chain(self.guest.to_shown_arguments()).collect()
    }

    /// Starts the new QEMU, which waits for the guest.
    ///
    /// # Errors
    /// It does not start; its own message is in the error. Nothing of it is left.
    pub fn start(self) -> Result<Reversible, Error> {
        let Self { request, directory, host, guest, names, confinement, image_lock, .. } = self;
        let mut launcher = Launcher::new(directory);
        launcher.incoming = IncomingOption::Defer;
        launcher.lifetime = Lifetime::Detached;
        launcher.image = request.image.as_ref().map(|image| image.path().to_owned());
        launcher.descriptors.extend(image_lock.map(Into::into));
        // As the old one: its own -sandbox is among its options.
        launcher.sandbox = ProcessSandbox::Off;
        launcher.confinement = Some(confinement.clone());
        let started = launcher.start(&guest, &host);
        let new = started.inspect_err(|_| names.iter().for_each(StagingName::remove))?;
        names.iter().for_each(StagingName::adopt_permissions);
        let pid = new.pid();
        let started = Reversible { request, new: Some(new), names };
        // It has given up what its options say by the time that its monitor answers.
        let differences = confinement.differences(&old::confinement(pid)?);
        if differences.is_empty() { Ok(started) } else { Err(Error::Confinement(differences)) }
    }
}

impl Reversible {
    /// Checks that the guest would run in the new QEMU, in the memory that it has.
    ///
    /// # Errors
    /// As [`plan::check_upgrade`].
    pub fn check(&self, cancel: &Cancel, observer: &dyn Observer) -> Result<(), Failure> {
        plan::check_upgrade(&self.request, cancel, observer)
            .map_err(|failure| judge(failure, &self.request.old))
    }

    /// Continues the guest in the new QEMU, and ends the old one.
    ///
    /// # Errors
    /// The reason, and the location of the guest. Unless the new QEMU may have the guest, it is ended.
    pub fn switch_over(mut self, cancel: &Cancel, observer: &dyn Observer) -> Result<Upgraded, Failure> {
        match plan::upgrade(&self.request, cancel, observer) {
            Ok(report) => {
                let new = self.pass_point_of_no_return();
                Ok(publish(&new, &self.names, report))
            }
            Err(failure) => {
                if failure.guest.may_be_at_destination() {
                    drop(self.pass_point_of_no_return());
                }
                Err(judge(failure, &self.request.old))
            }
        }
    }

    /// From here on the new QEMU is left alone with its names, whatever happens.
    fn pass_point_of_no_return(&mut self) -> RunningQemu {
        self.new.take().expect("passed once, by the method that consumes it")
    }
}

/// Whatever failed because the old QEMU has ended: its guest is not there any more. Elsewhere it may be.
fn judge(failure: Failure, old: &Path) -> Failure {
    let is_lost = failure.guest == GuestAfterFailure::SAFE && has_ended(old);
    if is_lost { Failure { guest: GuestAfterFailure::NOT_REACHED, ..failure } } else { failure }
}

impl Drop for Reversible {
    fn drop(&mut self) {
        let Some(new) = self.new.take() else { return };
        if std::thread::panicking() {
            // Where the guest is is not known. The next upgrade ends a QEMU that has nothing.
            return;
        }
        new.kill();
        if new.wait(KILL_TIMEOUT).is_none() {
            tracing::warn!(pid = new.pid(), "the new QEMU was killed and has not ended");
        }
        self.names.iter().for_each(StagingName::remove);
    }
}

/// Gives the new QEMU's sockets their names. The old QEMU has exited, and has unlinked its own.
fn publish(new: &RunningQemu, names: &[StagingName], report: CopyReport) -> Upgraded {
    let (mut published, mut not_published) = (Vec::new(), Vec::new());
    for name in names {
        match name.publish() {
            Ok(true) => published.push(name.target.clone()),
            // The move has done that, while its record existed.
            Ok(false) if name.is_published() => published.push(name.target.clone()),
            Ok(false) => not_published.push(format!("{}: it is not there", name.path.display())),
            Err(error) => not_published.push(format!("{}: {error}", name.path.display())),
        }
    }
    let (pid, name, monitor) = (new.pid(), new.directory().name().clone(), new.qmp_path());
    Upgraded { report, pid, name, monitor, published, not_published }
}

/// This host's part of the new command line.
fn host_arguments(options: &UpgradeOptions, old: &OldQemu) -> Result<HostArguments, Error> {
    let binary = options.binary.clone().or_else(|| old.program.clone());
    let found = || old.program_text.clone();
    Ok(HostArguments {
        binary: binary.ok_or_else(|| Error::NoBinary { pid: old.pid, found: found() })?,
        working_directory: Some(old.working_directory.clone()),
        settings: options.settings.clone(),
        arguments: options.arguments.clone(),
        ..HostArguments::default()
    })
}

/// Name of the guest, without the number of an earlier upgrade.
pub(crate) fn base_name(name: Option<&str>, monitor: &Path) -> String {
    let words = name.into_iter().flat_map(|name| name.split(','));
    let named =
        words.map(|word| word.strip_prefix("guest=").unwrap_or(word)).find(|word| !word.contains('='));
    let stem = || monitor.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let text = named.map_or_else(stem, str::to_owned);
    let kept = |c: char| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '-' };
    let text: String = text.chars().take(32).map(kept).collect();
    let text = text.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    if text.is_empty() { "guest".to_owned() } else { text.to_owned() }
}

/// Claims the first directory of that name and a number that no QEMU has.
fn claim(root: &RuntimeRoot, base: &str) -> Result<GuestDirectory, Error> {
    let mut number = 1;
    loop {
        let name: GuestName = format!("{base}.{number}").parse().expect("letters, digits and a number");
        match root.claim(&name) {
            Err(RuntimeError::Taken { .. }) if number < NAMES_MAX => number += 1,
            claimed => return Ok(claimed?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_has_its_own_name_or_that_of_its_monitor() {
        let name = |name: Option<&str>| base_name(name, Path::new("/run/vm/a.qmp"));
        assert_eq!(name(Some("guest=web,debug-threads=on")), "web");
        assert_eq!(name(Some("web")), "web");
        assert_eq!(name(Some("debug-threads=on")), "a");
        assert_eq!(name(None), "a");
        assert_eq!(name(Some("guest=a b/c")), "a-b-c");
        assert_eq!(base_name(None, Path::new("/")), "guest");
    }

    #[test]
    fn only_a_guest_that_was_safe_is_not_reached_in_a_qemu_that_has_ended() {
        use GuestAfterFailure as Guest;
        let directory = tempfile::tempdir().unwrap();
        let old = directory.path().join("qmp");
        let after =
            |guest| judge(Failure { guest, ..Failure::untouched(plan::Error::Cancelled) }, &old).guest;
        assert_eq!((after(Guest::SAFE), after(Guest::NO_GUEST)), (Guest::NOT_REACHED, Guest::NO_GUEST));
        let _there = std::os::unix::net::UnixListener::bind(&old).unwrap();
        assert_eq!((after(Guest::SAFE), after(Guest::NO_GUEST)), (Guest::SAFE, Guest::NO_GUEST));
    }

    #[test]
    fn names_of_running_guests_are_skipped() {
        let directory = tempfile::tempdir().unwrap();
        let root = RuntimeRoot::at(directory.path().join("towline/guests"));
        std::fs::create_dir(directory.path().join("towline")).unwrap();
        let first = claim(&root, "web").unwrap();
        let second = claim(&root, "web").unwrap();
        assert_eq!((first.name().as_str(), second.name().as_str()), ("web.1", "web.2"));
    }
}
