//! Each part of a protection dies alone: one host goes on with the guest.

use std::thread::sleep;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::expect::{assert_ended, events, number};
use towline_lab::{signal, wait_until};

use crate::protected::{GONE, Protected};
use crate::support::{Hosts, Part, Side, WITHIN, set_option};
use crate::{DIES_AFTER_MS, ends_well};

/// Longest time without a reply after the death of a part of a guest that stays where it is.
const LONGEST_GAP: Duration = Duration::from_secs(5);
/// Time in which a keeper ends that does not live on.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// A part dies, and the guest is protected again. A ferry that died was the only sign of life for the other host, which may win on a busy
/// machine: returns `false`, then the guest is there.
#[must_use]
fn dies_and_is_replaced(guest: &mut Protected, part: Part) -> bool {
    let (generation, begun) = (guest.generation(), Instant::now());
    guest.clients.forget_gaps();
    guest.hosts.kill(part);
    let side = guest.wait_decided(generation);
    let gap = guest.goes_on();
    if side == Side::There && part == Part::Ferry {
        println!("  {part:?} died: {gap:.0?} without a reply; the other host won");
        return false;
    }
    assert_eq!(side, Side::Here);
    guest.is_protected_again(generation);
    let again = begun.elapsed();
    let copied = guest.goes_on();
    println!(
        "  {part:?} died: {gap:.0?} without a reply; protected again after {again:.0?}, with {copied:.0?} without a reply"
    );
    assert!(gap < LONGEST_GAP, "{gap:?}");
    assert_eq!(guest.hosts.there.guests().unwrap().len(), 1);
    // One for the decision, unless the standby has given it up, and one for the next standby.
    assert!((1..=2).contains(&(guest.generation() - generation)), "{generation}");
    true
}

#[test]
fn a_guest_is_protected_again_after_the_deaths_of_the_qemu_that_waits_and_of_the_ferry() {
    let name = "a_guest_is_protected_again_after_the_deaths_of_the_qemu_that_waits_and_of_the_ferry";
    // The other host may win when the ferry dies.
    protected_again(name, &[Part::Waiting, Part::Ferry]);
}

#[test]
#[ignore = "nightly"]
fn a_guest_is_protected_again_each_time_that_the_ferry_dies() {
    protected_again("a_guest_is_protected_again_each_time_that_the_ferry_dies", &[Part::Ferry; 2]);
}

#[test]
#[ignore = "nightly"]
fn a_guest_is_protected_again_after_the_death_of_the_agent() {
    protected_again("a_guest_is_protected_again_after_the_death_of_the_agent", &[Part::Agent; 2]);
}

/// These parts die in turn. Then the guest's host dies.
fn protected_again(test: &str, parts: &[Part]) {
    let Some(mut guest) = Protected::new(test) else { return };
    if !parts.iter().all(|part| dies_and_is_replaced(&mut guest, *part)) {
        return guest.has_gone_there();
    }
    guest.takes_checkpoints();
    guest.survives_its_host(&mut Rng::with_seed(1));
}

/// The checkpoints have their own way. The next session is another one.
#[test]
#[ignore = "nightly"]
fn checkpoints_go_on_after_the_death_of_the_session() {
    let Some(mut guest) = Protected::new("checkpoints_go_on_after_the_death_of_the_session") else { return };
    let generation = guest.generation();
    guest.hosts.kill(Part::Session);
    println!("  the session died: {:.0?} without a reply", guest.goes_on());
    guest.takes_checkpoints();
    guest.takes_checkpoints();
    assert_eq!(guest.generation(), generation);
    if !dies_and_is_replaced(&mut guest, Part::Ferry) {
        return guest.has_gone_there();
    }
    guest.hosts.kill(Part::Session);
    guest.takes_checkpoints();
    guest.survives_its_host(&mut Rng::with_seed(2));
}

