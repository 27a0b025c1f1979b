//! Real guests: stored while they run, stored again, restored.

use towline_lab::expect::qmp;
use towline_lab::{Builder, Qemu, Version, require_lab, wait_until};

use crate::support::{BUCKET, S3, WITHIN, last_event, number, uploaded};

const MIB: u64 = 1 << 20;
/// Maximum memory of a towline that serves a guest of any size from a store.
const OWN_BYTES_MAX: u64 = 160 << 20;
/// Memory of a guest's kernel beside its data.
const KERNEL_MIB: u64 = 128;

fn builder() -> Builder {
    Qemu::builder(Version::V10_0).cpu("Nehalem").linux().memory_mib(256)
}

#[test]
#[ignore = "nightly"]
fn a_second_image_of_a_guest_sends_little_and_both_are_restored() {
    let test = "a_second_image_of_a_guest_sends_little_and_both_are_restored";
    if !require_lab(test) {
        return;
    }
    let Some(s3) = S3::start(test) else { return };
    let fixture = s3.fixture();
    let (source, mut guest) = builder().boot(WITHIN).unwrap();
    guest.fill(96 * MIB, 5).unwrap();
    let (hash, tick) = (guest.hash().unwrap(), guest.wait_ticking(WITHIN).unwrap());
    let (one, two) = (format!("s3://{BUCKET}/vm/one"), format!("s3://{BUCKET}/vm/two"));
    let first = fixture.done(&["copy", "--resume", &qmp(&source), &one]);
    // It runs on, and writes a little.
    guest.wait_ticking(WITHIN).unwrap();
    guest.dirty(4 * MIB, 2 * MIB).unwrap();
    guest.stop_dirtying().unwrap();
    let later = guest.wait_ticking(WITHIN).unwrap();
    let second = fixture.done(&["copy", &qmp(&source), &two]);
    let (all, more) = (uploaded(&first, "sent-bytes"), uploaded(&second, "sent-bytes"));
    println!(
        "{test}: the first image sent {all} bytes, the second {more}: {:.1} %",
        100.0 * more as f64 / all as f64
    );
    assert!(all > 96 * MIB, "{first}");
    assert!(more * 100 <= all * 15, "{second}");
    for (image, least) in [(&one, tick), (&two, later)] {
        let destination = builder().incoming_defer().start().unwrap();
        fixture.done(&["copy", image, &qmp(&destination)]);
        let mut guest = destination.linux(WITHIN).unwrap();
        assert!(guest.wait_ticking(WITHIN).unwrap() >= least);
        assert_eq!(guest.hash().unwrap(), hash);
    }
}

#[test]
#[ignore = "nightly"]
fn a_guest_in_a_store_runs_at_once_and_what_it_waits_for_comes_first() {
    let test = "a_guest_in_a_store_runs_at_once_and_what_it_waits_for_comes_first";
    if !require_lab(test) {
        return;
    }
    let Some(s3) = S3::start(test) else { return };
    let fixture = s3.fixture();
    let data_mib = number("TOWLINE_SOAK_STORE_MIB", 12);
    let builder = || builder().memory_mib(data_mib + KERNEL_MIB);
    let image = format!("s3://{BUCKET}/vm/instant");
    let hash = {
        let (source, mut guest) = builder().boot(WITHIN).unwrap();
        guest.fill(data_mib * MIB, 7).unwrap();
        let hash = guest.hash().unwrap();
        drop(guest);
        fixture.done(&["copy", &qmp(&source), &image]);
        hash
    };
    let destination = builder().incoming_defer().start().unwrap();
    let control = fixture.name("control");
    // Pages without requests take many minutes, however slow the machine is that hashes.
    let limits = ["--max-bandwidth", "128K", "--qmp", &control, "--json"];
    let mut towline = fixture.start(
        &[&["copy", "--postcopy", "--postcopy-preempt", &image, &qmp(&destination)], &limits[..]].concat(),
    );
    wait_until("a guest that runs", WITHIN, || {
        assert!(towline.runs()?, "{}{}", towline.stdout(), towline.stderr());
        Ok(towline.stdout().contains(r#""phase":"running""#).then_some(()))
    })
    .unwrap();
    let mut guest = destination.linux(WITHIN).unwrap();
    let mut peak = 0;
    let found = std::thread::scope(|scope| {
        let hashing = scope.spawn(|| guest.hash());
        wait_until("a hash of memory that comes", 5 * WITHIN, || {
            peak = peak.max(towline.own_memory().unwrap_or_default());
            Ok(hashing.is_finished().then_some(()))
        })
        .unwrap();
        hashing.join().unwrap().unwrap()
    });
    assert_eq!(found, hash);
    // The guest has received all requested pages, and the store still has most of the others.
    let told = fixture.ctl(&control, &["query-migrate"]);
    assert_eq!(told["status"], "postcopy-active", "{told}");
    assert!(told["ram"]["remaining"].as_u64() > Some(0), "{told}");
    fixture.ctl(&control, &["migrate-set-parameters", "max-bandwidth=0"]);
    let completed = last_event(&towline.wait_done(WITHIN).unwrap());
    let (faults, ram) = (&completed["postcopy"]["faults"], &completed["ram"]);
    println!("{test}: {data_mib} MiB, {:.1} MiB of towline's own, {faults}", peak as f64 / MIB as f64);
    assert!(faults["served"].as_u64() > Some(0), "{completed}");
    let pages = ram["normal"].as_u64().unwrap() + ram["duplicate"].as_u64().unwrap();
    assert_eq!(pages * 4096, ram["total"].as_u64().unwrap(), "each page once: {completed}");
    assert!(peak > 0 && peak <= OWN_BYTES_MAX, "towline took {peak} bytes");
    guest.wait_ticking(WITHIN).unwrap();
    assert_eq!(guest.hash().unwrap(), hash);
}

#[test]
fn no_guest_runs_from_a_damaged_store() {
    let test = "no_guest_runs_from_a_damaged_store";
    if !require_lab(test) {
        return;
    }
    let fixture = crate::support::Fixture::new();
    let source = builder().memory_mib(96).start().unwrap();
    source.linux(WITHIN).unwrap();
    let image = fixture.store("vm/a");
    fixture.done(&["copy", &qmp(&source), &image]);
    let chunks = fixture.files("vm/chunks");
    let victim = chunks.iter().max_by_key(|path| std::fs::metadata(path).unwrap().len()).unwrap();
    let mut bytes = std::fs::read(victim).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(victim, bytes).unwrap();
    let destination = builder().memory_mib(96).incoming_defer().start().unwrap();
    let error = fixture.refused(&["copy", &image, &qmp(&destination)]);
    assert!(error.contains("is damaged in the store"), "{error}");
    assert!(error.contains(victim.file_name().unwrap().to_str().unwrap()), "{error}");
    // If it can be queried, it does not run.
    if let Ok(status) = destination.qmp().execute("query-status", serde_json::Value::Null) {
        assert_ne!(status["status"], "running");
    }
}
