//! Compressed lanes to and from stock QEMUs: the guest's memory arrives unchanged to the byte, and the guest
//! runs on.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::expect::{completed, qmp};
use towline_lab::{BootSector, Builder, Qemu, Towline, Version, require_lab, towline};

const WITHIN: Duration = Duration::from_secs(120);
const METHODS: [&str; 2] = ["zlib", "zstd"];
/// Half of each page is incompressible.
const GUEST: BootSector = BootSector {
    fill_mib: 16,
    words_per_page: 512,
    seed: 1,
    sweep_pages: 256,
    steps_per_tick: 16,
    uses_popcnt: false,
};

fn builder(version: Version, machine: Version) -> Builder {
    // `-cpu max` is not the same in two versions.
    let builder = Qemu::builder(version).machine(machine.machine()).cpu("Nehalem");
    builder.memory_mib(64).boot_sector(GUEST)
}

/// Starts a guest and waits until it counts. On 7.2 it is stopped then, see
/// [`Version::tracks_emulated_writes`].
fn boot(version: Version, machine: Version) -> Qemu {
    let qemu = start(version, machine);
    if version == Version::V7_2 {
        qemu.qmp().execute("stop", Value::Null).unwrap();
    }
    qemu
}

fn start(version: Version, machine: Version) -> Qemu {
    let qemu = builder(version, machine).start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu
}

fn scratch() -> TempDir {
    tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap()
}

fn in_directory(directory: &TempDir, name: &str) -> String {
    directory.path().join(name).to_str().unwrap().to_owned()
}

fn start_copy(arguments: &[&str]) -> Towline {
    towline([&["copy", "--json"], arguments].concat()).unwrap()
}

fn refused(code: i32, arguments: &[&str]) -> String {
    let finished = start_copy(arguments).wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(code), "{}{}", finished.stdout, finished.stderr);
    finished.stderr
}

/// Copies over compressed lanes, which must have saved a good part of the bytes.
fn copy(compression: &str, arguments: &[&str]) -> Value {
    let method = compression.split(':').next().unwrap();
    // A guest that writes faster than its pages are compressed must still be stopped for the rest.
    let how = ["--compression", compression, "--downtime-limit", "10000"];
    let finished = start_copy(&[&how, arguments].concat()).wait_done(WITHIN).unwrap();
    let done = completed(&finished);
    assert_eq!(done["multifd-compression"], method, "{done}");
    assert_eq!(done["handed-over"], false, "{done}");
    let ratio = done["compression-ratio"].as_f64().unwrap();
    println!("{arguments:?}: {method} {ratio:.2}:1");
    // The rest depends on the number of times that a running guest's few written pages, which compress well,
    // were resent.
    assert!(ratio > 1.5, "{done}");
    assert!(done["ram"]["transferred"].as_u64() < done["ram"]["normal-bytes"].as_u64(), "{done}");
    done
}

/// Asserts that two stopped guests are equal in every byte, and that the destination's runs on from there.
fn prove_equal(source: &Qemu, destination: &Qemu) {
    let counter = source.counter().unwrap();
    assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    destination.check_filled().unwrap();
    destination.qmp().execute("cont", Value::Null).unwrap();
    assert!(destination.wait_counting(WITHIN).unwrap() > counter);
}

/// Sets up a QEMU as a user would without towline.
fn set(qemu: &Qemu, lanes: u64, method: &str) {
    let on = |name| json!({ "capability": name, "state": true });
    let capabilities = json!({ "capabilities": [on("multifd"), on("return-path")] });
    qemu.qmp().execute("migrate-set-capabilities", capabilities).unwrap();
    let parameters = json!({
        "multifd-channels": lanes,
        "multifd-compression": method,
        "max-bandwidth": 1_u64 << 40,
    });
    qemu.qmp().execute("migrate-set-parameters", parameters).unwrap();
}

fn parameters(qemu: &Qemu) -> Value {
    qemu.qmp().execute("query-migrate-parameters", Value::Null).unwrap()
}

/// Each method has one of the numbers of lanes; with all four tests each pair of QEMU, method and number is there.
fn through_an_image(from: Version, to: Version, machine: Version, lanes: [&str; METHODS.len()]) {
    for (method, lanes) in METHODS.into_iter().zip(lanes) {
        let directory = scratch();
        let image = in_directory(&directory, "guest.img");
        let source = boot(from, machine);
        let before = parameters(&source);
        copy(method, &["--multifd-channels", lanes, &qmp(&source), &image]);
        assert_eq!(parameters(&source), before);
        let destination = builder(to, machine).incoming_defer().start().unwrap();
        let to = qmp(&destination);
        copy(method, &["--multifd-channels", lanes, "--verify", "--paused", &image, &to]);
        prove_equal(&source, &destination);
    }
}

fn relayed(from: Version, to: Version, machine: Version, method: &str) {
    let source = boot(from, machine);
    let destination = builder(to, machine).incoming_defer().start().unwrap();
    copy(method, &["--paused", &qmp(&source), &qmp(&destination)]);
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    prove_equal(&source, &destination);
}

