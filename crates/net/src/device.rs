//! The network card as a vhost-user device.

mod holding;
mod pair;
mod passing;
mod shared;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use towline_vhost_user::{BackendError, Device, ProtocolFeatures, Worker};

use self::pair::{QueuePair, RECEIVE, TRANSMIT};
pub use self::shared::Options;
pub(crate) use self::shared::Shared;
use crate::features;
use crate::lock::lock;
use crate::pause::Pause;
use crate::state::State;
use crate::statistics::{DropReason, QueueStatistics, TransmitMode};
use crate::tap::{CarrierState, TapError, Taps};
use crate::xdp::Xdp;

/// First word of [`Device::migration_version`].
const KIND: &str = "towline-net-1";

/// A network card. It serves one guest, over any number of connections of its frontend, one after the other.
#[derive(Debug)]
pub struct Net {
    shared: Arc<Shared>,
}

impl Net {
    /// A card with a queue pair for each queue of the tap.
    pub fn new(taps: Taps, options: Options) -> Self {
        Self::with(taps, None, options)
    }

    /// As [`Net::new`], but frames of the guest are sent by AF_XDP where possible.
    #[cfg(feature = "af-xdp")]
    pub fn with_xdp(taps: Taps, xdp: Option<Xdp>, options: Options) -> Self {
        Self::with(taps, xdp, options)
    }

