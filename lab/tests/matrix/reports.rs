//! Reports: `inspect` of every kind of endpoint, and the events of `copy --json`.

use serde_json::{Value, json};
use towline_lab::{Finished, Qemu, Towline, require_lab, towline};

use crate::support::{
    Row, Scratch, WITHIN, boot, copy, events, listening_on, migrate, prove_equal, qmp, start_copy, stop,
    store_by_qemu, text, wait_migrated, waiting,
};

const PC_RAM_BYTES: u64 = 64 << 20;
const PAGE_SIZE: u64 = 4096;
/// Pages that the small guest has filled, which are never zero.
const FILLED_PAGES: u64 = 4096;

fn inspect(arguments: &[&str]) -> Towline {
    towline([&["inspect"], arguments].concat()).unwrap()
}

/// Runs `inspect --json`, which must succeed; returns its one event.
fn inspected(arguments: &[&str]) -> Value {
    let finished = inspect(&[&["--json"], arguments].concat()).wait_done(WITHIN).unwrap();
    the_event(&finished)
}

fn the_event(finished: &Finished) -> Value {
    let event = events(&finished.stdout).pop().unwrap();
    assert_eq!(event["event"], "inspected", "{event}");
    event
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Names and lengths of QEMU's own table, ordered by name.
fn blocks_of(qemu: &Qemu) -> Vec<(String, u64)> {
    let blocks = qemu.ram_blocks().unwrap();
    let mut blocks: Vec<_> = blocks.into_iter().map(|block| (block.name, block.used_length)).collect();
    blocks.sort();
    blocks
}

fn blocks_in(facts: &Value) -> Vec<(String, u64)> {
    let blocks = facts["blocks"].as_array().unwrap().iter();
    let mut blocks: Vec<_> =
        blocks.map(|block| (block["name"].as_str().unwrap().into(), number(&block["length"]))).collect();
    blocks.sort();
    blocks
}

fn assert_devices(facts: &Value) {
    let devices = facts["devices"].as_array().unwrap();
    for name in ["timer", "cpu", "fw_cfg", "globalstate"] {
        let found = devices.iter().find(|device| device["name"] == name);
        let found = found.unwrap_or_else(|| panic!("no {name} in {devices:?}"));
        assert_eq!(found["instance"], 0);
        assert!(number(&found["version"]) >= 1);
    }
}

#[test]
fn an_image_is_inspected() {
    if !require_lab("an_image_is_inspected") {
        return;
    }
    for (row, machine, version) in
        [(Row::Qemu10_0, "pc-q35-10.0", "10.0"), (Row::Qemu7_2, "pc-q35-7.2", "7.2")]
    {
        let scratch = Scratch::new();
        let image = scratch.text("guest.img");
        let source = boot(row.builder());
        copy(&[&qmp(&source), &image]);
        let facts = inspected(&["--verify", &image]);
        assert_eq!(facts["kind"], "image");
        assert_eq!(facts["path"], image);
        assert_eq!(facts["machine-type"], machine);
        assert_eq!(facts["run-state"], "running");
        assert_eq!(facts["verified"], true);
        assert_eq!(facts["loadable-by-qemu"], true);
        assert_eq!(facts["manifest"]["source"], "qmp");
        assert!(facts["manifest"]["qemu"].as_str().unwrap().starts_with(version), "{facts}");
        assert_eq!(blocks_in(&facts), blocks_of(&source));
        for block in facts["blocks"].as_array().unwrap() {
            let pages = number(&block["plain-pages"]) + number(&block["zero-pages"]);
            assert_eq!(pages, number(&block["length"]).div_ceil(PAGE_SIZE), "{block}");
        }
        let ram = facts["blocks"].as_array().unwrap().iter().find(|block| block["name"] == "pc.ram").unwrap();
        assert_eq!(number(&ram["length"]), PC_RAM_BYTES);
        let plain = number(&ram["plain-pages"]);
        assert!((FILLED_PAGES..FILLED_PAGES + 1024).contains(&plain), "{ram}");
        assert_devices(&facts);
        let length = std::fs::metadata(&image).unwrap().len();
        assert_eq!(number(&facts["length"]), length);
        assert!(number(&facts["allocated"]) < length, "{facts}");
        let state = &facts["device-state"];
        assert_eq!(number(&state["offset"]) + number(&state["length"]), length);
    }
}

#[test]
fn a_stock_image_gets_a_manifest() {
    if !require_lab("a_stock_image_gets_a_manifest") {
        return;
    }
    let scratch = Scratch::new();
    let (stock, image) = (scratch.path("stock.img"), scratch.text("guest.img"));
    let source = boot(Row::Qemu10_0.builder());
    store_by_qemu(&source, &stock, 0);
    let facts = inspected(&[&text(&stock)]);
    assert_eq!(facts["manifest"], Value::Null);
    assert_eq!(facts["verified"], false);
    let finished = inspect(&["--verify", &text(&stock)]).wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1));
    assert!(finished.stderr.contains("there is no manifest beside it"), "{}", finished.stderr);
    copy(&[&text(&stock), &image]);
    let converted = inspected(&["--verify", &image]);
    assert_eq!(converted["verified"], true);
    assert_eq!(converted["blocks"], facts["blocks"]);
    assert_eq!(converted["devices"], facts["devices"]);
    let destination = waiting(Row::Qemu10_0.builder());
    copy(&["--verify", "--paused", &image, &qmp(&destination)]);
    prove_equal(&source, &destination);
}