macro_rules! tests {
    ($($name:ident: $call:expr;)*) => {$(
        #[test]
        fn $name() {
            if require_lab(stringify!($name)) {
                $call;
            }
        }
    )*};
}

const V10_0: Version = Version::V10_0;
const V7_2: Version = Version::V7_2;

tests! {
    qemu_10_0_to_an_image_and_back: through_an_image(V10_0, V10_0, V10_0, ["1", "4"]);
    qemu_7_2_to_an_image_and_back: through_an_image(V7_2, V7_2, V7_2, ["4", "1"]);
    up_through_an_image: through_an_image(V7_2, V10_0, V7_2, ["1", "4"]);
    down_through_an_image: through_an_image(V10_0, V7_2, V7_2, ["4", "1"]);
    qemu_10_0_relayed_with_zstd: relayed(V10_0, V10_0, V10_0, "zstd");
    qemu_10_0_relayed_with_zlib: relayed(V10_0, V10_0, V10_0, "zlib");
    up_relayed_with_zstd: relayed(V7_2, V10_0, V7_2, "zstd");
    down_relayed_with_zstd: relayed(V10_0, V7_2, V7_2, "zstd");
}

#[test]
fn compression_levels_are_those_of_qemu() {
    if !require_lab("compression_levels_are_those_of_qemu") {
        return;
    }
    let directory = scratch();
    let image = in_directory(&directory, "guest.img");
    let source = boot(V10_0, V10_0);
    copy("zstd:20", &["--multifd-channels", "1", &qmp(&source), &image]);
    for method in ["zlib:9", "zstd:20"] {
        let destination = builder(V10_0, V10_0).incoming_defer().start().unwrap();
        copy(method, &["--multifd-channels", "1", "--paused", &image, &qmp(&destination)]);
        prove_equal(&source, &destination);
    }
}

#[test]
fn a_source_with_another_compression_is_refused_with_both_methods() {
    if !require_lab("a_source_with_another_compression_is_refused_with_both_methods") {
        return;
    }
    let source = boot(V10_0, V10_0);
    for (theirs, ours) in [("zlib", "zstd"), ("none", "zlib"), ("zstd", "none")] {
        let directory = scratch();
        let (socket, image) = (in_directory(&directory, "socket"), in_directory(&directory, "guest.img"));
        let here = format!("unix:{socket}");
        let mut towline = start_copy(&["--multifd-channels", "2", "--compression", ours, &here, &image]);
        // Its socket has a name before it listens.
        towline.listens_at(WITHIN).unwrap();
        set(&source, 2, theirs);
        source.qmp().execute("migrate", json!({ "uri": here })).unwrap();
        let finished = towline.wait(WITHIN).unwrap();
        assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
        let text = format!(
            "compression method {theirs} on a lane, expected {ours} (multifd-compression differs between the two ends; here it is --compression)"
        );
        assert!(finished.stderr.contains(&text), "{}", finished.stderr);
        assert!(!Path::new(&image).exists());
        source.qmp().wait_migration("failed", WITHIN).unwrap();
        source.qmp().wait_status("running", WITHIN).unwrap();
        source.wait_counting(WITHIN).unwrap();
    }
}

#[test]
fn a_destination_with_another_compression_is_refused() {
    if !require_lab("a_destination_with_another_compression_is_refused") {
        return;
    }
    let directory = scratch();
    let image = in_directory(&directory, "guest.img");
    let source = boot(V10_0, V10_0);
    copy("zstd", &[&qmp(&source), &image]);
    let destination = builder(V10_0, V10_0).paused().incoming_defer().start().unwrap();
    set(&destination, 2, "zlib");
    let there = format!("unix:{}", in_directory(&directory, "there"));
    let incoming = json!({ "uri": there, "exit-on-error": false });
    destination.qmp().execute("migrate-incoming", incoming).unwrap();
    let output = refused(1, &["--multifd-channels", "2", "--compression", "zstd", &image, &there]);
    assert!(output.contains(&there) && output.contains("multifd-compression is not zstd"), "{output}");
    assert!(output.contains("the guest: in its image, which is as it was"), "{output}");
}

#[test]
fn compression_without_effect_is_refused() {
    let output = refused(2, &["--compression", "zlib", "--multifd-channels", "0", "qmp:/nowhere", "a.img"]);
    let wanted = "towline: --compression zlib with 0 lanes: only lanes are compressed, the main channel never is; give both ends the same --multifd-channels, at least 1\n";
    assert_eq!(output, wanted);
    let output = refused(2, &["--compression", "zstd", "tcp:127.0.0.1:0", "a.img"]);
    assert!(output.starts_with("towline: --compression zstd with 0 lanes"), "{output}");
    let output = refused(2, &["--compression", "zstd", "a.img", "b.img"]);
    assert!(output.starts_with("towline: --compression zstd between two images"), "{output}");
    let output = refused(2, &["--compression", "qpl", "qmp:/nowhere", "a.img"]);
    assert!(output.contains("'qpl'") && output.contains("none, zlib, zstd"), "{output}");
    let output = refused(2, &["--compression", "zlib:10", "qmp:/nowhere", "a.img"]);
    assert!(output.contains("'zlib:10'") && output.contains("a whole number from 0 to 9"), "{output}");
}
