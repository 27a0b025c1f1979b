//! The notification protocol of `ring::notify` and the order of a mailbox's steps (`mailbox`), in every
//! interleaving and with every value that the memory model permits.
//!
//! The checker is loom and not shuttle: the error to be found is a store that is still in a store buffer when
//! the other side loads (two stores, two loads, a fence between each), and shuttle's threads are sequentially
//! consistent, which excludes it. Without the fence in `enable_and_recheck` this model fails; with shuttle it
//! would pass. The functions under test are generic over their fields, so loom is a dependency of the tests
//! only. A separate binary, because loom installs a handler for SIGBUS too.
#![allow(clippy::unwrap_used, reason = "loom never poisons a lock")]

#[path = "../../src/mailbox.rs"]
#[allow(dead_code, reason = "the implementation for the real queue")]
mod mailbox;
#[path = "../../src/ring/notify.rs"]
mod notify;

use loom::sync::atomic::{AtomicU16, Ordering, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::collections::VecDeque;
use std::sync::Arc;

use mailbox::{Mailbox, Pop, Popped, Push, Wake};
use notify::{NotificationWords, needs_event};

/// An eventfd: readable or not.
#[derive(Default)]
struct EventFd {
    signalled: Mutex<bool>,
    changed: Condvar,
}

impl EventFd {
    fn signal(&self) {
        *self.signalled.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut signalled = self.signalled.lock().unwrap();
        while !*signalled {
            signalled = self.changed.wait(signalled).unwrap();
        }
        *signalled = false;
    }
}

/// The fields of a ring. Without `fences` the model shows that it finds a missing fence.
struct Shared {
    event_index: bool,
    fences: bool,
    available: AtomicU16,
    used: AtomicU16,
    driver_suppression: AtomicU16,
    device_suppression: AtomicU16,
    kick: EventFd,
    call: EventFd,
}

impl Shared {
    fn new(event_index: bool, fences: bool) -> Arc<Self> {
        let word = || AtomicU16::new(0);
        let (available, used, driver_suppression, device_suppression) = (word(), word(), word(), word());
        let (kick, call) = (EventFd::default(), EventFd::default());
        Arc::new(Self {
            event_index,
            fences,
            available,
            used,
            driver_suppression,
            device_suppression,
            kick,
            call,
        })
    }

    /// The driver adds an entry, and kicks the device if necessary.
    fn add(&self, index: u16) {
        self.available.store(index, Ordering::Release);
        fence(Ordering::SeqCst);
        let suppression = self.device_suppression.load(Ordering::Relaxed);
        let wanted =
            if self.event_index { needs_event(suppression, index, index - 1) } else { suppression == 0 };
        if wanted {
            self.kick.signal();
        }
    }
}

impl NotificationWords for Shared {
    fn has_event_index(&self) -> bool {
        self.event_index
    }

    fn load_avail_idx(&self) -> u16 {
        self.available.load(Ordering::Acquire)
    }

    fn driver_suppression(&self) -> u16 {
        self.driver_suppression.load(Ordering::Relaxed)
    }

    fn device_suppression(&self) -> u16 {
        self.device_suppression.load(Ordering::Relaxed)
    }

    fn set_device_suppression(&self, value: u16) {
        self.device_suppression.store(value, Ordering::Relaxed);
    }

    fn full_fence(&self) {
        if self.fences {
            fence(Ordering::SeqCst);
        }
    }
}

/// Behaviour of the device in a model.
#[derive(Clone, Copy, PartialEq)]
enum Device {
    PopsEntries,
    IgnoresEntries,
}

/// A driver adds two entries; a device runs and sleeps until it has loaded the last index. A lost kick is a
/// deadlock, which loom reports.
fn kicks(event_index: bool, device: Device) {
    const ENTRIES: u16 = 2;
    let mut model = loom::model::Builder::new();
    // All schedules take a minute with flags, which change more often.
    let pops = device == Device::PopsEntries;
    model.preemption_bound = (!event_index && pops).then_some(3);
    model.check(move || {
        let shared = Shared::new(event_index, true);
        let driver = thread::spawn({
            let shared = Arc::clone(&shared);
            move || (1..=ENTRIES).for_each(|index| shared.add(index))
        });
        let (mut reported, mut runs) = (0, 0);
        while reported != ENTRIES {
            runs += 1;
            if pops {
                // `Ring::pop`: loads and so reports the index; kicks are suppressed in the meantime.
                if !event_index {
                    shared.set_device_suppression(1);
                }
                reported = shared.load_avail_idx();
            }
            if reported != ENTRIES && !notify::enable_and_recheck(&*shared, &mut reported).moved {
                shared.kick.wait();
            }
        }
        // Each value of the index causes at most one run without a kick, and a kick at most one more.
        assert!(runs <= 2 * ENTRIES + 1, "{runs} runs for {ENTRIES} entries");
        driver.join().unwrap();
    });
}

#[test]
fn no_kick_is_lost_with_event_indices() {
    kicks(true, Device::PopsEntries);
}

#[test]
fn no_kick_is_lost_with_flags() {
    kicks(false, Device::PopsEntries);
}

#[test]
fn a_device_that_ignores_entries_runs_once_for_each_index() {
    kicks(true, Device::IgnoresEntries);
    kicks(false, Device::IgnoresEntries);
}

/// One entry, one attempt to sleep: the device has loaded the new index, or the driver has kicked it.
fn loads_or_is_kicked(fences: bool) {
    loom::model(move || {
        let shared = Shared::new(true, fences);
        shared.device_suppression.store(9, Ordering::Relaxed);
        let driver = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.add(1)
        });
        let moved = notify::enable_and_recheck(&*shared, &mut 0).moved;
        driver.join().unwrap();
        assert!(moved || *shared.kick.signalled.lock().unwrap(), "a kick is lost");
    });
}

