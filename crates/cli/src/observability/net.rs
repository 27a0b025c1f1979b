//! Facts and statistics of a network card.

use std::sync::Arc;
use std::time::Duration;

use towline_compat::facts;
use towline_control::device::{HoldRequest, HoldStatus, ManagedDevice, PassedFrames};
use towline_control::statistics::{Metric, StatsObject};
use towline_net::{
    CopyReason, DropReason, Net, QueueStatistics, STATE_VERSION, STATE_VERSION_MIN, feature_names,
};
use towline_vhost_user::{Device, RING_SIZE_MAX, features};

/// A network card.
struct Card {
    net: Arc<Net>,
    /// As of the start of the process.
    version: Result<String, String>,
}

/// Returns the card as an observed device.
pub(crate) fn card(net: &Arc<Net>) -> Box<dyn ManagedDevice> {
    let version = net.migration_version().map_err(|error| error.to_string());
    Box::new(Card { net: Arc::clone(net), version })
}

impl ManagedDevice for Card {
    fn name(&self) -> String {
        self.net.taps().name().to_owned()
    }

    fn facts(&self) -> facts::DeviceFacts {
        let rings = features::COMMON & !(features::LOG_ALL | features::PROTOCOL_FEATURES);
        // The queues in use; before a guest is connected all queues.
        let queues = match self.net.pairs_in_use() {
            0 => self.net.reported_queue_num(),
            in_use => in_use,
        };
        facts::DeviceFacts {
            device_type: self.net.name().into(),
            features: feature_names(self.net.features() | rings).collect(),
            negotiated: feature_names(self.net.negotiated_features()).collect(),
            queues: u16::try_from(queues).unwrap_or(u16::MAX),
            ring_size_max: RING_SIZE_MAX,
            mtu: self.net.taps().mtu().and_then(|mtu| mtu.try_into().ok()).unwrap_or(0),
            state_version: if self.net.has_device_state() { STATE_VERSION.into() } else { 0 },
            state_version_min: if self.net.has_device_state() { STATE_VERSION_MIN.into() } else { 0 },
            migration_version: self.version.clone().ok(),
            unmigratable: self.version.clone().err(),
            ..facts::DeviceFacts::default()
        }
    }

    fn is_running(&self) -> bool {
        self.net.pairs_in_use() > 0
    }

    fn accepts(&self, version: &str) -> Result<(), String> {
        self.net.accepts(version).map_err(|error| error.to_string())
    }

    fn statistics(&self) -> Vec<StatsObject> {
        let tap = self.net.taps().name();
        let held = self.net.held(Duration::ZERO);
        let card = StatsObject {
            kind: "net",
            labels: vec![("tap", tap.to_owned())],
            metrics: vec![
                Metric::gauge("link", "1 while the link is up", self.net.is_link_up().into()),
                Metric::gauge(
                    "pairs-in-use",
                    "queue pairs in use by the guest",
                    self.net.pairs_in_use() as u64,
                ),
                Metric::gauge("holding", "1 while frames of the guest are held", held.is_holding.into()),
                Metric::gauge("held-frames", "frames of the guest that are held", held.frames as u64),
                Metric::gauge("held-bytes", "bytes of the held frames", held.bytes as u64),
            ],
        };
        std::iter::once(card).chain(queues(tap, &self.net.statistics(), self.net.uses_xdp())).collect()
    }

    fn set_link(&self, up: bool) -> Result<(), String> {
        self.net.set_link(up);
        Ok(())
    }

    fn take_frames(&self, wait: Duration) -> Result<PassedFrames, String> {
        let taken = self.net.take_frames(wait).map_err(|error| error.to_string())?;
        let towline_net::PassedFrames { series, is_stopped, features, frames } = taken;
        Ok(PassedFrames { series, stopped: is_stopped, features, frames })
    }

    fn drop_frames(&self) {
        self.net.drop_frames();
    }

    fn give_frames(&self, passed: &PassedFrames, is_last: bool) -> Result<bool, String> {
        let PassedFrames { series, stopped, features, frames } = passed.clone();
        let given = towline_net::PassedFrames { series, is_stopped: stopped, features, frames };
        self.net.give_frames(&given, is_last).map_err(|error| error.to_string())
    }

    fn hold(&self, request: &HoldRequest) -> Result<HoldStatus, String> {
        let net = &self.net;
        let done = match request {
            HoldRequest::Hold { generation } => net.hold(*generation),
            HoldRequest::Mark { generation, epoch } => net.mark(*generation, *epoch),
            HoldRequest::Release { generation, epoch } => net.release(*generation, *epoch),
            HoldRequest::Pass { generation, announce } => {
                net.pass(*generation, announce.as_deref().map(mac).transpose()?)
            }
            HoldRequest::QueryHeld { wait_ms } => Ok(net.held(Duration::from_millis(*wait_ms))),
        };
        let held = done.map_err(|error| error.to_string())?;
        Ok(HoldStatus {
            holding: held.is_holding,
            generation: held.generation,
            epoch: held.epoch,
            frames: held.frames,
            bytes: held.bytes,
            open_frames: held.open_frames,
            full: held.is_full,
        })
    }
}

