//! A QEMU whose guest is copied: its state, and the checks before that.

use std::path::Path;
use std::time::{Duration, Instant};

use towline_qmp::commands::{MigrationInfo, MigrationStatus, RunState};

use super::super::context::Context;
use super::super::convergence::Convergence;
use super::super::disks::DiskMirrors;
use super::super::error::{ABORTS_ASLEEP, BlockedBy, Error};
use super::super::error_origin;
use super::super::private_dir::{PrivateDir, QemuLink};
use super::super::progress::Progress;
use super::super::recorder::RecordedSource;
use super::super::request::{CopyRequest, GenerationUse};
use super::super::vsock::{self, DetachedVsocks};
use crate::generations::ManagedGuest;
use crate::moves::{self, MoveEnd};
use crate::qemu::{self, AppliedSettings, Inventory, Qemu, is_disconnected};

/// Timeout for the exit of a QEMU whose monitor is disconnected.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Name of the socket that it migrates to, in the private directory.
pub(super) const STREAM_SOCKET: &str = "source.sock";

/// A QEMU whose guest is copied.
#[derive(Debug)]
pub(in super::super) struct QmpSource {
    pub(super) settings: Option<AppliedSettings>,
    /// The guest was running when we connected, or we will resume it for this copy.
    pub(in super::super) was_running: bool,
    /// Paused by an earlier copy; resumed for this one once all checks pass.
    pub(super) resumes: bool,
    /// Resumed for this copy.
    pub(super) resumed: bool,
    /// The current migration is that of this command.
    pub(super) started: bool,
    /// Last reply to `query-migrate`.
    pub(super) last_migration: Option<MigrationInfo>,
    /// Its monitor has been lost since then.
    pub(super) lost_since: Option<Instant>,
    pub(super) dir: PrivateDir,
    /// The way of its stream.
    pub(super) link: QemuLink,
    pub(super) queried_at: Instant,
    pub(in super::super) progress: Progress,
    pub(super) convergence: Convergence,
    /// Number of tuning changes that QEMU has.
    pub(super) applied_changes: u64,
    /// Disks that are copied.
    pub(super) mirrors: Option<DiskMirrors>,
    /// With a stopped guest, its migration waits for the towline of another host.
    pub(super) waits_for_peer: bool,
    /// It is to switch to postcopy, with a guest that it stops then.
    pub(super) is_asked_to_switch: bool,
    /// Devices that are detached for the move.
    pub(in super::super) vsocks: DetachedVsocks,
    /// State that must be unchanged when the guest has stopped.
    pub(in super::super) required: Option<Required>,
    /// Last, so that its journal has no other owner when its monitor closes.
    pub(in super::super) qemu: Qemu,
}

/// State that a new QEMU was compared with.
#[derive(Debug)]
pub(in super::super) struct Required {
    /// Chardevs of network cards in other processes, which must be connected.
    pub(in super::super) card_chardevs: Vec<String>,
    /// Drives with their files.
    pub(in super::super) blocks: Inventory,
}

impl QmpSource {
    /// Connects and checks that this guest can be copied.
    pub(in super::super) fn prepare(path: &Path, context: &Context<'_>) -> Result<Self, Error> {
        let options = context.options;
        let mut qemu = context.connect_qemu(path)?;
        let socket = qemu.socket().to_owned();
        if let Some(status) = &qemu.facts().migration.status
            && !status.is_idle()
        {
            return Err(Error::Migrating { socket, status: status.as_str().into() });
        }
        if !qemu.wait_migration_cleanup()? {
            return Err(Error::NotCleanedUp { socket });
        }
        let facts = qemu.facts();
        let detached = |by: &BlockedBy| options.detaches_vsock() && matches!(by, BlockedBy::Vsock(_));
        let reasons = facts.blocked_reasons().iter().map(|reason| vsock::blocked_by(reason));
        let reasons: Vec<_> = reasons.filter(|by| !detached(by)).collect();
        if !reasons.is_empty() {
            return Err(Error::Blocked { socket, reasons });
        }
        let status = facts.status.status.clone();
        if status == RunState::INMIGRATE {
            return Err(Error::NoGuest { socket, status: status.as_str().into() });
        }
        let resumes = status == RunState::POSTMIGRATE;
        moves::check_source(&qemu)?;
        check_generation(&qemu, options)?;
        if resumes && !options.resumes() && !options.is_snapshot() {
            return Err(Error::NeedsCont { socket });
        }
        check_run_state(&mut qemu, options)?;
        check_known_faults(&mut qemu)?;
        let was_running = qemu.facts().status.running || resumes;
        context.adapt_lanes(&qemu);
        let vsocks = options.detaches_vsock().then(|| DetachedVsocks::find(&mut qemu));
        let vsocks = vsocks.transpose()?.unwrap_or_default();
        Ok(Self { was_running, resumes, vsocks, ..Self::new(qemu, options)? })
    }

