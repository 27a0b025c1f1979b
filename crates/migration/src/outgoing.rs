//! The sending end: sends a [`Guest`] over channels to a destination.
//!
//! ```text
//!   caller's thread   header · START │ PART: pass 1 │ PART: what was written meanwhile … │ stop │ END │ device state │ SHUT?
//!   lane i                           │ units of 2 MiB from one cursor · SYNC            │
//!   return path       PONG ◄─────────┴──────────────────────────────────────────────────────────── SHUT 0 ◄
//! ```
//!
//! Each unit is taken by the next free lane, announced to the guest ([`Guest::prepare`]) and sent as packets
//! straight from its memory. Without lanes the caller's thread sends it as records. The guest is stopped for
//! the last pass only, and started again if anything fails before the destination acknowledged it. Blocks
//! that the destination already has ([`Guest::is_present`]) are in the block list of START and in no pass.

mod connect;
mod lane;
mod main_channel;
mod pass;
mod records;
mod return_path;
mod sends;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use towline_protocol::PageRef;
use towline_protocol::device_state::DeviceState;
use towline_protocol::machine::{self, BarrierForm};
use towline_protocol::session::{FromSource, ReceiverMode};
use towline_protocol::source::RamOptions;

pub use connect::{Connections, accept, connect};
pub use lane::LaneOptions;
pub(crate) use lane::LaneWriter;
pub(crate) use main_channel::MainWriter;
pub(crate) use return_path::{Forwarding, ReturnPath};
pub(crate) use sends::check as check_zero_copy;
pub use towline_channel::ZeroCopySend;

use crate::convergence::{ConvergencePolicy, Limits, MinWindow, Observation, PassDecision};
use crate::limiter::Limiter;
use crate::lock::lock;
use crate::{Compression, Error, Guest, Result, Session, Statistics, parallel};
use pass::Pass;
pub(crate) use pass::{Position, UNIT_BYTES};
pub(crate) use records::RecordSender;
use records::classify;

/// Options of an outgoing migration.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Open a return path, and succeed only if the destination acknowledges. Off for a pipe or a file, which
    /// have no return path.
    pub return_path: bool,
    /// Time limit of the destination's reply to the head of the stream.
    pub answer_timeout: Duration,
    /// Total bytes per second; `None`: unlimited.
    pub max_bandwidth: Option<u64>,
    /// Maximum time for which the guest may be stopped for its last pass.
    pub downtime_limit: Duration,
    /// The part of it for everything but memory: the device state, starting the guest at its destination.
    pub switchover_cost: Duration,
    /// Time for which a guest that writes as fast as it is sent is observed before [`Self::unconverged`]
    /// decides.
    pub min_window: MinWindow,
    /// Handling of a guest that does not converge.
    pub unconverged: Unconverged,
    /// Compression of the pages on lanes. Pages are copied to be compressed, so it excludes zero-copy sends.
    pub compression: Compression,
    /// True if the kernel reads the pages on lanes where they are.
    pub zero_copy_send: ZeroCopySend,
}

impl Options {
    fn lanes(&self) -> LaneOptions {
        LaneOptions { compression: self.compression, zero_copy_send: self.zero_copy_send }
    }
}

/// Handling of a guest that writes as fast as it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unconverged {
    /// The guest runs on at its source; the migration ends with [`Error::CannotConverge`].
    GiveUp,
    /// The guest is stopped for as long as it takes to send the rest.
    SwitchOver,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            return_path: true,
            answer_timeout: Duration::from_secs(10),
            max_bandwidth: None,
            downtime_limit: Duration::from_millis(300),
            switchover_cost: Duration::ZERO,
            min_window: MinWindow::default(),
            unconverged: Unconverged::GiveUp,
            compression: Compression::None,
            zero_copy_send: ZeroCopySend::Auto,
        }
    }
}

/// A migration that goes out.
#[derive(Debug)]
pub struct Outgoing {
    session: Arc<Session>,
    statistics: Arc<Statistics>,
    options: Options,
}

/// State shared by the threads of one outgoing migration.
struct Shared<'a> {
    session: &'a Session,
    guest: &'a dyn Guest,
    main: Mutex<MainWriter>,
    limiter: Limiter,
    /// True if zero pages are sent on lanes; otherwise they are records of the main channel.
    lanes_carry_zero: bool,
}

impl Outgoing {
    /// A migration whose threads share `session` and are counted in `statistics`.
    pub fn new(session: Arc<Session>, statistics: Arc<Statistics>, options: Options) -> Self {
        Self { session, statistics, options }
    }

