//! Helpers of these tests: a guest with a disk, and another host with OpenSSH's server.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use towline_lab::expect::{Scratch, qmp};
use towline_lab::{
    Builder, Finished, LinuxGuest, Network, Qemu, SshHost, Sshd, Towline, Version, host_networks,
    require_lab, wait_until,
};

/// Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
pub(crate) const MIB: u64 = 1 << 20;
/// Part of its memory that the guest writes and checks.
pub(crate) const WRITTEN: u64 = 16 * MIB;
const ADDRESSES: [&str; 2] = ["10.213.78.1", "10.213.78.2"];
/// Socket of the agent of a guest that was started there.
const AGENT_THERE: &str = "there.agent";
/// Length of the guest's disk.
const DISK: u64 = 8 * MIB;

/// A guest that writes its memory, and has written its disk, on one of two hosts that have one link between them and the same files.
pub(crate) struct Hosts {
    pub(crate) there: SshHost,
    here: Network,
    pub(crate) source: Qemu,
    pub(crate) guest: Option<LinuxGuest>,
    pub(crate) place: Scratch,
}

impl Hosts {
    /// Boots the guest; `None`: the test is skipped.
    pub(crate) fn new(test: &str) -> Option<Self> {
        if !require_lab(test) {
            return None;
        }
        let sshd = Sshd::find(test)?;
        let [here, there] = host_networks(test, ADDRESSES)?;
        let there = SshHost::new(&sshd, there, ADDRESSES[1]).unwrap();
        let place = Scratch::new();
        File::create(place.path("disk.raw")).unwrap().set_len(DISK).unwrap();
        let (source, mut guest) = with_disk(&place.path("disk.raw")).within(&here).boot(WITHIN).unwrap();
        guest.shell(&written("first"), WITHIN).unwrap();
        guest.dirty(WRITTEN, WRITTEN).unwrap();
        guest.wait_ticking(WITHIN).unwrap();
        Some(Self { there, here, source, guest: Some(guest), place })
    }

    /// Starts towline on the guest's host.
    pub(crate) fn towline(&self, words: &[&str]) -> Towline {
        self.towline_after(&self.here.prefix(), words)
    }

    /// Words before a towline on the guest's host whose guests are those of this test.
    pub(crate) fn with_own_guests(&self) -> Vec<String> {
        let mut prefix = self.here.prefix();
        prefix.extend([
            "/usr/bin/env".to_owned(),
            format!("XDG_RUNTIME_DIR={}", self.place.path("").display()),
        ]);
        prefix
    }

    /// Starts towline after the words of a program that it replaces.
    pub(crate) fn towline_after(&self, prefix: &[String], words: &[&str]) -> Towline {
        Towline::start_after(prefix, words).unwrap()
    }

    /// Starts towline with these words for guests with different names. The sockets of their agents have this prefix.
    pub(crate) fn start_with_guests(&self, prefix: &[String], words: &[&str], agents: &str) -> Towline {
        let agent = self.place.path(&format!("{agents}{{name}}.agent"));
        let agent = format!("chardev.agent.path={}", agent.display());
        let options = self.start_options();
        let options = options.iter().take(3).map(String::as_str).chain(["--set", &agent]);
        self.towline_after(prefix, &words.iter().copied().chain(options).collect::<Vec<_>>())
    }

    pub(crate) fn with_guests(&self, prefix: &[String], words: &[&str], agents: &str) -> Finished {
        self.start_with_guests(prefix, words, agents).wait(WITHIN).unwrap()
    }

    /// Network of the guest's host.
    pub(crate) fn network(&self) -> &Network {
        &self.here
    }

    /// Limits the link to this rate, as `tc` has it.
    pub(crate) fn limit(&self, rate: &str) {
        self.here.limit("link0", rate).unwrap();
    }

    /// Bytes that the guest's host has sent over the link, with all headers.
    pub(crate) fn sent(&self) -> u64 {
        self.here.sent_bytes("link0").unwrap()
    }

    /// Cuts the link: what is sent is lost, and neither end notices.
    pub(crate) fn cut(&self) {
        self.neighbours(&["lladdr", "02:00:00:00:00:01", "nud", "permanent"], "replace");
    }

    /// Connects the hosts again.
    pub(crate) fn mend(&self) {
        self.neighbours(&[], "delete");
    }

    fn neighbours(&self, options: &[&str], verb: &str) {
        for (network, address) in [(&self.here, ADDRESSES[1]), (self.there.network(), ADDRESSES[0])] {
            network.run(&[&["ip", "neighbor", verb, address, "dev", "link0"][..], options].concat()).unwrap();
        }
    }

    /// Starts a command on the guest, with this place on the other host.
    pub(crate) fn start(&self, command: &str, place: &str, options: &[&str]) -> Towline {
        let (source, place, client) = (qmp(&self.source), format!("ssh:other{place}"), self.there.client());
        let words = [command, &source, &place, "--ssh", &client].into_iter().chain(options.iter().copied());
        self.towline(&words.collect::<Vec<_>>())
    }

    pub(crate) fn run(&self, command: &str, place: &str, options: &[&str]) -> Finished {
        self.start(command, place, options).wait(WITHIN).unwrap()
    }

