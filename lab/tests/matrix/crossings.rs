//! From each QEMU to each other with a machine type that both have, by every route.
//!
//! `make test` runs each route at least once with the newest QEMU at one end; all routes of all pairs run in
//! `cargo xtask soak versions`, which prints the table. TLS has its own test (`lab/tests/tls.rs`).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use serde_json::{Value, json};
use towline_lab::{BootSector, Builder, Qemu, Version, require_qemu, towline, wait_until};

use crate::support::{
    Scratch, WITHIN, boot, completed, copy, listen, listening_on, migrate, prove_equal, qmp, set_capability,
    start_copy, stop, store_by_qemu, wait_migrated, waiting,
};

use Version::{Newest, Stable, V7_2, V10_0};

/// Two QEMUs, and the one whose machine type both have.
#[derive(Debug, Clone, Copy)]
struct Crossing {
    from: Version,
    to: Version,
    machine: Version,
}

/// All crossings: each release with the newest one, both ways where the older one is not the oldest.
const CROSSINGS: [Crossing; 6] = [
    Crossing { from: V7_2, to: Newest, machine: V7_2 },
    Crossing { from: V10_0, to: Newest, machine: V10_0 },
    Crossing { from: Newest, to: V10_0, machine: V10_0 },
    Crossing { from: Stable, to: Newest, machine: Stable },
    Crossing { from: Newest, to: Stable, machine: Stable },
    Crossing { from: Newest, to: Newest, machine: Newest },
];
const UP: Crossing = CROSSINGS[3];
const DOWN: Crossing = CROSSINGS[4];
const OLDEST: Crossing = CROSSINGS[0];
const ALIKE: Crossing = CROSSINGS[5];

impl Crossing {
    fn builder(self, version: Version) -> Builder {
        let builder = Qemu::builder(version).machine(self.machine.machine());
        // `-cpu max` is not the same in two versions.
        builder.cpu("Nehalem").memory_mib(64).boot_sector(BootSector::default())
    }

    /// Starts a guest and waits until it counts; stopped where QEMU loses the writes of an emulated guest
    /// during a migration.
    fn boot(self) -> Qemu {
        let qemu = boot(self.builder(self.from));
        if !self.from.tracks_emulated_writes() {
            stop(&qemu);
        }
        qemu
    }

    fn waiting(self) -> Qemu {
        waiting(self.builder(self.to))
    }

    /// Returns true if both QEMUs have a feature.
    fn both(self, has: fn(Version) -> bool) -> bool {
        has(self.from) && has(self.to)
    }
}

/// A route of a guest.
struct Route {
    name: &'static str,
    goes: fn(Crossing),
    /// Feature that QEMU must have, at either end.
    needs: fn(Version) -> bool,
}

const fn route(name: &'static str, goes: fn(Crossing)) -> Route {
    Route { name, goes, needs: |_| true }
}

const ROUTES: [Route; 20] = [
    route("image, no lanes", |crossing| through_an_image(crossing, &["--multifd-channels", "0"])),
    route("image, 4 lanes", |crossing| through_an_image(crossing, &["--multifd-channels", "4"])),
    route("image, 4 lanes, zstd", |crossing| {
        through_an_image(crossing, &["--multifd-channels", "4", "--compression", "zstd"]);
    }),
    route("image, loaded by QEMU if it can", handed_over),
    Route { name: "QEMU's own image", goes: from_an_image_of_qemus, needs: |version| version != V7_2 },
    route("--live image", live_image),
    route("stream, no lanes", |crossing| between_two_sockets(crossing, 0)),
    route("stream, 4 lanes", |crossing| between_two_sockets(crossing, 4)),
    route("copy, no lanes", |crossing| relayed(crossing, &["--multifd-channels", "0"])),
    route("copy, 4 lanes", |crossing| relayed(crossing, &["--multifd-channels", "4"])),
    route("copy, 4 lanes, zstd", |crossing| {
        relayed(crossing, &["--multifd-channels", "4", "--compression", "zstd"]);
    }),
    route("move, no lanes", |crossing| moved(crossing, &["--multifd-channels", "0"])),
    route("move, 4 lanes", |crossing| moved(crossing, &["--multifd-channels", "4"])),
    route("move, 4 lanes, zstd", |crossing| {
        moved(crossing, &["--multifd-channels", "4", "--compression", "zstd"]);
    }),
    route("image, --postcopy", |crossing| restored(crossing, &["--postcopy"])),
    route("image, --postcopy-preempt", |crossing| restored(crossing, &["--postcopy", "--postcopy-preempt"])),
    route("copy --postcopy", |crossing| followed(crossing, &[])),
    route("copy --postcopy-preempt", |crossing| followed(crossing, &["--postcopy-preempt"])),
    Route {
        name: "copy --postcopy, 4 lanes",
        goes: |crossing| followed(crossing, &["--multifd-channels", "4"]),
        needs: |version| version == Newest,
    },
    Route {
        name: "copy --postcopy-preempt, 4 lanes, zstd",
        goes: |crossing| {
            followed(crossing, &["--postcopy-preempt", "--multifd-channels", "4", "--compression", "zstd"]);
        },
        needs: |version| version == Newest,
    },
];

