//! The card as vhost-user sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use towline_channel::IoBuf;
use towline_vhost_user::{BackendError, Device, ProtocolFeatures, Worker};

use crate::features;
use crate::pair::{Pair, RECEIVE, TRANSMIT};
use crate::rarp;
use crate::state::State;
use crate::statistics::{Counters, DropReason, QueueStatistics};
use crate::tap::Taps;
use crate::xdp::{Mode, Xdp};

/// The first word of [`Device::migration_version`].
const KIND: &str = "towline-net-1";

/// What is up to the owner.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// On which processors the threads run, one after the other and round again; wherever the kernel likes if empty.
    pub cpus: Vec<usize>,
    /// How long a thread waits awake where requests and answers alternate; 0: never.
    pub poll: Duration,
    /// The frontend is told that its guest cannot be migrated with it.
    pub unmigratable: bool,
    /// Its link and its counters travel with the guest; the card on the other host has to say so too.
    pub device_state: bool,
}

/// A network card. One of it serves one guest, over as many connections as its frontend makes.
#[derive(Debug)]
pub struct Net {
    shared: Arc<Shared>,
}

/// What the threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) taps: Taps,
    pub(crate) xdp: Option<Xdp>,
    /// By pair: a [`Mode`].
    pub(crate) modes: Vec<AtomicU8>,
    pub(crate) options: Options,
    /// What the driver took.
    pub(crate) features: AtomicU64,
    /// By pair: receiving, transmitting.
    pub(crate) counters: Vec<[Counters; 2]>,
    /// Whether anything goes between the guest and the tap.
    pub(crate) linked: AtomicBool,
    /// Whether the guest receives from this pair.
    pub(crate) in_use: Vec<AtomicBool>,
    /// By pair: whether a connection ended with chains under way by AF_XDP, on a queue that is not known to be free since.
    pub(crate) left: Vec<AtomicBool>,
}

impl Shared {
    /// What the connection before this one had under way on this pair is sent, or never will be. A ring that begins again may give
    /// those chains again, and whatever becomes of them then, the guest has them back.
    fn may_begin(&self, pair: usize) -> Result<(), BackendError> {
        let Some(xdp) = self.xdp.as_ref().filter(|_| self.left[pair].load(Relaxed)) else { return Ok(()) };
        match xdp.is_free(pair) {
            Ok(true) => {}
            Ok(false) => {
                let name = xdp.name();
                return Err(BackendError::temporary(format!(
                    "{name} may still send frames of the connection before; look at the link and the driver of {name}, \
                     or another program has the queue"
                )));
            }
            Err(error) => {
                tracing::warn!(pair, %error, "whether frames of the connection before are still sent cannot be found out");
            }
        }
        self.left[pair].store(false, Relaxed);
        Ok(())
    }
}

impl Net {
    /// A card on these queues of a tap, a pair for each.
    pub fn new(taps: Taps, options: Options) -> Self {
        Self::with_xdp(taps, None, options)
    }

    /// As [`Net::new`], but what the guest sends leaves by AF_XDP wherever it can.
    pub fn with_xdp(taps: Taps, xdp: Option<Xdp>, options: Options) -> Self {
        let counters = taps.queues().iter().map(|_| <[Counters; 2]>::default()).collect();
        let modes = taps.queues().iter().map(|_| AtomicU8::new(Mode::Tap as u8)).collect();
        let in_use = taps.queues().iter().map(|_| AtomicBool::new(false)).collect();
        let left = taps.queues().iter().map(|_| AtomicBool::new(false)).collect();
        let (features, linked) = (AtomicU64::new(0), AtomicBool::new(true));
        Self {
            shared: Arc::new(Shared { taps, xdp, modes, options, features, counters, linked, in_use, left }),
        }
    }

    /// Its tap.
    pub fn taps(&self) -> &Taps {
        &self.shared.taps
    }

