//! AF_XDP with zero-copy: `towline net --af-xdp` inside of a Linux guest, over the guest's own virtio card.
//!
//! ```text
//!   this test   ◄── wire: frames of QEMU's netdev ── QEMU's virtio-net ── queue of eth0   a guest with Linux 7
//!                                                        reads                │
//!               ── commands ─► driver (this program) ── its memory ── towline net
//! ```
//! Linux's virtio-net has zero-copy since 6.11, where the card uses the platform's DMA (`iommu_platform`). When this test stops
//! reading, the card's queue stops, and frames stay in the driver's memory.

mod driver;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use serde_json::Value;
use towline_lab::{
    Kernel, LinuxGuest, ProgramDisk, Qemu, Version, require_kernel, towline_binary, wait_until,
};

use crate::support::{WITHIN, path, scratch, sum};
use driver::SLOTS;

/// QEMU's card waits for this time, in nanoseconds, before it sends. It does not wait if it is notified again meanwhile.
const DELAYED: &str = ",tx=timer,x-txtimer=4000000000";
/// Number of frames of one notification.
const FRAMES_PER_BATCH: u32 = 48;

/// Starts the card, whose events and errors are in files.
const CARD: &str = "towline net --json --socket /tmp/net.sock --tap tap0 --af-xdp eth0 \
    > /tmp/card.out 2> /tmp/card.err & echo $! > /tmp/card.pid";

/// The other end of the guest's card.
struct Wire {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
    stream: UnixStream,
}

/// State of a wire and its reader.
#[derive(Default)]
struct Shared {
    received: Mutex<Received>,
    resumed: Condvar,
}

#[derive(Default)]
struct Received {
    paused: bool,
    /// Number of times that each of the driver's frames came.
    frames: BTreeMap<u32, u32>,
    /// The first frame with other bytes than the driver wrote.
    damaged: Option<u32>,
}

impl Wire {
    fn accept(listener: &UnixListener) -> Self {
        let stream = listener.accept().unwrap().0;
        let shared: Arc<Shared> = Arc::default();
        let (incoming, of_reader) = (stream.try_clone().unwrap(), Arc::clone(&shared));
        let reader = std::thread::spawn(move || read(incoming, &of_reader));
        Self { shared, reader: Some(reader), stream }
    }

    /// Stops or resumes reading.
    fn set_paused(&self, paused: bool) {
        self.shared.received.lock().unwrap().paused = paused;
        self.shared.resumed.notify_all();
    }

    /// Number of times that a frame came. Panics if one was damaged.
    fn count(&self, sequence: u32) -> u32 {
        let received = self.shared.received.lock().unwrap();
        assert_eq!(received.damaged, None, "a frame has other bytes than the driver wrote");
        received.frames.get(&sequence).copied().unwrap_or(0)
    }

