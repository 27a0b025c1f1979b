//! Output commit: a guest's frames leave once their epoch is released, by a small controller in place of one that copies the guest.
//!
//! ```text
//!   controller ── stop, cont ──► QEMU          epoch n:  stop ─► mark n ─► cont ─► release n
//!        └── hold, mark, release, pass ──► towline net ──► tap0 ◄── a packet socket, which sees every frame of the guest
//! ```

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvFlags, SocketFlags, SocketType, eth, recv, socket_with,
    sockopt::set_socket_recv_buffer_size_force,
};
use serde_json::{Value, json};
use towline_lab::{LinuxGuest, Network, Qemu, Qmp, Version, wait_until};

use crate::support::{
    EchoClient, Fixture, GUEST, HOST, MAC, WITHIN, add_tap, boot, builder, card, guest_address, number, path,
    shell,
};

const EPOCH: Duration = Duration::from_millis(50);

/// Frames of the guest that have left its card.
struct Capture(OwnedFd);

/// Identifier and number of an echo request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ping {
    id: u16,
    number: u16,
}

impl Capture {
    fn new(network: &Network) -> Self {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let open = || socket_with(AddressFamily::PACKET, SocketType::RAW, flags, Some(eth::ALL));
        let socket = network.enter(open).unwrap().unwrap();
        set_socket_recv_buffer_size_force(&socket, 64 << 20).unwrap();
        Self(socket)
    }

    /// Takes the frames since the last call.
    fn take(&self) -> Vec<Vec<u8>> {
        let mac: Vec<u8> = MAC.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        let mut bytes = vec![0; 1 << 17];
        let mut frames = Vec::new();
        while let Ok((length, _)) = recv(&self.0, &mut bytes[..], RecvFlags::empty()) {
            // The host's own frames are seen too.
            if bytes[6..12] == mac[..] {
                frames.push(bytes[..length].to_vec());
            }
        }
        frames
    }

    fn take_pings(&self) -> Vec<Ping> {
        let word = |frame: &[u8], at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        let is_ping =
            |frame: &Vec<u8>| frame.len() > 42 && frame[12..14] == [8, 0] && frame[23] == 1 && frame[34] == 8;
        let pings = self.take().into_iter().filter(is_ping);
        pings.map(|frame| Ping { id: word(&frame, 38), number: word(&frame, 40) }).collect()
    }
}

/// The controller of a guest.
struct Controller {
    qemu: Qemu,
    card: Qmp,
    epoch: u64,
    /// Longest time of `mark`, and of `release`.
    longest: [Duration; 2],
}

impl Controller {
    fn new(qemu: Qemu, control: &Path) -> Self {
        Self { qemu, card: Qmp::connect(control, WITHIN).unwrap(), epoch: 0, longest: [Duration::ZERO; 2] }
    }

    fn ask(&self, command: &str, arguments: Value) -> Value {
        self.card.execute(command, arguments).unwrap()
    }

    fn refusal(&self, command: &str, arguments: Value) -> String {
        format!("{:#}", self.card.execute(command, arguments).unwrap_err())
    }

    fn hold(&self) -> Value {
        self.ask("hold", json!({ "generation": 3 }))
    }

    fn pass(&self) -> Value {
        self.ask("pass", json!({ "generation": 3, "announce": MAC }))
    }

    /// Stops the guest, closes its epoch, and lets it run on. Returns the number of frames held.
    fn close_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.qemu.qmp().execute("stop", Value::Null).unwrap();
        let started = Instant::now();
        let marked = self.ask("mark", json!({ "generation": 3, "epoch": self.epoch }));
        self.longest[0] = self.longest[0].max(started.elapsed());
        self.qemu.qmp().execute("cont", Value::Null).unwrap();
        marked["frames"].as_u64().unwrap()
    }

    fn release(&mut self) {
        let started = Instant::now();
        self.ask("release", json!({ "generation": 3, "epoch": self.epoch }));
        self.longest[1] = self.longest[1].max(started.elapsed());
    }

    /// Runs at least that many epochs, until all clients have made progress. Returns the number of frames in them.
    fn run(&mut self, epochs: u64, clients: &[EchoClient]) -> u64 {
        let (done, until) = (AtomicBool::new(false), Instant::now() + 3 * WITHIN);
        std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                let (mut frames, first) = (0, self.epoch);
                while (!done.load(SeqCst) || self.epoch < first + epochs) && Instant::now() < until {
                    let started = Instant::now();
                    frames += self.close_epoch();
                    self.release();
                    std::thread::sleep(EPOCH.saturating_sub(started.elapsed()));
                }
                frames
            });
            clients.iter().for_each(|client| client.wait_blocks(5));
            done.store(true, SeqCst);
            running.join().unwrap()
        })
    }
}

/// Has the guest send echo requests, whose replies may not come.
fn ping(guest: &mut LinuxGuest, count: u16) {
    shell(guest, &format!("ping -c {count} -i 0.02 -W 1 {HOST} > /dev/null; true"));
}

fn numbers(pings: &[Ping]) -> Vec<u16> {
    pings.iter().map(|ping| ping.number).collect()
}

