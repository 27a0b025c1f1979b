//! Guests that run on the other host before all of their memory is there.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::ensure;
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::expect::{assert_ended, completed, number, wait_event};
use towline_lab::{Towline, child, signal, wait_until};

use crate::disks::with_disks;
use crate::support::{Hosts, MIB, WITHIN, WRITER, WRITTEN, assert_disk};

/// Slow enough for a guest that writes this much to run there without a part of its memory for seconds.
const SLOW: [&str; 5] = ["--json", "--max-bandwidth", "4M", "--peer-timeout", "3"];
/// Bytes a second, of a range of which a pass takes longer than the allowed downtime.
const TOO_FAST: u64 = 60 * MIB;

/// Starts a move by postcopy to a QEMU that is started there.
fn start(hosts: &Hosts, options: &[&str]) -> Towline {
    let start = hosts.start_options();
    let start: Vec<&str> = start.iter().map(String::as_str).collect();
    hosts.start("move", "/web", &[&start[..], options].concat())
}

/// Waits until the source sends the rest of its memory, also pages that the guest there has requested: it has its devices then.
fn wait_following(hosts: &Hosts, moving: &mut Towline) {
    let follows = || {
        ensure!(moving.runs()?, "towline has ended");
        let migration = hosts.source.qmp().execute("query-migrate", Value::Null)?;
        let requests = migration["ram"]["postcopy-requests"].as_u64();
        Ok((migration["status"] == "postcopy-active" && requests > Some(0)).then_some(()))
    };
    let followed = wait_until("a guest that runs without all of its memory", WITHIN, follows);
    followed.unwrap_or_else(|error| panic!("{error:#}: {} {}", moving.stdout(), moving.stderr()));
}

#[test]
fn a_postcopy_to_another_host_is_checked() {
    let Some(hosts) = Hosts::new("a_postcopy_to_another_host_is_checked") else { return };
    let options = hosts.start_options();
    let options: Vec<&str> = options.iter().map(String::as_str).chain(["--postcopy", "--json"]).collect();
    let checked = hosts.run("check", "/web", &options);
    assert_ended(&checked, 0, &[]);
    hosts.wait_for_guests_there(&[]);
    let lanes = hosts.run("move", "/web", &[&options[..], &["--multifd-channels", "2"]].concat());
    assert_ended(&lanes, 1, &["no lanes in a migration that may become postcopy", "--multifd-channels 0"]);
    hosts.wait_for_guests_there(&[]);
}

#[test]
fn a_guest_goes_to_another_host_by_postcopy_with_its_memory() {
    let Some(mut hosts) = Hosts::new("a_guest_goes_to_another_host_by_postcopy_with_its_memory") else {
        return;
    };
    let tick = hosts.last_tick();
    let moved = start(&hosts, &[&["--postcopy"], &SLOW[..3]].concat()).wait(WITHIN).unwrap();
    let event = completed(&moved);
    assert!(event["postcopy"]["faults"].is_object() || event["postcopy"]["faults"].is_number(), "{event}");
    assert!(moved.stdout.contains("it is lost if either host fails"), "{}", moved.stdout);
    hosts.source.wait_exit(WITHIN).unwrap();
    hosts.assert_continues_there("web", tick);
}

#[test]
fn a_guest_goes_to_another_host_by_postcopy_with_its_disk() {
    let Some(mut hosts) = Hosts::new("a_guest_goes_to_another_host_by_postcopy_with_its_disk") else {
        return;
    };
    let options = with_disks(&hosts);
    let options: Vec<&str> = options.iter().map(String::as_str).chain(["--postcopy"]).collect();
    hosts.guest.as_mut().unwrap().shell(WRITER, WITHIN).unwrap();
    let tick = hosts.last_tick();
    completed(&hosts.run("move", "/web", &options));
    hosts.source.wait_exit(WITHIN).unwrap();
    hosts.assert_continues_there("web", tick);
    assert_disk(&mut hosts.agent_there());
}

