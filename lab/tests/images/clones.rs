//! One image, several guests.

use std::path::Path;

use serde_json::Value;
use towline_lab::{Builder, Finished, Qemu, require_lab, wait_until};

use crate::support::{
    Fixture, SAFE, SLOW, UNCERTAIN, WITHIN, assert_ended, assert_runs, assert_waits, counting, guest, qmp,
    save, small_guest, wait_transferred, waiting,
};

/// Environment variable with the guests' memory in MiB, for `cargo xtask soak clones`.
const MEMORY_MIB_VARIABLE: &str = "TOWLINE_SOAK_CLONES_MIB";
const CLONES: usize = 8;
/// Maximum private memory of a towline that copies to eight guests of any size at once.
const OWN_BYTES_MAX: u64 = 160 << 20;

/// The guests of the tests with many clones; small ones by default.
fn many() -> Builder {
    match std::env::var(MEMORY_MIB_VARIABLE) {
        Ok(mib) => {
            let memory_mib: u64 = mib.parse().unwrap();
            let fill_mib = memory_mib - memory_mib / 4;
            let boot_sector =
                towline_lab::BootSector { fill_mib, words_per_page: 1024, ..Default::default() };
            guest().memory_mib(memory_mib).boot_sector(boot_sector)
        }
        Err(_) => guest(),
    }
}

/// Final results of each destination in the events of `--json`.
fn results(finished: &Finished) -> Vec<Value> {
    let events = finished.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == "completed" || event["event"] == "failed").collect()
}

fn result_of<'a>(results: &'a [Value], destination: &str) -> &'a Value {
    let mut of = results.iter().filter(|result| result["destination"] == destination);
    let (Some(result), None) = (of.next(), of.next()) else { panic!("{destination} in {results:?}") };
    result
}

fn eight_at_once(name: &str, options: &str) {
    if !require_lab(name) {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, many(), "guest.img");
    let clones: Vec<Qemu> = (0..CLONES).map(|_| waiting(&many())).collect();
    let names: Vec<String> = clones.iter().map(qmp).collect();
    let line = format!("copy --json {options} {} {}", fixture.name("guest.img"), names.join(" "));
    let mut towline = fixture.towline(&line);
    let mut peak = 0;
    wait_until("end of towline", 5 * WITHIN, || {
        peak = peak.max(towline.own_memory().unwrap_or_default());
        Ok((!towline.runs()?).then_some(()))
    })
    .unwrap();
    let finished = towline.wait(WITHIN).unwrap();
    assert_ended(&finished, 0, &[]);
    let results = results(&finished);
    let times: Vec<_> = names.iter().map(|name| result_of(&results, name)["total-time"].as_u64()).collect();
    println!(
        "{CLONES} clones with `{options}`: {times:?} ms, {:.1} MiB of towline's own",
        peak as f64 / f64::from(1 << 20)
    );
    clones.iter().for_each(assert_runs);
    for clone in &clones {
        clone.qmp().execute("stop", Value::Null).unwrap();
        clone.check_filled().unwrap();
    }
    assert!(peak <= OWN_BYTES_MAX, "towline took {peak} bytes, expected at most {OWN_BYTES_MAX}");
    // Of postcopy; the others record none.
    let _ = std::fs::remove_file(fixture.name("guest.img.working-set.json"));
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}

#[test]
fn eight_guests_are_restored_from_one_image_at_once() {
    eight_at_once("eight_guests_are_restored_from_one_image_at_once", "--verify --stream");
}

/// QEMUs that load the file themselves must not share one file position.
#[test]
#[ignore = "nightly"]
fn eight_qemus_load_one_image_at_once() {
    eight_at_once("eight_qemus_load_one_image_at_once", "--verify");
}

/// Each runs at once, and its memory follows.
#[test]
#[ignore = "nightly"]
fn eight_guests_run_at_once_and_their_memory_follows() {
    eight_at_once("eight_guests_run_at_once_and_their_memory_follows", "--verify --postcopy");
}