#[test]
fn a_guests_frames_leave_by_epochs() {
    let name = "a_guests_frames_leave_by_epochs";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 2);
    let (socket, control) = (path(&scratch, "net.sock"), path(&scratch, "net.qmp"));
    let options = ["--tap", "tap0", "--queues", "2", "--hold", "--qmp", control.to_str().unwrap()];
    let _card = card(&network, &socket, &options);
    let capture = Capture::new(&network);
    let (qemu, mut guest) = boot(&builder(Version::V10_0, &socket, 2));
    let mut controller = Controller::new(qemu, &control);
    // From the start on, without a request.
    ping(&mut guest, 3);
    assert_eq!(capture.take(), Vec::<Vec<u8>>::new());
    assert!(
        controller
            .refusal("pass", json!({ "generation": 3 }))
            .contains("generation 3 has not held this card")
    );
    let held = controller.hold();
    assert!(held["open-frames"].as_u64().unwrap() > 0, "{held}");
    controller.pass();
    let first = capture.take();
    assert_eq!(first[0][12..14], [0x80, 0x35], "the announcement is the first frame");
    assert!(first.len() > 1);
    ping(&mut guest, 3);
    assert!(!capture.take_pings().is_empty());

    controller.hold();
    let refused = controller.refusal("mark", json!({ "generation": 3, "epoch": 1 }));
    assert!(refused.contains("runs: stop the guest before its epoch is marked"), "{refused}");
    ping(&mut guest, 20);
    let received = "cat /sys/class/net/eth0/statistics/rx_packets";
    let before: u64 = shell(&mut guest, received).parse().unwrap();
    let host = network.enter(|| std::net::UdpSocket::bind((HOST, 0)).unwrap()).unwrap();
    for _ in 0..10 {
        host.send_to(b"comes in", (GUEST, 9)).unwrap();
    }
    wait_until("frames that are not held", WITHIN, || {
        Ok((shell(&mut guest, received).parse::<u64>()? >= before + 10).then_some(()))
    })
    .unwrap();
    assert_eq!(capture.take(), Vec::<Vec<u8>>::new());
    let marked = controller.close_epoch();
    assert!(marked >= 20, "{marked}");
    ping(&mut guest, 5);
    assert_eq!(capture.take(), Vec::<Vec<u8>>::new());
    controller.release();
    let released = capture.take_pings();
    assert_eq!(numbers(&released), (0..20).collect::<Vec<_>>());
    // Once the guest stands: its queues have been stopped, too.
    controller.qemu.qmp().execute("stop", Value::Null).unwrap();
    controller.ask("mark", json!({ "generation": 3, "epoch": 2 }));
    controller.ask("release", json!({ "generation": 3, "epoch": 2 }));
    let released = capture.take_pings();
    assert_eq!(numbers(&released), (0..5).collect::<Vec<_>>());
    assert_eq!(controller.ask("query-held", json!({}))["frames"], 0);
    let stale = controller.refusal("hold", json!({ "generation": 2 }));
    assert!(stale.contains("generation 2 is stale: the card is held by generation 3"), "{stale}");
}

#[test]
fn connections_go_on_by_epochs_and_over_the_death_of_their_card() {
    let name = "connections_go_on_by_epochs_and_over_the_death_of_their_card";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 2);
    let (socket, control) = (path(&scratch, "net.sock"), path(&scratch, "net.qmp"));
    let state = path(&scratch, "net.state");
    let [state, qmp] = [&state, &control].map(|path| path.to_str().unwrap());
    let options = ["--tap", "tap0", "--queues", "2", "--qmp", qmp];
    let mut process = card(&network, &socket, &options);
    let capture = Capture::new(&network);
    let (qemu, _guest) = boot(&builder(Version::V10_0, &socket, 2));
    let mut controller = Controller::new(qemu, &control);
    let clients: Vec<_> = (0..3).map(|_| EchoClient::begin(&network, guest_address(GUEST))).collect();
    clients.iter().for_each(|client| client.wait_blocks(2));
    let epochs = number("TOWLINE_SOAK_NET_EPOCHS", 80);
    let mut restart = |more: &[&str]| {
        process.kill().unwrap();
        capture.take();
        process = card(&network, &socket, &[&options, more].concat());
        wait_until("its control socket", WITHIN, || Ok(Qmp::connect(&control, WITHIN).ok())).unwrap()
    };
    // The next process holds frames by its option, or by what the former one has kept.
    for (former, next, expected) in [
        (&[][..], &["--hold"][..], "generation 3 has not held this card"),
        (&["--state", state], &["--state", state], "is not marked"),
    ] {
        controller.card = restart(former);
        assert_eq!(controller.ask("query-held", json!({}))["holding"], false);
        controller.hold();
        let before = controller.run(epochs, &clients);
        controller.card = restart(next);
        // The guest's driver sends again, and nothing leaves.
        wait_until("a held frame", WITHIN, || {
            let held = controller.ask("query-held", json!({ "wait-ms": 500 }));
            assert_eq!(held["holding"], true, "{held}");
            Ok((held["open-frames"] != 0).then_some(()))
        })
        .unwrap();
        assert_eq!(capture.take(), Vec::<Vec<u8>>::new());
        let released = json!({ "generation": 3, "epoch": controller.epoch });
        let refused = controller.refusal("release", released);
        assert!(refused.contains(expected), "{refused}");
        controller.hold();
        let after = controller.run(epochs, &clients);
        controller.pass();
        clients.iter().for_each(|client| client.wait_blocks(2));
        println!("{} epochs, {before} and {after} frames", controller.epoch);
    }
    let longest = clients.into_iter().map(EchoClient::end).max().unwrap();
    let [mark, release] = controller.longest;
    println!(
        "the longest block took {longest:?}, the longest mark {mark:?}, the longest release {release:?}"
    );
}
