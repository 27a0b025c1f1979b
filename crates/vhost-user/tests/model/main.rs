//! The notification protocol of `ring::notify` and the order of a mailbox's steps (`mailbox`), in every interleaving and with every
//! value that the memory model allows.
//!
//! The checker is loom and not shuttle: what can go wrong here is a store that is still in a store buffer when the other side
//! loads (two stores, two loads, a fence between each), and shuttle's threads take turns under sequential consistency, where that
//! does not exist. Without the fence in `arm` this model fails; with shuttle it would pass. The functions under test are generic
//! over their words, so loom is a dependency of the tests alone and nothing of it is in a build. A binary of its own, because loom
//! installs a handler for SIGBUS too.
#![allow(clippy::unwrap_used, reason = "a lock of loom's is never poisoned")]

#[path = "../../src/mailbox.rs"]
#[allow(dead_code, reason = "what is for the real queue")]
mod mailbox;
#[path = "../../src/ring/notify.rs"]
mod notify;

use loom::sync::atomic::{AtomicU16, Ordering, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::sync::Arc;

use mailbox::{Pop, Popped, Push, Wake};
use notify::{NotificationWords, needs_event};

/// An eventfd: readable or not.
#[derive(Default)]
struct Event {
    raised: Mutex<bool>,
    changed: Condvar,
}

impl Event {
    fn raise(&self) {
        *self.raised.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut raised = self.raised.lock().unwrap();
        while !*raised {
            raised = self.changed.wait(raised).unwrap();
        }
        *raised = false;
    }
}

/// The words of a ring. `fences` is off only to show that the model finds a fence that is missing.
struct Shared {
    event_index: bool,
    fences: bool,
    available: AtomicU16,
    used: AtomicU16,
    driver_wish: AtomicU16,
    device_wish: AtomicU16,
    kick: Event,
    call: Event,
}

impl Shared {
    fn new(event_index: bool, fences: bool) -> Arc<Self> {
        let word = || AtomicU16::new(0);
        let (available, used, driver_wish, device_wish) = (word(), word(), word(), word());
        let (kick, call) = (Event::default(), Event::default());
        Arc::new(Self { event_index, fences, available, used, driver_wish, device_wish, kick, call })
    }

    /// The driver adds an entry, and kicks if that is wanted.
    fn add(&self, index: u16) {
        self.available.store(index, Ordering::Release);
        fence(Ordering::SeqCst);
        let wish = self.device_wish.load(Ordering::Relaxed);
        let wanted = if self.event_index { needs_event(wish, index, index - 1) } else { wish == 0 };
        if wanted {
            self.kick.raise();
        }
    }
}

impl NotificationWords for Shared {
    fn has_event_index(&self) -> bool {
        self.event_index
    }

    fn available_index(&self) -> u16 {
        self.available.load(Ordering::Acquire)
    }

    fn driver_wish(&self) -> u16 {
        self.driver_wish.load(Ordering::Relaxed)
    }

    fn device_wish(&self) -> u16 {
        self.device_wish.load(Ordering::Relaxed)
    }

    fn set_device_wish(&self, wish: u16) {
        self.device_wish.store(wish, Ordering::Relaxed);
    }

    fn full_fence(&self) {
        if self.fences {
            fence(Ordering::SeqCst);
        }
    }
}

/// A driver adds two entries; a device takes what there is, or (`takes` false) leaves it, and sleeps between. It is over when the
/// device has seen the last index; a kick that is lost is a deadlock, which loom reports.
fn kicks(event_index: bool, fences: bool, takes: bool) {
    const ENTRIES: u16 = 2;
    let mut model = loom::model::Builder::new();
    // Every schedule takes a minute with flags, whose words change more often.
    model.preemption_bound = (!event_index && takes).then_some(3);
    model.check(move || {
        let shared = Shared::new(event_index, fences);
        let driver = thread::spawn({
            let shared = Arc::clone(&shared);
            move || (1..=ENTRIES).for_each(|index| shared.add(index))
        });
        let (mut reported, mut runs) = (0, 0);
        while reported != ENTRIES {
            runs += 1;
            if takes {
                // `Ring::pop`: a look at the index, which is thereby reported; and kicks are suppressed meanwhile.
                if !event_index {
                    shared.set_device_wish(1);
                }
                reported = shared.available_index();
            }
            if reported != ENTRIES && !notify::arm(&*shared, &mut reported).moved {
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
    kicks(true, true, true);
}

#[test]
fn no_kick_is_lost_with_flags() {
    kicks(false, true, true);
}

#[test]
fn a_device_that_leaves_entries_alone_runs_once_for_each_index() {
    kicks(true, true, false);
    kicks(false, true, false);
}

/// One entry, one attempt to sleep: the device has seen the entry, or the driver has kicked.
fn sees_or_is_kicked(fences: bool) {
    loom::model(move || {
        let shared = Shared::new(true, fences);
        shared.device_wish.store(9, Ordering::Relaxed);
        let driver = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.add(1)
        });
        let moved = notify::arm(&*shared, &mut 0).moved;
        driver.join().unwrap();
        assert!(moved || *shared.kick.raised.lock().unwrap(), "a kick is lost");
    });
}

#[test]
fn an_entry_is_seen_or_kicked_for() {
    sees_or_is_kicked(true);
}

#[test]
#[should_panic(expected = "a kick is lost")]
fn a_missing_fence_is_found() {
    sees_or_is_kicked(false);
}

/// The device gives an entry back while the driver enables its interrupt and sleeps.
#[test]
fn no_call_is_lost() {
    for event_index in [true, false] {
        loom::model(move || {
            let shared = Shared::new(event_index, true);
            // Suppressed until the driver asks.
            shared.driver_wish.store(if event_index { u16::MAX } else { 1 }, Ordering::Relaxed);
            let driver = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    shared.driver_wish.store(0, Ordering::Relaxed);
                    fence(Ordering::SeqCst);
                    if shared.used.load(Ordering::Acquire) == 0 {
                        shared.call.wait();
                    }
                }
            });
            shared.used.store(1, Ordering::Release);
            if notify::wants_call(&*shared, 0, 1) {
                shared.call.raise();
            }
            driver.join().unwrap();
        });
    }
}

