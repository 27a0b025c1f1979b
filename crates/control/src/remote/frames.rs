//! Frames that the tap of a guest's card receives while the guest goes to another host.
//!
//! ```text
//!   card here ── take-frames ──► this towline ── give-frames ──► its agent ── give-frames ──► card there
//! ```
//! Cards are those of `towline net` at both ends, whose control socket is beside their socket: `net0.qmp` beside `net0.sock`. A pair has the
//! same chardev id. The cards decide which host's rings get the frames. What fails here costs frames, and nothing else: the switchover does
//! not wait for it.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use towline_qmp::{self as qmp, Client, Command, CommandError, Commands};

use super::Error;
use super::waiting::{failed, parsed};
use crate::cards;
use crate::lock::lock;
use crate::qemu::Qemu;

/// Extension of a card's control socket.
const CONTROL: &str = "qmp";
/// Time of a step while the guest runs here, divided by the number of cards: a host may be busy. The card of a guest with one expects the
/// next message a little longer.
const BUSY_WITHIN: Duration = Duration::from_secs(10);
/// Time of each later step. What takes longer does not come in time.
const STOPPED_WITHIN: Duration = Duration::from_secs(2);
/// Longest wait for frames, while the guest runs here, and afterwards.
const WAIT_MS: [u64; 2] = [250, 10];
/// Time for which the network may still send here, after the guest has announced itself there.
const GRACE: Duration = Duration::from_millis(20);
/// Time for the announcement of a guest that is there.
const ANNOUNCED_WITHIN: Duration = Duration::from_secs(1);

/// The control socket of a guest's card.
#[derive(Debug)]
pub(super) struct Card {
    pub(super) chardev: String,
    pub(super) control: PathBuf,
    client: Client,
}

/// Has the other host's card take frames.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct GiveFrames {
    /// Chardev id of the card.
    card: String,
    passed: Value,
    last: bool,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Given {
    /// True once the guest has sent a frame there.
    announced: bool,
}

impl Command for GiveFrames {
    const NAME: &'static str = "give-frames";
    type Return = Given;
}

impl Card {
    /// The cards of a QEMU.
    pub(super) fn of(qemu: &mut Qemu) -> Vec<Self> {
        let chardevs = qemu.query_raw("query-chardev", None).ok().flatten().unwrap_or_default();
        let all = || chardevs.as_array().into_iter().flatten();
        let listens = |control: &Path| {
            let name = format!("unix:{},", control.display());
            all().filter_map(|chardev| chardev["filename"].as_str()).any(|found| found.contains(&name))
        };
        all().filter_map(|chardev| Self::at(chardev, listens)).collect()
    }

    /// The card that a chardev is connected to. QEMU `listens` at its own sockets, which may have such names too.
    fn at(chardev: &Value, listens: impl Fn(&Path) -> bool) -> Option<Self> {
        let path = PathBuf::from(chardev["filename"].as_str()?.strip_prefix("unix:")?);
        let control = path.with_extension(CONTROL);
        if !path.is_absolute() || control == path || !control.exists() || listens(&control) {
            return None;
        }
        let mut client = cards::connect(&control, BUSY_WITHIN).ok()?;
        let found = client.execute_raw("query-migration-version", None).ok()?;
        let chardev = chardev["label"].as_str()?.to_owned();
        (found["type"] == "net").then_some(Self { chardev, control, client })
    }

    fn take(&mut self, wait_ms: u64) -> Result<Value, qmp::Error> {
        self.client.execute_raw("take-frames", Some(Map::from_iter([("wait-ms".into(), wait_ms.into())])))
    }

    /// Sets the time of the next steps, with this number of cards.
    fn set_deadline(&mut self, has_stopped: bool, cards: usize) -> Duration {
        let busy = BUSY_WITHIN / u32::try_from(cards.max(1)).unwrap_or(u32::MAX);
        let within = if has_stopped { STOPPED_WITHIN } else { busy.max(STOPPED_WITHIN) };
        self.client.set_deadline(within);
        within
    }

    fn give(&mut self, passed: Value, is_last: bool) -> Result<Value, qmp::Error> {
        let arguments = [("passed".into(), passed), ("last".into(), is_last.into())];
        self.client.execute_raw(GiveFrames::NAME, Some(Map::from_iter(arguments)))
    }
}

