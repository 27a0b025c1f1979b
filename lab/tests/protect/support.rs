//! Helpers of these tests: two hosts, their cards, the guest of one of them, and the death of that host.

use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

use fastrand::Rng;
use serde_json::Value;
use towline_lab::counting::{assert_clean, make_ext4};
use towline_lab::expect::{Scratch, qmp, wait_event};
use towline_lab::{
    Finished, LinuxGuest, MemoryBackend, Network, Qemu, Qmp, SshHost, Sshd, Towline, Version, host_networks,
    kill, require_qemu, wait_removed, wait_until,
};

use crate::bridges::{TAP, add_bridge, attach, set_apart};
use crate::chains::{assert_has_guest, kill_all, placed, protect, wait_runs};
use crate::clients::Clients;
use crate::network::{self, GUEST, card, card_options, set_up};

pub(crate) const WITHIN: Duration = network::WITHIN;
pub(crate) const MIB: u64 = 1 << 20;
/// Name of the guest on the other host.
pub(crate) const NAME: &str = "web";
/// Time between two checkpoints.
pub(crate) const EPOCH: &str = "50ms";
/// Addresses of the link between the hosts.
pub(crate) const ADDRESSES: [&str; 2] = ["10.213.79.1", "10.213.79.2"];
/// Memory that the guest writes round and round, and the bytes of it in a second.
const WRITTEN: u64 = 16 * MIB;
const RATE: u64 = 4 * MIB;
/// Disk on which the guest counts.
const DISK_BYTES: u64 = 32 * MIB;
/// Connections of the client.
const CONNECTIONS: usize = 4;
/// Interfaces by which the guest's host is connected to all else.
const LINKS: [&str; 2] = ["link0", "uplink"];
/// Time in which a guest accepts a connection that it gets.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// Time in which a monitor greets that no one else has.
pub(crate) const GREETS_WITHIN: Duration = Duration::from_secs(2);

/// One of the hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Here,
    There,
}

impl Side {
    /// Directory of its files.
    pub(crate) fn directory(self) -> &'static str {
        match self {
            Self::Here => "a",
            Self::There => "b",
        }
    }

    pub(crate) fn other(self) -> Self {
        match self {
            Self::Here => Self::There,
            Self::There => Self::Here,
        }
    }
}

/// Connections of a host while it dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    /// The kernel lives for long enough to say that the processes are gone.
    Stay,
    /// Nothing more is received from it.
    AreCut,
}

/// A process of a protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Of `towline protect`, which has the monitor.
    Keeper,
    /// It takes checkpoints.
    Ferry,
    /// OpenSSH's client.
    Session,
    /// The QEMU that runs the guest.
    Guest,
    /// Of the other host, which has the copy.
    Agent,
    /// The QEMU that waits.
    Waiting,
}

/// Gives an option of a command another value.
pub(crate) fn set_option(words: &mut [String], option: &str, value: &str) {
    let at = words.iter().position(|word| word == option).unwrap();
    value.clone_into(&mut words[at + 1]);
}

/// The picture of `main.rs`, with a guest that writes its memory.
pub(crate) struct Hosts {
    pub(crate) source: Qemu,
    /// The guest in `source`.
    pub(crate) guest: Option<LinuxGuest>,
    /// Cards, here and there.
    pub(crate) cards: [Towline; 2],
    pub(crate) there: SshHost,
    pub(crate) here: Network,
    pub(crate) hub: Network,
    pub(crate) place: Scratch,
}

impl Hosts {
    /// Boots the guest; `None`: the test is skipped.
    pub(crate) fn new(test: &str) -> Option<Self> {
        Self::with_options(test, &[])
    }

    /// The same, with further options for QEMU.
    pub(crate) fn with_options(test: &str, further: &[&str]) -> Option<Self> {
        if !require_qemu(test, &[Version::Newest]) {
            return None;
        }
        let sshd = Sshd::find(test)?;
        let [here, there] = host_networks(test, ADDRESSES)?;
        let hub = network::network(test)?;
        add_bridge(&hub);
        network::give_addresses(&hub, "br0");
        attach(&hub, &here, "host-a");
        attach(&hub, &there, "host-b");
        let there = SshHost::new(&sshd, there, ADDRESSES[1]).unwrap();
        let place = Scratch::new();
        for name in ["a", "b", "arbiter"] {
            std::fs::create_dir(place.path(name)).unwrap();
        }
        let disk = place.path("a/disk.raw");
        std::fs::File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
        make_ext4(&disk);
        let drive = format!("file={},format=raw,if=none,id=disk0,file.locking=on", disk.display());
        let disk = ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0,id=vda"];
        let cards = [start_card(&here, &place, Side::Here), start_card(there.network(), &place, Side::There)];
        let options = card_options(Version::Newest, &socket(&place, Side::Here), 1, 4);
        let builder = Qemu::builder(Version::Newest).linux().memory_mib(256);
        let builder = builder.memory_backend(MemoryBackend::Memfd { prealloc: false }).args(options);
        let builder = builder.args(disk).args(further.iter().copied()).within(&here);
        let (source, mut guest) = builder.boot(WITHIN).unwrap();
        set_up(&mut guest);
        guest.begin_to_count();
        guest.dirty(RATE, WRITTEN).unwrap();
        guest.wait_ticking(WITHIN).unwrap();
        Some(Self { source, guest: Some(guest), cards, there, here, hub, place })
    }