#[test]
fn a_postcopy_that_ends_before_its_switch_leaves_the_guest_where_it_is() {
    let Some(mut hosts) = Hosts::new("a_postcopy_that_ends_before_its_switch_leaves_the_guest_where_it_is")
    else {
        return;
    };
    for end in ["user", "agent", "link"] {
        let mut moving = start(&hosts, &[&["--postcopy"], &SLOW[..]].concat());
        wait_event(&mut moving, "a part of memory", WITHIN, |event| event["bytes-rate"].as_u64() > Some(0));
        match end {
            "user" => signal(moving.pid(), Signal::INT),
            "agent" => signal(hosts.there.agent().unwrap(), Signal::TERM),
            _ => hosts.cut(),
        }
        let finished = moving.wait(WITHIN).unwrap();
        if end == "link" {
            hosts.mend();
        }
        assert_ended(&finished, 1, &["safe at its source"]);
        hosts.assert_stays();
    }
}

/// Starts a move by postcopy whose source follows it, and cuts the hosts off until both QEMUs wait for each other.
fn cut_off(hosts: &Hosts, options: &[&str]) -> Towline {
    let mut moving = start(hosts, &[&["--postcopy"], &SLOW[..], options].concat());
    wait_following(hosts, &mut moving);
    hosts.cut();
    hosts.source.qmp().wait_migration("postcopy-paused", WITHIN).unwrap();
    moving
}

/// Id of the move of this guest, by the record of its source.
fn undecided(hosts: &Hosts) -> Option<String> {
    let listed = hosts.towline(&["moves", "--json"]).wait(WITHIN).unwrap();
    let socket = hosts.source.qmp_path();
    let events = listed.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let is_of =
        |event: &Value| event["source"]["socket"].as_str().is_some_and(|path| socket == Path::new(path));
    events.filter(is_of).find_map(|event| Some(event["id"].as_str()?.to_owned()))
}

#[test]
fn a_postcopy_whose_hosts_lose_each_other_goes_on_once_they_are_connected_again() {
    let Some(mut hosts) =
        Hosts::new("a_postcopy_whose_hosts_lose_each_other_goes_on_once_they_are_connected_again")
    else {
        return;
    };
    let tick = hosts.last_tick();
    let mut moving = cut_off(&hosts, &[]);
    let is_lost =
        |event: &Value| event["text"].as_str().is_some_and(|text| text.contains("lost the other host"));
    wait_event(&mut moving, "the loss", WITHIN, is_lost);
    hosts.mend();
    wait_following(&hosts, &mut moving);
    // Once more, as it is resumed.
    hosts.cut();
    hosts.source.qmp().wait_migration("postcopy-paused", WITHIN).unwrap();
    hosts.mend();
    let moved = moving.wait(WITHIN).unwrap();
    let event = completed(&moved);
    assert!(event["postcopy"]["recoveries"].as_u64() >= Some(2), "{event}");
    assert!(moved.stdout.contains("connected again after"), "{}", moved.stdout);
    hosts.source.wait_exit(WITHIN).unwrap();
    hosts.assert_continues_there("web", tick);
}

/// Another party at the source's monitor has only the QEMUs lose each other.
#[test]
fn a_postcopy_whose_qemus_lose_each_other_goes_on() {
    let Some(mut hosts) = Hosts::new("a_postcopy_whose_qemus_lose_each_other_goes_on") else { return };
    let tick = hosts.last_tick();
    let mut moving = start(&hosts, &["--postcopy", "--json", "--max-bandwidth", "8M"]);
    wait_following(&hosts, &mut moving);
    let interrupted = Instant::now();
    hosts.source.qmp().execute("migrate-pause", Value::Null).unwrap();
    let moved = moving.wait(WITHIN).unwrap();
    let event = completed(&moved);
    // Both towlines have noticed that, before either could count as silent; the one there only once its QEMU's main loop, which may wait for
    // a page, was known to be blocked.
    let is_blocked = moved.stdout.contains("no answer to ");
    let within = Duration::from_secs(if is_blocked { 100 } else { 30 });
    assert!(interrupted.elapsed() < within, "{:?}: {}", interrupted.elapsed(), moved.stdout);
    assert_eq!(event["postcopy"]["recoveries"], 1, "{event}");
    hosts.source.wait_exit(WITHIN).unwrap();
    hosts.assert_continues_there("web", tick);
}

