//! The dirty log of a vsock device is exact: a migration that copies each marked page has in the end the same
//! memory as the guest. A page is marked after its last write, or its copy would differ.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use towline_frontend::vsock::{HEADER_BYTES, Options, VsockEvent, VsockGuest};
use towline_frontend::wire::{feature, protocol};
use towline_frontend::{Frontend, GUEST_BASE, MemoryArena};
use towline_vsock::ConnectionLimits;

use common::{CID, Served, TIMEOUT};

const PAGE: u64 = 4096;
/// Number of buffers of several pages: a batch of packets marks more words of the log than a ring gathers.
const BUFFERS: u16 = 1024;
const BUFFER_BYTES: usize = 20_000;
const CLIENTS: usize = 150;
/// Number of packets that the guest receives.
const PACKETS: u32 = 30_000;

/// A migration: copies of the marked pages.
#[derive(Default)]
struct Migration {
    pages: BTreeMap<u64, Vec<u8>>,
    passes: u64,
}

impl Migration {
    /// Harvests the log, which clears it, and then copies the pages.
    fn copy(&mut self, log: &MemoryArena, memory: &MemoryArena) {
        for page in log.take_dirty_pages() {
            self.pages.insert(page, memory.bytes(page * PAGE, PAGE as usize));
        }
        self.passes += 1;
    }

    /// Asserts that every page in this range equals its copy; pages that were never marked are as at the
    /// beginning.
    fn compare(&self, memory: &MemoryArena, range: Range<u64>) {
        for page in range.start / PAGE..range.end.div_ceil(PAGE) {
            let zeroes = vec![0; PAGE as usize];
            let copied = self.pages.get(&page).unwrap_or(&zeroes);
            let found = memory.bytes(page * PAGE, PAGE as usize);
            let at = found.iter().zip(copied).position(|(found, copied)| found != copied);
            assert!(
                at.is_none(),
                "page {page:#x} differs from its copy at byte {at:?}: it was written after it was marked"
            );
        }
    }
}

fn start(served: &Served) -> (Frontend, VsockGuest, MemoryArena) {
    let mut frontend = Frontend::connect(&served.path("d"), TIMEOUT).unwrap();
    let agreed = frontend.negotiate(0, feature::EVENT_IDX, protocol::LOG_SHMFD).unwrap();
    let options = Options {
        cid: CID,
        size: BUFFERS,
        receive_bytes: BUFFER_BYTES,
        features: agreed.features,
        takes_at_once: true,
    };
    let memory = Arc::new(MemoryArena::new(VsockGuest::memory_bytes(&options)).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut guest = VsockGuest::start(&mut frontend, &memory, options).unwrap();
    let log = MemoryArena::new((GUEST_BASE + VsockGuest::memory_bytes(&options)) / PAGE / 8 + PAGE).unwrap();
    frontend.set_log(&log).unwrap();
    frontend.set_features(agreed.features | feature::LOG_ALL).unwrap();
    frontend.set_vring_addr(guest.rx(), true).unwrap();
    frontend.set_vring_addr(guest.tx(), true).unwrap();
    (frontend, guest, log)
}

#[test]
fn a_page_is_marked_after_its_last_write() {
    towline_vsock::raise_descriptor_limit();
    let served = Served::new(ConnectionLimits::default());
    let (mut frontend, mut guest, log) = start(&served);
    let memory = Arc::clone(guest.memory());
    let over = AtomicBool::new(false);
    let mut packets = 0;
    let (mut first, mut last) = (u64::MAX, 0);
    let migration = std::thread::scope(|scope| {
        let copying = scope.spawn(|| {
            let mut migration = Migration::default();
            while !over.load(Ordering::Acquire) {
                migration.copy(&log, &memory);
            }
            migration
        });
        let writing = scope.spawn(|| {
            let mut rng = fastrand::Rng::with_seed(7);
            let mut clients: Vec<_> = (0..CLIENTS).map(|_| served.connect(22)).collect();
            clients.iter().for_each(|client| client.set_nonblocking(true).unwrap());
            let mut bytes = vec![0; 50_000];
            while !over.load(Ordering::Acquire) {
                for client in &mut clients {
                    let len = [10, 300, 5000, 50_000][rng.usize(..4)];
                    rng.fill(&mut bytes[..10]);
                    // Its buffer may be full.
                    let _ = client.write(&bytes[..len]);
                }
            }
        });
        let deadline = Instant::now() + TIMEOUT;
        while packets < PACKETS {
            guest
                .poll(|guest, event| match event {
                    VsockEvent::Request(ports) => guest.accept(ports),
                    VsockEvent::Data { guest: payload, .. } => {
                        packets += 1;
                        first = first.min(payload - HEADER_BYTES as u64);
                        last = last.max(payload - HEADER_BYTES as u64 + BUFFER_BYTES as u64);
                    }
                    _ => {}
                })
                .unwrap();
            assert!(Instant::now() < deadline, "{packets} packets were received");
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
        frontend.stop(0).unwrap();
        frontend.stop(1).unwrap();
        over.store(true, Ordering::Release);
        writing.join().unwrap();
        let mut migration = copying.join().unwrap();
        // Nothing writes from here on: the last pass copies the rest.
        migration.copy(&log, &memory);
        migration
    });
    assert!(last - first > u64::from(BUFFERS) * BUFFER_BYTES as u64 / 2, "{first:#x} to {last:#x}");
    assert!(migration.passes > 10, "{} passes", migration.passes);
    migration.compare(&memory, first..last);
    for used in [guest.rx().addresses().used, guest.tx().addresses().used] {
        migration.compare(&memory, used..used + 8 * u64::from(BUFFERS) + 6);
    }
}