/// Gives frames to the other host, which has this time.
type Give<'a> = &'a mut (dyn FnMut(&GiveFrames, Duration) -> Result<Given, Error> + 'a);

/// Cards of a guest that goes to another host, whose frames are passed on.
#[derive(Debug, Default)]
pub struct FramePassing {
    cards: Vec<DepartingCard>,
}

#[derive(Debug)]
struct DepartingCard {
    card: Card,
    has_stopped: bool,
    announced: Option<Instant>,
    /// The other card has the last frame, or gets no more.
    is_over: bool,
}

impl FramePassing {
    pub(super) fn of(cards: impl IntoIterator<Item = Card>) -> Self {
        let departing = |card| DepartingCard { card, has_stopped: false, announced: None, is_over: false };
        Self { cards: cards.into_iter().map(departing).collect() }
    }

    /// Returns true if there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.cards.is_empty()
    }

    /// Moves the guest by `work`, and passes frames on by `give` meanwhile. `has_arrived` tells whether it is there.
    pub(super) fn during<T>(
        &mut self,
        mut give: impl FnMut(&GiveFrames, Duration) -> Result<Given, Error> + Send,
        work: impl FnOnce() -> T,
        has_arrived: impl FnOnce(&T) -> bool,
    ) -> T {
        let (end, ended) = mpsc::channel();
        thread::scope(|scope| {
            // Owned by this thread: if that panics, the other one ends too.
            let end = end;
            let pass = move || self.pass(&mut give, &ended);
            if let Err(error) = Builder::new().spawn_scoped(scope, pass) {
                tracing::warn!(%error, "frames of the guest are not passed on");
            }
            let result = work();
            let _ = end.send(has_arrived(&result));
            result
        })
    }

    fn pass(&mut self, give: Give<'_>, ended: &Receiver<bool>) {
        let mut arrived: Option<Instant> = None;
        while self.cards.iter().any(|card| !card.is_over) {
            match ended.try_recv() {
                Ok(true) => arrived = Some(Instant::now()),
                Err(TryRecvError::Disconnected) if arrived.is_some() => {}
                Err(TryRecvError::Empty) => {}
                // The guest goes on here, and gets the frames.
                Ok(false) | Err(TryRecvError::Disconnected) => return,
            }
            let is_late = arrived.is_some_and(|arrived| arrived.elapsed() >= ANNOUNCED_WITHIN);
            let count = self.cards.iter().filter(|card| !card.is_over).count();
            for card in self.cards.iter_mut().filter(|card| !card.is_over) {
                card.pass_next(give, is_late, count).unwrap_or_else(|reason| {
                    tracing::warn!(card = card.card.chardev, reason, "frames of the pause are not passed on");
                    card.is_over = true;
                });
            }
        }
        if arrived.is_some() || ended.recv() == Ok(true) {
            for card in &mut self.cards {
                let _ = card.card.client.execute_raw("drop-frames", None);
            }
        }
    }
}

impl DepartingCard {
    /// Passes the next frames on, or the last ones; `cards` are still open.
    fn pass_next(&mut self, give: Give<'_>, is_late: bool, cards: usize) -> Result<(), String> {
        self.card.set_deadline(self.has_stopped, cards);
        let is_last = is_late || self.announced.is_some_and(|announced| announced.elapsed() >= GRACE);
        let wait_ms = if is_last { 0 } else { WAIT_MS[usize::from(self.has_stopped)] };
        let passed = self.card.take(wait_ms).map_err(|error| error.to_string())?;
        self.has_stopped = passed["stopped"] == true;
        let within = self.card.set_deadline(self.has_stopped, cards);
        let last = is_last && passed["frames"] == "";
        let request = GiveFrames { card: self.card.chardev.clone(), passed, last };
        let Given { announced } = give(&request, within).map_err(|error| error.to_string())?;
        if announced {
            self.announced.get_or_insert_with(Instant::now);
        }
        self.is_over = last;
        Ok(())
    }
}

/// The other end: cards of a QEMU that waits for the guest.
#[derive(Debug, Default)]
pub struct FrameReceiver(Mutex<Vec<Card>>);

impl FrameReceiver {
    pub(super) fn of(cards: Vec<Card>) -> Self {
        Self(Mutex::new(cards))
    }

    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }

    /// No more frames come.
    pub fn end(&self) {
        let none = json!({ "series": 0, "stopped": false, "features": 0, "frames": "" });
        for card in lock(&self.0).iter_mut() {
            card.set_deadline(true, 1);
            // It has had the last ones already, or drops them.
            let _ = card.give(none.clone(), true);
        }
    }
}

impl Commands for FrameReceiver {
    fn names(&self) -> &[&'static str] {
        &[GiveFrames::NAME]
    }

    fn execute(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        if name != GiveFrames::NAME {
            return Err(CommandError::NotFound);
        }
        let request: GiveFrames = parsed(arguments)?;
        let mut cards = lock(&self.0);
        let count = cards.len();
        let card = cards.iter_mut().find(|card| card.chardev == request.card);
        let card = card.ok_or_else(|| failed("no such card"))?;
        card.set_deadline(request.passed["stopped"] == true, count);
        card.give(request.passed, request.last).map_err(failed)
    }
}
