//! Events of `--json`, described by docs/json.md. docs/schema/events.json is generated from these types.
//!
//! ```text
//!   Event: Interim │ OfCopy + destination │ Final + exit status ─► Line: schema, time ─► one JSON object
//! ```
//! Every state, reason and result is an identifier from an enumeration of the schema. Sentences for people are fields of their own,
//! and may change. A change that is not an addition increments [`SCHEMA`].

/// Declares objects of events, each with a function that makes it from its arguments: every property once, with its type and value.
macro_rules! objects {
    (#![$rules:meta] $(
        $(#[$meta:meta])*
        $name:ident $(<$life:lifetime>)? ($($argument:ident: $type:ty),*) {
            $($(#[$about:meta])* $property:ident: $of:ty = $value:expr,)*
        }
    )*) => {$(
        #[derive(Debug, Serialize, JsonSchema)]
        #[$rules]
        $(#[$meta])*
        pub(crate) struct $name $(<$life>)? { $($(#[$about])* pub(crate) $property: $of,)* }

        impl $(<$life>)? $name $(<$life>)? {
            pub(crate) fn new($($argument: $type),*) -> Self {
                Self { $($property: $value,)* }
            }
        }
    )*};
}

mod copies;
mod identifiers;
mod inspected;
mod lists;
mod statistics;

use std::fmt::Display;
use std::time::SystemTime;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Serialize;
use towline_compat::{ConfiguredBy, Finding, Report, Verdict};
use towline_control::moves;
use towline_control::plan::{CopyPhase, GuestState, HostFacts};
use towline_control::protect::{Checkpoints, EpochCost, Forecast};
use towline_control::record::{RecordSummary, Recorded};
use towline_image::leftover::Partial;

use crate::endpoint::Endpoint;
use crate::exit::Exit;
pub(crate) use copies::{Completed, CopyProgress};
pub(crate) use identifiers::{Reason, reason};
pub(crate) use inspected::{Block, Inspected, InspectedImage, InspectedQemu, InspectedStream, Layer, Pages};
#[cfg(feature = "store")]
pub(crate) use inspected::{InspectedStore, InspectedStoredImage};
pub(crate) use lists::{GuestRuns, ImageContent, ListedGuest, ListedImage, StatusOfGuest, UndecidedMove};
pub(crate) use statistics::Statistics;

/// Version of the schema, in every event.
const SCHEMA: u32 = 2;

/// One object per line. Properties may be added within a version; identifiers of enumerations do not change.
#[derive(Serialize, JsonSchema)]
#[schemars(title = "Events of towline --json, version 2", deny_unknown_fields)]
struct Line<'a> {
    #[schemars(extend("const" = SCHEMA))]
    schema: u32,
    time: String,
    #[serde(flatten)]
    event: &'a Event<'a>,
}

/// An event.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub(crate) enum Event<'a> {
    Interim(InterimEvent<'a>),
    /// Of a copy; with its destination, if there are several.
    OfCopy {
        #[serde(flatten)]
        event: CopyEvent<'a>,
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "String")]
        destination: Option<&'a str>,
    },
    /// A result, with the exit status of a command that ends with it.
    Final {
        #[serde(flatten)]
        event: FinalEvent<'a>,
        /// Exit status.
        #[schemars(extend("enum" = [0, 1, 2, 3, 4, 5, 6, 7, 8]))]
        exit: u8,
        outcome: Exit,
    },
}

/// End of a guest's protection.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ProtectionEnd {
    /// As requested; the guest runs on.
    Cancelled,
    /// The guest was shut down.
    GuestEnded,
    /// The guest's QEMU has died.
    Died,
    /// The other host has the guest.
    TakenOver,
}

/// An event of a command that goes on.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub(crate) enum InterimEvent<'a> {
    /// First event of a copy or move.
    Begun {
        request: String,
    },
    /// An unreferenced object of a store.
    Garbage(Object<'a>),
    /// An unreferenced object of a store was removed.
    Removed(Object<'a>),
    Move(UndecidedMove<'a>),
    /// A record that cannot be read.
    Unreadable {
        error: String,
    },
    Guest(ListedGuest<'a>),
    /// `run` starts a QEMU with this command, which is without secrets.
    Starting {
        name: &'a str,
        command: Vec<String>,
    },
    Running(GuestRuns<'a>),
    /// A guest of `run` has ended by itself.
    Ended {
        name: &'a str,
        success: bool,
        text: String,
    },
    /// `record` has stored an image.
    Instant(StoredInstant),
    /// `standby` runs the guest from this image of a record, of an age in seconds by the clock of this host.
    TakesOver {
        sequence: u64,
        at: String,
        age: u64,
    },
    /// `protect`: the other host has the guest's first checkpoint of this generation.
    Protected {
        generation: u64,
    },
    Checkpoints(CheckpointsOf),
    /// `protect`: the other host does not have the guest any more; it runs on, and will be protected again.
    Unprotected {
        reason: &'a str,
    },
    /// Counters of `towline net`.
    Statistics(Statistics),
    Image(ListedImage<'a>),
    /// An image of `store verify`, with the error of a damaged one.
    Verified {
        image: &'a str,
        error: Option<&'a str>,
    },
    /// An image of `store rm`; freed disk space in bytes, or null if garbage collection frees it.
    RemovedImage {
        image: String,
        freed: Option<u64>,
    },
}

/// An event of a copy that goes on.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub(crate) enum CopyEvent<'a> {
    /// A phase begins.
    Phase {
        phase: CopyPhase,
    },
    /// The hosts of a copy from one to another.
    Hosts {
        source_host: &'a HostFacts,
        destination_host: &'a HostFacts,
    },
    /// The copy listens for its source.
    Listening {
        address: String,
    },
    Progress(Box<CopyProgress>),
    /// A message for people.
    Notice {
        text: &'a str,
    },
}

/// A result, mostly the last event of a command.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub(crate) enum FinalEvent<'a> {
    Completed(Box<Completed>),
    /// A command has failed.
    Failed {
        error: &'a str,
        reason: Reason,
        #[serde(flatten)]
        about: FailedPart<'a>,
    },
    /// All of several copies have ended.
    All {
        completed: usize,
        failed: usize,
    },
    /// Verdict of `check`, and of a dry run.
    Checked(Checked<'a>),
    /// Facts were written to a file.
    Facts {
        source: String,
        file: String,
    },
    /// End of the list of moves.
    Moves {
        moves: usize,
        unreadable: usize,
    },
    Status(StatusOfGuest<'a>),
    /// End of `run` or `fork`: the guests have ended, or run detached.
    Run {
        guests: usize,
    },
    /// End of `record`.
    Recorded(RecordEnded),
    /// End of `protect`.
    ProtectionEnded {
        end: ProtectionEnd,
    },
    /// End of the list of guests.
    Guests {
        guests: usize,
    },
    /// `resume` has finished a move.
    Resumed {
        id: String,
        done: &'a [String],
        #[schemars(with = "String", extend("enum" = ["at-destination", "at-source", "ended", "forgotten"]))]
        finding: &'a moves::Finding,
    },
    /// `resume` could not decide a move.
    Undecided {
        id: String,
        done: &'a [String],
        guest_state: GuestState,
        undecided: &'a str,
    },
    /// Result of `repair`.
    Repaired(Repaired<'a>),
    /// The last counters of `towline net`.
    Statistics(Statistics),
    /// End of `store ls`, `du`, `verify` or `rm`, and of `store gc` of a directory. Sizes are in bytes; `unreadable` counts those that
    /// were not removed, too.
    Images {
        place: String,
        images: usize,
        unreadable: usize,
        #[serde(flatten)]
        space: DiskSpace,
    },
    /// An image, a running QEMU, a migration stream, or the garbage of a store.
    Inspected(Inspected<'a>),
}

/// The part of a command that has failed.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged, rename_all_fields = "kebab-case")]
pub(crate) enum FailedPart<'a> {
    Whole {},
    Move { id: &'a str },
    Monitor { socket: &'a str },
    File { path: String },
    Notes { notes: &'a [String] },
    Guest { guest: &'a str, guest_state: GuestState, notes: &'a [String] },
    Copy { destination: String, guest: &'a str, guest_state: GuestState, notes: &'a [String] },
}

/// A verdict.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged, rename_all_fields = "kebab-case")]
pub(crate) enum Checked<'a> {
    Compared(Compared<'a>),
    Protectable(Protectable<'a>),
    /// The old QEMU of an upgrade.
    Upgradable {
        source: String,
        verdict: Verdict,
    },
    /// Without a comparison; null for an unusable command line.
    Unknown {
        verdict: Option<Verdict>,
        error: &'a str,
    },
}

objects! {
    #![serde(rename_all = "kebab-case")]

    /// An unreferenced object.
    Object<'a>(object: &'a str, bytes: u64, age: u64) {
        object: &'a str = object,
        bytes: u64 = bytes,
        age: u64 = age,
    }

    /// An image of a record. Its time in milliseconds since the record's first one, by a clock that no one steps; the time for which the
    /// guest was stopped, if it is known; its bytes on the disk, or sent to the store; the time that it took; the images of the record.
    StoredInstant(recorded: &Recorded) {
        sequence: u64 = recorded.instant.sequence,
        at: String = recorded.instant.at.to_string(),
        elapsed_ms: u64 = recorded.instant.elapsed.as_millis() as u64,
        pause_ms: Option<u64> = recorded.pause_ms,
        bytes: u64 = recorded.bytes,
        took_ms: u64 = recorded.took.as_millis() as u64,
        images: usize = recorded.images,
    }

    /// Checkpoints of the last second: number of the last one; pages and bytes of all; for how long the guest was stopped in microseconds,
    /// median and longest; the time from then on until the other host had the checkpoint and the output was sent.
    CheckpointsOf(checkpoints: &Checkpoints) {
        epoch: u64 = checkpoints.epoch,
        count: u64 = checkpoints.count,
        pages: u64 = checkpoints.pages,
        bytes: u64 = checkpoints.bytes,
        pause_us: u64 = checkpoints.pause.median_us,
        pause_max_us: u64 = checkpoints.pause.longest_us,
        latency_us: u64 = checkpoints.latency.median_us,
        latency_max_us: u64 = checkpoints.latency.longest_us,
    }

    /// Images that were stored and removed, intervals without one, and the images of the record.
    RecordEnded(summary: &RecordSummary) {
        recorded: u64 = summary.recorded,
        late: u64 = summary.late,
        idle: u64 = summary.idle,
        failed_images: u64 = summary.failed,
        removed: u64 = summary.removed,
        images: usize = summary.images,
    }

    /// Both ends were compared.
    Compared<'a>(ends: [&dyn Display; 2], report: &'a Report) {
        source: String = ends[0].to_string(),
        destination: String = ends[1].to_string(),
        verdict: Verdict = report.verdict(ConfiguredBy::Towline),
        by_hand: Verdict = report.verdict(ConfiguredBy::ByHand),
        findings: &'a [Finding] = report.findings(),
    }

    /// A guest whose protection is planned; without a destination no other host was asked. No costs: what it writes is not known.
    Protectable<'a>(source: &'a Endpoint, destination: Option<&'a Endpoint>, forecast: &'a Forecast) {
        source: String = source.to_string(),
        destination: Option<String> = destination.map(ToString::to_string),
        verdict: Verdict = forecast.report.verdict(ConfiguredBy::Towline),
        findings: &'a [Finding] = forecast.report.findings(),
        costs: Vec<CostOf> = forecast.costs.iter().map(CostOf::new).collect(),
    }

    /// Estimate of an epoch, which is the delay of replies as well: size of a checkpoint, bytes in a second between the hosts, pause of the
    /// guest, and its part of the time, in millionths: what a clock of KVM loses, in microseconds of each second.
    CostOf(cost: &EpochCost) {
        epoch_us: u64 = cost.epoch.as_micros() as u64,
        bytes: u64 = cost.bytes,
        bytes_per_second: u64 = cost.bandwidth(),
        pause_us: u64 = cost.pause.as_micros() as u64,
        stopped_ppm: u64 = (cost.stopped_share() * 1e6) as u64,
    }
}

/// A result of `repair`.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged, rename_all_fields = "kebab-case")]
pub(crate) enum Repaired<'a> {
    /// A QEMU that a killed towline has changed.
    Qemu {
        socket: &'a str,
        #[schemars(extend("enum" = ["clean", "repaired", "incomplete"]))]
        state: &'static str,
        owner_pid: Option<i32>,
        done: &'a [String],
        left: &'a [String],
    },
    /// Partial files of an image, or of a directory.
    Files { path: &'a str, partials: Vec<PartialFile> },
}

objects! {
    #![serde(deny_unknown_fields)]

    /// A partial file of an image.
    PartialFile(partial: &Partial, state: &'static str) {
        path: String = partial.path.display().to_string(),
        #[schemars(extend("enum" = ["in-use", "leftover", "removed"]))]
        state: &'static str = state,
        allocated: u64 = partial.allocated,
        writer: Option<String> = partial.writer.clone(),
        removed: bool = state == "removed",
    }
}

/// Disk space of a place with images.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub(crate) enum DiskSpace {
    Unknown {},
    Directory {
        bytes: u64,
    },
    #[cfg(feature = "store")]
    Store {
        bytes: u64,
        unreferenced: u64,
        uploads: usize,
    },
}

impl<'a> Event<'a> {
    /// A result with the exit status.
    pub(crate) fn last(event: FinalEvent<'a>, exit: Exit) -> Self {
        Self::Final { event, exit: exit.code(), outcome: exit }
    }

    /// The failure of a command that could not report more.
    pub(crate) fn failed(error: &'a str, reason: Reason, exit: Exit) -> Self {
        Self::last(FinalEvent::Failed { error, reason, about: FailedPart::Whole {} }, exit)
    }

    /// Formats the event, with its keys sorted.
    pub(crate) fn line(&self) -> String {
        let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let line = serde_json::to_value(Line { schema: SCHEMA, time, event: self });
        line.expect("the keys of every event are texts").to_string()
    }
}

/// Returns the JSON Schema of the lines.
pub(crate) fn schema() -> String {
    let generator = SchemaSettings::draft2020_12().for_serialize().into_generator();
    serde_json::to_string_pretty(&generator.into_root_schema_for::<Line<'_>>()).unwrap_or_default()
}