/// Pairs and routes of `make test`.
const SHORT: [(Crossing, &str); 9] = [
    (UP, "image, 4 lanes"),
    (UP, "move, no lanes"),
    (UP, "image, --postcopy-preempt"),
    (DOWN, "copy, 4 lanes, zstd"),
    (DOWN, "copy --postcopy-preempt"),
    (OLDEST, "move, 4 lanes"),
    (ALIKE, "--live image"),
    (ALIKE, "stream, 4 lanes"),
    (ALIKE, "copy --postcopy, 4 lanes"),
];

#[test]
fn guests_cross_from_version_to_version() {
    if !require_qemu("guests_cross_from_version_to_version", &[Stable, Newest]) {
        return;
    }
    let all = std::env::var_os("TOWLINE_SOAK_VERSIONS").is_some();
    let named = |name: &str| ROUTES.iter().find(|route| route.name == name).unwrap();
    let cells: Vec<(Crossing, &Route)> = if all {
        CROSSINGS.iter().flat_map(|crossing| ROUTES.iter().map(|route| (*crossing, route))).collect()
    } else {
        SHORT.into_iter().map(|(crossing, name)| (crossing, named(name))).collect()
    };
    let only = std::env::var("TOWLINE_CROSSING").unwrap_or_default();
    let (mut held, mut failed) = (0, Vec::new());
    for (crossing, route) in cells.into_iter().filter(|(crossing, route)| crossing.both(route.needs)) {
        let name = format!("{:?} to {:?}: {}", crossing.from, crossing.to, route.name);
        if !name.contains(&only) {
            continue;
        }
        let begun = Instant::now();
        // Only the name is used from here on.
        match catch_unwind(AssertUnwindSafe(|| (route.goes)(crossing))) {
            Ok(()) => held += 1,
            Err(_) => failed.push(name.clone()),
        }
        let mark = if failed.last() == Some(&name) { "FAILED" } else { "holds" };
        println!("{name:<50} {mark} ({:.1} s)", begun.elapsed().as_secs_f64());
    }
    println!("{held} of {} hold", held + failed.len());
    assert!(failed.is_empty(), "these do not hold: {failed:#?}");
}

fn through_an_image(crossing: Crossing, how: &[&str]) {
    let scratch = Scratch::new();
    let (image, source) = (scratch.text("guest.img"), crossing.boot());
    copy(&[how, &[&qmp(&source), &image]].concat());
    let destination = crossing.waiting();
    copy(&[how, &["--stream", "--verify", "--paused", &image, &qmp(&destination)]].concat());
    prove_equal(&source, &destination);
}

fn handed_over(crossing: Crossing) {
    let scratch = Scratch::new();
    let (image, source) = (scratch.text("guest.img"), crossing.boot());
    copy(&[&qmp(&source), &image]);
    let destination = crossing.waiting();
    let done = completed(&["--paused", &image, &qmp(&destination)]);
    assert_eq!(done["handed-over"], true, "{done}");
    prove_equal(&source, &destination);
}

fn from_an_image_of_qemus(crossing: Crossing) {
    let scratch = Scratch::new();
    let (image, source) = (scratch.path("guest.img"), crossing.boot());
    store_by_qemu(&source, &image, 4);
    let destination = crossing.waiting();
    copy(&["--stream", "--paused", image.to_str().unwrap(), &qmp(&destination)]);
    prove_equal(&source, &destination);
}

/// The guest runs on, so only memory that it does not write can be compared.
fn live_image(crossing: Crossing) {
    let scratch = Scratch::new();
    let (image, source) = (scratch.text("guest.img"), crossing.boot());
    let before = source.counter().unwrap();
    copy(&["--live", &qmp(&source), &image]);
    source.qmp().execute("cont", Value::Null).unwrap();
    source.wait_counting(WITHIN).unwrap();
    let destination = crossing.waiting();
    copy(&["--stream", "--verify", "--paused", &image, &qmp(&destination)]);
    assert!(destination.counter().unwrap() >= before);
    go_on(&destination, before);
}

