//! Helpers of these tests: tiny guests, links that can be held, and the run states of QEMUs.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
pub(crate) use towline_lab::expect::{Scratch, assert_ended, qmp, waiting};
pub(crate) use towline_lab::signal;
use towline_lab::{
    BootSector, Builder, Finished, Flow, Proxy, Qemu, Towline, Version, expect, is_asleep, towline,
    wait_until,
};

/// Timeout of anything that must happen. Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
/// Time limit of a reply from a QEMU that is not blocked.
const REPLY_TIMEOUT: Duration = Duration::from_secs(3);
/// Attempts to hit a moment that may be missed.
const TRIES: usize = 40;
/// Time without traffic after which everything counts as sent, if no process waits for a processor.
const QUIET: Duration = Duration::from_millis(400);

/// `SHUT 0` on the return path.
pub(crate) const SHUT: &[u8] = &[0, 1, 0, 4, 0, 0, 0, 0];
/// The reply to the query if everything but the last bytes is loaded.
pub(crate) const PONG_LOADED: &[u8] = &[0, 2, 0, 4, 0x74, 0x77, 0x6c, 0x03];
/// Beginning of the command with which a source's towline reports its outcome.
pub(crate) const OUTCOME: &[u8] = &[8, 0x74, 0x77, 0, 3, 2];
/// Beginning of the message with which a destination's towline reports its outcome.
pub(crate) const PLACED: &[u8] = &[0x74, 0x77, 0, 2, 3];

/// Name of the last device section of a stream; the end of the stream follows.
pub(crate) const LAST_SECTION: &[u8] = b"globalstate";

/// Starts `towline` with these space-separated arguments, and with events.
pub(crate) fn start(arguments: &str) -> Towline {
    let (command, rest) = arguments.split_once(' ').unwrap();
    towline([command, "--json", "--multifd-channels", "0"].into_iter().chain(rest.split_whitespace()))
        .unwrap()
}

/// Waits until it exits.
pub(crate) fn end(towline: Towline) -> Finished {
    towline.wait(WITHIN).unwrap()
}

/// Waits until it begins this phase; it must not exit before.
pub(crate) fn wait_phase(towline: &mut Towline, phase: &str) {
    expect::wait_event(towline, &format!("phase {phase}"), WITHIN, |event| event["phase"] == phase);
}

/// A guest that moves fast, and has some memory to send when it is stopped.
pub(crate) fn small(version: Version) -> Builder {
    let boot_sector = BootSector { fill_mib: 4, sweep_pages: 128, ..BootSector::default() };
    Qemu::builder(version).memory_mib(32).boot_sector(boot_sector)
}

/// Starts a guest and waits until it counts.
pub(crate) fn counting(builder: &Builder) -> Qemu {
    let qemu = builder.clone().start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu
}

/// Starts a stock QEMU that listens for such a guest, and runs it on its own.
pub(crate) fn listening(builder: &Builder) -> (Qemu, SocketAddr) {
    let qemu = builder.clone().incoming("tcp:127.0.0.1:0").start().unwrap();
    let migration = qemu.qmp().execute("query-migrate", Value::Null).unwrap();
    let port = migration["socket-address"][0]["port"].as_str().unwrap().parse().unwrap();
    (qemu, SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
}

/// Waits until a towline listens on TCP, and returns the address.
pub(crate) fn listens_at(towline: &mut Towline) -> SocketAddr {
    let address = towline.listens_at(WITHIN).unwrap();
    address.strip_prefix("tcp:").unwrap().parse().unwrap()
}

/// Has a QEMU that no towline drives migrate, with a return path.
pub(crate) fn migrate(source: &Qemu, to: SocketAddr) {
    let capabilities = json!([{ "capability": "return-path", "state": true }]);
    source.qmp().execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).unwrap();
    source.qmp().execute("migrate", json!({ "uri": format!("tcp:{to}") })).unwrap();
}

/// Stops the process of a QEMU until it is dropped; QEMU must live as long.
pub(crate) struct Suspended(u32);

impl Suspended {
    pub(crate) fn new(qemu: &Qemu) -> Self {
        signal(qemu.pid(), Signal::STOP);
        Self(qemu.pid())
    }
}

impl Drop for Suspended {
    fn drop(&mut self) {
        signal(self.0, Signal::CONT);
    }
}

/// A copy that has sent everything to a suspended destination.
pub(crate) struct SentCopy {
    // First, so it is resumed before its QEMU is ended.
    pub(crate) suspended: Suspended,
    pub(crate) towline: Towline,
    pub(crate) source: Qemu,
    pub(crate) destination: Qemu,
}

