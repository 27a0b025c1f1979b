//! Identifiers of values of the libraries, and the schemas of types that libraries serialize.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use towline_control::in_place::Error as InPlaceError;
use towline_control::plan::Error;
use towline_migration::SendReason;

/// Reason for a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
pub(crate) enum Reason {
    Channel,
    Image,
    Migration,
    Qemu,
    Settings,
    Check,
    UndecidedMove,
    Usage,
    SourcePostmigrate,
    SourceWithoutGuest,
    SourceMigrating,
    SourceBlocked,
    DestinationNotWaiting,
    Incompatible,
    Lanes,
    Recovery,
    Device,
    SourceExited,
    SourceFailed,
    DestinationFailed,
    SourceUnknown,
    PeerSilent,
    PeerGaveUp,
    DestinationNotRunning,
    SharedDrive,
    OtherHost,
    Disk,
    NotConverging,
    PrivateDirectory,
    CommandLine,
    MemoryNotInPlace,
    OtherDrive,
    NotCarried,
    CardDisconnected,
    UpgradeRefused,
    Cancelled,
    UnknownId,
    AmbiguousId,
    InUse,
    Refused,
    Record,
    Other,
}

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

/// Returns the identifier of the reason for a failure.
pub(crate) fn reason(error: &Error) -> Reason {
    match error {
        Error::Channel(_) => Reason::Channel,
        Error::Image(_) => Reason::Image,
        Error::Migration(_) => Reason::Migration,
        Error::Qemu(_) => Reason::Qemu,
        Error::Settings(_) => Reason::Settings,
        Error::Check(_) => Reason::Check,
        Error::Move(_) => Reason::UndecidedMove,
        Error::Invalid(_) => Reason::Usage,
        Error::Remote(_) => Reason::OtherHost,
        Error::NeedsCont { .. } => Reason::SourcePostmigrate,
        Error::NoGuest { .. } => Reason::SourceWithoutGuest,
        Error::Migrating { .. } | Error::NotCleanedUp { .. } => Reason::SourceMigrating,
        Error::Blocked { .. } | Error::Asleep { .. } => Reason::SourceBlocked,
        Error::NotWaiting { .. } | Error::WaitsElsewhere { .. } | Error::UsedUp { .. } => {
            Reason::DestinationNotWaiting
        }
        Error::DoesNotFit { .. } => Reason::Incompatible,
        Error::LaneLost { .. } | Error::LanesNotTaken { .. } => Reason::Lanes,
        Error::NothingToRecover { .. }
        | Error::BlockedMonitor { .. }
        | Error::NotRecovered { .. }
        | Error::NotConnectedAgain { .. }
        | Error::ConnectionOfQemus => Reason::Recovery,
        Error::NotDetached { .. } | Error::NotAttached { .. } => Reason::Device,
        Error::SourceEnded { .. } => Reason::SourceExited,
        Error::SourceFailed { .. } => Reason::SourceFailed,
        Error::DestinationFailed { .. } => Reason::DestinationFailed,
        Error::NotCompleted { .. } | Error::SourceNotDone { .. } | Error::SourceReset { .. } => {
            Reason::SourceUnknown
        }
        Error::PeerSilent { .. } => Reason::PeerSilent,
        Error::PeerGaveUp => Reason::PeerGaveUp,
        Error::NotRunning { .. } => Reason::DestinationNotRunning,
        Error::SharedDrive { .. } => Reason::SharedDrive,
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
        ) => Reason::Disk,
        Error::NotInPlace { .. } => Reason::MemoryNotInPlace,
        Error::NotCarried { .. } => Reason::NotCarried,
        Error::DrivesChanged { .. } => Reason::OtherDrive,
        Error::CardDisconnected { .. } => Reason::CardDisconnected,
        Error::CannotConverge { .. } => Reason::NotConverging,
        Error::PrivateDir { .. } => Reason::PrivateDirectory,
        Error::Cancelled => Reason::Cancelled,
        _ => Reason::Other,
    }
}