    /// Connects to one that was switched to postcopy by an earlier towline, and sends the rest of its memory.
    pub(in super::super) fn following(path: &Path, context: &Context<'_>) -> Result<Self, Error> {
        let qemu = context.connect_qemu(path)?;
        Ok(Self { started: true, ..Self::new(qemu, context.options)? })
    }

    fn new(qemu: Qemu, options: &CopyRequest) -> Result<Self, Error> {
        let dir = PrivateDir::for_qemu(&qemu)?;
        let convergence = Convergence::new(options, qemu.facts());
        Ok(Self {
            qemu,
            settings: None,
            was_running: false,
            resumes: false,
            resumed: false,
            started: false,
            last_migration: None,
            lost_since: None,
            link: QemuLink::socket(&dir, STREAM_SOCKET),
            dir,
            queried_at: Instant::now(),
            progress: Progress::default(),
            convergence,
            applied_changes: 0,
            mirrors: None,
            waits_for_peer: options.direct.is_some(),
            is_asked_to_switch: false,
            vsocks: DetachedVsocks::default(),
            required: None,
        })
    }

    /// Checks that the guest's network backends are connected and that its drives have the files that were
    /// compared. Best effort: passes if QEMU has exited or does not reply, for which a busy one has the time of any command.
    ///
    /// # Errors
    /// [`Error::CardDisconnected`]: QEMU has taken the guest's link down, which the device state has, and nothing would raise it elsewhere.
    /// [`Error::DrivesChanged`]: the other QEMU has the former files.
    pub(in super::super) fn check_unchanged(&mut self) -> Result<(), Error> {
        let Some(Required { card_chardevs, blocks }) = &self.required else { return Ok(()) };
        let query = |qemu: &mut Qemu| -> Result<_, qemu::Error> {
            Ok((qemu.client().execute_raw("query-chardev", None)?, qemu.block_inventory()?))
        };
        let (chardevs, found) = match query(&mut self.qemu) {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, "the connections of its cards and its drives are not known");
                return Ok(());
            }
        };
        let differences = blocks.differences(&found, ["before", "now"]);
        if !differences.is_empty() {
            return Err(Error::DrivesChanged { differences });
        }
        match card_chardevs.iter().find(|chardev| is_disconnected(&chardevs, chardev)) {
            None => Ok(()),
            Some(chardev) => Err(Error::CardDisconnected {
                socket: self.qemu.socket().to_owned(),
                chardev: chardev.clone(),
            }),
        }
    }

    /// Copies the disks that go with the guest; returns when the other end has them, and gets what the guest writes.
    pub(in super::super) fn mirror_disks(&mut self, context: &Context<'_>) -> Result<(), Error> {
        DiskMirrors::start(&mut self.qemu, &self.dir, context, &mut self.mirrors)
    }

    /// The source in a record of the move.
    pub(in super::super) fn recorded(&self) -> RecordedSource {
        RecordedSource {
            end: MoveEnd::qemu(&self.qemu),
            vcpus: self.qemu.vcpu_threads(),
            devices: self.vsocks.records(),
            way: None,
        }
    }

    /// Returns true if QEMU is known to have exited, and the guest with it.
    pub(in super::super) fn has_exited(&self) -> bool {
        self.qemu.has_exited(EXIT_TIMEOUT)
    }

    /// Leaves QEMU's settings unchanged: it has exited, or cannot be configured.
    pub(in super::super) fn keep_settings(&mut self) {
        if let Some(settings) = self.settings.take() {
            settings.leave_applied();
        }
    }

    /// Replaces an error of the stream by QEMU's own reason, if it has one. QEMU knows nothing of an error on
    /// our side.
    pub(in super::super) fn explain(&mut self, error: Error) -> Error {
        let socket = self.qemu.socket().to_owned();
        let is_protocol = matches!(error, Error::Migration(towline_migration::Error::Protocol { .. }));
        if is_protocol || !error_origin::is_from(&error, &socket, &self.link.address) {
            return error;
        }
        match self.qemu.migration().map_err(Error::from) {
            Ok(migration) if migration.status.as_ref().is_some_and(MigrationStatus::has_failed) => {
                match migration.error_desc {
                    Some(text) => Error::SourceFailed { socket, text: format!("{text} ({error})") },
                    None => error,
                }
            }
            Err(gone) if error_origin::is_monitor_lost(&gone) && self.has_exited() => {
                tracing::debug!(%error, "the source exited");
                Error::SourceEnded { socket }
            }
            _ => error,
        }
    }
}

