//! Identifiers of values of the libraries, and the schemas of types that libraries serialize.

use std::collections::BTreeMap;

use towline_control::in_place::Error as InPlaceError;
use towline_control::plan::Error;
use towline_migration::{SendReason, ZeroCopySend};

/// Reason for a failure.
pub(crate) type Reason = &'static str;

/// Numbers by name, as those of `query-migrate`.
pub(crate) type Counters = BTreeMap<String, u64>;

/// Returns the identifier of a lane's choice of sends.
pub(crate) fn send_method_reason(reason: SendReason) -> &'static str {
    match reason {
        SendReason::Asked => "requested",
        SendReason::Undecided => "undecided",
        SendReason::Unsupported => "unsupported",
        SendReason::Compressed => "compressed",
        SendReason::Copied => "copied",
        SendReason::CostsMore => "costs-more",
        SendReason::CostsLess => "costs-less",
        SendReason::SpliceCostsLess => "splice-costs-less",
        SendReason::NoMemory => "no-memory",
    }
}

/// Returns the value of `--zero-copy-send`.
pub(crate) fn zero_copy_send(setting: ZeroCopySend) -> &'static str {
    match setting {
        ZeroCopySend::Auto => "auto",
        ZeroCopySend::On => "on",
        ZeroCopySend::Off => "off",
    }
}

/// Returns the identifier of the reason for a failure.
pub(crate) fn reason(error: &Error) -> Reason {
    match error {
        Error::Channel(_) => "channel",
        Error::Image(_) => "image",
        Error::Migration(_) => "migration",
        Error::Qemu(_) => "qemu",
        Error::Settings(_) => "settings",
        Error::Check(_) => "check",
        Error::Move(_) => "undecided-move",
        Error::Invalid(_) => "usage",
        Error::Remote(_) => "other-host",
        Error::NeedsCont { .. } => "source-postmigrate",
        Error::NoGuest { .. } => "source-without-guest",
        Error::Migrating { .. } | Error::NotCleanedUp { .. } => "source-migrating",
        Error::Blocked { .. } | Error::Asleep { .. } => "source-blocked",
        Error::NotWaiting { .. } | Error::WaitsElsewhere { .. } | Error::UsedUp { .. } => {
            "destination-not-waiting"
        }
        Error::DoesNotFit { .. } => "incompatible",
        Error::LaneLost { .. } | Error::LanesNotTaken { .. } => "lanes",
        Error::NothingToRecover { .. }
        | Error::BlockedMonitor { .. }
        | Error::NotRecovered { .. }
        | Error::NotConnectedAgain { .. }
        | Error::ConnectionOfQemus => "recovery",
        Error::NotDetached { .. } | Error::NotAttached { .. } => "device",
        Error::SourceEnded { .. } => "source-exited",
        Error::SourceFailed { .. } => "source-failed",
        Error::DestinationFailed { .. } => "destination-failed",
        Error::NotCompleted { .. } | Error::SourceNotDone { .. } | Error::SourceReset { .. } => {
            "source-unknown"
        }
        Error::PeerSilent { .. } => "peer-silent",
        Error::PeerGaveUp => "peer-gave-up",
        Error::NotRunning { .. } => "destination-not-running",
        Error::SharedDrive { .. } => "shared-drive",
        Error::WritesDisk { .. }
        | Error::DisksNotKept { .. }
        | Error::DiskNotCopied { .. }
        | Error::DiskNotCompared { .. }
        | Error::DiskDiffers { .. }
        | Error::NoOverlayDirectory { .. }
        | Error::InPlace(
            InPlaceError::NoOverlay { .. }
            | InPlaceError::LongChain { .. }
            | InPlaceError::Overlay(_)
            | InPlaceError::Owner { .. }
            | InPlaceError::DriveChanged { .. },
        ) => "disk",
        Error::NotInPlace { .. } => "memory-not-in-place",
        Error::NotCarried { .. } => "not-carried",
        Error::DrivesChanged { .. } => "other-drive",
        Error::CardDisconnected { .. } => "card-disconnected",
        Error::CannotConverge { .. } => "not-converging",
        Error::PrivateDir { .. } => "private-directory",
        Error::Cancelled => "cancelled",
        _ => "other",
    }
}
