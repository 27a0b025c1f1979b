//! Simulated time, scheduling of actors, and the store's objects.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::AddAssign;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use object_store::PutMode;
use towline_channel::lock::lock;

use super::super::fault::StoreBug;
use super::super::lease_state::LeaseGuard;
use super::super::objects::Objects;
use super::super::runtime::Clock;
use super::super::{LEASE_AGE_MAX, Location, access::Store, chunk};
use super::actor::Actor;
use super::model::{self, Conditions, Model, StoreReply, StoreRequest, Stored};
use super::scenario::{Chaos, Scenario};
use crate::index::Index;

/// Slot for the result of an operation.
pub(super) type Slot<T> = Arc<Mutex<Option<T>>>;
type ReplyResult = object_store::Result<StoreReply>;
/// Behaviour of a participant.
pub(super) type Role = Box<dyn FnOnce(&Actor) + Send>;

/// Timeout of a client's request, all attempts together.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time for which a request is in flight after its client's timeout; see docs/store.md for the
/// reason.
const LATE_MAX_S: f64 = 1200.0;
/// Probability that a request that publishes or removes is late.
const LATE_DECISIVE_RATE: f64 = 0.3;
/// Maximum number of requests before a planned suspension: as many as a collection sends before it removes an
/// object.
const SUSPENDED_AFTER_MAX: usize = 16;
/// Maximum length of a scenario.
const TIME_MAX: Duration = Duration::from_secs(72 * 3600);
/// Prefix of the simulated images.
/// The model tells a whole listing from a part, so that no listing is asked for twice: of S3 each would be.
pub(super) const PREFIX: &str = "az://model/vm";

/// Events counted in a scenario.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EventCounts {
    pub(super) published: u64,
    pub(super) uploads_refused: u64,
    pub(super) leases_lost: u64,
    pub(super) read: u64,
    pub(super) read_failed: u64,
    pub(super) collections: u64,
    pub(super) collections_refused: u64,
    pub(super) removed: u64,
    pub(super) kept_for_readers: u64,
    pub(super) late: u64,
    pub(super) suspended: u64,
    pub(super) crashed: u64,
}

impl EventCounts {
    /// All counters with their names.
    pub(super) fn all(self) -> [(&'static str, u64); 12] {
        [
            ("images published", self.published),
            ("uploads refused", self.uploads_refused),
            ("leases lost", self.leases_lost),
            ("images read", self.read),
            ("reads that failed", self.read_failed),
            ("collections", self.collections),
            ("collections refused", self.collections_refused),
            ("objects removed", self.removed),
            ("collections that kept chunks for readers", self.kept_for_readers),
            ("requests that were late", self.late),
            ("suspensions", self.suspended),
            ("crashes", self.crashed),
        ]
    }
}

impl AddAssign for EventCounts {
    fn add_assign(&mut self, other: Self) {
        self.published += other.published;
        self.uploads_refused += other.uploads_refused;
        self.leases_lost += other.leases_lost;
        self.read += other.read;
        self.read_failed += other.read_failed;
        self.collections += other.collections;
        self.collections_refused += other.collections_refused;
        self.removed += other.removed;
        self.kept_for_readers += other.kept_for_readers;
        self.late += other.late;
        self.suspended += other.suspended;
        self.crashed += other.crashed;
    }
}

/// The simulated world. Clones share it.
#[derive(Clone)]
pub(super) struct World(Arc<Mutex<State>>);

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "world")
    }
}

struct State {
    now: Duration,
    rng: Rng,
    chaos: Chaos,
    conditions: Conditions,
    fault: Option<StoreBug>,
    events: BTreeMap<(Duration, u64), SimulationEvent>,
    sequence: u64,
    objects: BTreeMap<String, Stored>,
    /// Chunks that each present index references.
    names: BTreeMap<String, HashSet<[u8; 32]>>,
    actors: Vec<ActorState>,
    violation: Option<String>,
    counts: EventCounts,
    trace: Option<String>,
}

/// Channel on which a turn is returned, and the one on which the next one is received.
type Parking = (Sender<()>, Arc<Mutex<Receiver<()>>>);

#[derive(Default)]
struct ActorState {
    turn: Option<Sender<()>>,
    parked: Option<Parking>,
    is_done: bool,
    has_crashed: bool,
    suspended_until: Duration,
    suspended: Duration,
    /// Number of requests until a planned suspension, and its duration.
    suspended_after: Option<(usize, Duration)>,
    /// Time at which the store received the last renewal of this actor's lease as a reader.
    lease_renewed: Option<Duration>,
    lease_expired: bool,
}

