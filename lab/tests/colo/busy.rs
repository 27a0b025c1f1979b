//! A card and a disk of a primary, whose memory they write.
//!
//! ```text
//!   network of its own   client of the guest's echo, TCP ── tap0 ── towline net ── card ┐
//!                                                     disk.raw, ext4 ── virtio-blk ─────┴─ QEMU, guest
//! ```

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::{JoinHandle, spawn};

use towline_lab::counting::make_ext4;
use towline_lab::expect::Scratch;
use towline_lab::{Builder, LinuxGuest, Network, Towline, skip, towline_binary, wait_until};

use crate::primary::{MIB, WITHIN};

const HOST: &str = "10.0.2.2";
const GUEST: &str = "10.0.2.15";
const ECHO: u16 = 7;
const DISK: u64 = 64 * MIB;
/// Bytes of each write of the client.
const PART: usize = 64 << 10;

pub(crate) struct Busy {
    network: Network,
    card: Towline,
    place: Scratch,
    talk: Option<Talk>,
}

/// A connection to the guest's echo.
struct Talk {
    stream: TcpStream,
    echoed: Arc<AtomicU64>,
    threads: [JoinHandle<()>; 2],
}

impl Busy {
    /// Starts the card, and makes the disk; `None`: the test `name` is skipped.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let made = Network::new().and_then(|network| {
            network.add_tap("tap0", &format!("{HOST}/24"))?;
            Ok(network)
        });
        let network =
            made.inspect_err(|error| skip(name, &format!("no separate network: {error:#}"))).ok()?;
        let place = Scratch::new();
        std::fs::File::create(place.path("disk.raw")).unwrap().set_len(DISK).unwrap();
        make_ext4(&place.path("disk.raw"));
        let (prefix, towline, socket) = (network.prefix(), towline_binary().unwrap(), place.path("card"));
        let words = ["net", "--socket", socket.to_str().unwrap(), "--tap", "tap0"];
        let words = prefix[1..].iter().map(String::as_str).chain([towline.to_str().unwrap()]).chain(words);
        let mut card = Towline::start(Path::new(&prefix[0]), words).unwrap();
        wait_until("the card's socket", WITHIN, || {
            assert!(card.runs()?, "it ended: {}", card.stderr());
            Ok(socket.exists().then_some(()))
        })
        .unwrap();
        Some(Self { network, card, place, talk: None })
    }

    /// The QEMU with both.
    pub(crate) fn added_to(&self, builder: Builder) -> Builder {
        let socket = format!("socket,id=net0,path={}", self.place.text("card"));
        let drive = format!("file={},format=raw,if=none,id=disk0", self.place.text("disk.raw"));
        let card = ["-chardev", &socket, "-netdev", "vhost-user,id=n0,chardev=net0"];
        let devices = [
            "-device",
            "virtio-net-pci,netdev=n0",
            "-drive",
            &drive,
            "-device",
            "virtio-blk-pci,drive=disk0",
        ];
        builder.args(card).args(devices).within(&self.network)
    }

    /// Has both of them busy until the end of the test.
    pub(crate) fn begin(&mut self, guest: &mut LinuxGuest) {
        let up = format!("ip link set lo up && ip addr add {GUEST}/24 dev eth0 && ip link set eth0 up");
        guest.shell(&up, WITHIN).unwrap();
        guest.echo(ECHO).unwrap();
        guest.begin_to_count();
        let stream = self.network.enter(|| TcpStream::connect((GUEST, ECHO))).unwrap().unwrap();
        let (mut sends, mut receives) = (stream.try_clone().unwrap(), stream.try_clone().unwrap());
        let echoed = Arc::<AtomicU64>::default();
        let counter = Arc::clone(&echoed);
        let sender = spawn(move || {
            let part: Vec<u8> = (0..PART).map(|byte| byte as u8).collect();
            while sends.write_all(&part).is_ok() {}
        });
        let receiver = spawn(move || {
            let mut part = vec![0; PART];
            while let Ok(length @ 1..) = receives.read(&mut part) {
                counter.fetch_add(length as u64, SeqCst);
            }
        });
        self.talk = Some(Talk { stream, echoed, threads: [sender, receiver] });
    }

    /// Bytes that were returned so far.
    pub(crate) fn echoed(&self) -> u64 {
        self.talk.as_ref().map_or(0, |talk| talk.echoed.load(SeqCst))
    }

    /// Ends the connection, and asserts that the guest has counted the same in memory and on its disk.
    pub(crate) fn end(self, guest: &mut LinuxGuest) {
        let Talk { stream, threads, .. } = self.talk.unwrap();
        stream.shutdown(Shutdown::Both).unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        guest.assert_counted("the primary");
        drop(self.card);
    }
}