    /// What each pair did so far: receiving (the guest), transmitting.
    pub fn statistics(&self) -> Vec<[QueueStatistics; 2]> {
        let snapshot = |pair: &[Counters; 2]| [pair[0].snapshot(), pair[1].snapshot()];
        self.shared.counters.iter().map(snapshot).collect()
    }

    /// Whether it was made to send by AF_XDP.
    pub fn uses_xdp(&self) -> bool {
        self.shared.xdp.is_some()
    }

    /// Whether a state of its own travels with its guest.
    pub fn has_state(&self) -> bool {
        self.shared.options.device_state
    }

    /// How each pair sends now.
    pub fn modes(&self) -> Vec<Mode> {
        self.shared.modes.iter().map(|mode| Mode::of(mode.load(Relaxed))).collect()
    }

    /// What the driver took of [`Device::features`]; nothing before there is one.
    pub fn features_taken(&self) -> u64 {
        self.shared.features.load(Relaxed)
    }

    /// How many pairs the guest receives from.
    pub fn pairs_in_use(&self) -> usize {
        self.shared.in_use.iter().filter(|pair| pair.load(Relaxed)).count()
    }

    /// Whether anything goes between the guest and the tap. While the link is down, what either side sends is thrown away and
    /// counted ([`DropReason::Unlinked`]); the guest's driver is not told, which is the VMM's to do.
    pub fn set_link(&self, up: bool) {
        let Shared { taps, counters, linked, .. } = &*self.shared;
        if up && !linked.load(Relaxed) {
            // A guest without buffers has left some in the tap.
            counters[0][RECEIVE].drop(DropReason::Unlinked, taps.discard());
        }
        linked.store(up, Relaxed);
    }

    /// Whether the link is up.
    pub fn is_linked(&self) -> bool {
        self.shared.linked.load(Relaxed)
    }

    fn pairs(&self) -> usize {
        self.shared.taps.queues().len()
    }

    /// Has the tap do what a driver with these features understands.
    fn take(&self, taken: u64) -> Result<(), BackendError> {
        let (taps, before) = (&self.shared.taps, self.shared.features.load(Relaxed));
        let refused = |error: crate::TapError| BackendError::new(error.to_string());
        taps.set_header_bytes(features::header_bytes(taken)).map_err(refused)?;
        taps.set_offloads(features::offloads(taken)).map_err(refused)?;
        self.shared.features.store(taken, Relaxed);
        // What waits already was made for the driver before.
        if !features::offloads(taken).contains(features::offloads(before)) {
            let frames = taps.discard();
            tracing::debug!(frames, "frames for another driver were thrown away");
        }
        Ok(())
    }
}

impl Device for Net {
    fn name(&self) -> &str {
        "net"
    }

    fn queue_count(&self) -> usize {
        self.pairs() * 2
    }

    fn reported_queue_num(&self) -> usize {
        self.pairs()
    }

    fn queues_per_worker(&self) -> usize {
        2
    }

    /// A guest that sends again what got lost waits for ever for what still lies in its queue.
    fn drops_while_disabled(&self, queue: usize) -> bool {
        queue % 2 == TRANSMIT
    }

    fn completes_in_order(&self) -> bool {
        true
    }

    fn features(&self) -> u64 {
        features::offered(self.shared.taps.offloads(), self.pairs())
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        let state = match self.shared.options.device_state {
            true => ProtocolFeatures::DEVICE_STATE,
            false => ProtocolFeatures::empty(),
        };
        ProtocolFeatures::RARP | ProtocolFeatures::NET_MTU | state
    }

    fn save(&self) -> Result<Vec<u8>, BackendError> {
        Ok(State { linked: self.is_linked(), counters: self.statistics() }.encode())
    }

    fn load(&self, state: &[u8]) -> Result<(), BackendError> {
        let state = State::decode(state)?;
        self.set_link(state.linked);
        // Of a guest that had more pairs, the first ones.
        for (counters, before) in self.shared.counters.iter().zip(&state.counters) {
            counters.iter().zip(before).for_each(|(counters, before)| counters.go_on(before));
        }
        Ok(())
    }