/// Of six destinations four fail, each for another reason; the other two get the guest anyway.
#[test]
fn a_failure_at_one_destination_does_not_affect_the_others() {
    if !require_lab("a_failure_at_one_destination_does_not_affect_the_others") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, guest(), "guest.img");
    let (good, dies) = (waiting(&guest()), waiting(&guest()));
    let (busy, small) = (counting(small_guest()), waiting(&small_guest()));
    let gone = format!("qmp:{}", fixture.name("missing.qmp"));
    let copy = fixture.name("copy.img");
    let names = [qmp(&good), qmp(&dies), qmp(&busy), qmp(&small), gone.clone(), copy.clone()];
    // Slow, so one can be killed half-way.
    let line = format!("copy --json --stream {SLOW} {} {}", fixture.name("guest.img"), names.join(" "));
    let mut towline = fixture.towline(&line);
    wait_transferred(&mut towline, 1 << 20);
    dies.kill().unwrap();
    let finished = towline.wait(WITHIN).unwrap();
    assert_ended(&finished, SAFE, &[]);
    let results = results(&finished);
    assert_eq!(results.len(), names.len(), "{results:?}");
    let died = result_of(&results, &qmp(&dies))["error"].as_str().unwrap().to_owned();
    // During the load, or still during the preflight check.
    let words = ["ended while it loaded", "QEMU closed it (ended, crashed"];
    assert!(words.iter().any(|word| died.contains(word)), "{died}");
    for (name, text) in [
        (qmp(&dies), qmp(&dies).trim_start_matches("qmp:")),
        (qmp(&busy), "does not wait for a guest"),
        (
            qmp(&small),
            "RAM block \"pc.ram\" has 64 MiB (67108864 bytes) in the guest and 16 MiB (16777216 bytes) there",
        ),
        (gone, "missing.qmp"),
    ] {
        let result = result_of(&results, &name);
        assert_eq!((&result["event"], &result["exit"]), (&"failed".into(), &SAFE.into()), "{result}");
        assert!(result["error"].as_str().unwrap().contains(text), "{result}");
        assert!(finished.stderr.contains(&format!("towline: {name}: ")), "{}", finished.stderr);
    }
    assert_eq!(result_of(&results, &qmp(&good))["destination-state"], "running");
    assert_eq!(result_of(&results, &format!("file:{copy}"))["destination-state"], "stored");
    let all: Value = serde_json::from_str(finished.stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&all["event"], &all["completed"], &all["failed"]), (&"all".into(), &2.into(), &4.into()));
    assert_runs(&good);
    assert_runs(&busy);
    assert_waits(&small);
    fixture.assert_holds(&["copy.img", "copy.img.manifest.json", "guest.img", "guest.img.manifest.json"]);
    assert_ne!(finished.status.code(), Some(UNCERTAIN));
}

/// Adds a disk, backed by the file `disk`, which is created.
fn with_disk(builder: &Builder, disk: &Path) -> Builder {
    std::fs::File::options().append(true).create(true).open(disk).unwrap().set_len(1 << 20).unwrap();
    builder.clone().args([
        "-drive".to_owned(),
        format!("file={},format=raw,if=none,id=disk0", disk.display()),
        "-device".to_owned(),
        "virtio-blk-pci,drive=disk0".to_owned(),
        "-nic".to_owned(),
        "none".to_owned(),
        "-netdev".to_owned(),
        "socket,id=net0,udp=127.0.0.1:1,localaddr=127.0.0.1:0".to_owned(),
        "-device".to_owned(),
        "virtio-net-pci,netdev=net0,romfile=".to_owned(),
    ])
}

#[test]
fn clones_that_share_a_writable_disk_are_refused() {
    if !require_lab("clones_that_share_a_writable_disk_are_refused") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, with_disk(&guest(), &fixture.path("disk")), "guest.img");
    let on = |disk: &str| waiting(&with_disk(&guest(), &fixture.path(disk)));
    std::os::unix::fs::symlink(fixture.path("disk"), fixture.path("alias")).unwrap();
    let (first, second, own) = (on("disk"), on("alias"), on("own"));
    let names = [qmp(&first), qmp(&second), qmp(&own)];
    let finished = fixture.run(&format!("copy --json {} {}", fixture.name("guest.img"), names.join(" ")));
    assert_ended(&finished, SAFE, &[]);
    let results = results(&finished);
    for (name, other) in [(&names[0], &second), (&names[1], &first)] {
        let result = result_of(&results, name);
        let other = format!("and so has QEMU on {}", other.qmp_path().display());
        let error = result["error"].as_str().unwrap();
        assert!(error.contains("has the writable drive \"disk0\"") && error.contains(&other), "{error}");
    }
    assert_eq!(result_of(&results, &names[2])["destination-state"], "running");
    // One warning for all of them: their cards have the same address, and the guests do not know that they
    // are clones.
    let notices = finished.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let notices: Vec<_> = notices.filter(|event| event["event"] == "notice").collect();
    for text in ["3 of the clones have network cards", "3 of the clones have no vmgenid device"] {
        let count =
            notices.iter().filter(|notice| notice["text"].as_str().unwrap().starts_with(text)).count();
        assert_eq!(count, 1, "{text}: {notices:?}");
    }
    for waits in [&first, &second] {
        assert_waits(waits);
    }
    assert_runs(&own);
    // No command was sent to either: alone it loads the guest.
    drop(second);
    assert_ended(&fixture.run(&format!("copy {} {}", fixture.name("guest.img"), qmp(&first))), 0, &[]);
    assert_runs(&first);
}

#[test]
fn a_destination_that_is_named_twice_is_a_usage_error() {
    if !require_lab("a_destination_that_is_named_twice_is_a_usage_error") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, small_guest(), "guest.img");
    let destination = waiting(&small_guest());
    let (image, name) = (fixture.name("guest.img"), qmp(&destination));
    let finished = fixture.run(&format!("copy {image} {name} {} {name}", fixture.name("other.img")));
    assert_ended(&finished, 2, &[&format!("{name} is named twice, and takes one guest")]);
    assert_waits(&destination);
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}