enum SimulationEvent {
    Start(usize),
    Arrive { actor: usize, request: StoreRequest, slot: Slot<ReplyResult>, is_lost: bool },
    Reply { actor: usize, slot: Slot<ReplyResult>, reply: ReplyResult },
    Timer { actor: usize, slot: Slot<()> },
    Suspend { actor: usize, time: Duration },
    Crash(usize),
}

impl World {
    pub(super) fn new(scenario: &Scenario, fault: Option<StoreBug>) -> Self {
        Self(Arc::new(Mutex::new(State {
            now: Duration::from_secs(1_000_000),
            rng: Rng::with_seed(scenario.seed),
            chaos: Chaos::CALM,
            conditions: scenario.conditions,
            fault,
            events: BTreeMap::new(),
            sequence: 0,
            objects: BTreeMap::new(),
            names: BTreeMap::new(),
            actors: Vec::new(),
            violation: None,
            counts: EventCounts::default(),
            trace: std::env::var_os("TOWLINE_TRACE").map(|_| String::new()),
        })))
    }

    /// Opens the prefix for a participant's process.
    pub(super) fn store(&self, actor: &Actor) -> Arc<Store> {
        let location: Location = PREFIX.parse().unwrap();
        let guard = LeaseGuard::default();
        let model = model::shared(Model { actor: actor.clone(), guard: guard.clone() });
        let mut objects = Objects::new(model, &location, Clock::Simulated(actor.clone()), guard).unwrap();
        objects.fault = self.fault();
        Arc::new(Store::simulated(objects, actor.clone()))
    }

    pub(super) fn fault(&self) -> Option<StoreBug> {
        lock(&self.0).fault
    }

    /// Returns true if the store is reached over a network.
    pub(super) fn is_remote(&self) -> bool {
        lock(&self.0).conditions != Conditions::Create
    }

    pub(super) fn trace(&self) -> String {
        lock(&self.0).trace.clone().unwrap_or_default()
    }

    /// Adds an event of an actor to the trace.
    pub(super) fn note(&self, actor: usize, what: impl FnOnce() -> String) {
        lock(&self.0).note(|| format!("actor {actor}: {}", what()));
    }

    pub(super) fn count(&self, what: impl FnOnce(&mut EventCounts)) {
        what(&mut lock(&self.0).counts);
    }

    pub(super) fn fail(&self, why: String) {
        lock(&self.0).fail(why);
    }

    pub(super) fn has_crashed(&self, actor: usize) -> bool {
        lock(&self.0).actors[actor].has_crashed
    }

    pub(super) fn boot_time(&self, actor: usize) -> Duration {
        let state = lock(&self.0);
        match state.fault {
            Some(StoreBug::SuspendedTimeIgnored) => state.now - state.actors[actor].suspended,
            _ => state.now,
        }
    }

    /// Returns true if the lease of this actor as a reader was once not renewed for so long that its owner is
    /// considered dead.
    pub(super) fn lease_expired(&self, actor: usize) -> bool {
        let state = lock(&self.0);
        let found = &state.actors[actor];
        found.lease_expired || found.lease_renewed.is_none_or(|renewed| is_expired(renewed, state.now))
    }

    /// Keys of all objects.
    pub(super) fn keys(&self) -> Vec<String> {
        lock(&self.0).objects.keys().cloned().collect()
    }

    /// Chunks that the images reference.
    pub(super) fn referenced(&self) -> HashSet<[u8; 32]> {
        lock(&self.0).names.values().flatten().copied().collect()
    }

    pub(super) fn timer(&self, actor: usize, time: Duration) -> Slot<()> {
        let (mut state, slot) = (lock(&self.0), Slot::default());
        let at = state.now + time;
        state.add(at, SimulationEvent::Timer { actor, slot: Arc::clone(&slot) });
        slot
    }

    /// Delay of a client before a request is sent.
    pub(super) fn request_delay(&self) -> Duration {
        let mut state = lock(&self.0);
        let slow = state.chaos.slow;
        if state.rng.f64() < slow { state.delay(1.0, 120.0) } else { Duration::ZERO }
    }

