//! A relay does not buffer a guest: towline's memory is bounded for a guest of any size, also with a slow
//! destination.

use std::time::Duration;

use rustix::process::Signal;
use towline_lab::{Towline, require_lab, signal, wait_until};

use crate::support::{MIB, WITHIN, completed, events, linux, prove_alive, qmp, start, waiting, writing};

/// Maximum memory of a relay.
const OWN_BYTES_MAX: u64 = 96 * MIB;
const RANGE: u64 = 16 * MIB;

fn transferred(towline: &Towline) -> u64 {
    let events = events(&towline.stdout());
    events.iter().filter_map(|event| event["ram"]["transferred"].as_u64()).max().unwrap_or_default()
}

/// The destination is stopped for a while in the middle: nothing accumulates in between, and the source is
/// blocked.
#[test]
fn a_relay_takes_little_memory_and_makes_its_source_wait() {
    if !require_lab("a_relay_takes_little_memory_and_makes_its_source_wait") {
        return;
    }
    let builder = linux(512);
    let (source, mut guest) = writing(&builder, 20_000_000, RANGE);
    guest.fill(256 * MIB, 3).unwrap();
    let tick = guest.tick().unwrap();
    drop(guest);
    let destination = waiting(&builder);
    // Slow enough that it takes some seconds.
    let line = format!(
        "copy --json --multifd-channels 16 --max-bandwidth 96M {} {}",
        qmp(&source),
        qmp(&destination)
    );
    let mut towline = start(&line);
    let mut peak = 0;
    wait_until("some of the guest", WITHIN, || {
        assert!(towline.runs()?, "it ended: {}{}", towline.stdout(), towline.stderr());
        Ok((transferred(&towline) > 8 * MIB).then_some(()))
    })
    .unwrap();
    signal(destination.pid(), Signal::STOP);
    // Once no more bytes get through, all buffers between the two are full.
    let mut stood = (0, 0);
    wait_until("a source that waits", WITHIN, || {
        peak = peak.max(towline.own_memory().unwrap_or_default());
        let sent =
            source.qmp().execute("query-migrate", serde_json::Value::Null)?["ram"]["transferred"].as_u64();
        let sent = sent.unwrap_or_default();
        stood = if sent == stood.0 { (sent, stood.1 + 1) } else { (sent, 0) };
        std::thread::sleep(Duration::from_millis(20));
        Ok((stood.1 >= 25).then_some(()))
    })
    .unwrap();
    assert!(towline.runs().unwrap(), "it was over before: {}", towline.stdout());
    signal(destination.pid(), Signal::CONT);
    wait_until("end of towline", WITHIN, || {
        peak = peak.max(towline.own_memory().unwrap_or_default());
        Ok((!towline.runs()?).then_some(()))
    })
    .unwrap();
    let done = completed(&towline.wait(WITHIN).unwrap());
    println!("a relay over 16 lanes takes {:.1} MiB", peak as f64 / MIB as f64);
    assert!(peak > 0, "it was never looked at");
    assert!(peak < OWN_BYTES_MAX, "{peak} bytes");
    assert!(done["downtime"].as_u64().is_some() && done["total-time"].as_u64() > Some(0), "{done}");
    // Counted at both ends, so no page was received twice or sent by another way.
    assert!(done["ram"]["normal"].as_u64() >= Some(256 * MIB / 4096), "{done}");
    prove_alive(&destination, RANGE, tick);
}
