//! `towline ocf`: the actions of a resource agent for Pacemaker.
//!
//! ```text
//!   pacemaker-execd ─ exec /usr/lib/ocf/resource.d/towline/guest ACTION ─► here ─┬─ start ──────── the newest state on the shared storage
//!                     parameters in the environment                              ├─ migrate_to ─── ssh HOST towline agent
//!   exit status of OCF ◄─────────────────────────────────────────────────────────┴─ stop ───────── saved there
//! ```
//! Which host runs the guest, and which one is dead, is the cluster's to decide; which state is the newest is what the generations say
//! (`towline_control::generations`). Each action can be killed at any moment and done again. A stop that fails costs the whole host, so
//! it ends in time, without a QEMU whatever happens.

mod here;
mod parameters;
mod protected;
mod refusal;
mod start;
mod state;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::Cancel;
use towline_control::check::PlannedTransfer;
use towline_control::plan::{self, CopyRequest, Destination, GenerationUse, Source, Task, TransferOptions};
use towline_control::remote::{DiskPolicy, NewGuest, Place, SessionTimeouts};
use towline_launch::RuntimeRoot;

use crate::args::{OcfAgent, OcfArgs, Output, Via};
use crate::console;
use crate::endpoint::SshEndpoint;
use crate::errors;
use crate::progress::Reporter;
use crate::remote::{self, PlaceOptions, RemoteCopy};
use crate::signals::{SignalEffects, cancel_on_signals};
use here::{Decided, GuestState, Here};
use parameters::{Parameters, Reading, TIMEOUT_MIN};
use refusal::{Code, Outcome, Refusal, answer, say};
use state::{GuestLine, SharedState};

/// Part of a stop's time that is left to end a QEMU when its guest could not be saved.
const END_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval of attempts to save a guest whose monitor another client has.
const SAVE_INTERVAL: Duration = Duration::from_millis(500);
/// Time in which ssh connects.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the command. Returns the exit status.
pub(crate) fn run(args: &OcfArgs) -> u8 {
    let done = catch_unwind(AssertUnwindSafe(|| match args.agent {
        OcfAgent::Guest => act(&args.action),
        OcfAgent::Protected => protected::act(&args.action),
    }));
    let refusal = match done {
        Ok(Ok(())) => return Code::Done as u8,
        Ok(Err(refusal)) => refusal,
        Err(_) => Refusal::failed("internal error, please report it"),
    };
    if let Some(reason) = refusal.reason {
        // What `arbitrate` prints is for people.
        let prefix = if args.action == "arbitrate" { "" } else { "ocf-exit-reason:" };
        console::plain_error(&format!("{prefix}{}", console::printable(&reason)));
    }
    refusal.code as u8
}

fn act(action: &str) -> Outcome {
    if action == "meta-data" {
        answer(&parameters::meta_data(&parameters::GUEST));
        return Ok(());
    }
    // Of what these may say no to, the host would be fenced.
    let is_answer = matches!(action, "stop" | "monitor" | "status");
    let agent = match Agent::new(if is_answer { Reading::Lenient } else { Reading::Strict }) {
        // No guest was started without a name.
        Err(_) if action == "stop" => return Ok(()),
        agent => agent?,
    };
    match action {
        "start" => agent.start(),
        "stop" => agent.stop(),
        "monitor" | "status" => agent.monitor(),
        "migrate_to" => agent.migrate_to(),
        "migrate_from" => agent.migrate_from(),
        "validate-all" => agent.validate(),
        // All that can be changed without a restart is read by each action.
        "reload-agent" | "reload" => Ok(()),
        _ => Err(Refusal::new(Code::Unimplemented, format!("no action {action:?}"))),
    }
}

/// The request of a move, or of a stop that stores the guest.
fn request(transfer: TransferOptions) -> CopyRequest {
    let task = Task::Move { transfer, run: None, detach_vsock: false, devices: Vec::new() };
    CopyRequest::new(task)
}

