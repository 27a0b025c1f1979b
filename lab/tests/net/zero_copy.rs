//! AF_XDP with zero-copy: `towline net --af-xdp` inside of a Linux guest, over the guest's own virtio card.
//!
//! ```text
//!   this test   ◄── wire: frames of QEMU's netdev ── QEMU's virtio-net ── queue of eth0   a guest with Linux 7
//!                                                        reads                │
//!               ── commands ─► driver (this program) ── its memory ── towline net
//! ```
//! Linux's virtio-net has zero-copy since 6.11, where the card uses the platform's DMA (`iommu_platform`).
//! When this test stops reading, the card's queue stops, and frames stay in the driver's memory.

mod costs;
mod driver;
mod killed;
mod pages;
mod pairs;
mod stress;
mod wire;

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use towline_lab::{
    Builder, Kernel, LinuxGuest, Network, Qemu, Version, require_kernel, towline_binary, wait_until,
};

use crate::support::{WITHIN, path, scratch, sum};
use driver::SLOTS;
use wire::Wire;

/// QEMU's card waits for this time, in nanoseconds, before it sends. It does not wait if it is notified again
/// before.
const DELAYED: &str = ",tx=timer,x-txtimer=4000000000";
/// All frames that can be are sent by reference.
const ALL_REFERENCES: &str = "--zero-copy-send on";
/// Huge pages of the guest.
const HUGE_PAGES: u32 = 16;
/// Number of frames of one notification.
const FRAMES_PER_BATCH: u32 = 48;

/// Name of QEMU's tap, if the card has two queue pairs.
const WIRE_TAP: &str = "wire0";

/// A card and its guest.
#[derive(Clone, Copy)]
struct Setup<'n> {
    /// Further properties of QEMU's card.
    card: &'static str,
    /// Further options of `towline net`.
    arguments: &'static str,
    /// Network of a tap, by which the card has two queue pairs instead of one.
    network: Option<&'n Network>,
    /// Further programs of the guest.
    programs: &'n [&'n Path],
    /// Pages of the driver's memory, and the DMA of the guest.
    pages: Pages,
}

/// Pages of the driver's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pages {
    Small,
    /// Of 2 MiB.
    Huge,
    /// Of 2 MiB, but an IOMMU maps each of their parts of 4 KiB somewhere else.
    Scattered,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Self { card: "", arguments: ALL_REFERENCES, network: None, programs: &[], pages: Pages::Small }
    }
}

impl Setup<'_> {
    fn pairs(&self) -> usize {
        if self.network.is_some() { 2 } else { 1 }
    }

    /// Boots the guest with a card, and starts the other end of the wire.
    fn boot(&self, builder: Builder, socket: &Path) -> (Qemu, LinuxGuest, Wire) {
        let listener = UnixListener::bind(socket).unwrap();
        let (netdev, queues) = match self.network {
            None => (format!("stream,server=off,addr.type=unix,addr.path={}", socket.display()), ""),
            Some(network) => {
                let add = ["ip", "tuntap", "add", "dev", WIRE_TAP, "mode", "tap", "multi_queue"];
                network.run(&add).unwrap();
                network.run(&["ip", "link", "set", WIRE_TAP, "up"]).unwrap();
                let tap = format!("tap,ifname={WIRE_TAP},script=no,downscript=no,queues=2");
                (tap, ",mq=on,vectors=6")
            }
        };
        let netdev = format!("{netdev},id=wire");
        let card = self.card;
        let device = format!("virtio-net-pci,netdev=wire,iommu_platform=on,disable-legacy=on{queues}{card}");
        let builder = builder.args(["-netdev", &netdev, "-device", &device]);
        match self.network {
            None => {
                let (qemu, guest) = builder.boot(WITHIN).unwrap();
                (qemu, guest, Wire::accept(&listener))
            }
            Some(network) => {
                let wire = Wire::capture(network);
                let (qemu, guest) = builder.within(network).boot(WITHIN).unwrap();
                (qemu, guest, wire)
            }
        }
    }
}

/// A command that the driver executes.
struct Begun {
    marker: String,
    /// Number of times that it was executed before.
    before: usize,
}

/// A guest with a card and a driver.
struct Bench {
    guest: LinuxGuest,
    wire: Wire,
    /// Command line of the card.
    card: String,
    /// Number of frames that the driver was asked for.
    frames: u32,
    // Last: the others end first.
    qemu: Qemu,
}

impl Drop for Bench {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("QEMU: {}\nthe guest: {}", self.qemu.stderr(), self.qemu.console());
        }
    }
}

