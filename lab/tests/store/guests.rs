//! Real guests: stored while they run on, stored again, brought back.

use towline_lab::expect::qmp;
use towline_lab::{Builder, Qemu, Version, require_lab};

use crate::support::{BUCKET, S3, WITHIN, uploaded};

const MIB: u64 = 1 << 20;

fn builder() -> Builder {
    Qemu::builder(Version::V10_0).cpu("Nehalem").linux().memory_mib(256)
}

#[test]
fn a_second_image_of_a_guest_sends_little_and_both_come_back() {
    let test = "a_second_image_of_a_guest_sends_little_and_both_come_back";
    if !require_lab(test) {
        return;
    }
    let Some(s3) = S3::start(test) else { return };
    let place = s3.place();
    let source = builder().start().unwrap();
    let mut guest = source.linux(WITHIN).unwrap();
    guest.fill(96 * MIB, 5).unwrap();
    let (hash, tick) = (guest.hash().unwrap(), guest.wait_ticking(WITHIN).unwrap());
    let (one, two) = (format!("s3://{BUCKET}/vm/one"), format!("s3://{BUCKET}/vm/two"));
    let first = place.done(&["copy", "--resume", &qmp(&source), &one]);
    // It runs on, and writes a little.
    guest.wait_ticking(WITHIN).unwrap();
    guest.dirty(4 * MIB, 2 * MIB).unwrap();
    guest.stop_dirtying().unwrap();
    let later = guest.wait_ticking(WITHIN).unwrap();
    let second = place.done(&["copy", &qmp(&source), &two]);
    let (all, more) = (uploaded(&first, "sent-bytes"), uploaded(&second, "sent-bytes"));
    println!(
        "{test}: the first image sent {all} bytes, the second {more}: {:.1} %",
        100.0 * more as f64 / all as f64
    );
    assert!(all > 96 * MIB, "{first}");
    assert!(more * 100 <= all * 15, "{second}");
    for (image, least) in [(&one, tick), (&two, later)] {
        let destination = builder().incoming_defer().start().unwrap();
        place.done(&["copy", image, &qmp(&destination)]);
        let mut guest = destination.linux(WITHIN).unwrap();
        assert!(guest.wait_ticking(WITHIN).unwrap() >= least);
        assert_eq!(guest.hash().unwrap(), hash);
    }
}

#[test]
fn no_guest_runs_from_a_damaged_store() {
    let test = "no_guest_runs_from_a_damaged_store";
    if !require_lab(test) {
        return;
    }
    let place = crate::support::Place::new();
    let source = builder().memory_mib(96).start().unwrap();
    source.linux(WITHIN).unwrap();
    let image = place.store("vm/a");
    place.done(&["copy", &qmp(&source), &image]);
    let chunks = place.files("vm/chunks");
    let victim = chunks.iter().max_by_key(|path| std::fs::metadata(path).unwrap().len()).unwrap();
    let mut bytes = std::fs::read(victim).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(victim, bytes).unwrap();
    let destination = builder().memory_mib(96).incoming_defer().start().unwrap();
    let error = place.refused(&["copy", &image, &qmp(&destination)]);
    assert!(error.contains("is damaged in the store"), "{error}");
    assert!(error.contains(victim.file_name().unwrap().to_str().unwrap()), "{error}");
    // Where it can be asked at all, it does not run.
    if let Ok(status) = destination.qmp().execute("query-status", serde_json::Value::Null) {
        assert_ne!(status["status"], "running");
    }
}
