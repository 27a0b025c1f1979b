//! Checkpoints of a stock QEMU, the primary of COLO, whose Linux writes all the time.
//!
//! Its guest is stopped before the first copy: emulation loses writes to the first pass of a running guest
//! (`docs/testing.md`). COLO starts it.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod busy;
#[path = "../net/support.rs"]
#[allow(dead_code, unused_imports, reason = "the tests of cards use the rest")]
mod network;
mod primary;

use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::Value;
use towline_compat::checkpoints::{CannotCheckpoint, DirtyLog, check};
use towline_compat::facts::QemuFacts;
use towline_lab::expect::number;
use towline_lab::{Qemu, Version, require_qemu, wait_until};
use towline_migration::{Error, checkpoints};
use towline_protocol::colo::{Checkpoint, CheckpointBuffer, FirstCopy};
use towline_protocol::device_state::DeviceState;

use crate::busy::Busy;
use crate::primary::{Primary, WITHIN};

/// Maximum size of a checkpoint: more than the guest's memory.
const LIMIT: usize = 512 << 20;
/// Checkpoints that are compared, unless `TOWLINE_SOAK_CHECKPOINTS` says otherwise.
const CHECKPOINTS: u64 = 40;
const LOSSES: usize = 12;
/// Limit of a checkpoint that ends in its memory: the guest writes more.
const TOO_SMALL: usize = 64 << 10;

/// Compares the memory of each checkpoint with the primary's, which is stopped.
struct Compared<'a> {
    primary: &'a Primary,
    buffer: Option<CheckpointBuffer>,
    /// Checkpoints that were taken, and how many are.
    checkpoints: u64,
    wanted: u64,
    marked: u64,
    pages: u64,
    /// Checkpoints with different pages: their numbers, and how many.
    different: Vec<(u64, u64)>,
}

impl checkpoints::CheckpointSink for Compared<'_> {
    fn buffer(&mut self) -> Result<CheckpointBuffer, Error> {
        if self.checkpoints == self.wanted {
            return Err(Error::Cancelled);
        }
        Ok(self.buffer.take().unwrap_or_else(|| CheckpointBuffer::new(LIMIT)))
    }

    fn mark(&mut self, number: u64) -> Result<(), Error> {
        assert_eq!((number, number), (self.checkpoints + 1, self.marked + 1));
        self.marked = number;
        Ok(())
    }

    fn put(&mut self, checkpoint: Checkpoint) -> Result<(), Error> {
        assert_eq!(checkpoint.number(), self.marked, "it is marked before it is taken");
        assert!(!self.primary.is_running(), "the guest stands until its checkpoint was taken");
        checkpoints::apply(&checkpoint, &self.primary.memory)?;
        let different = self.primary.different_pages();
        if different > 0 {
            self.different.push((checkpoint.number(), different));
        }
        assert_eq!(names(checkpoint.device_state()), names(&self.primary.first_state));
        self.pages += checkpoint.pages().len() as u64;
        self.checkpoints = checkpoint.number();
        self.buffer = Some(checkpoint.into_buffer());
        Ok(())
    }
}

/// Names and instances of the devices. Their lengths change: a serial port that sends has one more subsection.
fn names(state: &DeviceState) -> Vec<(&str, u32)> {
    state.devices().iter().map(|device| (&*device.name, device.instance)).collect()
}

#[test]
fn each_checkpoint_is_the_memory_of_the_primary_while_it_stands() {
    if !require_qemu("each_checkpoint_is_the_memory_of_the_primary_while_it_stands", &[Version::Newest]) {
        return;
    }
    let (mut primary, first) = Primary::protected();
    compare(&primary, first);
    primary.end();
    primary.prove_alive();
}

#[test]
#[ignore = "nightly"]
fn each_checkpoint_is_the_memory_of_a_primary_whose_card_and_disk_write_it() {
    let name = "each_checkpoint_is_the_memory_of_a_primary_whose_card_and_disk_write_it";
    if !require_qemu(name, &[Version::Newest]) {
        return;
    }
    let Some(mut busy) = Busy::new(name) else { return };
    let (mut primary, first) = Primary::protected_with(Some(&mut busy));
    compare(&primary, first);
    primary.end();
    primary.prove_alive();
    let bytes = busy.end(primary.guest.as_mut().unwrap());
    println!("{} MiB were sent back and forth", bytes >> 20);
    assert!(bytes > 4 << 20, "more than its first connection");
}

/// Takes checkpoints, and compares them.
fn compare(primary: &Primary, first: FirstCopy) {
    let mut compared = Compared {
        primary,
        buffer: None,
        checkpoints: 0,
        wanted: number("TOWLINE_SOAK_CHECKPOINTS", CHECKPOINTS),
        marked: 0,
        pages: 0,
        different: Vec::new(),
    };
    let ended = checkpoints::take(primary.channel.as_ref(), first, &mut compared).unwrap_err();
    assert!(matches!(ended, Error::Cancelled), "{ended}");
    println!(
        "{} checkpoints, {} pages, different: {:?}",
        compared.checkpoints, compared.pages, compared.different
    );
    assert_eq!((compared.checkpoints, &compared.different[..]), (compared.wanted, &[][..]));
    assert!(compared.pages > compared.wanted * 8, "the guest writes: {} pages", compared.pages);
}

/// A place in a checkpoint's course.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    BeforeReply,
    AtTheMark,
    InItsMemory,
    BeforeAcknowledgement,
}

/// Loses the secondary at a place of a checkpoint.
struct Lost<'a> {
    primary: &'a Primary,
    buffer: Option<CheckpointBuffer>,
    place: Place,
    /// Checkpoints that are taken before the loss.
    left: u64,
    lost_at: Option<Instant>,
}

