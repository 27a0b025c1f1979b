//! `--zero-copy-send`: to stock QEMUs over the loopback, where the kernel copies anyway, and refusals.

use serde_json::Value;
use towline_lab::{Qemu, require_lab};

use crate::support::{
    Row, Scratch, WITHIN, boot, completed, copy, listen, listening_on, migrate_as_set, prove_equal, qmp,
    refused, set_capability, set_lanes, start_copy, stop, wait_migrated, waiting,
};

const LANES: usize = 2;

/// Copies to a QEMU that listens; returns the report of each lane.
fn sent_to(source: &str, destination: &Qemu, asked: &str) -> (Value, Vec<Value>) {
    let address = listen(destination, LANES);
    let lanes = LANES.to_string();
    let arguments = ["--multifd-channels", &lanes, "--zero-copy-send", asked, source, &address];
    let done = completed(&arguments);
    assert_eq!(done["zero-copy-send"], asked);
    let lanes = done["lanes"].as_array().unwrap().clone();
    assert_eq!(lanes.len(), LANES, "{done}");
    (done, lanes)
}

#[test]
#[ignore = "nightly"]
fn stock_qemus_receive_zero_copy_sends() {
    if !require_lab("stock_qemus_receive_zero_copy_sends") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    for row in [Row::Qemu10_0, Row::Qemu7_2] {
        let source = boot(row.builder());
        for (asked, mode) in [("on", "zero-copy"), ("auto", "plain")] {
            let check = |lanes: &[Value], modes: &[&str]| {
                for lane in lanes {
                    assert!(modes.contains(&lane["mode"].as_str().unwrap()), "{lane}");
                    assert_eq!(lane["sends-zero-copied"], 0, "{lane}");
                    assert!(lane["sends-copied"].as_u64().unwrap() > 0, "{lane}");
                }
            };
            run_a_little(&source);
            copy(&["--overwrite", &qmp(&source), &image]);
            let destination = waiting(row.builder());
            let (done, lanes) = sent_to(&image, &destination, asked);
            check(&lanes, &[mode]);
            let missed = done["ram"]["dirty-sync-missed-zero-copy"].as_u64().unwrap();
            assert_eq!(missed > 0, asked == "on", "{done}");
            prove_equal(&source, &destination);
            // Through a relay, which sends from its receive buffers, or splices.
            run_a_little(&source);
            let destination = waiting(row.builder());
            let (_, lanes) = sent_to(&qmp(&source), &destination, asked);
            check(&lanes, &[mode, if asked == "on" { mode } else { "splice" }]);
            let spliced = lanes.iter().map(|lane| lane["spliced"]["packets"].as_u64().unwrap()).sum::<u64>();
            assert_eq!(spliced > 0, asked == "auto", "{lanes:?}");
            prove_equal(&source, &destination);
        }
    }
}

/// A stock QEMU with `zero-copy-send` on sends to a towline that listens. The loopback copies what it sends,
/// so it counts missed flushes of lanes, several of them in a pass; in a guest, over virtio-net, towline's own
/// sends show that none is missed.
#[test]
fn a_stock_source_may_send_without_a_copy() {
    if !require_lab("a_stock_source_may_send_without_a_copy") {
        return;
    }
    for row in [Row::Qemu10_0, Row::Qemu7_2] {
        let source = boot(row.builder());
        run_a_little(&source);
        let destination = waiting(row.builder());
        let lanes = LANES.to_string();
        let arguments = ["--json", "--paused", "--multifd-channels", &lanes, "tcp:127.0.0.1:0"];
        let mut towline = start_copy(&[&arguments[..], &[&qmp(&destination)]].concat());
        let here = listening_on(&mut towline);
        set_lanes(&source, LANES);
        set_capability(&source, "zero-copy-send", true);
        set_capability(&source, "return-path", true);
        migrate_as_set(&source, &here);
        let migration = wait_migrated(&source);
        towline.wait_done(WITHIN).unwrap();
        assert!(migration["ram"]["dirty-sync-missed-zero-copy"].as_u64() > Some(0), "{migration}");
        prove_equal(&source, &destination);
    }
}

/// Runs the guest for a moment, so its memory differs and it can be copied again.
fn run_a_little(source: &Qemu) {
    source.qmp().execute("cont", Value::Null).unwrap();
    source.wait_counting(WITHIN).unwrap();
    stop(source);
}

#[test]
fn zero_copy_on_is_refused_where_it_is_unsupported() {
    if !require_lab("zero_copy_on_is_refused_where_it_is_unsupported") {
        return;
    }
    let scratch = Scratch::new();
    let (image, other) = (scratch.text("guest.img"), scratch.text("other.img"));
    let source = boot(Row::Qemu10_0.builder());
    copy(&["--resume", &qmp(&source), &image]);
    let (from, to) = (qmp(&source), waiting(Row::Qemu10_0.builder()));
    let to = qmp(&to);
    let (tcp, unix) = ("tcp:127.0.0.1:1", format!("unix:{}", scratch.text("s.sock")));
    let lanes = &["--multifd-channels", "2"][..];
    let zlib = &["--multifd-channels", "2", "--compression", "zlib"][..];
    for source in [&from, &image] {
        for (more, destination, why) in [
            (&[][..], tcp, "only lanes have it"),
            (zlib, tcp, "--compression zlib copies every page"),
            (lanes, &unix, "is not a TCP connection"),
            (lanes, &to, "goes through a Unix socket on this host"),
            (lanes, &other, "nothing is sent to DEST"),
        ] {
            let stderr = refused(2, &[more, &["--zero-copy-send", "on", source, destination]].concat());
            assert!(
                stderr.contains(&format!("--zero-copy-send on: {why}")) || stderr.contains(why),
                "{stderr}"
            );
        }
    }
    assert_eq!(source.qmp().status().unwrap(), "running");
    assert!(!std::path::Path::new(&other).exists());
}