#[test]
fn a_qemu_is_inspected() {
    if !require_lab("a_qemu_is_inspected") {
        return;
    }
    for (row, machine, version) in
        [(Row::Qemu10_0, "pc-q35-10.0", "10.0"), (Row::Qemu7_2, "pc-q35-7.2", "7.2")]
    {
        let source = boot(row.builder());
        let facts = inspected(&[&qmp(&source)]);
        assert_eq!(facts["kind"], "qemu");
        assert!(facts["version"].as_str().unwrap().starts_with(version), "{facts}");
        assert_eq!(facts["machine-type"], machine);
        assert_eq!(facts["run-state"], "running");
        assert_eq!(facts["uuid"], "00000000-0000-0000-0000-000000000000");
        assert_eq!(facts["waits-for-migrate-incoming"], false);
        assert_eq!(facts["blocked-reasons"], json!([]));
        assert_eq!(facts["capabilities"], json!([]));
        assert_eq!(blocks_in(&facts), blocks_of(&source));
        source.wait_counting(WITHIN).unwrap();
        let facts = inspected(&[&qmp(&waiting(row.builder()))]);
        assert_eq!(facts["waits-for-migrate-incoming"], true);
        assert_eq!(facts["run-state"], "inmigrate");
    }
}

#[test]
fn a_stream_is_inspected_and_its_guest_stays() {
    if !require_lab("a_stream_is_inspected_and_its_guest_stays") {
        return;
    }
    for (row, machine) in [(Row::Qemu10_0, "pc-q35-10.0"), (Row::Qemu7_2, "pc-q35-7.2")] {
        let source = boot(row.builder());
        let mut towline = inspect(&["--json", "tcp:127.0.0.1:0"]);
        migrate(&source, &listening_on(&mut towline), 0);
        let facts = the_event(&towline.wait_done(WITHIN).unwrap());
        assert_eq!(facts["kind"], "stream");
        assert_eq!(facts["machine-type"], machine);
        assert_eq!(facts["run-state"], "running");
        assert_eq!(blocks_in(&facts), blocks_of(&source));
        assert_devices(&facts);
        let ram = &facts["ram"];
        let total: u64 = blocks_of(&source).iter().map(|(_, length)| length).sum();
        assert_eq!(number(&ram["total"]), total);
        assert!(number(&ram["normal"]) >= FILLED_PAGES, "{ram}");
        assert!(number(&ram["normal"]) + number(&ram["duplicate"]) >= total / PAGE_SIZE, "{ram}");
        source.qmp().wait_migration("failed", WITHIN).unwrap();
        source.qmp().wait_status("running", WITHIN).unwrap();
        source.wait_counting(WITHIN).unwrap();
    }
}

