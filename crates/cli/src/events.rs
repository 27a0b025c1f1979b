//! Events of `--json`, described by docs/json.md and docs/schema/events.json.
//!
//! Every state, reason and result is an identifier from an enumeration of the schema. Sentences for people are fields of their own,
//! and may change. A change that is not an addition increments [`SCHEMA`].

use std::time::SystemTime;

use serde_json::{Map, Value, json};
use towline_control::plan::{CopyPhase, Error};
use towline_migration::{SendReason, ZeroCopySend};

use crate::exit::Exit;

/// Version of the schema, in every event.
pub(crate) const SCHEMA: u32 = 2;

/// Formats an event.
pub(crate) fn line(name: &str, fields: Value) -> String {
    let mut event = Map::new();
    event.insert("event".into(), name.into());
    event.insert("schema".into(), SCHEMA.into());
    event.insert("time".into(), humantime::format_rfc3339_millis(SystemTime::now()).to_string().into());
    if let Value::Object(fields) = fields {
        event.extend(fields);
    }
    Value::Object(event).to_string()
}

/// Adds the exit status and its identifier to the fields of a last event.
pub(crate) fn with_exit(mut fields: Value, exit: Exit) -> Value {
    fields["exit"] = exit.code().into();
    fields["outcome"] = json!(exit);
    fields
}

/// Returns the identifier of a phase.
pub(crate) fn phase(phase: CopyPhase) -> &'static str {
    match phase {
        CopyPhase::Prepare => "prepare",
        CopyPhase::Connect => "connect",
        CopyPhase::Transfer => "transfer",
        CopyPhase::Switchover => "switchover",
        CopyPhase::Loaded => "loaded",
        CopyPhase::Release => "release",
        CopyPhase::CutOver => "cut-over",
        CopyPhase::Running => "running",
        CopyPhase::Upload => "upload",
    }
}

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
pub(crate) fn reason(error: &Error) -> &'static str {
    match error {
        Error::Channel(_) => "channel",
        Error::Image(_) => "image",
        Error::Migration(_) => "migration",
        Error::Qemu(_) => "qemu",
        Error::Settings(_) => "settings",
        Error::Check(_) => "check",
        Error::Move(_) => "undecided-move",
        Error::Invalid(_) => "usage",
        Error::NeedsCont { .. } => "source-postmigrate",
        Error::NoGuest { .. } => "source-without-guest",
        Error::Migrating { .. } => "source-migrating",
        Error::Blocked { .. } | Error::Asleep { .. } => "source-blocked",
        Error::NotWaiting { .. } | Error::WaitsElsewhere { .. } | Error::UsedUp { .. } => {
            "destination-not-waiting"
        }
        Error::DoesNotFit { .. } => "incompatible",
        Error::LaneLost { .. } | Error::LanesNotTaken { .. } => "lanes",
        Error::NothingToRecover { .. }
        | Error::BlockedMonitor { .. }
        | Error::NotRecovered { .. }
        | Error::NotConnectedAgain { .. } => "recovery",
        Error::NotDetached { .. } | Error::NotAttached { .. } => "device",
        Error::SourceEnded { .. } => "source-exited",
        Error::SourceFailed { .. } => "source-failed",
        Error::DestinationFailed { .. } => "destination-failed",
        Error::NotCompleted { .. } | Error::SourceNotDone { .. } | Error::SourceReset { .. } => {
            "source-unknown"
        }
        Error::PeerSilent { .. } => "peer-silent",
        Error::NotRunning { .. } => "destination-not-running",
        Error::SharedDrive { .. } => "shared-drive",
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

/// Formats the event `failed` of a command that could not report more.
pub(crate) fn failed(text: &str, reason: &str, exit: Exit) -> String {
    line("failed", with_exit(json!({ "error": text, "reason": reason }), exit))
}
