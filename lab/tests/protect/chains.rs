//! A guest goes from host to host, each of which dies.

use fastrand::Rng;
use towline_lab::counting::assert_clean;
use towline_lab::expect::{Scratch, wait_event};
use towline_lab::{LinuxGuest, Network, SshHost, Sshd, Towline, Version, kill, wait_until};

use crate::clients::Clients;
use crate::ends_well;
use crate::support::{
    ADDRESSES, EPOCH, GREETS_WITHIN, Hosts, Links, NAME, Side, WITHIN, assert_is_guest, name, socket,
    start_card,
};

/// Times that the guest's host dies.
const DEATHS: usize = 4;

/// Two hosts that are reached by ssh, one of which has the guest.
struct Chain {
    /// Here and there.
    hosts: [SshHost; 2],
    cards: [Towline; 2],
    guest_is: Side,
    place: Scratch,
    sshd: Sshd,
    _hub: Network,
}

impl Chain {
    /// The hosts, once the one of the guest has died.
    fn of(hosts: Hosts, sshd: Sshd) -> Self {
        let Hosts { cards, there, here, hub, place, .. } = hosts;
        let here = SshHost::new(&sshd, here, ADDRESSES[0]).unwrap();
        Self { hosts: [here, there], cards, guest_is: Side::There, place, sshd, _hub: hub }
    }

    fn host(&self, side: Side) -> &SshHost {
        &self.hosts[side as usize]
    }

    /// The other host protects the guest, and the guest's host dies and comes back.
    fn goes_on(&mut self, clients: &Clients, random: &mut Rng) {
        let (from, to) = (self.guest_is, self.guest_is.other());
        // The disk that the guest had there before.
        std::fs::remove_file(self.place.path(to.directory()).join("disk.raw")).unwrap();
        self.cards[to as usize] = start_card(self.host(to).network(), &self.place, to);
        let words = protect(&self.place, NAME, self.host(to), to);
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let mut protecting = Towline::start_after(&self.host(from).prefix(), &words).unwrap();
        wait_event(&mut protecting, "the protection", WITHIN, |event| event["event"] == "protected");
        clients.wait_more(2);
        clients.forget_gaps();
        let killed = kill_all(self.host(from).network(), random);
        clients.wait_more(2);
        println!(
            "  {from:?} died: {}; {:.0?} without a reply",
            killed.join(", "),
            clients.snapshot().longest_gap()
        );
        wait_runs(self.host(to));
        self.hosts[from as usize].restart(&self.sshd).unwrap();
        self.guest_is = to;
    }
}

#[test]
#[ignore = "nightly"]
fn a_guest_goes_from_host_to_host_each_of_which_dies() {
    let test = "a_guest_goes_from_host_to_host_each_of_which_dies";
    let (Some(mut hosts), Some(sshd)) = (Hosts::new(test), Sshd::find(test)) else { return };
    let random = &mut Rng::with_seed(1);
    let tick = hosts.guest.take().unwrap().tick().unwrap();
    let _protecting = hosts.protected();
    let clients = hosts.clients();
    clients.wait_more(2);
    hosts.kill_here(Links::Stay, random);
    hosts.wait_runs_there();
    let mut chain = Chain::of(hosts, sshd);
    for _ in 1..DEATHS {
        chain.goes_on(&clients, random);
    }
    assert_has_guest(chain.host(chain.guest_is), chain.guest_is, &chain.place, tick);
    ends_well(clients);
}

/// Waits until the guest runs on this host.
pub(crate) fn wait_runs(host: &SshHost) {
    let runs = || {
        // Until the guest runs its monitor is that of the towline there, and greets no one else.
        let monitor = host.monitor(NAME, GREETS_WITHIN);
        let status = monitor.and_then(|monitor| monitor.status());
        Ok(status.is_ok_and(|status| status == "running").then_some(()))
    };
    wait_until("the guest on the other host", WITHIN, runs)
        .unwrap_or_else(|error| panic!("{error}: {:?}, sshd: {}", host.guests(), host.log()));
}

/// The guest runs on this host, with its memory and its disk.
pub(crate) fn assert_has_guest(host: &SshHost, side: Side, place: &Scratch, tick: u64) {
    wait_runs(host);
    assert_eq!(host.guests().unwrap(), [NAME]);
    let files = place.path(side.directory());
    let mut guest = LinuxGuest::connect_at(&files.join("agent")).unwrap();
    guest.wait_ready(WITHIN).unwrap();
    assert_is_guest(&mut guest, tick);
    assert_clean(&files.join("disk.raw"));
}

/// Words that protect a guest by that host.
pub(crate) fn protect(place: &Scratch, guest: &str, by: &SshHost, side: Side) -> Vec<String> {
    let arbiter = place.text("arbiter");
    let words = ["protect", "--json", "--arbiter", &arbiter, "--epoch", EPOCH, "--peer-timeout", "3s"];
    words.map(str::to_owned).into_iter().chain(placed(place, guest, by, side)).collect()
}

/// Words for a guest and its place on that host.
pub(crate) fn placed(place: &Scratch, guest: &str, by: &SshHost, side: Side) -> Vec<String> {
    let path = |name: &str| place.path(side.directory()).join(name).display().to_string();
    let settings = [
        format!("chardev.net0.path={}", socket(place, side).display()),
        format!("chardev.agent.path={}", path("agent")),
        format!("serial.0=file:{}", path("console")),
        format!("drive.disk0.file={}", path("disk.raw")),
    ];
    let qemu = Version::Newest.command().get_program().to_string_lossy().into_owned();
    let client = by.client();
    let how = ["--ssh", &client, "--trust-command-line", "--qemu", &qemu];
    let destination = format!("ssh:other/{NAME}");
    let settings = settings.iter().flat_map(|setting| ["--set", setting]);
    how.into_iter().chain(settings).chain([guest, &destination]).map(str::to_owned).collect()
}

/// Kills all processes of a host, in a random order. Returns their names in that order.
pub(crate) fn kill_all(network: &Network, random: &mut Rng) -> Vec<String> {
    let mut killed = Vec::new();
    wait_until("the death of a host", WITHIN, || {
        let mut processes = network.processes()?;
        random.shuffle(&mut processes);
        let names: Vec<_> = processes.iter().map(|pid| name(*pid)).collect();
        processes.iter().for_each(|pid| kill(*pid));
        killed.extend(names);
        // One that was being started is not among them.
        Ok(network.processes()?.is_empty().then_some(()))
    })
    .unwrap();
    killed
}