    /// Options for a QEMU that is started there, with the guest's own command line.
    pub(crate) fn start_options(&self) -> Vec<String> {
        let qemu = Version::V10_0.command().get_program().to_str().unwrap().to_owned();
        let agent = format!("chardev.agent.path={}", self.place.path(AGENT_THERE).display());
        ["--trust-command-line", "--qemu", &qemu, "--set", &agent].map(str::to_owned).into()
    }

    /// Agent of the guest that has this socket.
    pub(crate) fn agent(&self, socket: &str) -> LinuxGuest {
        let mut guest = LinuxGuest::connect_at(&self.place.path(socket)).unwrap();
        guest.wait_ready(WITHIN).unwrap();
        guest
    }

    /// Agent of the guest in a QEMU that was started there.
    pub(crate) fn agent_there(&self) -> LinuxGuest {
        self.agent(AGENT_THERE)
    }

    /// The guest continues there, in the QEMU that was started for it, with its memory and its disk.
    pub(crate) fn assert_continues_there(&self, name: &str, tick: u64) {
        self.there.monitor(name, WITHIN).unwrap().wait_status("running", WITHIN).unwrap();
        assert_is_guest(&mut self.agent_there(), tick);
    }

    /// The guest runs on where it was, and nothing is left on the other host.
    pub(crate) fn assert_stays(&mut self) {
        self.source.qmp().wait_status("running", WITHIN).unwrap();
        let mut guest = self.guest.take().unwrap();
        let tick = guest.tick().unwrap();
        guest.wait_ticking(WITHIN).unwrap();
        guest.stop_dirtying().unwrap();
        assert_is_guest(&mut guest, tick);
        guest.dirty(WRITTEN, WRITTEN).unwrap();
        self.guest = Some(guest);
        self.wait_for_guests_there(&[]);
        let tokens = fs::read_dir(self.place.path("")).unwrap().map(|entry| entry.unwrap().file_name());
        let tokens: Vec<_> = tokens.filter(|name| name.to_string_lossy().starts_with('.')).collect();
        assert!(tokens.is_empty(), "{tokens:?}");
    }

    /// Waits until these are the guests of the other host.
    pub(crate) fn wait_for_guests_there(&self, names: &[&str]) {
        let guests = || Ok((self.there.guests()? == names).then_some(()));
        wait_until("the end of a QEMU on the other host", WITHIN, guests).unwrap();
    }

    /// The counter of the guest, which nothing asks for its memory afterwards.
    pub(crate) fn last_tick(&mut self) -> u64 {
        self.guest.take().unwrap().tick().unwrap()
    }
}

/// Has the guest write numbers to its disk, one after another, each to a place of its own, and keep the last one that its disk has
/// confirmed.
pub(crate) const WRITER: &str = "echo 0 > /tmp/confirmed; (n=0; while :; do n=$((n+1)); echo $n | \
    dd of=/dev/vda bs=512 seek=$((n % 8000 + 8)) conv=sync,fsync,notrunc 2>/dev/null; \
    echo $n > /tmp/confirmed.new; mv /tmp/confirmed.new /tmp/confirmed; done) > /dev/null 2>&1 &";

/// The disk has what the guest knows to be on it, and the guest goes on writing.
pub(crate) fn assert_disk(guest: &mut LinuxGuest) {
    let read = "echo 3 > /proc/sys/vm/drop_caches; n=$(cat /tmp/confirmed); echo confirmed $n; \
        for m in $(seq $((n > 30 ? n - 30 : 1)) $n); do \
        found=$(dd if=/dev/vda bs=512 skip=$((m % 8000 + 8)) count=1 2>/dev/null | head -n 1); \
        [ \"$found\" = $m ] || echo $m is \"$found\"; done; \
        until [ $(cat /tmp/confirmed) -gt $n ]; do sleep 0.05; done";
    let said = guest.shell(read, WITHIN).unwrap();
    assert!(said.trim().lines().count() == 1 && said.starts_with("confirmed"), "{said}");
}

/// It has its memory and its disk, and both can be written to.
pub(crate) fn assert_is_guest(guest: &mut LinuxGuest, tick: u64) {
    assert!(guest.wait_ticking(WITHIN).unwrap() > tick);
    assert_eq!(guest.check().unwrap(), WRITTEN / 4096);
    guest.shell("echo 3 > /proc/sys/vm/drop_caches", WITHIN).unwrap();
    let read = guest.shell("dd if=/dev/vda bs=8 count=1 2>/dev/null", WITHIN).unwrap();
    assert!(read.starts_with("first"), "{read:?}");
    guest.shell(&written("first"), WITHIN).unwrap();
}

/// Writes to the disk and waits for it.
fn written(text: &str) -> String {
    format!("echo {text} | dd of=/dev/vda bs=512 conv=sync,fsync 2>/dev/null")
}

pub(crate) fn with_disk(disk: &Path) -> Builder {
    with_disk_of(Version::V10_0, disk, "raw")
}

pub(crate) fn with_disk_of(version: Version, disk: &Path, format: &str) -> Builder {
    let drive = format!("file={},format={format},if=none,id=disk0,file.locking=on", disk.display());
    let disk = ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0,id=vda"];
    Qemu::builder(version).cpu("Nehalem").linux().memory_mib(256).processors(2).args(disk)
}

/// The last event.
pub(crate) fn last(finished: &Finished) -> Value {
    let line = finished.stdout.lines().last();
    serde_json::from_str(line.unwrap_or_else(|| panic!("no event: {}", finished.stderr))).unwrap()
}