    fn acknowledge(&self, features: u64) -> Result<(), BackendError> {
        self.take(features)
    }

    fn worker(&self, index: usize) -> Result<Box<dyn Worker>, BackendError> {
        self.shared.may_begin(index)?;
        Ok(Box::new(Pair::new(index, Arc::clone(&self.shared))?))
    }

    /// Memory that has not come cannot be pinned.
    fn allows_postcopy(&self) -> bool {
        self.shared.xdp.is_none()
    }

    fn send_rarp(&self, mac: [u8; 6]) -> Result<(), BackendError> {
        let header = [0; 12];
        let header = &header[..features::header_bytes(self.shared.features.load(Relaxed))];
        let frame = rarp::frame(mac);
        self.shared.taps.queues()[0].write(&[IoBuf::from(header), IoBuf::from(&frame)])?;
        Ok(())
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), BackendError> {
        let taps = &self.shared.taps;
        match taps.mtu() {
            Some(found) if found < mtu.into() && taps.is_made() => {
                taps.set_mtu(mtu).map_err(|error| BackendError::new(error.to_string()))
            }
            Some(found) if found < mtu.into() => Err(BackendError::new(format!(
                "the guest's MTU is {mtu} (host_mtu) and that of {name} only {found}; `ip link set {name} mtu {mtu}`",
                name = taps.name()
            ))),
            _ => Ok(()),
        }
    }

    fn is_migratable(&self) -> bool {
        !self.shared.options.unmigratable
    }

    fn migration_version(&self) -> Result<String, BackendError> {
        if !self.is_migratable() {
            return Err(BackendError::new("it was started so that it cannot be migrated"));
        }
        let (features, pairs) = (self.features(), self.pairs());
        let mtu = self.shared.taps.mtu().map_or("unknown".to_owned(), |mtu| mtu.to_string());
        let state = if self.shared.options.device_state { " state=1" } else { "" };
        Ok(format!("{KIND} features={features:#x} pairs={pairs} mtu={mtu}{state}"))
    }

    fn accepts(&self, source: &str) -> Result<(), BackendError> {
        let ours = self.migration_version()?;
        let refused =
            |why: String| Err(BackendError::new(format!("{why}; it is `{source}`, this is `{ours}`")));
        let Some(theirs) = Version::parse(source) else {
            return refused(format!("the source is no {KIND}"));
        };
        let here = Version::parse(&ours).ok_or(BackendError::new("its own version cannot be read"))?;
        let missing = theirs.features & !here.features;
        // MQ follows the number of pairs, which QEMU compares itself.
        if missing & !features::MQ != 0 {
            return refused(format!(
                "features {missing:#x} of the source are not to be had on this host's tap"
            ));
        }
        if theirs.state != here.state {
            return refused("one of the two cards has --device-state on, and the other one has not".into());
        }
        match (theirs.mtu, here.mtu) {
            (Some(there), Some(here)) if here < there => {
                refused(format!("the MTU is {there} at the source and only {here} here"))
            }
            _ => Ok(()),
        }
    }
}

/// What [`Device::migration_version`] says.
struct Version {
    features: u64,
    mtu: Option<u32>,
    /// Whether a state travels.
    state: bool,
}

impl Version {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        if words.next() != Some(KIND) {
            return None;
        }
        let pairs: Vec<(&str, &str)> = words.filter_map(|word| word.split_once('=')).collect();
        let value = |key: &str| pairs.iter().find(|(known, _)| *known == key).map(|(_, value)| *value);
        let features = u64::from_str_radix(value("features")?.strip_prefix("0x")?, 16).ok()?;
        Some(Self { features, mtu: value("mtu")?.parse().ok(), state: value("state").is_some() })
    }
}
