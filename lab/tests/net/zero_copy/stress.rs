//! Two pairs send all the time, while settings of the interface and of the rings change, a capture stops
//! reading, and the card's process is started again. Every frame arrives once, with the bytes that the driver
//! wrote.

use std::path::Path;
use std::time::Duration;

use towline_lab::{Kernel, require_kernel, skip, wait_until};

use super::{Bench, Setup, driver, pairs};
use crate::support::{WITHIN, network, number, sum};

/// The driver sees completions in their own order, as the record tells the next process which chains are in
/// flight.
const RECORD: &str = "--zero-copy-send on --state /tmp/card.state";
/// Frames that are queued when the process ends.
const FRAMES: u32 = 400;

#[test]
#[ignore = "nightly"]
fn streams_survive_changes_meanwhile() {
    let name = "streams_survive_changes_meanwhile";
    if let Ok(socket) = std::env::var(driver::SOCKET) {
        return driver::run(Path::new(&socket));
    }
    if !require_kernel(name, Kernel::Newest) {
        return;
    }
    let ethtool = ["/usr/sbin/ethtool", "/sbin/ethtool"].map(Path::new);
    let Some(ethtool) = ethtool.into_iter().find(|path| path.is_file()) else {
        return skip(name, "no ethtool; run `cargo xtask setup`");
    };
    let Some(network) = network(name) else { return };
    let setup =
        Setup { arguments: RECORD, network: Some(&network), programs: &[ethtool], ..Setup::default() };
    let mut bench = Bench::start(&format!("zero_copy::stress::{name}"), setup);
    [0, 1].into_iter().for_each(|pair| pairs::send(&mut bench, pair));

    let seconds = |variable, otherwise| Duration::from_secs(number(variable, otherwise));
    flow(&mut bench, seconds("TOWLINE_SOAK_XDP_SECONDS", 3), |bench| {
        for change in ["-K eth0 sg off", "-K eth0 tx off", "-K eth0 tx on", "-K eth0 sg on"] {
            bench.shell(&format!("ethtool {change}"));
        }
        // The kernel keeps the queues that sockets are bound to.
        let fewer = bench.shell("ethtool -L eth0 combined 1 2>&1 || echo refused");
        assert!(fewer.contains("refused"), "{fewer}");
    });
    bench.command("capture");
    flow(&mut bench, seconds("TOWLINE_SOAK_XDP_SUSPENDED_S", 2), |_| {});

    let statistics = bench.statistics();
    let [zero_copy, pending] = ["zero-copy", "pending"].map(|key| sum(&statistics, "tx", key));
    let overtaken = bench.command("overtaken");
    println!("{} frames, {zero_copy} without a copy, {overtaken} overtaken: {statistics}", bench.frames);
    assert!(pending == 0 && zero_copy > u64::from(bench.frames) / 10 && overtaken > 0, "{statistics}");

    bench.command("pair 0");
    let queued = bench.frames("queue", FRAMES);
    bench.end_card();
    bench.start_card();
    bench.command("connect");
    assert_eq!(bench.command("finish"), 0);
    [0, 1].into_iter().for_each(|pair| pairs::send(&mut bench, pair));
    assert_arrived(&bench, queued);
}

/// Sends for this time, with changes in between. A stop of a ring has a second for the frames in flight: if the
/// host is too busy for that, the card closes its socket, and frames are lost. Then it is done once more.
fn flow(bench: &mut Bench, length: Duration, changes: impl Fn(&mut Bench)) {
    let sent =
        wait_until("frames that are sent within the time limit of a stop", pairs::ATTEMPTS_WITHIN, || {
            let before = pairs::closings(bench);
            let begun = bench.begin(&format!("flow {}", length.as_millis()));
            changes(bench);
            let count = u32::try_from(bench.result(begun, length + WITHIN)).unwrap();
            assert!(count > 0);
            bench.frames += count;
            if pairs::closings(bench) > before {
                [0, 1].into_iter().for_each(|pair| pairs::send(bench, pair));
                return Ok(None);
            }
            Ok(Some(bench.frames - count..bench.frames))
        });
    assert_arrived(bench, sent.unwrap());
    for pair in [0, 1] {
        assert_eq!(pairs::mode(bench, pair), pairs::ZERO_COPY, "{}", bench.card_errors());
    }
}

/// Every frame arrives once.
fn assert_arrived(bench: &Bench, frames: std::ops::Range<u32>) {
    bench.wire.wait_for(frames.clone());
    let twice: Vec<u32> = frames.filter(|sequence| bench.wire.count(*sequence) != 1).collect();
    assert!(twice.is_empty(), "sent more than once: {twice:?}");
}
