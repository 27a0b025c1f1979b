//! The cost of a protection: the guest's pauses, its speed and its clock, replies, bytes, and processors.

use std::time::{Duration, Instant};

use serde_json::Value;
use towline_lab::LinuxGuest;
use towline_lab::expect::events;

use crate::support::{Hosts, MIB, Part, Side, WITHIN, set_option};

/// Time for which each case is measured, and of a computation of the guest at the beginning and at the end.
const MEASURED: Duration = Duration::from_secs(6);
const EPOCHS: [&str; 4] = ["25ms", "50ms", "100ms", "output"];
/// Bytes that the guest writes in a second, and whether it answers requests.
const LOADS: [(u64, bool); 5] =
    [(0, false), (10 * MIB, false), (50 * MIB, false), (0, true), (10 * MIB, true)];
/// Memory that is written.
const WRITTEN: u64 = 64 * MIB;
/// Computes for some 100 ms.
const COMPUTES: &str = "n=0; while [ $n -lt 20000 ]; do n=$((n + 1)); done";
/// Ticks of the kernel in a second, by which it counts the time of processors.
const TICKS: f64 = 100.0;

/// A case, with and without a protection.
struct Measured {
    /// Seconds that a computation takes, without requests.
    computes: f64,
    /// Seconds of the guest's clock in one of the host's.
    clock: f64,
    /// Milliseconds of a request; none without requests.
    reply_ms: f64,
}

fn uptime(guest: &mut LinuxGuest) -> f64 {
    let said = guest.shell("cat /proc/uptime", WITHIN).unwrap();
    said.split(' ').next().unwrap().parse().unwrap()
}

/// Seconds of a processor that these processes have had.
fn processor_seconds(pids: &[u32]) -> f64 {
    let of = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap()).sum::<f64>()
    };
    pids.iter().map(of).sum::<f64>() / TICKS
}

impl Hosts {
    fn measure(&mut self, with_requests: bool) -> Measured {
        let mut guest = self.guest.take().unwrap();
        let clients = with_requests.then(|| self.clients());
        let replies = || clients.as_ref().map_or(0, |clients| clients.snapshot().replies.iter().sum::<u64>());
        let (first, began, up) = (replies(), Instant::now(), uptime(&mut guest));
        let mut computed = Vec::new();
        while began.elapsed() < MEASURED {
            if with_requests {
                // A guest that computes would answer later.
                std::thread::sleep(MEASURED.saturating_sub(began.elapsed()));
                continue;
            }
            let begun = Instant::now();
            guest.shell(COMPUTES, WITHIN).unwrap();
            computed.push(begun.elapsed().as_secs_f64());
        }
        let (clock, seconds) = (uptime(&mut guest) - up, began.elapsed().as_secs_f64());
        let count = (replies() - first) as f64;
        let connections = clients.map_or(0, |clients| clients.end().replies.len()) as f64;
        self.guest = Some(guest);
        computed.sort_by(f64::total_cmp);
        let computes = computed.get(computed.len() / 2).copied().unwrap_or(f64::NAN);
        Measured { computes, clock: clock / seconds, reply_ms: seconds * 1e3 * connections / count.max(1.0) }
    }
}

fn median(values: impl Iterator<Item = u64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).map_or(f64::NAN, |value| *value as f64)
}

/// Prints a table. It asserts that the guest is protected all the time, and nothing about the figures, which are of this machine.
#[test]
#[ignore = "nightly"]
fn the_cost_of_a_protection() {
    let Some(mut hosts) = Hosts::new("the_cost_of_a_protection") else { return };
    let guest = hosts.guest.as_mut().unwrap();
    guest.stop_dirtying().unwrap();
    guest.assert_counted("before");
    println!("| written | epochs | pause, median and longest | passed on | processors | guest | clock |");
    for (rate, with_requests) in LOADS {
        if rate > 0 {
            hosts.guest.as_mut().unwrap().dirty(rate, WRITTEN).unwrap();
        }
        let (before, mut passes) = (hosts.measure(with_requests), None);
        for epoch in EPOCHS {
            let mut protecting = hosts.protected_by(|words| set_option(words, "--epoch", epoch));
            let pids = [Part::Keeper, Part::Ferry, Part::Agent].map(|part| hosts.part(part));
            let (used, began) = (processor_seconds(&pids), Instant::now());
            let measured = hosts.measure(with_requests);
            let seconds = began.elapsed().as_secs_f64();
            let used = (processor_seconds(&pids) - used) / seconds;
            protecting.check().unwrap();
            let events = events(&protecting.stdout());
            assert!(events.iter().all(|event| event["event"] != "unprotected"), "{events:?}");
            let taken: Vec<_> = events.iter().filter(|event| event["event"] == "checkpoints").collect();
            let number = |event: &&Value, key: &str| event[key].as_u64().unwrap();
            let sum = |key: &str| taken.iter().map(|event| number(event, key)).sum::<u64>() as f64;
            // Requests that wait for an epoch leave the guest its processor.
            let effect = match with_requests {
                true => format!("{:.1} ms, {:.1} without", measured.reply_ms, before.reply_ms),
                false => format!("{:.2} of its speed", before.computes / measured.computes),
            };
            println!(
                "| {} MiB/s | {epoch}: {:.0} a second | {:.1} ms, {:.1} ms | {:.1} MiB/s | {used:.2} | {effect} | {:+.1} ms/s |",
                rate / MIB,
                sum("count") / taken.len() as f64,
                median(taken.iter().map(|event| number(event, "pause-us"))) / 1e3,
                median(taken.iter().map(|event| number(event, "pause-max-us"))) / 1e3,
                sum("bytes") / taken.len() as f64 / MIB as f64,
                (measured.clock - before.clock) * 1e3,
            );
            towline_lab::signal(protecting.pid(), rustix::process::Signal::INT);
            assert_eq!(protecting.wait(WITHIN).unwrap().status.code(), Some(0));
            passes = Some(hosts.wait_decided());
        }
        assert_eq!(passes, Some(Side::Here));
        if rate > 0 {
            hosts.guest.as_mut().unwrap().stop_dirtying().unwrap();
        }
    }
}