/// Starts a copy between two new QEMUs by `start`, and suspends the destination when the source has stopped
/// its guest. If the switchover is faster than that, tries again.
pub(crate) fn sent_to_a_suspended_destination(start: &dyn Fn(&Qemu, &Qemu) -> Towline) -> SentCopy {
    let boot_sector = BootSector { fill_mib: 1, sweep_pages: 8, ..BootSector::default() };
    let builder = Qemu::builder(Version::V10_0).memory_mib(32).boot_sector(boot_sector);
    for _ in 0..TRIES {
        let (source, destination) = (counting(&builder), waiting(&builder));
        let towline = start(&source, &destination);
        source.qmp().wait_event("STOP", WITHIN).unwrap();
        let suspended = Suspended::new(&destination);
        if wait_sent(&source, &towline) {
            return SentCopy { suspended, towline, source, destination };
        }
        drop(suspended);
        assert_ended(&end(towline), 0, &[]);
    }
    panic!("the destination was quicker {TRIES} times");
}

/// Waits until the proxy has forwarded nothing for a while: everything possible is sent.
pub(crate) fn wait_quiet(proxy: &Proxy) {
    let mut last = (proxy.forwarded(Flow::ToDestination), Instant::now());
    wait_until("a quiet link", WITHIN, || {
        let now = proxy.forwarded(Flow::ToDestination);
        if now != last.0 {
            last = (now, Instant::now());
        }
        Ok((last.1.elapsed() >= QUIET).then_some(()))
    })
    .unwrap();
}

/// Waits until the source has sent everything. False if its migration has completed, or if it does not answer
/// because it waits for the destination to read the rest.
fn wait_sent(source: &Qemu, towline: &Towline) -> bool {
    let mut last = (0, Instant::now());
    let ask = |command: &str| source.qmp().execute_within(command, Value::Null, REPLY_TIMEOUT);
    wait_until("a source that has sent everything", WITHIN, || {
        let (Ok(status), Ok(migration)) = (ask("query-status"), ask("query-migrate")) else {
            return Ok(Some(false));
        };
        let status = status["status"].as_str().unwrap();
        let transferred = migration["ram"]["transferred"].as_u64().unwrap_or(0);
        if transferred != last.0 {
            last = (transferred, Instant::now());
        }
        let is_quiet = last.1.elapsed() >= QUIET && status == "finish-migrate";
        let is_sent = is_quiet && is_asleep(source.pid()) && is_asleep(towline.pid());
        Ok(if status == "postmigrate" { Some(false) } else { is_sent.then_some(true) })
    })
    .unwrap()
}

/// Waits until the trigger of this proxy has fired.
pub(crate) fn wait_fired(proxy: &Proxy) {
    wait_until("the bytes that trigger the proxy", WITHIN, || Ok(proxy.has_fired().then_some(()))).unwrap();
}

/// Returns true if a guest is live in this QEMU: it runs, or sleeps and can wake up.
pub(crate) fn is_live(qemu: &Qemu) -> bool {
    match qemu.qmp().status() {
        Ok(status) => ["running", "suspended"].contains(&status.as_str()),
        // Only an emulator that has exited may not answer.
        Err(_) => {
            qemu.wait_exit(WITHIN).unwrap();
            false
        }
    }
}

/// Waits until an incoming migration has completed or failed.
pub(crate) fn wait_over(destination: &Qemu) {
    wait_until("the end of an incoming migration", WITHIN, || {
        if destination.exited()?.is_some() {
            return Ok(Some(()));
        }
        // It may exit between two queries.
        let Ok(status) = destination.qmp().status() else { return Ok(None) };
        let Ok(migration) = destination.qmp().execute("query-migrate", Value::Null) else { return Ok(None) };
        Ok((status != "inmigrate" || migration["status"] == "failed").then_some(()))
    })
    .unwrap();
}

/// Asserts that the guest runs and counts in `here`, and does not in `not_here`.
#[track_caller]
pub(crate) fn assert_runs_only_in(here: &Qemu, not_here: &Qemu) {
    wait_over(not_here);
    assert!(!is_live(not_here), "two guests run");
    here.qmp().wait_status("running", WITHIN).unwrap();
    here.wait_counting(WITHIN).unwrap();
    assert!(!is_live(not_here), "two guests run");
}

/// Asserts that the guest runs in neither.
#[track_caller]
pub(crate) fn assert_runs_nowhere(one: &Qemu, other: &Qemu) {
    for qemu in [one, other] {
        assert!(!is_live(qemu), "{:?}", qemu.qmp().status());
    }
}
