//! Zero-copy sends from a guest's vsock to TCP: `towline vsock` inside a guest, whose forwards end on this host.
//!
//! ```text
//!   inside a guest:  a driver over shared memory ── vhost-user ── towline vsock ── virtio-net ── tap ──► a reader, here
//! ```
//! The driver is this very test binary, run there.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towline_frontend::vsock::{Options, VsockEvent, VsockGuest};
use towline_frontend::wire::feature;
use towline_frontend::{Frontend, MemoryArena};
use towline_lab::{LinuxGuest, Network, Qemu, require_lab, skip, towline_binary};

use super::WITHIN;

/// Path in the guest of the device's socket.
const SOCKET: &str = "/tmp/vsock.sock";
/// Environment variable that makes this binary the driver.
const ASKED: &str = "TOWLINE_DRIVES_VSOCK";
const PORTS: (u32, u32) = (1080, 80);
const BYTES: usize = 16 << 20;
const PACKET: usize = 60 << 10;

/// Payload of the driver: each packet has its own bytes, so that an overwritten one is noticed.
fn packet(number: usize) -> Vec<u8> {
    (0..PACKET).map(|at| ((at ^ number).wrapping_mul(0x9e37_79b1) >> 8) as u8).collect()
}

/// Reads a stream of [`packet`]s: number of bytes, and true if they are right.
fn read_stream(mut stream: impl std::io::Read) -> (usize, bool) {
    let (mut total, mut right) = (0, true);
    for number in 0.. {
        let mut bytes = vec![0; PACKET];
        let mut len = 0;
        while len < PACKET {
            match stream.read(&mut bytes[len..]).unwrap() {
                0 => return (total + len, right && bytes[..len] == packet(number)[..len]),
                count => len += count,
            }
        }
        total += len;
        right &= bytes == packet(number);
    }
    unreachable!("a stream ends")
}

/// Not a test on this machine: the process that runs in the guest.
#[test]
fn drives_a_vsock_in_the_guest() {
    if std::env::var_os(ASKED).is_none() {
        return;
    }
    let mut frontend = Frontend::connect(Path::new(SOCKET), WITHIN).unwrap();
    let features = frontend.negotiate(0, feature::EVENT_IDX, 0).unwrap().features;
    let options = Options { cid: 33, size: 128, receive_bytes: 4096, features, takes_at_once: true };
    let memory = Arc::new(MemoryArena::new(VsockGuest::memory_bytes(&options)).unwrap());
    frontend.set_mem_table(Some(&memory)).unwrap();
    let mut guest = VsockGuest::start(&mut frontend, &memory, options).unwrap();
    guest.request(PORTS);
    let mut connected = false;
    let deadline = Instant::now() + WITHIN;
    while !connected {
        guest.poll(|_, event| connected |= event == VsockEvent::Connected(PORTS)).unwrap();
        assert!(Instant::now() < deadline, "no connection");
        guest.wait(false, Duration::from_millis(10)).unwrap();
    }
    for number in 0..BYTES / PACKET {
        let bytes = packet(number);
        while !(guest.can_send() && guest.credit(PORTS) as usize >= PACKET && guest.send(PORTS, &bytes, 0)) {
            assert!(Instant::now() < deadline, "{number} packets were taken");
            guest.poll(|_, _| ()).unwrap();
            guest.wait(!guest.can_send(), Duration::from_millis(10)).unwrap();
        }
        guest.poll(|_, _| ()).unwrap();
    }
    guest.shutdown(PORTS, 3);
    while guest.tx().in_flight() > 0 {
        assert!(Instant::now() < deadline, "{} packets are under way", guest.tx().in_flight());
        guest.poll(|_, _| ()).unwrap();
        guest.wait(false, Duration::from_millis(10)).unwrap();
    }
}

/// Runs the driver in the guest; returns the bytes sent without a copy, and the device's CPU time in clock ticks.
fn run(network: &Network, guest: &mut LinuxGuest, asked: &str) -> (u64, u64) {
    let listener = network.enter(|| TcpListener::bind("10.0.2.2:0")).unwrap().unwrap();
    let port = listener.local_addr().unwrap().port();
    let reader = std::thread::spawn(move || read_stream(listener.accept().unwrap().0));
    let driver = std::env::current_exe().unwrap();
    let driver = driver.file_name().unwrap().to_str().unwrap();
    let line = format!(
        "rm -f {SOCKET}; towline vsock --socket {SOCKET} --cid 33 --forward guest:80=tcp:10.0.2.2:{port} \
         --zero-copy-send {asked} > /tmp/device.log 2>&1 & device=$!; \
         while [ ! -S {SOCKET} ]; do kill -0 $device || exec cat /tmp/device.log; busybox usleep 10000; done; \
         {ASKED}=1 {driver} --exact vsock::drives_a_vsock_in_the_guest --nocapture > /tmp/driver 2>&1 || cat /tmp/driver; \
         echo cpu $(busybox awk '{{print $14 + $15}}' /proc/$device/stat); kill $device; wait $device; cat /tmp/device.log"
    );
    let output = guest.shell(&line, WITHIN).unwrap();
    let (total, right) = reader.join().unwrap();
    assert_eq!((total, right), (BYTES / PACKET * PACKET, true), "{output}");
    // A counter of 0 is not printed.
    assert!(output.contains(" bytes_to_host="), "{output}");
    let number = |key: &str| -> u64 {
        let value = output.split_once(key).map(|(_, rest)| rest.split_whitespace().next().unwrap());
        value.map_or(0, |value| value.parse().unwrap())
    };
    assert_eq!((number(" zero_copy_in_flight="), number(" zero_copy_resets=")), (0, 0), "{output}");
    (number(" bytes_zero_copy="), number("cpu "))
}

#[test]
fn a_vsock_sends_over_a_virtio_card_without_a_copy() {
    let name = "a_vsock_sends_over_a_virtio_card_without_a_copy";
    if !require_lab(name) {
        return;
    }
    let network = match super::network() {
        Ok(network) => network,
        Err(error) => return skip(name, &format!("no network of its own: {error:#}")),
    };
    let (_qemu, mut guest): (Qemu, _) =
        super::guest(&network, &[&towline_binary().unwrap(), &std::env::current_exe().unwrap()]);
    let bytes = (BYTES / PACKET * PACKET) as u64;
    for asked in ["off", "auto", "on"] {
        let (lent, cpu) = run(&network, &mut guest, asked);
        println!("--zero-copy-send {asked:<5} {:>3} % lent, {cpu} ticks of CPU", 100 * lent / bytes);
        match asked {
            "off" => assert_eq!(lent, 0),
            // `auto` disables zero-copy at the first packet that the kernel copied.
            _ => assert!(lent > bytes / 2, "{lent} of {bytes} bytes"),
        }
    }
}