#[test]
fn an_available_entry_is_polled_or_kicked() {
    loads_or_is_kicked(true);
}

#[test]
#[should_panic(expected = "a kick is lost")]
fn a_missing_fence_is_found() {
    loads_or_is_kicked(false);
}

/// The device publishes a used entry while the driver enables its interrupt and sleeps.
#[test]
fn no_call_is_lost() {
    for event_index in [true, false] {
        loom::model(move || {
            let shared = Shared::new(event_index, true);
            // Suppressed at first.
            shared.driver_suppression.store(if event_index { u16::MAX } else { 1 }, Ordering::Relaxed);
            let driver = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    shared.driver_suppression.store(0, Ordering::Relaxed);
                    fence(Ordering::SeqCst);
                    if shared.used.load(Ordering::Acquire) == 0 {
                        shared.call.wait();
                    }
                }
            });
            shared.used.store(1, Ordering::Release);
            if notify::wants_call(&*shared, 0, 1) {
                shared.call.signal();
            }
            driver.join().unwrap();
        });
    }
}

/// A queue for loom.
#[derive(Default)]
struct Queue(Mutex<Contents>);

#[derive(Default)]
struct Contents {
    commands: VecDeque<u32>,
    closed: bool,
}

impl Push<u32> for Queue {
    fn push(&self, command: u32) -> bool {
        self.0.lock().unwrap().commands.push_back(command);
        true
    }
}

impl Pop<u32> for Queue {
    fn pop(&self) -> Popped<u32> {
        let mut queue = self.0.lock().unwrap();
        match queue.commands.pop_front() {
            Some(command) => Popped::Command(command),
            None if queue.closed => Popped::Closed,
            None => Popped::Empty,
        }
    }
}

impl Wake for EventFd {
    fn signal(&self) {
        Self::signal(self);
    }

    fn drain(&self) {
        *self.signalled.lock().unwrap() = false;
    }
}

/// The session sends two commands and then closes the mailbox; the thread sleeps in between. Every command is
/// executed, in order, and the thread ends.
#[test]
fn no_command_is_lost() {
    loom::model(|| {
        let queue = Arc::new(Queue::default());
        let wake = Arc::new(EventFd::default());
        let session = thread::spawn({
            let (queue, wake) = (Arc::clone(&queue), Arc::clone(&wake));
            move || {
                assert!(mailbox::send(&*queue, &*wake, 1) && mailbox::send(&*queue, &*wake, 2));
                queue.0.lock().unwrap().closed = true;
                Wake::signal(&*wake);
            }
        });
        let mut executed = Vec::new();
        loop {
            // `poll` returns without draining the eventfd.
            {
                let mut signalled = wake.signalled.lock().unwrap();
                while !*signalled {
                    signalled = wake.changed.wait(signalled).unwrap();
                }
            }
            let mailbox = mailbox::process(&*queue, Some(&*wake), |command| executed.push(command));
            if mailbox == Mailbox::Closed {
                break;
            }
        }
        assert_eq!(executed, [1, 2]);
        session.join().unwrap();
    });
}