#[test]
fn a_guest_copied_to_null_keeps_running() {
    if !require_lab("a_guest_copied_to_null_keeps_running") {
        return;
    }
    let source = boot(Row::Qemu10_0.builder());
    let done = crate::support::completed(&[&qmp(&source), "null:"]);
    assert_eq!(done["destination-state"], "discarded", "{done}");
    assert_eq!(done["source-state"], "running", "{done}");
    assert!(number(&done["ram"]["normal"]) >= FILLED_PAGES);
    source.qmp().wait_status("running", WITHIN).unwrap();
    source.wait_counting(WITHIN).unwrap();
}

/// Counters that must equal QEMU's. Its `normal` lacks pages that are counted in its own `multifd-bytes`.
const SAME_AS_QEMU: [&str; 2] = ["total", "duplicate"];

#[test]
fn the_events_of_a_copy() {
    if !require_lab("the_events_of_a_copy") {
        return;
    }
    for row in [Row::Qemu10_0, Row::Qemu7_2] {
        let scratch = Scratch::new();
        let image = scratch.text("guest.img");
        let source = boot(row.builder());
        // Every page is sent once, because QEMU's counters of resent pages differ.
        stop(&source);
        let finished = start_copy(&["--json", "--multifd-channels", "2", &qmp(&source), &image])
            .wait_done(WITHIN)
            .unwrap();
        assert_eq!(finished.stderr, "");
        let events = events(&finished.stdout);
        let named = |name: &str| events.iter().filter(|event| event["event"] == name).collect::<Vec<_>>();
        let phases: Vec<_> = named("phase").iter().map(|event| event["phase"].as_str().unwrap()).collect();
        assert_eq!(phases, ["prepare", "connect", "transfer", "switchover", "loaded", "release", "cut-over"]);
        for event in named("progress") {
            let [transferred, total] = ["transferred", "total"].map(|name| number(&event["ram"][name]));
            // The first bytes precede the list of blocks, which has the total.
            assert!(total == 0 || transferred <= total * 2, "{event}");
            assert!(event.get("dirty-bytes-rate").is_some() && event.get("remaining").is_some(), "{event}");
        }
        assert!(!named("progress").is_empty());
        let done = events.last().unwrap();
        assert_eq!(done["event"], "completed");
        assert_eq!(named("completed").len(), 1);
        assert_eq!(done["source"], qmp(&source));
        assert_eq!(done["destination"], format!("file:{image}"));
        assert_eq!(done["multifd-channels"], 2);
        assert_eq!(done["handed-over"], false);
        assert_eq!(done["source-state"], "postmigrate");
        assert_eq!(done["destination-state"], "stored");
        let migrated = wait_migrated(&source);
        assert!(number(&done["total-time"]) >= number(&migrated["downtime"]), "{done}");
        assert_eq!(done["downtime"], migrated["downtime"]);
        for name in SAME_AS_QEMU {
            assert_eq!(done["ram"][name], migrated["ram"][name], "{name}: {} {migrated}", done["ram"]);
        }
        let of = |name: &str| number(&done["ram"][name]);
        assert!(of("normal") >= number(&migrated["ram"]["normal"]), "{done} {migrated}");
        assert_eq!(of("normal-bytes"), of("normal") * PAGE_SIZE);
        assert!(
            of("multifd-bytes") > of("normal-bytes") && of("transferred") > of("multifd-bytes"),
            "{done}"
        );
    }
}

#[test]
fn the_events_of_a_refusal() {
    if !require_lab("the_events_of_a_refusal") {
        return;
    }
    let scratch = Scratch::new();
    let missing = scratch.text("missing.img");
    let destination = waiting(Row::Qemu10_0.builder());
    let finished = start_copy(&["--json", &missing, &qmp(&destination)]).wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1));
    let failed = events(&finished.stdout).pop().unwrap();
    assert_eq!(failed["event"], "failed");
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains(&missing), "{failed}");
    assert!(failed["guest"].is_string() && failed["guest-state"]["to-do"].is_string(), "{failed}");
    assert!(finished.stderr.starts_with(&format!("towline: {error}\n")), "{}", finished.stderr);
    assert_eq!(failed["destination"], qmp(&destination));
    assert_eq!(failed["exit"], 1);
    assert_eq!(destination.qmp().status().unwrap(), "inmigrate");
}
