//! `towline protect`: a Linux guest goes on where another host has it when its own host dies, and the network does not notice.
//!
//! ```text
//!   hub  br0 10.7.0.1, numbered requests to the guest's echo on several TCP connections
//!    ├─ host-a ── uplink  br0 ── vm0 ── towline net --hold ── QEMU, the guest          link0 10.213.79.1, towline protect
//!    └─ host-b ── uplink  br0 ── vm0 ── towline net --hold ── a QEMU that waits        link0 10.213.79.2, sshd, towline agent
//! ```
//! A host is a network with all processes in it. Every byte that comes back is compared.
//!
//! `TOWLINE_SOAK_PROTECT_KILLS` is the number of hosts that die, `TOWLINE_SOAK_PROTECT_CUTS` that of links that are cut,
//! `TOWLINE_SOAK_PROTECT_DISTURBANCES` that of random disturbances, `TOWLINE_SOAK_SEED` the first seed.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod bridges;
mod chains;
mod checks;
mod clients;
mod cost;
mod deaths;
mod disks;
mod losses;
#[path = "../net/support.rs"]
#[allow(dead_code, unused_imports, reason = "the tests of cards use the rest")]
mod network;
mod protected;
mod support;

use std::thread::sleep;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;
use towline_lab::expect::{assert_ended, number};
use towline_lab::{signal, wait_until};

use crate::clients::{Clients, Snapshot};
use crate::support::{Hosts, Links, Side, WITHIN};

/// Replies on each connection that prove that it goes on.
const PROOF: u64 = 20;
/// Time for which the guest was protected, in milliseconds, when its host dies.
const DIES_AFTER_MS: std::ops::Range<u64> = 500..2000;

/// Has the guest's host die after a random time, and proves that the guest goes on. Prints what the connections have seen.
fn survives(hosts: &mut Hosts, links: Links, random: &mut Rng) {
    let protecting = hosts.protected();
    let clients = hosts.clients();
    clients.wait_more(2);
    let tick = hosts.guest.take().unwrap().tick().unwrap();
    let claimed = hosts.generations();
    clients.forget_gaps();
    let delay = Duration::from_millis(random.u64(DIES_AFTER_MS));
    sleep(delay);
    let before = clients.snapshot();
    clients.forget_gaps();
    let killed = hosts.kill_here(links, random);
    clients.wait_more(PROOF);
    let after = clients.snapshot();
    println!("links: {links:?}; died after {delay:?}: {}; {}", killed.join(", "), gaps(&before, &after));
    hosts.assert_goes_on_there(tick);
    let last = claimed.last().copied().unwrap_or_default();
    assert_eq!(hosts.generations().last(), Some(&(last + 1)), "{claimed:?}: {}", protecting.stdout());
    ends_well(clients);
}

fn gaps(before: &Snapshot, after: &Snapshot) -> String {
    let each: Vec<_> =
        after.longest_gaps.iter().map(|gap| format!("{:.0}", gap.as_secs_f64() * 1e3)).collect();
    let (replies, longest) = (before.replies.iter().sum::<u64>(), before.longest_gap().as_secs_f64() * 1e3);
    format!(
        "longest gap between replies {:.0} ms (each: {}), before {longest:.0} ms in {replies} replies",
        after.longest_gap().as_secs_f64() * 1e3,
        each.join(", ")
    )
}

/// Ends the connections, none of which has seen an error.
fn ends_well(clients: Clients) {
    let ended = clients.end();
    assert!(ended.errors.is_empty(), "{ended:?}");
}

#[test]
fn a_guest_survives_the_death_of_its_host() {
    let Some(mut hosts) = Hosts::new("a_guest_survives_the_death_of_its_host") else { return };
    survives(&mut hosts, Links::Stay, &mut Rng::with_seed(number("TOWLINE_SOAK_SEED", 1)));
}

/// Its sockets are those of that user, on both hosts.
#[test]
#[ignore = "nightly"]
fn a_guest_of_a_qemu_that_became_another_user_survives_its_host() {
    let test = "a_guest_of_a_qemu_that_became_another_user_survives_its_host";
    let Some(mut hosts) = Hosts::with_options(test, &["-run-with", "user=daemon"]) else { return };
    survives(&mut hosts, Links::Stay, &mut Rng::with_seed(1));
}

/// Each time of another guest.
#[test]
#[ignore = "nightly"]
fn guests_survive_deaths_of_their_hosts_at_any_moment() {
    let first = number("TOWLINE_SOAK_SEED", 1);
    for seed in first..first + number("TOWLINE_SOAK_PROTECT_KILLS", 2) {
        let Some(mut hosts) = Hosts::new("guests_survive_deaths_of_their_hosts_at_any_moment") else {
            return;
        };
        let mut random = Rng::with_seed(seed);
        let links = if seed % 2 == 0 { Links::Stay } else { Links::AreCut };
        print!("seed {seed}: ");
        survives(&mut hosts, links, &mut random);
    }
}

#[test]
fn an_ordered_end_leaves_the_guest_unprotected_and_running() {
    let Some(mut hosts) = Hosts::new("an_ordered_end_leaves_the_guest_unprotected_and_running") else {
        return;
    };
    let protecting = hosts.protected();
    let clients = hosts.clients();
    clients.wait_more(PROOF);
    let tick = hosts.guest.as_mut().unwrap().tick().unwrap();
    clients.forget_gaps();
    signal(protecting.pid(), Signal::INT);
    assert_ended(&protecting.wait(WITHIN).unwrap(), 0, &[]);
    clients.wait_more(PROOF);
    println!("longest gap between replies at the end {:?}", clients.snapshot().longest_gap());
    hosts.assert_stays(tick);
    ends_well(clients);
}

/// Precondition of the tests above.
#[test]
fn nothing_of_a_guest_is_received_while_its_card_holds() {
    let Some(hosts) = Hosts::new("nothing_of_a_guest_is_received_while_its_card_holds") else { return };
    // From its start on, without a request.
    assert_eq!(hosts.held(Side::Here)["holding"], true);
    assert!(!hosts.answers());
    hosts.ask_card(Side::Here, &["hold", "generation=1"]);
    hosts.ask_card(Side::Here, &["pass", "generation=1"]);
    let clients = hosts.clients();
    clients.wait_more(PROOF);
    hosts.ask_card(Side::Here, &["hold", "generation=1"]);
    assert!(!hosts.answers());
    let silent = clients.snapshot();
    let frames = || hosts.held(Side::Here)["open-frames"].as_u64();
    let before = frames();
    wait_until("another frame of the guest", WITHIN, || Ok((frames() > before).then_some(()))).unwrap();
    assert_eq!(clients.snapshot().replies, silent.replies);
    hosts.ask_card(Side::Here, &["pass", "generation=1"]);
    clients.wait_more(PROOF);
    println!("{}", gaps(&silent, &clients.snapshot()));
    ends_well(clients);
}