    /// Sends `guest`; returns when the destination has acknowledged it.
    ///
    /// # Errors
    /// The first error of any thread; the guest was started again if it had been stopped, or it is
    /// [`Error::NotStarted`].
    pub fn run(&self, connections: &Connections, guest: &dyn Guest) -> Result<()> {
        let _guard = self.session.guard();
        connections.watch(&self.session, &self.statistics);
        let mut stopped = false;
        let result = self.phases(connections, guest, &mut stopped);
        let result = result.map_err(|error| {
            // The destination learns it before the guest runs again.
            let error = self.session.end(error);
            connections.drain_zero_copy();
            error
        });
        if let Err(error) = guest.stop_tracking() {
            tracing::warn!(%error, "the guest's memory may still be tracked");
        }
        let Err(error) = result else { return Ok(()) };
        match stopped.then(|| guest.start()) {
            Some(Err(start)) => Err(Error::NotStarted { source: Box::new(error), start: Box::new(start) }),
            _ => Err(error),
        }
    }

    fn phases(&self, connections: &Connections, guest: &dyn Guest, stopped: &mut bool) -> Result<()> {
        check_zero_copy(self.options.zero_copy_send, self.options.compression, &connections.lanes)?;
        guest.start_tracking()?;
        let machine_type = &guest.configuration().machine_type;
        let shared = Shared {
            session: &self.session,
            guest,
            main: Mutex::new(MainWriter::new(Arc::clone(&connections.main), Arc::clone(&self.statistics))),
            limiter: Limiter::new(self.options.max_bandwidth),
            lanes_carry_zero: machine::lanes_carry_zero_pages(machine_type),
        };
        let mut lanes = connections.lane_writers(&self.statistics, self.options.lanes())?;
        let answers = self.begin(connections, &shared)?;
        self.setup(connections, &shared, &mut lanes)?;
        if let Some(answers) = &answers {
            answers.wait_pong(&self.session, self.options.answer_timeout, lanes.len())?;
            greet(&self.session, &mut lock(&shared.main), answers)?;
        }
        let left = self.iterate(&shared, &mut lanes)?;
        guest.stop()?;
        *stopped = true;
        let state = self.complete(&shared, &mut lanes, left)?;
        self.send_state(&mut lock(&shared.main), answers.as_deref(), &state)?;
        match answers {
            Some(answers) => answers.wait_shut(&self.session)?,
            None => lock(&shared.main).shutdown_and_wait()?,
        }
        self.session.succeed();
        Ok(())
    }

    /// A state that is not QEMU's is sent unchanged.
    fn send_state(&self, main: &mut MainWriter, answers: Option<&ReturnPath>, state: &[u8]) -> Result<()> {
        if let Ok(state) = DeviceState::parse(state) {
            return send_device_state(&self.session, main, answers, &state, state.run_state());
        }
        self.session.commit(None)?;
        if let Some(answers) = answers {
            answers.expect_shut();
        }
        main.finish(state)
    }

    /// Header and configuration; opens the return path.
    fn begin(&self, connections: &Connections, shared: &Shared<'_>) -> Result<Option<Arc<ReturnPath>>> {
        self.statistics.set_total(Pass::full(shared.guest).bytes());
        lock(&shared.main).begin(shared.guest.configuration(), self.options.return_path)?;
        let channel = Arc::clone(&connections.main);
        let start = || ReturnPath::start(channel, Arc::clone(&self.session), Forwarding::Disabled);
        self.options.return_path.then(start).transpose()
    }

    /// The lanes' init packets and START.
    fn setup(&self, connections: &Connections, shared: &Shared<'_>, lanes: &mut [LaneWriter]) -> Result<()> {
        for (index, lane) in lanes.iter_mut().enumerate() {
            lane.init(index, connections.uuid, connections.introduced).map_err(Error::lane(index))?;
        }
        // A destination reads nothing more of any lane before it knows all of them.
        for (index, lane) in lanes.iter_mut().enumerate() {
            lane.sync(shared.guest.blocks()).map_err(Error::lane(index))?;
        }
        let form = BarrierForm::of(&shared.guest.configuration().machine_type);
        let barrier = (!lanes.is_empty()).then_some(form);
        let options = RamOptions { section_id: shared.guest.ram_section_id(), barrier };
        lock(&shared.main).write_ram_start(options, shared.guest.blocks())
    }

    /// Passes until what is left fits into the downtime; returns that.
    fn iterate(&self, shared: &Shared<'_>, lanes: &mut [LaneWriter]) -> Result<Pass> {
        let Options { downtime_limit: downtime, switchover_cost, min_window, .. } = self.options;
        let mut policy = ConvergencePolicy::new(Limits { downtime, switchover_cost, min_window });
        let mut pass = Pass::full(shared.guest);
        loop {
            let (begun, sent_before) = (Instant::now(), self.statistics.snapshot().normal_bytes);
            lock(&shared.main).open_part();
            self.pass(shared, lanes, &pass)?;
            lock(&shared.main).close_section()?;
            pass = Pass::harvested(shared.guest)?;
            let sent = self.statistics.snapshot().normal_bytes - sent_before;
            let observation = Observation::of_pass(begun.elapsed(), sent, pass.bytes());
            if let Some(limit) = self.session.tuning().downtime_limit() {
                policy.set_downtime(limit);
            }
            let decision = policy.observe(&observation);
            tracing::debug!(?observation, ?decision, "pass");
            match decision {
                PassDecision::Continue => {}
                PassDecision::SwitchOver => return Ok(pass),
                PassDecision::CannotConverge(verdict) => match self.options.unconverged {
                    Unconverged::GiveUp => return Err(verdict.into()),
                    Unconverged::SwitchOver => return Ok(pass),
                },
            }
        }
    }