// Guests that QEMU would lose or change by sending them, which it does not refuse itself.

/// The first QEMU whose background snapshot does not run a guest that is stopped: 7.2 runs it.
const SNAPSHOTS_PAUSED_SINCE: u32 = 10;

/// Refuses a guest whose present run state this copy would not survive: queried before anything is changed,
/// and again right before `migrate`, as a guest stops whenever it likes.
pub(super) fn check_run_state(qemu: &mut Qemu, options: &CopyRequest) -> Result<(), Error> {
    let status = qemu.status()?.status;
    let is_quiet = [RunState::PAUSED, RunState::SUSPENDED].contains(&status);
    let snapshots_quiet = qemu.facts().version.qemu.major >= SNAPSHOTS_PAUSED_SINCE;
    let reason = if options.is_snapshot() && status != RunState::RUNNING && !(is_quiet && snapshots_quiet) {
        BlockedBy::Snapshot { status, version: qemu.version_text() }
    } else if options.resumes() && status == RunState::SUSPENDED {
        let reason = format!("it is `{status}`, and {ABORTS_ASLEEP}: wake it up first (`system_wakeup`)");
        BlockedBy::Qemu(reason)
    } else if options.is_postcopy() && status != RunState::RUNNING && !is_quiet {
        BlockedBy::Postcopy { status }
    } else {
        return Ok(());
    };
    Err(blocked(qemu, reason))
}

/// Refuses a guest that QEMU loses whenever it sends it.
fn check_known_faults(qemu: &mut Qemu) -> Result<(), Error> {
    let replay = qemu.query_raw("query-replay", None)?.unwrap_or_default();
    if let Some(mode) = replay["mode"].as_str().filter(|mode| *mode != "none") {
        let reason =
            format!("its execution is under `-icount rr={mode}`, with which QEMU aborts at `migrate`");
        return Err(blocked(qemu, BlockedBy::Qemu(reason)));
    }
    let devices = qemu.query_raw("query-memory-devices", None)?.unwrap_or_default();
    let has_pmem = devices.as_array().into_iter().flatten().any(|device| device["type"] == "virtio-pmem");
    if has_pmem && qemu.facts().status.running && !qemu.is_kvm()? {
        let reason = "it is emulated (TCG) and has a virtio-pmem, whose content QEMU may lose on the way: pause it first (`stop`)";
        return Err(blocked(qemu, BlockedBy::Qemu(reason.into())));
    }
    Ok(())
}

pub(super) fn blocked(qemu: &Qemu, reason: BlockedBy) -> Error {
    Error::Blocked { socket: qemu.socket().to_owned(), reasons: vec![reason] }
}

/// Refuses a guest that a cluster would miss, or whose state is not the newest.
fn check_generation(qemu: &Qemu, options: &CopyRequest) -> Result<(), Error> {
    // Its guest is not touched by a snapshot.
    if options.is_snapshot() {
        return Ok(());
    }
    let Some(guest) = ManagedGuest::of_qemu(qemu)? else { return Ok(()) };
    match options.generations {
        GenerationUse::Refused => Err(guest.refuse().into()),
        GenerationUse::TakesPart => Ok(guest.enter()?),
        GenerationUse::Stored => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::fake_qemu::{FakeQemu, in_copy};
    use super::*;

    /// A guest would be without its link, or on the disk of another instant.
    #[test]
    fn a_busy_qemu_that_has_changed_is_found() {
        let fake = FakeQemu::start("running");
        let mut source = in_copy(|context| QmpSource::prepare(&fake.path(), context).unwrap());
        let card_chardevs = vec!["card".to_owned()];
        source.required = Some(Required { card_chardevs, blocks: Inventory::default() });
        fake.script().delayed = Some(("query-chardev", Duration::from_millis(700)));
        let error = source.check_unchanged().unwrap_err();
        assert!(matches!(error, Error::CardDisconnected { .. }), "{error}");
    }
}