impl Bench {
    fn start(test: &str, setup: Setup<'_>) -> Self {
        let scratch = scratch();
        let own = std::env::current_exe().unwrap();
        let towline = towline_binary().unwrap();
        let programs = [&[towline.as_path(), &own], setup.programs].concat();
        let builder =
            Qemu::builder(Version::V10_0).linux().kernel(Kernel::Newest).memory_mib(2048).processors(2);
        let builder = match setup.pages {
            Pages::Scattered => builder
                .args(["-device", "intel-iommu,intremap=off"])
                .kernel_arguments("intel_iommu=on iommu.passthrough=0"),
            Pages::Small | Pages::Huge => builder,
        };
        let (qemu, guest, wire) = setup.boot(builder.guest_programs(programs), &path(&scratch, "wire"));
        let pairs = setup.pairs();
        let card = card_line(pairs, setup.arguments);
        let mut bench = Self { guest, wire, card, frames: 0, qemu };
        bench.shell(&format!("ip link set eth0 up && busybox mkfifo {}", driver::PIPE));
        bench.start_card();
        let program = own.file_name().unwrap().to_str().unwrap();
        let (socket, variable) = (driver::SOCKET, driver::PAIRS);
        let mut huge = String::new();
        if setup.pages != Pages::Small {
            bench.shell(&format!("echo {HUGE_PAGES} > /proc/sys/vm/nr_hugepages"));
            huge = format!("{}=1", driver::HUGE_PAGES);
        }
        bench.shell(&format!(
            "{huge} {socket}=/tmp/net.sock {variable}={pairs} {program} {test} --exact --nocapture > /tmp/driver.out 2>&1 &"
        ));
        bench
    }

    fn shell(&mut self, line: &str) -> String {
        self.guest.shell(line, WITHIN).unwrap()
    }

    /// Starts the card's process.
    fn start_card(&mut self) {
        let card = self.card.clone();
        self.shell(&card);
    }

    /// Ends the card's process as a service manager does, and waits for its exit.
    fn end_card(&mut self) {
        let pid = self.card_pid();
        self.shell(&format!("kill -TERM {pid}"));
        self.wait_for_exit(pid);
    }

    /// Waits until the process has closed its files. Until then its socket accepts connections.
    fn wait_for_exit(&mut self, pid: u32) {
        // Its parent need not have waited for it: then one thread is left, a zombie.
        let ended =
            format!("test $(ls /proc/{pid}/task | wc -l) = 1 && grep -q '^State:.Z' /proc/{pid}/status");
        let line = format!("if test -e /proc/{pid} && ! {{ {ended}; }} 2>/dev/null; then echo runs; fi");
        wait_until("the card's exit", WITHIN, || {
            let left = self.guest.shell(&line, WITHIN)?;
            Ok(left.trim().is_empty().then_some(()))
        })
        .unwrap();
    }

    fn card_pid(&mut self) -> u32 {
        self.shell("cat /tmp/card.pid").trim().parse().unwrap()
    }

    /// Has the driver execute a command. Returns its number of chains in flight.
    fn command(&mut self, command: &str) -> u64 {
        let begun = self.begin(command);
        self.result(begun, WITHIN)
    }

    /// Has the driver begin with a command.
    fn begin(&mut self, command: &str) -> Begun {
        let marker = format!("{command}: ");
        let output = self.shell("cat /tmp/driver.out");
        let before = output.lines().filter(|line| line.starts_with(&marker)).count();
        self.shell(&format!("echo {command} > {}", driver::PIPE));
        Begun { marker, before }
    }

    /// Returns the result of a command.
    fn result(&mut self, begun: Begun, within: Duration) -> u64 {
        let Begun { marker, before } = begun;
        wait_until(&format!("the driver to {marker}"), within, || {
            let text = self.guest.shell("cat /tmp/driver.out", WITHIN)?;
            assert!(!text.contains("panicked"), "{text}\n{}", self.card_errors());
            let found = text.lines().filter_map(|line| line.strip_prefix(&marker)).nth(before);
            Ok(found.map(|value| value.parse().unwrap()))
        })
        .unwrap()
    }

    /// Has the driver queue or send frames. Returns their sequence numbers.
    fn frames(&mut self, command: &str, count: u32) -> std::ops::Range<u32> {
        self.command(&format!("{command} {count}"));
        self.frames += count;
        self.frames - count..self.frames
    }

    fn card_errors(&mut self) -> String {
        self.shell("cat /tmp/card.err")
    }

    /// Statistics of the card now.
    fn statistics(&mut self) -> Value {
        let lines = "grep -c pairs /tmp/card.out || true";
        let before = self.guest.shell(lines, WITHIN).unwrap();
        self.guest.shell("kill -USR1 $(cat /tmp/card.pid)", WITHIN).unwrap();
        wait_until("the card's statistics", WITHIN, || {
            Ok((self.guest.shell(lines, WITHIN)? != before).then_some(()))
        })
        .unwrap();
        let last = self.guest.shell("grep pairs /tmp/card.out | tail -n 1", WITHIN).unwrap();
        serde_json::from_str(&last).unwrap()
    }

    fn assert_zero_copy(&mut self) -> Value {
        let statistics = self.statistics();
        let mode = statistics["pairs"][0]["tx"]["mode"].clone();
        assert_eq!(mode, "af-xdp-zero-copy", "{statistics}\n{}", self.card_errors());
        statistics
    }