    fn with(taps: Taps, xdp: Option<Xdp>, options: Options) -> Self {
        let pairs = taps.queues().len();
        let shared = Shared {
            taps,
            xdp: xdp.map(Arc::new),
            features: AtomicU64::new(0),
            link_up: AtomicBool::new(options.link_was_up()),
            hold: options.first_hold(),
            options,
            statistics: (0..pairs).map(|_| Default::default()).collect(),
            modes: (0..pairs).map(|_| Mutex::default()).collect(),
            receivers: (0..pairs).map(|_| Mutex::default()).collect(),
            transmitters: (0..pairs).map(|_| Mutex::default()).collect(),
            pause: Pause::default(),
            workers: AtomicUsize::new(0),
            next_worker: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The tap.
    pub fn taps(&self) -> &Taps {
        &self.shared.taps
    }

    /// Statistics of each pair: receiving, transmitting.
    pub fn statistics(&self) -> Vec<[QueueStatistics; 2]> {
        self.shared.statistics.iter().map(|pair| pair.each_ref().map(|queue| *lock(queue))).collect()
    }

    /// Returns true if the card has an interface for AF_XDP.
    pub fn uses_xdp(&self) -> bool {
        self.shared.xdp.is_some()
    }

    /// Returns true if the card's state migrates with its guest.
    pub fn has_device_state(&self) -> bool {
        self.shared.options.device_state
    }

    /// Current transmit mode of each pair.
    pub fn transmit_modes(&self) -> Vec<TransmitMode> {
        self.shared.modes.iter().map(|mode| *lock(mode)).collect()
    }

    /// Features that the driver negotiated; none before a driver has.
    pub fn negotiated_features(&self) -> u64 {
        self.shared.features.load(Relaxed)
    }

    /// Number of pairs whose receive ring runs.
    pub fn pairs_in_use(&self) -> usize {
        self.shared.receivers.iter().filter(|pair| lock(pair).is_some()).count()
    }

    /// Sets the link up or down. While it is down, frames of both directions are discarded and counted
    /// ([`DropReason::LinkDown`]). The driver is not notified; that is up to the VMM.
    pub fn set_link(&self, up: bool) {
        let Shared { taps, statistics, link_up, .. } = &*self.shared;
        if up && !link_up.load(Relaxed) {
            // Frames that stayed in the tap because the receive ring was empty.
            let mut discarded = QueueStatistics::default();
            discarded.drops[DropReason::LinkDown as usize] = taps.discard() as u64;
            lock(&statistics[0][RECEIVE]).add(&discarded);
        }
        let state = self.shared.hold.lock();
        link_up.store(up, Relaxed);
        self.shared.store_word(&state);
    }

    /// Returns true if the link is up.
    pub fn is_link_up(&self) -> bool {
        self.shared.link() == CarrierState::Up
    }

    fn pairs(&self) -> usize {
        self.shared.taps.queues().len()
    }

    /// Configures the tap for a driver that negotiated these features.
    fn apply_features(&self, negotiated: u64) -> Result<(), TapError> {
        let (taps, before) = (&self.shared.taps, self.shared.features.load(Relaxed));
        // Held frames are sent with the header of either driver.
        let _sending = lock(&self.shared.hold.sending);
        taps.set_header_bytes(features::header_bytes(negotiated))?;
        taps.set_offloads(features::offloads(negotiated))?;
        self.shared.features.store(negotiated, Relaxed);
        // Frames that the tap holds already have the offloads of the previous driver.
        if !features::offloads(negotiated).contains(features::offloads(before)) {
            let frames = taps.discard();
            tracing::debug!(frames, "discarded frames with offloads of the previous driver");
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

    /// Transmit queues: a guest that retransmits would otherwise wait for the chains of a disabled queue
    /// without end.
    fn drops_while_disabled(&self, queue: usize) -> bool {
        queue % 2 == TRANSMIT
    }

    fn completes_in_order(&self) -> bool {
        true
    }

    fn features(&self) -> u64 {
        features::offered(self.shared.taps.offloads, self.pairs())
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        let state =
            if self.has_device_state() { ProtocolFeatures::DEVICE_STATE } else { ProtocolFeatures::empty() };
        ProtocolFeatures::RARP | ProtocolFeatures::NET_MTU | state
    }

    fn save(&self) -> Result<Vec<u8>, BackendError> {
        Ok(State { link_up: self.is_link_up(), counters: self.statistics() }.encode())
    }

    fn load(&self, state: &[u8]) -> Result<(), BackendError> {
        let state = State::decode(state)?;
        self.set_link(state.link_up);
        // The source may have more pairs; those beyond ours are ignored.
        let queues = self.shared.statistics.iter().flatten().zip(state.counters.iter().flatten());
        queues.for_each(|(queue, source)| lock(queue).add(source));
        Ok(())
    }

    fn acknowledge(&self, features: u64) -> Result<(), BackendError> {
        self.apply_features(features).map_err(|error| BackendError::new(error.to_string()))
    }

    fn worker(&self, index: usize) -> Result<Box<dyn Worker>, BackendError> {
        let pair = QueuePair::new(index, Arc::clone(&self.shared))?;
        self.shared.pause.forget();
        Ok(Box::new(pair))
    }

    /// Not with AF_XDP, whose socket of a pair has one worker.
    fn allows_standby(&self) -> bool {
        self.shared.xdp.is_none()
    }

    /// Not with AF_XDP: memory that has not arrived cannot be pinned.
    fn allows_postcopy(&self) -> bool {
        self.shared.xdp.is_none()
    }

    fn send_rarp(&self, mac: [u8; 6]) -> Result<(), BackendError> {
        self.shared.send_announcement(mac)
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), BackendError> {
        let taps = &self.shared.taps;
        match taps.mtu() {
            Some(found) if found < mtu.into() && taps.is_created() => {
                taps.set_mtu(mtu).map_err(|error| BackendError::new(error.to_string()))
            }
            Some(found) if found < mtu.into() => Err(BackendError::new(format!(
                "the guest's MTU is {mtu} (host_mtu), the MTU of {name} is {found}; run `ip link set {name} mtu {mtu}`",
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
            return Err(BackendError::new("it cannot be migrated: it was started with --unmigratable"));
        }
        let (features, pairs) = (self.features(), self.pairs());
        let mtu = self.shared.taps.mtu().map_or("unknown".to_owned(), |mtu| mtu.to_string());
        let state = if self.has_device_state() { " state=1" } else { "" };
        Ok(format!("{KIND} features={features:#x} pairs={pairs} mtu={mtu}{state}"))
    }

    fn accepts(&self, source: &str) -> Result<(), BackendError> {
        let destination = self.migration_version()?;
        let refused = |reason: String| {
            Err(BackendError::new(format!(
                "{reason}; the source is `{source}`, this card is `{destination}`"
            )))
        };
        let Some(theirs) = Version::parse(source) else {
            return refused(format!("the source is not a {KIND}"));
        };
        let ours =
            Version::parse(&destination).ok_or(BackendError::new("the card's own version is invalid"))?;
        if let (Some(theirs), Some(ours)) = (theirs.pairs, ours.pairs)
            && ours < theirs
        {
            return refused(format!(
                "the source has {theirs} queue pairs and this card only {ours}; start it with --queues {theirs}"
            ));
        }
        let missing = theirs.features & !ours.features;
        // MQ depends on the number of pairs.
        if missing & !features::MQ != 0 {
            return refused(format!("the tap of this host lacks features {missing:#x} of the source"));
        }
        if theirs.state != ours.state {
            return refused(
                "only one of the two cards has --device-state on; give both the same setting".into(),
            );
        }
        match (theirs.mtu, ours.mtu) {
            (Some(theirs), Some(ours)) if ours < theirs => {
                refused(format!("the MTU is {theirs} on the source and only {ours} on this host"))
            }
            _ => Ok(()),
        }
    }
}

/// Contents of [`Device::migration_version`].
struct Version {
    features: u64,
    pairs: Option<u32>,
    mtu: Option<u32>,
    /// True if the card's state migrates.
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
        let pairs = value("pairs").and_then(|pairs| pairs.parse().ok());
        Some(Self { features, pairs, mtu: value("mtu")?.parse().ok(), state: value("state").is_some() })
    }
}