    /// Sends a request.
    pub(super) fn send(&self, actor: usize, request: StoreRequest) -> Slot<ReplyResult> {
        let (mut state, slot) = (lock(&self.0), Slot::default());
        state.count_request(actor);
        let (now, roll, failing) = (state.now, state.rng.f64(), state.chaos.failing);
        let failure = SimulationEvent::Reply { actor, slot: Arc::clone(&slot), reply: Err(model::failed()) };
        // Decisive requests are late more often than others, which would rarely happen otherwise.
        let late = if request.is_decisive() && failing > 0.0 { LATE_DECISIVE_RATE } else { failing };
        let arrive = |is_lost| SimulationEvent::Arrive { actor, request, slot: Arc::clone(&slot), is_lost };
        if roll < failing {
            // The request is lost.
            state.add(now + REQUEST_TIMEOUT, failure);
        } else if roll < failing + late {
            let late =
                if state.rng.bool() { state.delay(0.01, LATE_MAX_S) } else { state.delay(60.0, LATE_MAX_S) };
            state.add(now + late, arrive(true));
            state.add(now + REQUEST_TIMEOUT, failure);
            state.counts.late += 1;
        } else {
            let slow = if state.rng.f64() < state.chaos.slow { 50.0 } else { 0.5 };
            let latency = state.delay(0.002, slow);
            state.add(now + latency, arrive(false));
        }
        slot
    }

    /// Yields until an event concerns the actor.
    pub(super) fn park(&self, actor: usize) {
        let parked = lock(&self.0).actors[actor].parked.clone();
        if let Some((parked, turn)) = parked {
            // The world has ended if the other end is closed.
            let _ = parked.send(());
            let _ = lock(&turn).recv();
        }
    }

    /// Runs these actors, each from its start time, until all have ended and no request is in flight.
    pub(super) fn run(&self, roles: Vec<(Duration, Role)>, chaos: Chaos) -> Result<EventCounts, String> {
        let first = lock(&self.0).actors.len();
        let (parked, back) = channel();
        lock(&self.0).chaos = chaos;
        thread::scope(|scope| {
            for (number, (start, role)) in roles.into_iter().enumerate() {
                let (turn, taken) = channel();
                let taken = Arc::new(Mutex::new(taken));
                let actor = Actor::new(self, first + number);
                {
                    let mut state = lock(&self.0);
                    let parked = Some((parked.clone(), Arc::clone(&taken)));
                    state.actors.push(ActorState { turn: Some(turn), parked, ..ActorState::default() });
                    let at = state.now + start;
                    state.add(at, SimulationEvent::Start(actor.number));
                    state.plan(actor.number, at);
                }
                let (parked, seed) = (parked.clone(), lock(&self.0).rng.u64(..));
                scope.spawn(move || {
                    fastrand::seed(seed);
                    let _ = lock(&taken).recv();
                    let done = catch_unwind(AssertUnwindSafe(|| role(&actor)));
                    actor.end();
                    if done.is_err() {
                        actor.world.fail("an actor panics".into());
                    }
                    lock(&actor.world.0).actors[actor.number].is_done = true;
                    let _ = parked.send(());
                });
            }
            while self.step(&back) {}
        });
        let state = lock(&self.0);
        state.violation.clone().map_or(Ok(state.counts), Err)
    }

    /// Handles one event. Returns false if there is nothing left to do.
    fn step(&self, back: &Receiver<()>) -> bool {
        let mut state = lock(&self.0);
        let all_done = state.actors.iter().all(|actor| actor.is_done);
        if state.violation.is_some() || state.now > TIME_MAX + Duration::from_secs(1_000_000) {
            if all_done {
                return false;
            }
            state.violation.get_or_insert_with(|| "an actor does not end".into());
            state.actors.iter_mut().for_each(|actor| actor.has_crashed = true);
            let next = state.actors.iter().position(|actor| !actor.is_done);
            drop(state);
            next.into_iter().for_each(|next| self.resume(next, back));
            return true;
        }
        let Some(((at, _), event)) = state.events.pop_first() else {
            if !all_done {
                state.fail("deadlock: all actors wait and there are no events".into());
            }
            return !all_done;
        };
        let woken = state.handle(at, event);
        drop(state);
        woken.into_iter().for_each(|actor| self.resume(actor, back));
        true
    }

    fn resume(&self, actor: usize, back: &Receiver<()>) {
        let turn = {
            let state = lock(&self.0);
            state.actors[actor].turn.clone().filter(|_| !state.actors[actor].is_done)
        };
        if let Some(turn) = turn
            && turn.send(()).is_ok()
        {
            back.recv().expect("every actor yields");
        }
    }
}