/// The guest there may hold its QEMU's main loop, with a page that it needs: only the source is looked at.
#[test]
fn a_postcopy_whose_hosts_are_not_connected_again_is_reported_and_runs_at_one_end() {
    let Some(mut hosts) =
        Hosts::new("a_postcopy_whose_hosts_are_not_connected_again_is_reported_and_runs_at_one_end")
    else {
        return;
    };
    hosts.last_tick();
    let finished = cut_off(&hosts, &["--recover-timeout", "2"]).wait(WITHIN).unwrap();
    hosts.mend();
    assert_ended(&finished, 3, &["migrate-recover"]);
    hosts.source.qmp().wait_migration("postcopy-paused", WITHIN).unwrap();
    let id = &undecided(&hosts).expect("a record of the move");
    // A source that has switched is not run by a choice.
    let refused = hosts.towline(&["resume", id, "--run-here"]).wait(WITHIN).unwrap();
    assert!(!refused.status.success(), "{}", refused.stdout);
    assert_ne!(hosts.source.qmp().execute("query-status", Value::Null).unwrap()["status"], "running");
}

/// The source does not wait for a towline that has ended, whose host refuses connections.
#[test]
#[ignore = "nightly"]
fn a_postcopy_whose_agent_is_killed_ends_without_a_long_wait() {
    let Some(mut hosts) = Hosts::new("a_postcopy_whose_agent_is_killed_ends_without_a_long_wait") else {
        return;
    };
    hosts.last_tick();
    let mut moving = start(&hosts, &["--postcopy", "--json", "--max-bandwidth", "4M"]);
    wait_following(&hosts, &mut moving);
    let killed = Instant::now();
    signal(hosts.there.agent().unwrap(), Signal::KILL);
    assert_ended(&moving.wait(WITHIN).unwrap(), 3, &["migrate-recover"]);
    assert!(killed.elapsed() < Duration::from_secs(60), "{:?}", killed.elapsed());
}

/// Its towline is killed, or gives up while the hosts are cut off: the one there still waits.
#[test]
fn a_postcopy_whose_source_lost_its_towline_is_resumed() {
    let Some(mut hosts) = Hosts::new("a_postcopy_whose_source_lost_its_towline_is_resumed") else { return };
    let tick = hosts.last_tick();
    let moving = cut_off(&hosts, &[]);
    signal(moving.pid(), Signal::INT);
    assert_ended(&moving.wait(WITHIN).unwrap(), 3, &["`towline resume`"]);
    hosts.mend();
    let id = &undecided(&hosts).expect("a record of the move");
    let mut killed = hosts.towline(&["resume", id]);
    wait_following(&hosts, &mut killed);
    signal(killed.pid(), Signal::KILL);
    killed.wait(WITHIN).unwrap();
    hosts.source.qmp().wait_migration("postcopy-paused", WITHIN).unwrap();
    // What is left may be sent quickly.
    let unlimited = json!({ "max-postcopy-bandwidth": 0 });
    hosts.source.qmp().execute("migrate-set-parameters", unlimited).unwrap();
    let resumed = hosts.towline(&["resume", id]).wait(WITHIN).unwrap();
    assert!(resumed.status.success() && resumed.stdout.contains("finished"), "{}", resumed.stderr);
    hosts.source.wait_exit(WITHIN).unwrap();
    hosts.assert_continues_there("web", tick);
    assert_eq!(undecided(&hosts), None);
}

/// A mishap of a move whose guest has switched.
#[derive(Debug, Clone, Copy)]
enum Mishap {
    /// The hosts are cut off from each other for this time.
    Cut(Duration),
    /// Another party at the source's monitor has the QEMUs lose each other.
    Pause,
    /// Its ssh is killed.
    Ssh,
    /// The source's towline is killed, and `resume` goes on.
    Kill,
}

