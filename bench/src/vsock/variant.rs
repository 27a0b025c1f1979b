//! Variants of the device for `vsock-ablation`, and the command line of a process that hosts one.

use towline_vsock::{Ablation, CreditUpdates, Merging};

/// Option that has the program host a device; its value is the variant, and socket and path for clients follow.
pub(super) const ROLE_OPTION: &str = "--vsock-device";
/// Maximum payload of a packet before the series.
pub(super) const SMALL_PACKET_BYTES: u32 = 4096;

/// The device with all ideas, or without one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    All,
    NoMerging,
    EveryCreditUpdate,
    OneBuffer,
    SmallPackets,
}

impl Variant {
    pub(super) const ALL: [Self; 5] =
        [Self::All, Self::NoMerging, Self::EveryCreditUpdate, Self::OneBuffer, Self::SmallPackets];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::All => "all ideas",
            Self::NoMerging => "without merging of small packets",
            Self::EveryCreditUpdate => "a credit update whenever space is free",
            Self::OneBuffer => "no data split over several buffers",
            Self::SmallPackets => "packets of 4 KiB at most",
        }
    }

    pub(super) fn ablation(self) -> Ablation {
        let all = Ablation::default();
        match self {
            Self::All => all,
            Self::NoMerging => Ablation { merging: Merging::None, ..all },
            Self::EveryCreditUpdate => Ablation { credit_updates: CreditUpdates::Always, ..all },
            Self::OneBuffer => Ablation { buffers_per_receive: 1, ..all },
            Self::SmallPackets => Ablation { payload_bytes_max: SMALL_PACKET_BYTES, ..all },
        }
    }
}

/// Returns the arguments of this program as the host of a device.
pub(super) fn arguments(variant: Variant, socket: &str, uds: &str) -> [String; 4] {
    [ROLE_OPTION, variant.name(), socket, uds].map(str::to_owned)
}