    /// Starts the client's connections to the guest.
    pub(crate) fn clients(&self) -> Clients {
        Clients::begin(&self.hub, network::guest_address(GUEST), CONNECTIONS)
    }

    /// Returns true if the guest accepts a connection.
    pub(crate) fn answers(&self) -> bool {
        let to = network::guest_address(GUEST);
        self.hub.enter(|| TcpStream::connect_timeout(&to, ANSWERS_WITHIN).is_ok()).unwrap()
    }

    /// Starts to protect the guest.
    pub(crate) fn protect(&self) -> Towline {
        self.start_protecting(|_| {})
    }

    fn start_protecting(&self, change: impl FnOnce(&mut Vec<String>)) -> Towline {
        let mut words = protect(&self.place, &qmp(&self.source), &self.there, Side::There);
        change(&mut words);
        self.run_here(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Starts a command about the guest and its place on the other host.
    pub(crate) fn start(&self, command: &[&str]) -> Towline {
        let placed = placed(&self.place, &qmp(&self.source), &self.there, Side::There);
        let words = command.iter().copied().chain(placed.iter().map(String::as_str));
        self.run_here(&words.collect::<Vec<_>>())
    }

    /// Protects the guest, and waits until the other host has its first checkpoint.
    pub(crate) fn protected(&self) -> Towline {
        self.protected_by(|_| {})
    }

    /// The same, by words that are changed before.
    pub(crate) fn protected_by(&self, change: impl FnOnce(&mut Vec<String>)) -> Towline {
        let mut protecting = self.start_protecting(change);
        wait_event(&mut protecting, "the protection", WITHIN, |event| event["event"] == "protected");
        protecting
    }

    /// Asks the card of a host by `towline ctl`.
    pub(crate) fn ask_card(&self, side: Side, words: &[&str]) -> Finished {
        let control = control(&self.place, side).display().to_string();
        towline_lab::towline([&["ctl", &control], words].concat()).unwrap().wait_done(WITHIN).unwrap()
    }

    /// Reply of a card to `query-held`.
    pub(crate) fn held(&self, side: Side) -> Value {
        let card = Qmp::connect(&control(&self.place, side), WITHIN).unwrap();
        card.execute("query-held", Value::Null).unwrap()
    }

    /// Kills all processes of the guest's host, in a random order: towline and what it has started, QEMU, and the card. Returns their names
    /// in that order.
    pub(crate) fn kill_here(&self, links: Links, random: &mut Rng) -> Vec<String> {
        if links == Links::AreCut {
            for link in LINKS {
                self.here.run(&["ip", "link", "set", link, "down"]).unwrap();
            }
        }
        kill_all(&self.here, random)
    }

    /// A process of the guest's protection, which lives.
    pub(crate) fn part(&self, part: Part) -> u32 {
        let network =
            if matches!(part, Part::Agent | Part::Waiting) { self.there.network() } else { &self.here };
        let is_it = |pid: u32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let is_towline = name(pid) == "towline";
            match part {
                Part::Keeper => is_towline && line.contains("\0protect\0"),
                Part::Ferry => is_towline && line.ends_with("\0ferry\0"),
                Part::Session => name(pid) == "ssh",
                Part::Guest => pid == self.source.pid(),
                // The arguments of towline name the program, too.
                Part::Waiting => !is_towline && line.contains("qemu-system"),
                Part::Agent => Some(pid) == self.there.agent(),
            }
        };
        let found = || Ok(network.processes()?.into_iter().find(|pid| is_it(*pid)));
        wait_until(&format!("{part:?}"), WITHIN, found).unwrap()
    }

    /// Kills a process of the protection. Returns its number.
    pub(crate) fn kill(&self, part: Part) -> u32 {
        let pid = self.part(part);
        kill(pid);
        pid
    }

    /// The guest's card dies.
    pub(crate) fn kill_card(&mut self) {
        self.cards[0].kill().unwrap();
    }

    /// Another card is started in its place, as by a service manager.
    pub(crate) fn restart_card(&mut self) {
        self.cards[0] = start_card(&self.here, &self.place, Side::Here);
    }

    /// All processes of the other host die, and it comes back with its files, after this has looked at them.
    pub(crate) fn restart_there(&mut self, sshd: &Sshd, random: &mut Rng, look: impl FnOnce(&Self)) {
        kill_all(self.there.network(), random);
        look(self);
        self.cards[1] = start_card(self.there.network(), &self.place, Side::There);
        self.there.restart(sshd).unwrap();
    }

    /// Cuts the link between the hosts, or mends it. What is sent over a link that is cut is lost, and neither end notices; the guest's network is
    /// another one.
    pub(crate) fn cut(&self, cut: bool) {
        set_apart(&self.here, ADDRESSES[1], cut);
        set_apart(self.there.network(), ADDRESSES[0], cut);
    }

    /// Runs `work`. Meanwhile at most one of both cards sends what its guest does.
    pub(crate) fn watched<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let worker = scope.spawn(work);
            let mut looks = 0;
            wait_until("the end of this step", 5 * WITHIN, || {
                assert!(self.passing().len() < 2, "both hosts send what their guest does");
                looks += 1;
                Ok(worker.is_finished().then_some(()))
            })
            .unwrap();
            assert!(looks > 0);
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Hosts whose card sends what its guest does.
    pub(crate) fn passing(&self) -> Vec<Side> {
        let passes = |side: &Side| self.held(*side)["holding"] == false;
        let passing: Vec<_> = [Side::Here, Side::There].into_iter().filter(passes).collect();
        // The first may hold since.
        passing.into_iter().filter(passes).collect()
    }

    /// Waits until one of both hosts has the guest for itself, whose output was held until then.
    pub(crate) fn wait_decided(&self) -> Side {
        let decided = || Ok(self.passing().first().copied());
        wait_until("a decision between the hosts", WITHIN, decided).unwrap()
    }

    /// The other host has no guest, and no QEMU that waits for one.
    pub(crate) fn wait_none_there(&self) {
        let none = || Ok(self.there.guests()?.is_empty().then_some(()));
        wait_until("the end of the QEMU on the other host", WITHIN, none).unwrap();
    }

    /// Renames the directory of the arbiter, which only exists for the hosts under its first name.
    pub(crate) fn rename_arbiter(&self, from: &str, to: &str) {
        std::fs::rename(self.place.path(from), self.place.path(to)).unwrap();
    }

    /// Starts towline on the guest's host.
    pub(crate) fn run_here(&self, words: &[&str]) -> Towline {
        Towline::start_after(&self.here.prefix(), words).unwrap()
    }

    /// Generations that were claimed.
    pub(crate) fn generations(&self) -> Vec<u64> {
        let files = std::fs::read_dir(self.place.path("arbiter")).unwrap();
        let names = files.filter_map(|file| file.unwrap().file_name().into_string().ok());
        let mut generations: Vec<_> =
            names.filter_map(|name| name.strip_prefix("web.generation.")?.parse().ok()).collect();
        generations.sort_unstable();
        generations
    }

    /// Waits until the guest runs on the other host.
    pub(crate) fn wait_runs_there(&self) {
        wait_runs(&self.there);
    }

    /// The guest runs on the other host, with its memory and its disk.
    pub(crate) fn assert_goes_on_there(&self, tick: u64) {
        assert_has_guest(&self.there, Side::There, &self.place, tick);
    }

    /// The guest runs where it was, sends as before, and the other host has none.
    pub(crate) fn assert_stays(&mut self, tick: u64) {
        self.source.qmp().wait_status("running", WITHIN).unwrap();
        assert_is_guest(self.guest.as_mut().unwrap(), tick);
        assert_clean(&self.place.path("a/disk.raw"));
        assert_eq!(self.held(Side::Here)["holding"], false);
        self.wait_none_there();
        wait_removed(&self.place.path("b/disk.raw"), WITHIN).unwrap();
    }
}

/// It runs on after this tick, and what it wrote is as written.
pub(crate) fn assert_is_guest(guest: &mut LinuxGuest, tick: u64) {
    // Its serial port, by which it tells its tick, is not held: it may have told one that no checkpoint had yet.
    wait_until("a guest that goes on", WITHIN, || Ok((guest.tick()? > tick).then_some(()))).unwrap();
    guest.stop_dirtying().unwrap();
    assert_eq!(guest.check().unwrap(), WRITTEN / 4096);
    let kernel = guest.shell("dmesg", WITHIN).unwrap();
    guest.assert_counted("the guest");
    assert!(
        !["Oops", "lockup", "NETDEV WATCHDOG", "EXT4-fs error"].iter().any(|text| kernel.contains(text)),
        "{kernel}"
    );
}

/// Socket of the card of a host; its control socket is beside it.
pub(crate) fn socket(place: &Scratch, side: Side) -> PathBuf {
    place.path(side.directory()).join("net0.sock")
}

pub(crate) fn start_card(network: &Network, place: &Scratch, side: Side) -> Towline {
    let (socket, control) = (socket(place, side), control(place, side));
    card(network, &socket, &["--tap", TAP, "--hold", "--qmp", control.to_str().unwrap()])
}

fn control(place: &Scratch, side: Side) -> PathBuf {
    socket(place, side).with_extension("qmp")
}

pub(crate) fn name(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}