/// Parses a MAC address.
fn mac(text: &str) -> Result<[u8; 6], String> {
    let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    let mac = bytes.and_then(|bytes| bytes.try_into().ok());
    mac.ok_or_else(|| format!("{text:?} is not a MAC address, such as 52:54:00:12:34:56"))
}

/// Returns the queues of a card, all with the same metrics. `rx` is the guest's direction of receiving.
fn queues(tap: &str, pairs: &[[QueueStatistics; 2]], uses_xdp: bool) -> impl Iterator<Item = StatsObject> {
    let queue = move |(number, queue): (usize, &QueueStatistics)| {
        let drops = DropReason::ALL.map(|reason| {
            let (name, about) = dropped(reason);
            Metric::counter(name, about, queue.dropped(reason))
        });
        let copies = uses_xdp.then(|| copies(queue)).into_iter().flatten();
        let way = ["rx", "tx"][number % 2].to_owned();
        StatsObject {
            kind: "net-queue",
            labels: vec![("tap", tap.to_owned()), ("way", way), ("queue", (number / 2).to_string())],
            metrics: counters(queue).into_iter().chain(drops).chain(copies).collect(),
        }
    };
    pairs.as_flattened().iter().enumerate().map(queue)
}

/// Returns the counters of a queue that have no reason.
pub(crate) fn counters(queue: &QueueStatistics) -> Vec<Metric> {
    vec![
        Metric::counter("packets", "frames and super-frames", queue.packets),
        Metric::byte_counter("bytes", "bytes of the frames, without virtio headers", queue.bytes),
        Metric::counter("batches", "updates of the used index", queue.batches),
        Metric::counter("notifications", "notifications of the driver", queue.notifications),
        Metric::counter(
            "notifications-suppressed",
            "notifications that the driver suppressed",
            queue.notifications_suppressed,
        ),
        Metric::counter("kicks", "notifications by the driver", queue.kicks),
        Metric::counter("copied", "frames copied by this process or the kernel", queue.copied),
        Metric::counter("zero-copy", "frames read from guest memory by the network device", queue.zero_copy),
        Metric::counter(
            "referenced",
            "frames passed to the kernel by reference to guest memory",
            queue.referenced,
        ),
        Metric::gauge("pending", "frames in flight in the kernel", queue.pending),
    ]
}

/// Returns the metric of a drop reason, and its help text.
fn dropped(reason: DropReason) -> (&'static str, &'static str) {
    match reason {
        DropReason::InterfaceDown => {
            ("dropped-interface-down", "frames dropped: the host's interface is down")
        }
        DropReason::Malformed => ("dropped-malformed", "frames dropped: malformed"),
        DropReason::TooLong => ("dropped-too-long", "frames dropped: too long"),
        DropReason::NoRoom => ("dropped-no-room", "frames dropped: the kernel's queue is full"),
        DropReason::Refused => ("dropped-refused", "frames dropped: the tap refused them or is removed"),
        DropReason::LinkDown => ("dropped-link-down", "frames dropped: the link is down"),
    }
}

/// Returns the counters of frames that were copied although the card sends by AF_XDP.
fn copies(queue: &QueueStatistics) -> [Metric; CopyReason::ALL.len()] {
    CopyReason::ALL.map(|reason| {
        let (name, about) = match reason {
            CopyReason::Short => ("copied-short", "frames copied: so short that a copy is cheaper"),
            CopyReason::Buffers => {
                ("copied-buffers", "frames copied: more descriptors than the driver accepts")
            }
            CopyReason::Pages => ("copied-pages", "frames copied: in a buffer across a page boundary"),
            CopyReason::Unregistered => {
                ("copied-unregistered", "frames copied: in memory that is not registered")
            }
            CopyReason::InFlight => ("copied-in-flight", "frames copied: many others are in flight"),
            CopyReason::Errors => ("copied-errors", "frames copied: the driver refused many others"),
            CopyReason::NoRoom => {
                ("copied-no-room", "frames copied: too many segments, or no room for their headers")
            }
            CopyReason::CopyMode => ("copied-copy-mode", "frames copied: the driver has no zero-copy"),
            CopyReason::Tap => ("copied-tap", "frames copied: sent by the tap"),
            CopyReason::Setting => ("copied-setting", "frames copied: references are disabled"),
        };
        Metric::counter(name, about, queue.copied_because(reason))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Metrics and `query-stats-schemas` have those of the first object of a kind.
    #[test]
    fn each_queue_has_the_same_metrics() {
        for (uses_xdp, copied) in [(false, false), (true, true)] {
            let queues: Vec<_> = queues("vm0", &[[QueueStatistics::default(); 2]; 2], uses_xdp).collect();
            let names =
                |queue: &StatsObject| queue.metrics.iter().map(|metric| metric.name).collect::<Vec<_>>();
            assert!(queues.iter().all(|queue| names(queue) == names(&queues[0])), "{queues:?}");
            assert_eq!(names(&queues[0]).contains(&"copied-short"), copied);
            assert_eq!(queues[3].labels[1..], [("way", "tx".to_owned()), ("queue", "1".to_owned())]);
        }
    }
}