    /// Sends the remainder `left` and the pages written until the guest stopped; returns its device state.
    fn complete(&self, shared: &Shared<'_>, lanes: &mut [LaneWriter], left: Pass) -> Result<Vec<u8>> {
        let mut pass = left;
        pass.merge(Pass::harvested(shared.guest)?);
        lock(&shared.main).open_end();
        self.pass(shared, lanes, &pass)?;
        shared.guest.device_state()
    }

    /// Sends every unit of a pass, and the barrier after it.
    fn pass(&self, shared: &Shared<'_>, lanes: &mut [LaneWriter], pass: &Pass) -> Result<()> {
        Statistics::add(&self.statistics.dirty_sync_count, 1);
        if lanes.is_empty() {
            while let Some((page, length)) = pass.next() {
                shared.limiter.reserve(length, shared.session)?;
                shared.guest.prepare(page, length)?;
                let sent = lock(&shared.main).unit(shared.guest, page, length)?;
                shared.limiter.refund(length - sent);
            }
            return lock(&shared.main).flush();
        }
        let lanes: Vec<_> = lanes.iter_mut().enumerate().map(Mutex::new).collect();
        let send = |lane: &Mutex<(usize, &mut LaneWriter)>| {
            let _guard = shared.session.guard();
            let (index, lane) = &mut *lock(lane);
            send_units(shared, lane, pass).map_err(|error| shared.session.fail(Error::lane(*index)(error)))
        };
        // Of its errors the session has the first.
        let _ = parallel::for_each(&lanes, lanes.len(), || &send);
        shared.session.check()?;
        lock(&shared.main).barrier()
    }
}

/// After the reply to the stream's head: sends HELLO if the destination is a towline that waits for the
/// outcome.
pub(crate) fn greet(session: &Session, main: &mut MainWriter, answers: &ReturnPath) -> Result<()> {
    let receiver = answers.receiver();
    session.gate().destination(receiver);
    match receiver {
        Some(ReceiverMode::Waits) => main.send_session_frame(FromSource::Hello(session.gate().move_id())),
        _ => Ok(()),
    }
}

/// Sends the device state, and its last bytes only if the session's gate permits: to a QEMU that runs the
/// guest on its own, when it has loaded everything before them. `run_state`: that of the guest at its source.
pub(crate) fn send_device_state(
    session: &Session,
    main: &mut MainWriter,
    answers: Option<&ReturnPath>,
    state: &DeviceState,
    run_state: Option<&str>,
) -> Result<()> {
    let confirming = answers.filter(|_| session.gate().confirms_loading());
    let Some(answers) = confirming else {
        session.commit(run_state)?;
        if let Some(answers) = answers {
            answers.expect_shut();
        }
        return main.finish(state.bytes());
    };
    main.devices(state.sections())?;
    answers.wait_loaded(session)?;
    session.commit(run_state)?;
    answers.expect_shut();
    main.send(&state.bytes()[state.sections().len()..])
}

/// One lane's part of a pass.
fn send_units(shared: &Shared<'_>, lane: &mut LaneWriter, pass: &Pass) -> Result<()> {
    while let Some((page, length)) = pass.next() {
        shared.session.check()?;
        shared.limiter.reserve(length, shared.session)?;
        shared.guest.prepare(page, length)?;
        let sent = send_unit(shared, lane, page, length)?;
        // Incompressible data becomes a little longer.
        shared.limiter.refund(length.saturating_sub(sent));
    }
    lane.sync(shared.guest.blocks())?;
    // The last page is already on its way, so the network is not idle.
    lane.flush()
}

/// Returns the number of bytes that the contents of its pages took.
fn send_unit(shared: &Shared<'_>, lane: &mut LaneWriter, page: PageRef, length: u64) -> Result<u64> {
    let (mut zeros, mut sent) = (Vec::new(), 0);
    for (offset, zero) in classify(shared.guest, page, length) {
        match (zero, shared.lanes_carry_zero) {
            (true, false) => zeros.push(offset),
            (true, true) => lane.zero(page.block, offset),
            (false, _) => lane.page(page.block, offset),
        }
        if lane.is_full() {
            sent += lane.send(shared.guest)?;
        }
    }
    sent += lane.send(shared.guest)?;
    if !zeros.is_empty() {
        lock(&shared.main).zero(page.block, &zeros)?;
    }
    Ok(sent)
}