fn is_expired(renewed: Duration, now: Duration) -> bool {
    // The store's times are in whole seconds.
    now.saturating_sub(renewed) + Duration::from_secs(2) >= LEASE_AGE_MAX
}

impl State {
    fn add(&mut self, at: Duration, event: SimulationEvent) {
        self.sequence += 1;
        self.events.insert((at, self.sequence), event);
    }

    fn note(&mut self, what: impl FnOnce() -> String) {
        let now = self.now - Duration::from_secs(1_000_000);
        if let Some(trace) = &mut self.trace {
            *trace += &format!("{:>12.3} {}\n", now.as_secs_f64(), what());
        }
    }

    fn fail(&mut self, why: String) {
        self.note(|| format!("VIOLATION {why}"));
        self.violation.get_or_insert(why);
    }

    /// A logarithmically distributed delay between `least` and `most` seconds.
    fn delay(&mut self, least: f64, most: f64) -> Duration {
        Duration::from_secs_f64(least * (most / least).powf(self.rng.f64()))
    }

    /// Plans suspensions and a crash of an actor that begins at `start`.
    fn plan(&mut self, actor: usize, start: Duration) {
        let chaos = self.chaos;
        if self.rng.f64() < chaos.suspensions {
            for _ in 0..self.rng.usize(1..=2) {
                let at = start + self.delay(0.1, 5000.0);
                let minutes = [5, 28, 31, 59, 61, 70, 90, 150, 240, 240][self.rng.usize(..10)];
                self.add(at, SimulationEvent::Suspend { actor, time: Duration::from_secs(60 * minutes) });
            }
        } else if self.rng.f64() < chaos.pauses {
            // Between two consecutive requests, which a random time would hardly ever hit.
            let minutes = [1, 5, 15, 28][self.rng.usize(..4)];
            let requests = self.rng.usize(1..=SUSPENDED_AFTER_MAX);
            self.actors[actor].suspended_after = Some((requests, Duration::from_secs(60 * minutes)));
        }
        if self.rng.f64() < chaos.crashes {
            let at = start + self.delay(0.1, 10_000.0);
            self.add(at, SimulationEvent::Crash(actor));
        }
    }

    /// Suspends an actor after the planned number of requests.
    fn count_request(&mut self, actor: usize) {
        let Some((left, time)) = &mut self.actors[actor].suspended_after else { return };
        *left -= 1;
        let time = (*left == 0).then_some(*time);
        if let Some(time) = time {
            self.actors[actor].suspended_after = None;
            let now = self.now;
            self.add(now, SimulationEvent::Suspend { actor, time });
        }
    }

    /// Handles an event; returns the actor to resume.
    fn handle(&mut self, at: Duration, event: SimulationEvent) -> Option<usize> {
        let whose = match &event {
            SimulationEvent::Start(actor)
            | SimulationEvent::Reply { actor, .. }
            | SimulationEvent::Timer { actor, .. } => Some(*actor),
            _ => None,
        };
        if let Some(actor) = whose
            && self.actors[actor].suspended_until > at
        {
            let wake = self.actors[actor].suspended_until;
            self.add(wake, event);
            return None;
        }
        self.now = at;
        match event {
            SimulationEvent::Start(actor) => Some(actor),
            SimulationEvent::Reply { actor, slot, reply } => {
                put(&slot, reply);
                Some(actor)
            }
            SimulationEvent::Timer { actor, slot } => {
                put(&slot, ());
                Some(actor)
            }
            SimulationEvent::Suspend { actor, time } => {
                let found = &mut self.actors[actor];
                if !found.is_done && !found.has_crashed && found.suspended_until <= at {
                    found.suspended_until = at + time;
                    found.suspended += time;
                    self.counts.suspended += 1;
                    self.note(|| format!("actor {actor}: suspended for {} s", time.as_secs()));
                }
                None
            }
            SimulationEvent::Crash(actor) => {
                if self.actors[actor].is_done {
                    return None;
                }
                self.actors[actor].has_crashed = true;
                self.counts.crashed += 1;
                self.note(|| format!("actor {actor}: crashes"));
                Some(actor)
            }
            SimulationEvent::Arrive { actor, request, slot, is_lost } => {
                let reply = self.apply(actor, &request);
                self.note(|| {
                    format!("actor {actor}: {} -> {}", request_text(&request), reply_text(&reply, is_lost))
                });
                if !is_lost {
                    let back = self.delay(0.002, 1.0);
                    // A response may be lost too.
                    let is_reply_lost = request.is_write() && self.rng.f64() < self.chaos.failing;
                    let reply = if is_reply_lost { Err(model::failed()) } else { reply };
                    let at = self.now + if is_reply_lost { REQUEST_TIMEOUT } else { back };
                    self.add(at, SimulationEvent::Reply { actor, slot, reply });
                }
                None
            }
        }
    }

