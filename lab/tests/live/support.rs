//! What these tests share: guests that write while they are moved, and how a towline ended.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use towline_lab::{BootSector, Builder, Finished, LinuxGuest, Qemu, Towline, Version, towline, wait_until};

/// For anything that must come. Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(60);
pub(crate) const MIB: u64 = 1 << 20;

/// What this variable says, for long runs.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// A directory for images and sockets, that goes with the test.
pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new() -> Self {
        Self(tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A path in it as an argument.
    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }
}

/// The endpoint that a QEMU is by its QMP socket.
pub(crate) fn qmp(qemu: &Qemu) -> String {
    format!("qmp:{}", qemu.qmp_path().display())
}

/// Starts `towline` with these arguments, which spaces separate.
pub(crate) fn start(arguments: &str) -> Towline {
    towline(arguments.split(' ')).unwrap()
}

/// Runs `towline` to its end.
pub(crate) fn run(arguments: &str) -> Finished {
    start(arguments).wait(WITHIN).unwrap()
}

/// Fails unless it ended with this code and said all this on its standard error, in this order.
#[track_caller]
pub(crate) fn assert_ended(finished: &Finished, code: i32, texts: &[&str]) {
    let Finished { status, stdout, stderr } = finished;
    assert_eq!(status.code(), Some(code), "{status}: {stdout}{stderr}");
    let mut at = 0;
    for text in texts {
        match stderr[at..].find(text) {
            Some(found) => at += found + text.len(),
            None => panic!("{text:?} is not in (or not in this order): {stderr}"),
        }
    }
}

/// The lines of `--json` so far; the last one may be half written.
pub(crate) fn events(stdout: &str) -> Vec<Value> {
    stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The event that `--json` ends with.
#[track_caller]
pub(crate) fn completed(finished: &Finished) -> Value {
    assert_ended(finished, 0, &[]);
    let last = events(&finished.stdout).pop().unwrap();
    assert_eq!(last["event"], "completed", "{last}");
    last
}

/// Waits until a towline with `--json` has told of such an event; it must not end before.
pub(crate) fn tells(towline: &mut Towline, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    wait_until(what, WITHIN, || {
        let found = events(&towline.stdout()).into_iter().find(|event| wanted(event));
        assert!(found.is_some() || towline.runs()?, "it ended: {}{}", towline.stdout(), towline.stderr());
        Ok(found)
    })
    .unwrap()
}

/// The small guest: 16 MiB with content, one of them written for ever.
pub(crate) fn small() -> Builder {
    Qemu::builder(Version::V10_0).memory_mib(64).boot_sector(BootSector::default())
}

/// Starts the small guest and waits until it counts.
pub(crate) fn counting() -> Qemu {
    let qemu = small().start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu
}

pub(crate) fn waiting(builder: &Builder) -> Qemu {
    builder.clone().incoming_defer().start().unwrap()
}

/// A Linux of two processors.
pub(crate) fn linux(memory_mib: u64) -> Builder {
    Qemu::builder(Version::V10_0).cpu("Nehalem").linux().memory_mib(memory_mib).processors(2)
}

/// Boots Linux and has it write `range` bytes round and round at `rate` bytes per second, in a pattern that can be
/// checked.
pub(crate) fn writing(builder: &Builder, rate: u64, range: u64) -> (Qemu, LinuxGuest) {
    let qemu = builder.clone().start().unwrap();
    let mut guest = qemu.linux(WITHIN).unwrap();
    guest.dirty(rate, range).unwrap();
    guest.wait_ticking(WITHIN).unwrap();
    (qemu, guest)
}

/// The guest goes on where it was: it counts on from `tick`, and every page that it wrote is as it was written.
pub(crate) fn prove_alive(qemu: &Qemu, range: u64, tick: u64) -> u64 {
    qemu.qmp().wait_status("running", WITHIN).unwrap();
    let mut guest = qemu.linux(WITHIN).unwrap();
    let now = guest.wait_ticking(WITHIN).unwrap();
    assert!(now > tick, "the counter is {now}, before it was {tick}");
    assert_eq!(guest.check().unwrap(), range / 4096);
    now
}