impl Mishap {
    fn random(rng: &mut Rng) -> Self {
        match rng.u8(..6) {
            0..3 => Self::Cut(Duration::from_millis(rng.u64(200..6000))),
            3 => Self::Pause,
            4 => Self::Ssh,
            _ => Self::Kill,
        }
    }

    /// Has it happen to the move, which is returned.
    fn happen(self, hosts: &Hosts, moving: Towline) -> Towline {
        match self {
            Self::Cut(time) => {
                hosts.cut();
                sleep(time);
                hosts.mend();
            }
            Self::Pause => drop(hosts.source.qmp().execute("migrate-pause", Value::Null)),
            Self::Ssh => child(moving.pid(), "ssh").into_iter().for_each(|pid| signal(pid, Signal::KILL)),
            Self::Kill => {
                let id = undecided(hosts).expect("a record of the move");
                signal(moving.pid(), Signal::KILL);
                moving.wait(WITHIN).unwrap();
                return hosts.towline(&["resume", &id]);
            }
        }
        moving
    }
}

/// `TOWLINE_SOAK_POSTCOPY_MOVES` is the number of moves, `TOWLINE_SOAK_SEED` the first seed.
#[test]
#[ignore = "nightly"]
fn a_postcopy_arrives_through_mishaps_at_random_moments() {
    let (runs, first) = (number("TOWLINE_SOAK_POSTCOPY_MOVES", 2), number("TOWLINE_SOAK_SEED", 1));
    for seed in first..first + runs {
        let Some(mut hosts) = Hosts::new("a_postcopy_arrives_through_mishaps_at_random_moments") else {
            return;
        };
        let mut rng = Rng::with_seed(seed);
        let tick = hosts.last_tick();
        let mut moving = start(&hosts, &[&["--postcopy"], &SLOW[..]].concat());
        wait_following(&hosts, &mut moving);
        let mut happened = Vec::new();
        for _ in 0..rng.u8(1..4) {
            sleep(Duration::from_millis(rng.u64(..1500)));
            if !moving.runs().unwrap() {
                break;
            }
            let mishap = Mishap::random(&mut rng);
            happened.push(mishap);
            moving = mishap.happen(&hosts, moving);
        }
        let begun = Instant::now();
        let finished = moving.wait(WITHIN).unwrap();
        println!("{seed} {happened:?}: {} after {:.1} s", finished.status, begun.elapsed().as_secs_f64());
        assert_ended(&finished, 0, &[]);
        hosts.source.wait_exit(WITHIN).unwrap();
        hosts.assert_continues_there("web", tick);
        assert_eq!(undecided(&hosts), None);
    }
}

#[test]
#[ignore = "nightly"]
fn a_guest_that_does_not_converge_goes_to_another_host_as_its_user_permits() {
    let Some(mut hosts) =
        Hosts::new("a_guest_that_does_not_converge_goes_to_another_host_as_its_user_permits")
    else {
        return;
    };
    let mut guest = hosts.guest.take().unwrap();
    guest.stop_dirtying().unwrap();
    guest.dirty(TOO_FAST, WRITTEN).unwrap();
    hosts.guest = Some(guest);
    let limits = ["--json", "--max-bandwidth", "24M", "--downtime-limit", "100", "--if-not-converging"];
    let given_up = start(&hosts, &[&limits[..], &["give-up"]].concat()).wait(WITHIN).unwrap();
    assert_ended(&given_up, 1, &["MiB/s get through", "safe at its source"]);
    hosts.wait_for_guests_there(&[]);
    let tick = hosts.last_tick();
    let moved = start(&hosts, &[&limits[..], &["postcopy"]].concat()).wait(WITHIN).unwrap();
    completed(&moved);
    assert!(moved.stdout.contains("it is switched to postcopy"), "{}", moved.stdout);
    hosts.assert_continues_there("web", tick);
}
