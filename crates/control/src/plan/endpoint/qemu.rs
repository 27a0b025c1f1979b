//! A QEMU by its monitor: one that runs a guest as the source, one that waits for it as the destination.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Channel;
use towline_image::{Image, Origin as ImageOrigin};
use towline_migration::incoming::Connections;
use towline_migration::{Compression, Relay, Session, Sink, Snapshot};

use super::super::blame;
use super::super::context::Run;
use super::super::destination::{QmpDestination, RunFailed};
use super::super::error::{Error, Failure};
use super::super::outcomes::GuestState;
use super::super::progress::Phase;
use super::super::receive::Arrival;
use super::super::report::{DestinationState, SourceState};
use super::super::send::send;
use super::super::source::QmpSource;
use super::super::switch::Switch;
use super::super::vsock::Vsocks;
use super::contract::{Departure, DestinationEndpoint, Local, Origin, SourceEndpoint, Undo, receiver};
use crate::moves::End;
use crate::switchover::{DestinationKind, DestinationView, Directive, GuestRun, SourceKind, Started};

/// Threads that compare an image with its manifest while QEMU loads it.
const VERIFY_THREADS: usize = 2;
/// How often a QEMU that loads by itself is asked.
const LOAD_INTERVAL: Duration = Duration::from_millis(2);
/// How often one that is sent a guest of this process is asked.
const SEND_INTERVAL: Duration = Duration::from_millis(250);

/// A failure of a QEMU that was only asked.
pub(in super::super) fn asked(error: Error) -> Failure {
    let guest = if blame::is_unreached(&error) { GuestState::Unreached } else { GuestState::Safe };
    Failure { guest, ..Failure::untouched(error) }
}

/// A QEMU that runs a guest.
pub(in super::super) struct QemuSource {
    qemu: QmpSource,
    arrival: Arrival,
}

impl QemuSource {
    /// Connects to it, and checks that its guest can be copied.
    pub(in super::super) fn new(path: &Path, run: &Run<'_>) -> Result<Self, Failure> {
        let qemu = QmpSource::prepare(path, run.options).map_err(asked)?;
        run.tell_repaired(qemu.qemu());
        Ok(Self { qemu, arrival: Arrival::default() })
    }

    /// Takes out of the guest what cannot be migrated, and connects both ends: the source last, because a destination that was set
    /// to load and is not needed can be started again.
    fn connect(
        &mut self,
        to: &mut dyn DestinationEndpoint,
        session: &Arc<Session>,
        run: &Run<'_>,
    ) -> Result<Connections, Error> {
        to.check_vsocks(&self.qemu.vsocks)?;
        self.qemu.detach(run.cancel)?;
        run.observer.phase(Phase::Connect);
        to.connect(session, run)?;
        self.qemu.start(run.lanes, run.options, run.cancel)
    }
}

impl SourceEndpoint for QemuSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Qemu
    }

    fn prepare(&mut self, is_compared: bool, run: &Run<'_>) -> Result<Departure<'_>, Failure> {
        // Nothing is changed before a device is detached, so that nothing has to be put back.
        let guest = self.qemu.guest(is_compared).map_err(asked)?;
        let guest = if run.options.detaches_vsock() { guest.without_vsocks() } else { guest };
        let how = if run.options.is_snapshot() { "qmp (background-snapshot)" } else { "qmp" };
        let qemu = Some(self.qemu.version_text());
        let origin = ImageOrigin { source: how.into(), qemu, ..ImageOrigin::default() };
        Ok(Departure { guest: Some(guest), origin, file: None })
    }

    fn start(
        &mut self,
        to: &mut dyn DestinationEndpoint,
        switch: &Arc<Switch>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        let session = switch.session();
        // A relay's destination waits for its first bytes.
        let connections = self.connect(to, &session, run).inspect_err(|_| {
            session.fail(towline_migration::Error::Cancelled);
        })?;
        self.arrival.connected(session, connections);
        Ok(())
    }

    fn transfer(
        &mut self,
        to: &mut dyn DestinationEndpoint,
        switch: &Arc<Switch>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        let Self { qemu, arrival } = self;
        let received = arrival.receive(to.sink(), receiver(to.kind()), switch, run, &mut || qemu.look());
        // Asked before anything is closed: which end it was says most then.
        received.map_err(|error| if to.is_to_blame(&error) { error } else { self.qemu.explain(error) })
    }

    fn moved(&self) -> Snapshot {
        self.arrival.moved()
    }

    fn end_of_move(&self) -> Option<End> {
        Some(self.qemu.end_of_move())
    }

    fn link(&self) -> Option<Arc<dyn Channel>> {
        self.arrival.main_channel()
    }

    /// A source whose connections break before it says that it is done would have failed.
    fn disconnect(&mut self, to: &mut dyn DestinationEndpoint) {
        self.arrival.disconnect();
        to.disconnect();
    }

    fn origin(&mut self) -> Origin<'_> {
        Origin::Qemu(&mut self.qemu)
    }

    fn state_if_dropped(&self) -> SourceState {
        if self.qemu.ran { SourceState::Running } else { SourceState::Paused }
    }

    fn close(&mut self) {
        self.arrival.disconnect();
    }
}