/// The agent of one guest, for one action.
struct Agent {
    parameters: Parameters,
    shared: SharedState,
    reporter: Reporter,
    begun: Instant,
    timeout: Duration,
}

impl Agent {
    fn new(reading: Reading) -> Result<Self, Refusal> {
        let (parameters, timeout) = (Parameters::read(reading)?, parameters::timeout());
        let shared = SharedState(parameters.state.join(parameters.name.as_str()));
        let reporter = Reporter::new(&Output { json: false, quiet: false });
        Ok(Self { parameters, shared, reporter, begun: Instant::now(), timeout })
    }

    fn find(&self) -> Result<Option<Here>, Refusal> {
        Here::find(&RuntimeRoot::of_user(), &self.parameters.name, &self.shared)
    }

    /// Time that is left until this long before the end of the action.
    fn left(&self, before: Duration) -> Duration {
        self.timeout.saturating_sub(before).saturating_sub(self.begun.elapsed()).max(TIMEOUT_MIN)
    }

    /// A token that is cancelled by a signal, or when the time that is left has gone.
    fn cancel(&self, left: Duration) -> Result<Cancel, Refusal> {
        let effects = SignalEffects { first: "cancelling; the guest stays where it is", second: None };
        let cancel = cancel_on_signals(effects).map_err(|error| Refusal::failed(errors::text(&error)))?;
        let token = cancel.clone();
        let wait = move || {
            thread::park_timeout(left);
            token.cancel();
        };
        thread::Builder::new().name("timeout".into()).spawn(wait)?;
        Ok(cancel)
    }

    fn monitor(&self) -> Outcome {
        let Some(here) = self.find()? else { return Err(Refusal::NOT_RUNNING) };
        match here.state() {
            GuestState::Broken(state) => Err(Refusal::failed(format!("the guest is `{state}`"))),
            GuestState::Paused if !here.undecided()?.is_empty() => {
                Err(Refusal::failed("the guest is paused by a move that was interrupted"))
            }
            // No towline works on the move: it may be the newest state, which only a stop keeps.
            GuestState::Arriving | GuestState::Sent
                if here.undecided()?.iter().any(|listed| listed.owner.is_none()) =>
            {
                Err(Refusal::failed("the guest was sent by a move that was interrupted"))
            }
            GuestState::Arriving | GuestState::Sent => Err(Refusal::NOT_RUNNING),
            GuestState::Held => {
                say("the monitor of the guest's QEMU is held by another client, or does not answer");
                Ok(())
            }
            GuestState::Runs | GuestState::Paused => Ok(()),
        }
    }

    fn validate(&self) -> Outcome {
        if !self.parameters.state.is_dir() {
            let text = format!("{} is no directory here", self.parameters.state.display());
            return Err(Refusal::new(Code::Installed, text));
        }
        GuestLine::of(&self.parameters).map(drop)
    }

    /// Returns true unless the guest's first image shows that it writes no disk.
    fn may_have_disks(&self) -> bool {
        GuestLine::of(&self.parameters).map_or(true, |line| line.disks().exist)
    }

    fn stop(&self) -> Outcome {
        let Some(here) = self.find()? else { return Ok(()) };
        // Whatever goes wrong with its guest, the QEMU ends.
        match catch_unwind(AssertUnwindSafe(|| self.save(&here))) {
            Ok(Ok(())) => {}
            Ok(Err(refusal)) => {
                say(&format!("the guest is not saved: {}", refusal.reason.unwrap_or_default()));
            }
            Err(_) => say("the guest is not saved: internal error, please report it"),
        }
        let ended = here.end(self.timeout.saturating_sub(self.begun.elapsed()).max(TIMEOUT_MIN));
        if ended { Ok(()) } else { Err(Refusal::failed("its QEMU cannot be ended")) }
    }

