//! A part of a protection stops for a while, or loses its way to the others: one host goes on with the guest.

use std::thread::sleep;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;
use towline_lab::expect::{number, wait_event};
use towline_lab::signal;

use crate::DIES_AFTER_MS;
use crate::protected::Protected;
use crate::support::{Part, Side, WITHIN};

/// Time for which a part is stopped: longer than the silence that means a loss.
const STOPPED_FOR: Duration = Duration::from_secs(3);

/// Both hosts live and are connected to the guest's network, but not to each other.
#[test]
fn one_host_has_the_guest_when_the_link_between_them_is_cut() {
    let name = "one_host_has_the_guest_when_the_link_between_them_is_cut";
    let mut guest = None;
    let first = number("TOWLINE_SOAK_SEED", 1);
    for seed in first..first + number("TOWLINE_SOAK_PROTECT_CUTS", 1) {
        let Some(mut now) = guest.take().or_else(|| Protected::new(name)) else { return };
        sleep(Duration::from_millis(Rng::with_seed(seed).u64(DIES_AFTER_MS)));
        let generation = now.generation();
        now.clients.forget_gaps();
        now.hosts.cut(true);
        let side = now.hosts.watched(|| now.hosts.wait_decided());
        println!("  seed {seed}: {side:?} after {:.0?} without a reply", now.goes_on());
        assert_eq!(now.generation(), generation + 1);
        if side == Side::There {
            now.has_gone_there();
            continue;
        }
        now.hosts.wait_none_there();
        now.hosts.cut(false);
        now.is_protected_again(generation);
        println!("  protected again: {:.0?} without a reply", now.goes_on());
        guest = Some(now);
    }
    guest.into_iter().for_each(|guest| guest.survives_its_host(&mut Rng::with_seed(5)));
}

/// The standby has the guest then.
#[test]
#[ignore = "nightly"]
fn a_keeper_that_is_late_ends_its_guest() {
    let Some(guest) = Protected::new("a_keeper_that_is_late_ends_its_guest") else { return };
    let pid = guest.hosts.part(Part::Keeper);
    guest.hosts.watched(|| {
        signal(pid, Signal::STOP);
        guest.hosts.cut(true);
        assert_eq!(guest.hosts.wait_decided(), Side::There);
        println!("  the link was cut: {:.0?} without a reply", guest.goes_on());
        signal(pid, Signal::CONT);
        guest.hosts.source.wait_exit(WITHIN).unwrap();
    });
    guest.has_gone_there();
}

/// A part is stopped and runs on: it may have been replaced meanwhile, and must not disturb its successor.
fn stops_for_a_while(test: &str, part: Part) {
    let Some(mut guest) = Protected::new(test) else { return };
    sleep(Duration::from_millis(Rng::with_seed(part as u64).u64(DIES_AFTER_MS)));
    let (generation, pid) = (guest.generation(), guest.hosts.part(part));
    guest.clients.forget_gaps();
    let is_decided = || guest.generation() > generation;
    let side = guest.hosts.watched(|| {
        signal(pid, Signal::STOP);
        sleep(STOPPED_FOR);
        // One that was replaced may have been killed.
        let stopped = std::fs::metadata(format!("/proc/{pid}")).is_ok();
        stopped.then(|| signal(pid, Signal::CONT));
        let gap = guest.goes_on();
        let side = is_decided().then(|| guest.wait_decided(generation));
        println!("  {part:?} stopped: {gap:.0?} without a reply, {side:?}");
        side
    });
    match side {
        Some(Side::There) => return guest.has_gone_there(),
        Some(Side::Here) => guest.is_protected_again(generation),
        None => {}
    }
    guest.takes_checkpoints();
    guest.goes_on();
    assert_eq!(guest.hosts.there.guests().unwrap().len(), 1);
    guest.survives_its_host(&mut Rng::with_seed(6));
}

#[test]
#[ignore = "nightly"]
fn a_keeper_stops_for_a_while() {
    stops_for_a_while("a_keeper_stops_for_a_while", Part::Keeper);
}

#[test]
#[ignore = "nightly"]
fn a_ferry_stops_for_a_while() {
    stops_for_a_while("a_ferry_stops_for_a_while", Part::Ferry);
}

#[test]
#[ignore = "nightly"]
fn an_agent_stops_for_a_while() {
    stops_for_a_while("an_agent_stops_for_a_while", Part::Agent);
}

#[test]
#[ignore = "nightly"]
fn a_guest_stops_for_a_while() {
    stops_for_a_while("a_guest_stops_for_a_while", Part::Guest);
}

/// The guest runs meanwhile, and its output is held.
#[test]
#[ignore = "nightly"]
fn an_arbiter_that_is_away_delays_the_decision() {
    let Some(mut guest) = Protected::new("an_arbiter_that_is_away_delays_the_decision") else { return };
    let generation = guest.generation();
    guest.hosts.rename_arbiter("arbiter", "away");
    guest.hosts.cut(true);
    wait_event(&mut guest.protecting, "its notice", WITHIN, |event| {
        event["event"] == "notice" && event.to_string().contains("not decided")
    });
    guest.hosts.source.qmp().wait_status("running", WITHIN).unwrap();
    assert!(guest.hosts.passing().is_empty() && !guest.hosts.answers());
    guest.hosts.rename_arbiter("away", "arbiter");
    let side = guest.hosts.watched(|| guest.hosts.wait_decided());
    println!("  {side:?} after {:.0?} without a reply", guest.goes_on());
    match side {
        Side::There => guest.has_gone_there(),
        Side::Here => {
            guest.hosts.cut(false);
            guest.is_protected_again(generation);
            guest.survives_its_host(&mut Rng::with_seed(8));
        }
    }
}