    fn apply(&mut self, actor: usize, request: &StoreRequest) -> ReplyResult {
        match request {
            StoreRequest::Put { key, bytes, mode } => {
                self.may_put(key, mode)?;
                let stored = Stored { bytes: bytes.clone(), modified: self.now };
                let e_tag = Some(stored.e_tag());
                self.objects.insert(key.clone(), stored);
                if key.contains("/readers/") {
                    let renewed = self.actors[actor].lease_renewed.replace(self.now);
                    let expired = renewed.is_some_and(|renewed| is_expired(renewed, self.now));
                    self.actors[actor].lease_expired |= expired;
                }
                if key.ends_with(Location::SUFFIX) {
                    let index = Index::parse(bytes).expect("it was encoded by the real code");
                    self.names.insert(key.clone(), index.all_names().collect());
                    self.check(key);
                }
                let extensions = Default::default();
                Ok(StoreReply::Put(object_store::PutResult { e_tag, version: None, extensions }))
            }
            StoreRequest::Get { key } => {
                self.objects.get(key).cloned().map(StoreReply::Object).ok_or_else(|| model::not_found(key))
            }
            StoreRequest::Delete { key } => {
                self.objects.remove(key);
                self.names.remove(key);
                if key.contains("/chunks/") {
                    self.check(key);
                }
                Ok(StoreReply::Done)
            }
            StoreRequest::List { prefix, after } => {
                Ok(StoreReply::Page(model::page(self.objects.iter(), prefix, after)))
            }
        }
    }

    fn may_put(&self, key: &str, mode: &PutMode) -> object_store::Result<()> {
        let found = self.objects.get(key);
        match (mode, self.conditions) {
            (PutMode::Overwrite, _) | (_, Conditions::Ignored) => Ok(()),
            (_, Conditions::Refused) | (PutMode::Update(_), Conditions::Create) => Err(model::unsupported()),
            (PutMode::Create, _) => found.map_or(Ok(()), |_| Err(model::exists(key))),
            (PutMode::Update(version), _) => match found {
                Some(found) if Some(found.e_tag()) == version.e_tag => Ok(()),
                _ => Err(model::precondition(key)),
            },
        }
    }

    /// Checks that every index references only present chunks.
    fn check(&mut self, cause: &str) {
        let chunk = |name: &[u8; 32]| format!("vm/{}", chunk::key(name));
        let missing = self.names.iter().find_map(|(index, names)| {
            let missing = names.iter().map(chunk).find(|key| !self.objects.contains_key(key))?;
            Some(format!("{index} names {missing}, which is not there ({cause})"))
        });
        missing.into_iter().for_each(|why| self.fail(why));
    }
}

impl StoreRequest {
    /// Returns true if the request publishes an image or removes chunks.
    fn is_decisive(&self) -> bool {
        match self {
            Self::Put { key, .. } => key.ends_with(Location::SUFFIX),
            Self::Delete { key } => key.contains("/chunks/"),
            _ => false,
        }
    }

    fn is_write(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Delete { .. })
    }
}

fn put<T>(slot: &Slot<T>, value: T) {
    *lock(slot) = Some(value);
}

fn request_text(request: &StoreRequest) -> String {
    let short = |key: &str| key.get(..30).unwrap_or(key).to_owned();
    match request {
        StoreRequest::Put { key, mode, .. } => format!("put {} {mode:?}", short(key)),
        StoreRequest::Get { key } => format!("get {}", short(key)),
        StoreRequest::Delete { key } => format!("delete {}", short(key)),
        StoreRequest::List { prefix, .. } => format!("list {prefix}"),
    }
}

fn reply_text(reply: &ReplyResult, is_lost: bool) -> String {
    let text = match reply {
        Ok(StoreReply::Page(page)) => format!("{} objects", page.len()),
        Ok(_) => "ok".into(),
        Err(error) => error.to_string(),
    };
    if is_lost { format!("late, {text}") } else { text }
}