impl Lost<'_> {
    /// Returns an error if it is lost here.
    fn survives(&mut self, place: Place) -> Result<(), Error> {
        if self.left > 0 || self.place != place {
            return Ok(());
        }
        self.lose();
        Err(Error::Cancelled)
    }

    fn lose(&mut self) {
        self.primary.channel.shutdown(std::net::Shutdown::Both).unwrap();
        self.lost_at = Some(Instant::now());
    }
}

impl checkpoints::CheckpointSink for Lost<'_> {
    fn buffer(&mut self) -> Result<CheckpointBuffer, Error> {
        self.survives(Place::BeforeReply)?;
        if self.left == 0 && self.place == Place::InItsMemory {
            return Ok(CheckpointBuffer::new(TOO_SMALL));
        }
        Ok(self.buffer.take().unwrap_or_else(|| CheckpointBuffer::new(LIMIT)))
    }

    fn mark(&mut self, _number: u64) -> Result<(), Error> {
        self.survives(Place::AtTheMark)
    }

    fn put(&mut self, checkpoint: Checkpoint) -> Result<(), Error> {
        self.survives(Place::BeforeAcknowledgement)?;
        self.left = self.left.saturating_sub(1);
        self.buffer = Some(checkpoint.into_buffer());
        Ok(())
    }
}

#[test]
fn a_primary_that_loses_its_secondary_runs_on_and_can_be_protected_again() {
    if !require_qemu(
        "a_primary_that_loses_its_secondary_runs_on_and_can_be_protected_again",
        &[Version::Newest],
    ) {
        return;
    }
    let (mut random, places) = (
        Rng::with_seed(11),
        [Place::BeforeReply, Place::AtTheMark, Place::InItsMemory, Place::BeforeAcknowledgement],
    );
    let (mut primary, mut first) = Primary::protected();
    let mut longest = Duration::ZERO;
    for place in places.into_iter().cycle().take(LOSSES) {
        let left = random.u64(1..6);
        let mut lost = Lost { primary: &primary, buffer: None, place, left, lost_at: None };
        let error = checkpoints::take(primary.channel.as_ref(), first, &mut lost).unwrap_err();
        if place == Place::InItsMemory {
            assert!(error.to_string().contains("does not fit the 65536 bytes"), "{error}");
            lost.lose();
        }
        let since = lost.lost_at.unwrap();
        primary.lost_heartbeat();
        wait_until("the guest to run on", WITHIN, || Ok(primary.is_running().then_some(()))).unwrap();
        longest = longest.max(since.elapsed());
        println!("{place:?}: the guest runs after {:.1} ms", since.elapsed().as_secs_f64() * 1e3);
        primary.prove_alive();
        first = primary.protect();
    }
    println!("longest standstill: {:.1} ms", longest.as_secs_f64() * 1e3);
    primary.end();
    primary.prove_alive();
}

/// Facts of a QEMU for the check of its version.
fn facts(qemu: &Qemu) -> QemuFacts {
    let version = qemu.qmp().execute("query-version", Value::Null).unwrap();
    let version = ["major", "minor", "micro"].map(|part| version["qemu"][part].to_string()).join(".");
    let listed = qemu.qmp().execute("query-migrate-capabilities", Value::Null).unwrap();
    let listed = listed.as_array().unwrap().iter();
    let capability =
        |entry: &Value| Some((entry["capability"].as_str()?.to_owned(), entry["state"].as_bool()?));
    QemuFacts { version, capabilities: listed.filter_map(capability).collect(), ..QemuFacts::default() }
}

#[test]
fn versions_that_fail_at_a_checkpoint_are_refused_by_name() {
    let versions = [Version::Newest, Version::V10_0, Version::V7_2];
    if !require_qemu("versions_that_fail_at_a_checkpoint_are_refused_by_name", &versions) {
        return;
    }
    let verdicts = versions.map(|version| {
        let facts = facts(&Qemu::builder(version).paused().start().unwrap());
        println!("{}: {:?}", facts.version, check(&facts, DirtyLog::Emulation));
        check(&facts, DirtyLog::Emulation)
    });
    assert!(
        matches!(
            verdicts,
            [
                Ok(()),
                Err(CannotCheckpoint::Completes { .. }),
                Err(CannotCheckpoint::BlockedByEmulation { .. })
            ]
        ),
        "{verdicts:?}"
    );
}

struct Counted(u64);

impl checkpoints::CheckpointSink for Counted {
    fn buffer(&mut self) -> Result<CheckpointBuffer, Error> {
        Ok(CheckpointBuffer::new(LIMIT))
    }

    fn mark(&mut self, _number: u64) -> Result<(), Error> {
        Ok(())
    }

    fn put(&mut self, checkpoint: Checkpoint) -> Result<(), Error> {
        self.0 = checkpoint.number();
        Ok(())
    }
}

#[test]
fn a_guest_that_shuts_down_ends_its_protection_and_its_monitor_says_so() {
    if !require_qemu(
        "a_guest_that_shuts_down_ends_its_protection_and_its_monitor_says_so",
        &[Version::Newest],
    ) {
        return;
    }
    let (mut primary, first) = Primary::protected();
    let mut counted = Counted(0);
    let guest = primary.guest.take().unwrap();
    let off = std::thread::spawn(move || primary::power_off(guest));
    let ended = checkpoints::take(primary.channel.as_ref(), first, &mut counted).unwrap_err();
    off.join().unwrap();
    println!("after {} checkpoints: {ended}", counted.0);
    assert!(matches!(ended, Error::Ended { .. } | Error::Channel(_)), "{ended}");
    let event = primary.qemu.qmp().wait_event("SHUTDOWN", WITHIN).unwrap();
    assert_eq!(event["data"]["guest"], true, "{event}");
}