    /// Queues frames that QEMU's card delays, until some are in flight. Returns the sequence numbers of the
    /// last ones.
    fn delay_frames(&mut self) -> std::ops::Range<u32> {
        wait_until("frames in flight", WITHIN, || {
            assert_eq!(self.command("finish"), 0);
            let frames = self.frames("queue", FRAMES_PER_BATCH);
            let pending = sum(&self.statistics(), "tx", "pending");
            Ok((pending > 0).then_some(frames))
        })
        .unwrap()
    }

    /// Queues frames while the wire is paused, until some are in flight. Returns their sequence numbers.
    fn hold_frames(&mut self) -> std::ops::Range<u32> {
        self.wire.set_paused(true);
        let frames = self.frames("queue", u32::try_from(SLOTS).unwrap());
        let pending = sum(&self.statistics(), "tx", "pending");
        let in_flight = self.command("look");
        assert!(pending > 0 && in_flight > 0, "{pending} pending, {in_flight} in flight");
        frames
    }
}

/// Command line that starts a card, with its events and errors in files.
fn card_line(pairs: usize, arguments: &str) -> String {
    format!(
        "towline net --json --socket /tmp/net.sock --tap tap0 --queues {pairs} --af-xdp eth0 {arguments} \
         >> /tmp/card.out 2>> /tmp/card.err & echo $! > /tmp/card.pid"
    )
}

#[test]
fn frames_leave_the_drivers_memory_without_a_copy() {
    let name = "frames_leave_the_drivers_memory_without_a_copy";
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        return driver::run(Path::new(&socket));
    }
    if !require_kernel(name, Kernel::Newest) {
        return;
    }
    let mut bench = Bench::start(&format!("zero_copy::{name}"), Setup::default());
    bytes_are_equal(&mut bench);
    chains_are_used_after_their_completion(&mut bench);
    assert_eq!(sum(&bench.statistics(), "tx", "pending"), 0);
}

/// The wire is not paused here: QEMU 10.0 fails an assertion (`async_tx.elem`) if a queue is reset while its
/// netdev accepts nothing.
#[test]
#[ignore = "nightly"]
fn a_ring_can_be_stopped_with_frames_in_flight() {
    let name = "a_ring_can_be_stopped_with_frames_in_flight";
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        return driver::run(Path::new(&socket));
    }
    if !require_kernel(name, Kernel::Newest) {
        return;
    }
    let mut bench = Bench::start(&format!("zero_copy::{name}"), Setup { card: DELAYED, ..Setup::default() });
    a_ring_stops_with_frames_in_flight(&mut bench);
    assert_eq!(sum(&bench.statistics(), "tx", "pending"), 0);
}

fn bytes_are_equal(bench: &mut Bench) {
    let sent = bench.frames("send", 3000);
    bench.wire.wait_for(sent.clone());
    assert!(sent.clone().all(|sequence| bench.wire.count(sequence) == 1));
    let statistics = bench.assert_zero_copy();
    let long = sent.filter(|sequence| driver::frame(*sequence).len() > 256).count() as u64;
    let [zero_copy, referenced] = ["zero-copy", "referenced"].map(|key| sum(&statistics, "tx", key));
    println!("{zero_copy} of {long} long frames without a copy: {statistics}");
    assert!(zero_copy == referenced && zero_copy > long / 2, "{statistics}");
    // The driver accepts one descriptor per packet: all others are in several buffers, or cross a page
    // boundary.
    let copies = &statistics["pairs"][0]["tx"]["copies"];
    let [short, buffers, pages] =
        ["short", "buffers", "pages"].map(|reason| copies[reason].as_u64().unwrap());
    assert!(buffers > 0 && pages > 0, "{statistics}");
    assert_eq!((zero_copy + buffers + pages, short), (long, 3000 - long), "{statistics}");
}

fn chains_are_used_after_their_completion(bench: &mut Bench) {
    let held = bench.hold_frames();
    bench.wire.set_paused(false);
    assert_eq!(bench.command("finish"), 0);
    bench.wire.wait_for(held.clone());
    assert!(held.into_iter().all(|sequence| bench.wire.count(sequence) == 1));
    bench.assert_zero_copy();
}

/// The frames that the card has not read are lost; none is sent with the contents of a reused buffer.
fn a_ring_stops_with_frames_in_flight(bench: &mut Bench) {
    let sent = bench.frames("send", 100);
    bench.wire.wait_for(sent);
    bench.assert_zero_copy();
    let held = bench.delay_frames();
    assert_eq!(bench.command("stop"), 0, "the reply returns all chains");
    bench.command("start");
    let sent = bench.frames("send", 500);
    bench.wire.wait_for(sent.clone());
    assert!(held.chain(sent).all(|sequence| bench.wire.count(sequence) <= 1));
    bench.assert_zero_copy();
}
