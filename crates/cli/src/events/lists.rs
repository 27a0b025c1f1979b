//! Guests, their moves, and images, as they are listed.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use schemars::JsonSchema;
use serde::Serialize;
use towline_control::moves::{Decision, ListedMove, MoveEnd, MoveRecord, Role};
use towline_control::run::{MemoryOrigin, Running, StartedGuest};
use towline_image::manifest::Timestamp;
use towline_launch::RunningGuest;

objects! {
    #![serde(rename_all = "kebab-case")]

    /// An undecided move.
    UndecidedMove<'a>(listed: &'a ListedMove) {
        id: String = listed.record.id.to_string(),
        role: Role = listed.record.role,
        stage: Decision = listed.record.stage,
        source: End = End::new(&listed.record, &listed.record.source),
        destination: End = End::new(&listed.record, &listed.record.destination),
        undecided: String = listed.undecided(),
        message: Option<&'a str> = listed.record.message.as_deref(),
        since: u64 = listed.record.begun_ms,
        changed: u64 = listed.record.changed_ms,
        owner_pid: Option<i32> = listed.owner,
        exited: &'a [String] = &listed.exited,
        repair: &'a [String] = &listed.changed,
        advice: Vec<String> = listed.advice(),
    }

    /// A guest that `run` has started.
    ListedGuest<'a>(guest: &'a RunningGuest, state: Option<&'a str>, age: Option<Duration>, memory: Option<u64>) {
        name: &'a str = &guest.name,
        pid: u32 = guest.pid,
        owner_pid: u32 = guest.owner_pid,
        qmp: String = guest.qmp.display().to_string(),
        image: Option<String> = guest.image.as_ref().map(|image| image.display().to_string()),
        detached: bool = guest.is_detached,
        /// RunState of QEMU's QAPI; null: unknown.
        state: Option<&'a str> = state,
        /// Seconds since its QEMU was started.
        age: Option<u64> = age.map(|age| age.as_secs()),
        /// Resident memory of its QEMU in bytes.
        memory: Option<u64> = memory,
    }

    /// The state of a guest (`status`).
    StatusOfGuest<'a>(
        guest: &Path, state: &'static str, run_state: Option<&'a str>, qmp: Option<&Path>, pid: Option<u32>,
        moves: &'a [String]
    ) {
        guest: String = guest.display().to_string(),
        #[schemars(extend("enum" = ["running", "paused", "waiting", "ended", "none", "held"]))]
        state: &'static str = state,
        /// RunState of QEMU's QAPI; null: unknown.
        run_state: Option<&'a str> = run_state,
        qmp: Option<String> = qmp.map(|path| path.display().to_string()),
        /// Of a guest of `run`.
        pid: Option<u32> = pid,
        /// Ids of undecided moves.
        moves: &'a [String] = moves,
    }

    /// A guest of `run` runs.
    GuestRuns<'a>(guest: &'a StartedGuest, running: &Running, begun: Instant) {
        name: &'a str = guest.start.name.as_str(),
        pid: u32 = guest.qemu.pid(),
        qmp: String = guest.qemu.qmp_path().display().to_string(),
        image: String = running.image().to_string_lossy().into_owned(),
        #[schemars(extend("enum" = ["mapped", "reflink", "copied", "postcopy"]))]
        memory: &'static str = memory_id(&running.memory),
        answered_us: u64 = microseconds(guest.answered.duration_since(begun)),
        running_us: u64 = microseconds(begun.elapsed()),
    }

    /// An image of `store ls` or `du`. Sizes are in bytes, the age in seconds; all are null if the image cannot be read.
    ListedImage<'a>(
        name: &'a str, content: Result<&'a ImageContent, &'a String>, bases: &'a [String], readers: &'a [String]
    ) {
        name: &'a str = name,
        error: Option<&'a str> = content.err().map(String::as_str),
        created: Option<String> = content.ok().map(|content| content.created.to_string()),
        age: Option<u64> = content.ok().map(|content| content.age().as_secs()),
        source: Option<&'a str> = content.ok().and_then(|content| content.source.as_deref()),
        qemu: Option<&'a str> = content.ok().and_then(|content| content.qemu.as_deref()),
        memory: Option<u64> = content.ok().map(|content| content.memory),
        alone: Option<u64> = content.ok().map(|content| content.alone),
        own: Option<u64> = content.ok().map(|content| content.own),
        shared: Option<u64> = content.ok().map(ImageContent::shared),
        missing_chunks: Option<u64> = content.ok().map(|content| content.missing),
        bases: &'a [String] = bases,
        readers: &'a [String] = readers,
    }
}

/// An end of a move.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged, deny_unknown_fields)]
pub(crate) enum End {
    Qemu { endpoint: String, socket: String, pid: Option<i32>, exited: bool },
    Other { endpoint: String },
}

impl End {
    fn new(record: &MoveRecord, end: &MoveEnd) -> Self {
        let endpoint = end.to_string();
        let MoveEnd::Qemu { socket, pid, .. } = end else { return Self::Other { endpoint } };
        let (socket, exited) = (socket.display().to_string(), record.has_exited(end));
        Self::Qemu { endpoint, socket, pid: *pid, exited }
    }
}

fn memory_id(memory: &MemoryOrigin) -> &'static str {
    match memory {
        MemoryOrigin::Mapped => "mapped",
        MemoryOrigin::Reflink => "reflink",
        MemoryOrigin::Copied(_) => "copied",
        MemoryOrigin::Postcopy => "postcopy",
    }
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Content of an image.
#[derive(Debug)]
pub(crate) struct ImageContent {
    pub(crate) created: Timestamp,
    pub(crate) source: Option<String>,
    pub(crate) qemu: Option<String>,
    /// Memory of the guest in bytes.
    pub(crate) memory: u64,
    /// Disk space without the other images.
    pub(crate) alone: u64,
    /// Disk space that its removal frees.
    pub(crate) own: u64,
    /// Chunks that are missing in the store.
    pub(crate) missing: u64,
}

impl ImageContent {
    pub(crate) fn shared(&self) -> u64 {
        self.alone.saturating_sub(self.own)
    }

    pub(crate) fn age(&self) -> Duration {
        SystemTime::now().duration_since(self.created.into()).unwrap_or_default()
    }
}