    /// Stores the guest, if this QEMU has its newest state, and ends the QEMU then.
    fn save(&self, here: &Here) -> Outcome {
        here.await_agent(self.parameters.peer_timeout * 2);
        let image = match here.decide(&self.shared, false, self.may_have_disks()) {
            Decided::Elsewhere => return Ok(()),
            Decided::Here if !self.parameters.saves => return Ok(()),
            Decided::Here => {
                // A paused guest that has just come has none yet.
                here.0.enter()?;
                self.shared.saved(here.0.held()?)
            }
            Decided::Open => self.shared.arrived(self.shared.newest()?),
        };
        let deadline = Instant::now() + self.left(END_TIMEOUT);
        loop {
            let cancel = self.cancel(deadline.saturating_duration_since(Instant::now()))?;
            // It may have been interrupted before.
            let generations = GenerationUse::Stored;
            let request = CopyRequest { overwrite: true, generations, ..request(TransferOptions::default()) };
            let source = Source::Qmp(here.qmp().to_owned());
            match plan::copy(&source, &Destination::Image(image.clone()), &request, &cancel, &self.reporter) {
                Ok(_) => {
                    say(&format!("{} is saved as {}", self.parameters.name, image.display()));
                    return Ok(());
                }
                Err(failure) if Instant::now() + SAVE_INTERVAL >= deadline => {
                    return Err(Refusal::failed(errors::failure_text(&failure)));
                }
                Err(failure) => say(&errors::failure_text(&failure)),
            }
            thread::sleep(SAVE_INTERVAL);
        }
    }

    fn migrate_to(&self) -> Outcome {
        let node = parameters::migrate_target()?;
        let here = self.find()?.ok_or(Refusal::NOT_RUNNING)?;
        let target = self
            .parameters
            .target(&node)
            .parse()
            .map_err(|error: String| Refusal::new(Code::Configured, error))?;
        let Parameters { name, lanes, bandwidth, peer_timeout, .. } = &self.parameters;
        let transfer = TransferOptions {
            multifd_channels: Some(*lanes),
            max_bandwidth: *bandwidth,
            ..TransferOptions::default()
        };
        let request = CopyRequest {
            connect_timeout: CONNECT_TIMEOUT,
            peer_timeout: *peer_timeout,
            generations: GenerationUse::TakesPart,
            ..request(transfer)
        };
        let guest = NewGuest {
            name: name.to_string(),
            binary: Some(self.parameters.qemu.clone()),
            settings: remote::texts(&self.parameters.settings),
            is_trusted: self.parameters.is_trusted,
            ..NewGuest::default()
        };
        let end = SshEndpoint { target, place: Place::Guest(guest) };
        let shares_disks = self.parameters.has_shared_disks;
        let cancel = self.cancel(self.left(TIMEOUT_MIN))?;
        let place = PlaceOptions {
            ssh: &self.parameters.ssh,
            host: None,
            lanes: *lanes,
            disks: if shares_disks { DiskPolicy::VouchedFor } else { DiskPolicy::Proven },
            planned: PlannedTransfer::Precopy,
            via: Via::Auto,
            timeouts: SessionTimeouts { connect: CONNECT_TIMEOUT, peer: *peer_timeout },
            interrupt: cancel.descriptor(),
        };
        let moved = RemoteCopy::move_guest(&end, &place, here.qmp(), request, &cancel, &self.reporter);
        let moved = moved.map_err(|error| Refusal::failed(errors::text(&error)))?;
        moved.map(drop).map_err(|failure| {
            failure.notes.iter().for_each(|note| say(note));
            Refusal::failed(errors::failure_text(&failure))
        })
    }

    /// The guest was sent here, and its source knows that it runs.
    fn migrate_from(&self) -> Outcome {
        let here = self.find()?.ok_or(Refusal::NOT_RUNNING)?;
        here.await_agent(self.parameters.peer_timeout * 2);
        self.monitor()?;
        // One that is paused has not needed its generation yet.
        Ok(here.0.enter()?)
    }
}