fn between_two_sockets(crossing: Crossing, lanes: usize) {
    let source = crossing.boot();
    let destination = waiting(crossing.builder(crossing.to).paused());
    let (there, count) = (listen(&destination, lanes), lanes.to_string());
    let mut towline = start_copy(&["--json", "--multifd-channels", &count, "tcp:127.0.0.1:0", &there]);
    migrate(&source, &listening_on(&mut towline), lanes);
    towline.wait_done(WITHIN).unwrap();
    wait_migrated(&source);
    destination.qmp().wait_migration("completed", WITHIN).unwrap();
    prove_equal(&source, &destination);
}

fn relayed(crossing: Crossing, how: &[&str]) {
    let (source, destination) = (crossing.boot(), crossing.waiting());
    copy(&[how, &["--paused", &qmp(&source), &qmp(&destination)]].concat());
    prove_equal(&source, &destination);
}

fn moved(crossing: Crossing, how: &[&str]) {
    let (source, destination) = (crossing.boot(), crossing.waiting());
    let counter = source.counter().unwrap();
    let (from, to) = (qmp(&source), qmp(&destination));
    let moved = towline([&["move"], how, &[&from, &to]].concat()).unwrap();
    let finished = moved.wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(0), "{}; there: {}", finished.stderr, destination.stderr());
    assert!(source.wait_exit(WITHIN).unwrap().success(), "{}", source.stderr());
    go_on(&destination, counter);
}

/// A guest runs at its destination while most of its memory is still at the source (postcopy). It writes too
/// much to converge without that. Where QEMU loses the writes of an emulated guest it is stopped until the
/// first pages have been sent, or for good.
fn followed(crossing: Crossing, how: &[&str]) {
    let (source, destination) = (crossing.boot(), crossing.waiting());
    let (counter, begins_stopped) =
        (source.counter().unwrap(), crossing.from != V10_0 && crossing.from != Stable);
    if begins_stopped {
        stop(&source);
    }
    set_capability(&destination, "events", true);
    let runs_there = if crossing.from.tracks_emulated_writes() { "--run" } else { "--paused" };
    // Compressed, all of it is less than a MiB.
    let rate = if how.contains(&"zstd") { "1M" } else { "16M" };
    let slowly = ["--json", "--postcopy", runs_there, "--max-bandwidth", rate, "--downtime-limit", "1"];
    let towline = start_copy(&[&slowly[..], how, &[&qmp(&source), &qmp(&destination)]].concat());
    wait_until("pages that were sent", WITHIN, || {
        let ram = source.qmp().execute("query-migrate", Value::Null)?["ram"].take();
        Ok((ram["dirty-sync-count"].as_u64() > Some(1) && ram["transferred"].as_u64() > Some(32 << 10))
            .then_some(()))
    })
    .unwrap();
    let follow = json!({ "max-bandwidth": 16 << 20, "max-postcopy-bandwidth": 0 });
    source.qmp().execute("migrate-set-parameters", follow).unwrap();
    if begins_stopped && crossing.from.tracks_emulated_writes() {
        source.qmp().execute("cont", Value::Null).unwrap();
    }
    let finished = towline.wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(0), "{}; there: {}", finished.stderr, destination.stderr());
    let migrated = wait_migrated(&source);
    if crossing.from.tracks_emulated_writes() {
        // A reply comes after all events that precede it.
        destination.qmp().status().unwrap();
        let events = destination.qmp().take_events();
        assert!(events.iter().any(|event| event["data"]["status"] == "postcopy-active"), "{events:?}");
        let on_lanes = migrated["ram"]["multifd-bytes"].as_u64().unwrap();
        assert_eq!(on_lanes > 0, how.contains(&"--multifd-channels"), "{migrated}");
    }
    go_on(&destination, counter);
}

fn restored(crossing: Crossing, how: &[&str]) {
    let scratch = Scratch::new();
    let (image, source) = (scratch.text("guest.img"), crossing.boot());
    copy(&[&qmp(&source), &image]);
    let (counter, destination) = (source.counter().unwrap(), crossing.waiting());
    copy(&[how, &["--verify", &image, &qmp(&destination)]].concat());
    go_on(&destination, counter);
}

/// Asserts that the guest counts on from there, and that its filled memory is unchanged.
fn go_on(destination: &Qemu, counter: u64) {
    destination.qmp().execute("cont", Value::Null).unwrap();
    assert!(destination.wait_counting(WITHIN).unwrap() > counter);
    stop(destination);
    destination.check_filled().unwrap();
}