/// A mailbox of loom's.
struct Queue(loom::sync::Mutex<(std::collections::VecDeque<u32>, bool)>);

impl Push<u32> for Queue {
    fn push(&self, command: u32) -> bool {
        self.0.lock().unwrap().0.push_back(command);
        true
    }
}

impl Pop<u32> for Queue {
    fn pop(&self) -> Popped<u32> {
        let mut queue = self.0.lock().unwrap();
        match queue.0.pop_front() {
            Some(command) => Popped::Command(command),
            None if queue.1 => Popped::Closed,
            None => Popped::Empty,
        }
    }
}

impl Wake for Event {
    fn raise(&self) {
        Self::raise(self);
    }

    fn drain(&self) {
        *self.raised.lock().unwrap() = false;
    }
}

/// The session sends two commands and then closes the mailbox; the thread sleeps between. Every command is executed, in order, and
/// the thread ends.
#[test]
fn no_command_is_lost() {
    loom::model(|| {
        let queue = Arc::new(Queue(Mutex::default()));
        let wake = Arc::new(Event::default());
        let session = thread::spawn({
            let (queue, wake) = (Arc::clone(&queue), Arc::clone(&wake));
            move || {
                assert!(mailbox::send(&*queue, &*wake, 1) && mailbox::send(&*queue, &*wake, 2));
                queue.0.lock().unwrap().1 = true;
                Wake::raise(&*wake);
            }
        });
        let mut executed = Vec::new();
        loop {
            // `poll` returns and leaves the eventfd as it is.
            {
                let mut raised = wake.raised.lock().unwrap();
                while !*raised {
                    raised = wake.changed.wait(raised).unwrap();
                }
            }
            if !mailbox::process(&*queue, Some(&*wake), |command| executed.push(command)) {
                break;
            }
        }
        assert_eq!(executed, [1, 2]);
        session.join().unwrap();
    });
}