    /// Waits until each of these frames has come.
    fn wait_for(&self, sequences: std::ops::Range<u32>) {
        for sequence in sequences {
            wait_until(&format!("frame {sequence}"), WITHIN, || Ok((self.count(sequence) > 0).then_some(())))
                .unwrap();
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.set_paused(false);
        // It may be closed already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let ended = self.reader.take().map(JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || std::thread::panicking());
    }
}

/// Reads frames, each after its length, until QEMU closes the connection.
fn read(mut incoming: UnixStream, shared: &Shared) {
    let mut length = [0; 4];
    loop {
        let waiting = shared.received.lock().unwrap();
        drop(shared.resumed.wait_while(waiting, |received| received.paused).unwrap());
        if incoming.read_exact(&mut length).is_err() {
            return;
        }
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        if incoming.read_exact(&mut frame).is_err() {
            return;
        }
        let mut received = shared.received.lock().unwrap();
        match driver::sequence(&frame) {
            Some(sequence) if driver::frame(sequence) == frame => {
                *received.frames.entry(sequence).or_default() += 1;
            }
            Some(sequence) => drop(received.damaged.get_or_insert(sequence)),
            // Overwritten from its beginning on.
            None if frame.starts_with(&[0xee; 14]) => drop(received.damaged.get_or_insert(u32::MAX)),
            // The guest's kernel sends by the same card.
            None => {}
        }
    }
}

/// A guest with a card and a driver.
struct Bench {
    guest: LinuxGuest,
    wire: Wire,
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
    /// `options` are those of QEMU's card.
    fn start(test: &str, options: &str) -> Self {
        let scratch = scratch();
        let socket = path(&scratch, "wire");
        let listener = UnixListener::bind(&socket).unwrap();
        let own = std::env::current_exe().unwrap();
        let programs = ProgramDisk::pack(&[&towline_binary().unwrap(), &own]).unwrap();
        let qemu =
            Qemu::builder(Version::V10_0).linux().kernel(Kernel::Newest).memory_mib(2048).processors(2);
        let netdev = format!("stream,id=wire,server=off,addr.type=unix,addr.path={}", socket.display());
        let device = format!("virtio-net-pci,netdev=wire,iommu_platform=on,disable-legacy=on{options}");
        let card = ["-netdev", &netdev, "-device", &device];
        let qemu = qemu.args(programs.arguments()).args(card).start().unwrap();
        let wire = Wire::accept(&listener);
        let mut guest = qemu.linux(WITHIN).unwrap();
        guest.unpack_programs().unwrap();
        guest.shell(&format!("ip link set eth0 up && busybox mkfifo {}", driver::PIPE), WITHIN).unwrap();
        guest.shell(CARD, WITHIN).unwrap();
        let program = own.file_name().unwrap().to_str().unwrap();
        let variable = driver::SOCKET;
        let drive =
            format!("{variable}=/tmp/net.sock {program} {test} --exact --nocapture > /tmp/driver.out 2>&1 &");
        guest.shell(&drive, WITHIN).unwrap();
        Self { guest, wire, frames: 0, qemu }
    }

    /// Has the driver execute a command. Returns its number of chains in flight.
    fn command(&mut self, command: &str) -> u64 {
        let output = |guest: &mut LinuxGuest| guest.shell("cat /tmp/driver.out", WITHIN);
        let marker = format!("{command}: ");
        let count = |text: &str| text.lines().filter(|line| line.starts_with(&marker)).count();
        let before = count(&output(&mut self.guest).unwrap());
        self.guest.shell(&format!("echo {command} > {}", driver::PIPE), WITHIN).unwrap();
        wait_until(&format!("the driver to {command}"), WITHIN, || {
            let text = output(&mut self.guest)?;
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
        self.guest.shell("cat /tmp/card.err", WITHIN).unwrap()
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

    /// Queues frames that QEMU's card delays, until some are in flight. Returns the sequence numbers of the last ones.
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

#[test]
fn frames_leave_the_drivers_memory_without_a_copy() {
    let name = "frames_leave_the_drivers_memory_without_a_copy";
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        return driver::run(Path::new(&socket));
    }
    if !require_kernel(name, Kernel::Newest) {
        return;
    }
    let mut bench = Bench::start(&format!("zero_copy::{name}"), "");
    bytes_are_equal(&mut bench);
    chains_are_used_after_their_completion(&mut bench);
    assert_eq!(sum(&bench.statistics(), "tx", "pending"), 0);
}

/// The wire is not paused here: QEMU 10.0 fails an assertion (`async_tx.elem`) if a queue is reset while its netdev accepts
/// nothing.
#[test]
fn a_ring_can_be_stopped_with_frames_in_flight() {
    let name = "a_ring_can_be_stopped_with_frames_in_flight";
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        return driver::run(Path::new(&socket));
    }
    if !require_kernel(name, Kernel::Newest) {
        return;
    }
    let mut bench = Bench::start(&format!("zero_copy::{name}"), DELAYED);
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
    assert!(zero_copy == referenced && zero_copy > long / 2 && zero_copy <= long, "{statistics}");
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