/// The ferry goes on without its keeper.
#[test]
#[ignore = "nightly"]
fn repair_ends_the_protection_of_a_keeper_that_died() {
    let Some(mut guest) = Protected::new("repair_ends_the_protection_of_a_keeper_that_died") else { return };
    for _ in 0..3 {
        guest.protecting.kill().unwrap();
        println!("  the keeper died: {:.0?} without a reply", guest.goes_on());
        assert!(guest.hosts.passing().is_empty(), "the ferry goes on");
        let begun = Instant::now();
        let repaired = guest.repair();
        println!("  repair ended after {:.0?}: {}", begun.elapsed(), repaired.stdout.trim());
        assert_ended(&repaired, 0, &[]);
        assert_eq!(guest.hosts.wait_decided(), Side::Here);
        println!("  repaired: {:.0?} without a reply", guest.goes_on());
        guest.hosts.wait_none_there();
        guest.protecting = guest.hosts.protected();
        guest.clients.forget_gaps();
    }
    guest.survives_its_host(&mut Rng::with_seed(3));
}

#[test]
fn a_second_protection_follows_a_keeper_that_died() {
    let Some(mut guest) = Protected::new("a_second_protection_follows_a_keeper_that_died") else { return };
    let generation = guest.generation();
    guest.protecting.kill().unwrap();
    guest.goes_on();
    guest.protecting = guest.hosts.protect();
    guest.is_protected_again(generation);
    println!("  protected again: {:.0?} without a reply", guest.goes_on());
    guest.survives_its_host(&mut Rng::with_seed(4));
}

/// For the other host that is the death of the whole host.
#[test]
#[ignore = "nightly"]
fn one_host_has_a_guest_whose_keeper_and_ferry_died() {
    let name = "one_host_has_a_guest_whose_keeper_and_ferry_died";
    let first = number("TOWLINE_SOAK_SEED", 1);
    for seed in first..first + 3 {
        let Some(mut guest) = Protected::new(name) else { return };
        sleep(Duration::from_millis(Rng::with_seed(seed).u64(DIES_AFTER_MS)));
        let generation = guest.generation();
        let ferry = guest.hosts.part(Part::Ferry);
        guest.clients.forget_gaps();
        guest.protecting.kill().unwrap();
        signal(ferry, Signal::KILL);
        let status = guest.hosts.source.qmp().status().unwrap();
        let (side, repaired) = guest.hosts.watched(|| {
            // Else the two hosts contend for it.
            let is_late = seed % 2 == 0;
            is_late.then(|| assert_eq!(guest.hosts.wait_decided(), Side::There));
            let repaired = guest.repair();
            (guest.hosts.wait_decided(), repaired)
        });
        println!(
            "  seed {seed}: {status} here; {side:?} after {:.0?}: {}",
            guest.goes_on(),
            repaired.stdout.trim()
        );
        assert_eq!(guest.generation(), generation + 1);
        match side {
            Side::Here => {
                assert_ended(&repaired, 0, &[]);
                guest.has_stayed();
            }
            Side::There => {
                assert_eq!(repaired.status.code(), Some(1), "{}", repaired.stdout);
                guest.hosts.source.wait_exit(WITHIN).unwrap();
                guest.hosts.assert_goes_on_there(guest.tick);
                ends_well(guest.clients);
            }
        }
    }
}

#[test]
fn a_guest_that_is_shut_down_stays_so() {
    let Some(mut guest) = Protected::new("a_guest_that_is_shut_down_stays_so") else { return };
    // Its agent does not answer any more.
    let _ = guest.hosts.guest.take().unwrap().shell("poweroff -f", Duration::from_secs(5));
    assert_ended(&guest.protecting.wait(WITHIN).unwrap(), GONE, &[]);
    guest.hosts.wait_none_there();
    // Its last output has gone.
    assert_eq!(guest.hosts.passing(), [Side::Here]);
}

#[test]
fn a_second_protection_is_refused() {
    let Some(mut guest) = Protected::new("a_second_protection_is_refused") else { return };
    let claimed = guest.hosts.generations();
    let refused = guest.hosts.protect().wait(WITHIN).unwrap();
    println!("  refused: {}", refused.stderr.trim());
    assert_ended(&refused, 1, &["another"]);
    assert_eq!(guest.hosts.generations(), claimed, "a generation that no host has");
    guest.takes_checkpoints();
    guest.goes_on();
    guest.survives_its_host(&mut Rng::with_seed(7));
}