/// A QEMU that waits for a guest.
pub(in super::super) struct QemuDestination {
    qemu: QmpDestination,
    /// There once it is connected for what comes in as a stream.
    relay: Option<Box<Relay>>,
    is_handed_over: bool,
}

impl QemuDestination {
    /// Connects to it, and checks that the guest would run there.
    pub(in super::super) fn new(
        path: &Path,
        departure: &Departure<'_>,
        run: &Run<'_>,
    ) -> Result<Self, Error> {
        let mut qemu = QmpDestination::prepare(path)?;
        run.tell_repaired(qemu.qemu());
        if let Some(guest) = &departure.guest {
            qemu.check(guest, run)?;
        }
        Ok(Self::of(qemu))
    }

    /// One that is checked.
    pub(in super::super) fn of(qemu: QmpDestination) -> Self {
        Self { qemu, relay: None, is_handed_over: false }
    }

    fn stream(&mut self, local: &Local<'_>, switch: &Arc<Switch>, run: &Run<'_>) -> Result<Snapshot, Error> {
        let connections = self.qemu.start(run.lanes, run.options, run.cancel)?;
        let mut asked = Instant::now();
        send(local.guest, &connections, switch, run, &mut || {
            if asked.elapsed() > SEND_INTERVAL {
                asked = Instant::now();
                self.qemu.has_not_failed()?;
            }
            Ok(())
        })
    }

    /// QEMU loads the file itself; if asked to, we hash it beside that, and no guest runs from a damaged image.
    fn load(&mut self, image: &Image, run: &Run<'_>) -> Result<Snapshot, Error> {
        // A description of its own: a QEMU reads the stream at the file's position, and shares that with every duplicate.
        let file = image.reopen()?;
        self.qemu.load(&file, run.lanes)?;
        run.observer.phase(Phase::Transfer);
        thread::scope(|scope| {
            let verify = || image.verify(VERIFY_THREADS, &|_| {});
            let verifier = run.options.verify.then(|| scope.spawn(verify));
            let mut loaded = false;
            while !loaded || verifier.as_ref().is_some_and(|verifier| !verifier.is_finished()) {
                run.check_cancelled()?;
                loaded = loaded || self.qemu.has_loaded_file()?;
                thread::park_timeout(LOAD_INTERVAL);
            }
            match verifier.map(thread::ScopedJoinHandle::join) {
                Some(Ok(result)) => result?,
                Some(Err(panic)) => std::panic::resume_unwind(panic),
                None => {}
            }
            Ok(image.loaded_by_qemu())
        })
    }
}

impl DestinationEndpoint for QemuDestination {
    fn kind(&self) -> DestinationKind {
        DestinationKind::Qemu
    }

    fn end_of_move(&self) -> End {
        End::qemu(self.qemu.qemu().socket(), self.qemu.qemu().process())
    }

    fn connect(&mut self, session: &Arc<Session>, run: &Run<'_>) -> Result<(), Error> {
        let connections = self.qemu.start(run.lanes, run.options, run.cancel)?;
        self.relay = Some(run.relay(session, connections)?);
        Ok(())
    }

    fn sink(&self) -> &dyn Sink {
        self.relay.as_deref().expect("connected before anything is received")
    }

    fn take(&mut self, local: &Local<'_>, switch: &Arc<Switch>, run: &Run<'_>) -> Result<Snapshot, Error> {
        // QEMU reads the file itself as fast as it goes, and as it is.
        let is_plain =
            run.options.means().max_bandwidth.is_none() && run.options.compression == Compression::None;
        let loads = !run.options.stream && self.qemu.loads_images() && is_plain;
        let file = local.file.filter(|image| loads && !image.is_incremental());
        self.is_handed_over = file.is_some();
        run.observer.phase(Phase::Connect);
        let moved = match file {
            Some(file) => self.load(file, run)?,
            None => self.stream(local, switch, run)?,
        };
        self.qemu.wait_loaded()?;
        Ok(moved)
    }

    fn delivered(&self, run_state: Option<&str>, switch: &Switch) -> Directive {
        switch.loaded(GuestRun::from_state(run_state))
    }

    fn is_handed_over(&self) -> bool {
        self.is_handed_over
    }

    fn disconnect(&mut self) {
        self.relay = None;
    }

    fn view(&mut self) -> DestinationView {
        self.qemu.view()
    }

    fn run_guest(&mut self) -> Result<Started, RunFailed> {
        self.qemu.run_guest()
    }

    fn is_to_blame(&self, error: &Error) -> bool {
        self.qemu.is_to_blame(error)
    }

    fn settle(&mut self, _: &Run<'_>) -> Result<Vec<String>, Error> {
        self.qemu.wait_loaded()?;
        self.qemu.release()
    }

    fn stored_state(&self) -> DestinationState {
        DestinationState::Stored
    }

    fn check_vsocks(&mut self, vsocks: &Vsocks) -> Result<(), Error> {
        self.qemu.check_vsocks(vsocks)
    }

    fn attach(&mut self, vsocks: &Vsocks) -> Result<(), Error> {
        self.qemu.attach(vsocks)
    }

    fn undo(&mut self, error: Error, _: &Run<'_>, undo: Undo) -> (Error, Vec<String>) {
        let error = if undo.is_cut_over { error } else { self.qemu.explain(error) };
        (error, self.qemu.undo(undo.holds))
    }
}
