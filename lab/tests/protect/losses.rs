//! A part of a protection stops for a while, or loses its way to the others: one host goes on with the guest.

use std::thread::sleep;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;
use towline_lab::expect::{number, wait_event};
use towline_lab::{signal, signal_if_any};

use crate::DIES_AFTER_MS;
use crate::protected::Protected;
use crate::support::{Hosts, Part, Side, WITHIN};

/// Time for which a part is stopped: longer than the silence that means a loss.
const STOPPED_FOR: Duration = Duration::from_secs(5);

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

/// Event that lasts for a while, and disturbs a protection.
#[derive(Debug, Clone, Copy)]
enum Disturbance {
    /// Both hosts live, and neither receives anything from the other one.
    Cut,
    /// A part is stopped and runs on: it may have been replaced meanwhile, and must not disturb its successor.
    Stop(Part),
}

impl Disturbance {
    fn random(random: &mut Rng) -> Self {
        let parts = [Part::Keeper, Part::Ferry, Part::Session, Part::Guest, Part::Agent, Part::Waiting];
        random.choice(parts).filter(|_| random.bool()).map_or(Self::Cut, Self::Stop)
    }

    /// Disturbs the protection for this time.
    fn happen(self, hosts: &Hosts, lasts: Duration) {
        match self {
            Self::Cut => {
                hosts.cut(true);
                sleep(lasts);
                hosts.cut(false);
            }
            Self::Stop(part) => {
                let pid = hosts.part(part);
                signal(pid, Signal::STOP);
                sleep(lasts);
                // One that was replaced may have been killed.
                signal_if_any(pid, Signal::CONT);
            }
        }
    }
}

/// Disturbs a protection. Returns it if the guest is still here, protected as before or again.
fn disturbed(mut guest: Protected, what: Disturbance, lasts: Duration) -> Option<Protected> {
    let generation = guest.generation();
    guest.clients.forget_gaps();
    let side = guest.hosts.watched(|| {
        what.happen(&guest.hosts, lasts);
        let gap = guest.goes_on();
        let side = guest.settled(generation);
        println!("  {what:?} for {lasts:.1?}: {gap:.1?} without a reply, {side:?}");
        side
    });
    match side {
        Some(Side::There) => {
            guest.has_gone_there();
            return None;
        }
        Some(Side::Here) => guest.is_protected_again(generation),
        None => {}
    }
    guest.takes_checkpoints();
    guest.goes_on();
    assert_eq!(guest.hosts.there.guests().unwrap().len(), 1);
    Some(guest)
}

/// Stops a part for a while; then the guest's host dies.
fn stops_for_a_while(test: &str, part: Part) {
    let Some(guest) = Protected::new(test) else { return };
    sleep(Duration::from_millis(Rng::with_seed(part as u64).u64(DIES_AFTER_MS)));
    if let Some(guest) = disturbed(guest, Disturbance::Stop(part), STOPPED_FOR) {
        guest.survives_its_host(&mut Rng::with_seed(6));
    }
}

/// Times in milliseconds for which a random disturbance lasts: around the silence that means a loss.
const LASTS_MS: std::ops::Range<u64> = 100..6000;

#[test]
#[ignore = "nightly"]
fn one_host_has_a_guest_whose_protection_is_disturbed_at_any_moment() {
    let name = "one_host_has_a_guest_whose_protection_is_disturbed_at_any_moment";
    let mut guest = None;
    let first = number("TOWLINE_SOAK_SEED", 1);
    for seed in first..first + number("TOWLINE_SOAK_PROTECT_DISTURBANCES", 3) {
        let Some(now) = guest.take().or_else(|| Protected::new(name)) else { return };
        let mut random = Rng::with_seed(seed);
        sleep(Duration::from_millis(random.u64(DIES_AFTER_MS)));
        print!("  seed {seed}:");
        let what = Disturbance::random(&mut random);
        guest = disturbed(now, what, Duration::from_millis(random.u64(LASTS_MS)));
    }
    guest.into_iter().for_each(|guest| guest.survives_its_host(&mut Rng::with_seed(9)));
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