/// No other part tells the standby.
#[test]
fn a_guest_that_is_ended_stays_so_without_a_session() {
    let Some(mut guest) = Protected::new("a_guest_that_is_ended_stays_so_without_a_session") else { return };
    guest.hosts.kill(Part::Session);
    guest.takes_checkpoints();
    let agent = guest.hosts.part(Part::Agent);
    guest.hosts.source.qmp().execute("quit", Value::Null).unwrap();
    let ended = guest.protecting.wait(WITHIN).unwrap();
    assert_ended(&ended, GONE, &[]);
    let has_ended = || Ok((guest.hosts.there.agent() != Some(agent)).then_some(()));
    wait_until("the end of the agent", WITHIN, has_ended).unwrap();
    assert_eq!(
        guest.hosts.passing(),
        [Side::Here],
        "the other host runs it: {}{}",
        ended.stdout,
        ended.stderr
    );
    guest.hosts.wait_none_there();
}

/// The keeper learns of both at once.
#[test]
fn a_guest_that_is_ended_after_a_loss_stays_so() {
    let Some(hosts) = Hosts::new("a_guest_that_is_ended_after_a_loss_stays_so") else { return };
    // The other host is to wait for the keeper.
    let protecting = hosts.protected_by(|words| set_option(words, "--peer-timeout", "60s"));
    let keeper = hosts.part(Part::Keeper);
    signal(keeper, Signal::STOP);
    let qmp = hosts.source.qmp();
    let jobs = || qmp.execute("query-block-jobs", Value::Null);
    let mirror = jobs().unwrap()[0]["device"].clone();
    qmp.execute("block-job-cancel", json!({ "device": mirror, "force": true })).unwrap();
    let has_ended = || Ok((jobs()?[0]["status"] == "concluded").then_some(()));
    wait_until("the end of the mirror", WITHIN, has_ended).unwrap();
    qmp.execute("quit", Value::Null).unwrap();
    hosts.source.wait_exit(WITHIN).unwrap();
    signal(keeper, Signal::CONT);
    let ended = protecting.wait(WITHIN).unwrap();
    assert_ended(&ended, GONE, &[]);
    assert_eq!(events(&ended.stdout).last().unwrap()["end"], "guest-ended");
    hosts.wait_none_there();
    assert_eq!(hosts.passing(), [Side::Here]);
}

#[test]
#[ignore = "nightly"]
fn a_guest_survives_the_death_of_its_qemu() {
    its_qemu_dies("a_guest_survives_the_death_of_its_qemu", &[], &[Part::Guest]);
}

/// The keeper may see either first.
#[test]
fn a_guest_survives_the_death_of_its_qemu_and_the_ferry() {
    let name = "a_guest_survives_the_death_of_its_qemu_and_the_ferry";
    its_qemu_dies(name, &[], &[Part::Ferry, Part::Guest]);
}

/// As above, of a keeper that protects it for the second time.
#[test]
#[ignore = "nightly"]
fn a_guest_survives_the_death_of_its_qemu_and_another_ferry() {
    let name = "a_guest_survives_the_death_of_its_qemu_and_another_ferry";
    its_qemu_dies(name, &[Part::Ferry], &[Part::Ferry, Part::Guest]);
}

/// Parts die one after the other, which changes nothing for the guest, and then others at once.
fn its_qemu_dies(test: &str, before: &[Part], at_once: &[Part]) {
    let Some(mut guest) = Protected::new(test) else { return };
    assert!(before.iter().all(|part| dies_and_is_replaced(&mut guest, *part)), "{before:?}");
    let pids: Vec<_> = at_once.iter().map(|part| guest.hosts.part(*part)).collect();
    guest.clients.forget_gaps();
    pids.into_iter().for_each(|pid| signal(pid, Signal::KILL));
    guest.hosts.watched(|| assert_eq!(guest.hosts.wait_decided(), Side::There));
    println!("  {at_once:?} died: {:.0?} without a reply", guest.goes_on());
    guest.has_gone_there();
}

/// QEMU connects to the next one. The keeper lives on without a card, too.
#[test]
#[ignore = "nightly"]
fn a_guest_is_protected_again_with_another_card() {
    let Some(mut guest) = Protected::new("a_guest_is_protected_again_with_another_card") else { return };
    for is_late in [true, false] {
        let generation = guest.generation();
        guest.hosts.kill_card();
        if is_late {
            let ended = || Ok((!guest.protecting.runs()?).then_some(()));
            wait_until("the end of the keeper", ENDS_WITHIN, ended).unwrap_err();
        }
        guest.hosts.restart_card();
        guest.is_protected_again(generation);
        println!("  its card died: {:.0?} without a reply", guest.goes_on());
    }
    guest.survives_its_host(&mut Rng::with_seed(9));
}
