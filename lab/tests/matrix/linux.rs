//! A real Linux, which itself reports the hash of its memory and its counter.

use towline_lab::{
    Builder, Kernel, LinuxGuest, Qemu, Version, require_kernel, require_lab, require_qemu, towline,
    wait_until,
};

use crate::support::{
    Row, Scratch, WITHIN, copy, copy_with, listen, listening_on, load_by_qemu, migrate, qmp, start_copy,
    store_by_qemu, wait_migrated, waiting,
};

const MIB: u64 = 1 << 20;

fn builder() -> Builder {
    // A part of the memory above 4 GiB, without the gigabytes that q35 would need for that.
    let machine = "pc-q35-10.0,max-ram-below-4g=128M";
    Qemu::builder(Version::V10_0).machine(machine).cpu("Nehalem").linux().memory_mib(320).processors(2)
}

/// A guest with filled memory, and the facts that it reported.
struct Known {
    source: Qemu,
    hash: String,
    tick: u64,
}

impl Known {
    fn boot() -> (Self, LinuxGuest) {
        let (source, mut guest) = builder().boot(WITHIN).unwrap();
        guest.fill(96 * MIB, 5).unwrap();
        let (hash, tick) = (guest.hash().unwrap(), guest.wait_ticking(WITHIN).unwrap());
        (Self { source, hash, tick }, guest)
    }

    /// Compares the paused destination, resumes it, and queries its agent.
    fn prove_moved_to(&self, destination: &Qemu) -> LinuxGuest {
        assert_eq!(destination.memory_hash().unwrap(), self.source.memory_hash().unwrap());
        destination.qmp().execute("cont", serde_json::Value::Null).unwrap();
        let mut guest = destination.linux(WITHIN).unwrap();
        assert!(guest.wait_ticking(WITHIN).unwrap() > self.tick);
        assert_eq!(guest.hash().unwrap(), self.hash);
        guest
    }
}

#[test]
fn through_an_image_streamed_handed_over_and_loaded_by_qemu() {
    if !require_lab("through_an_image_streamed_handed_over_and_loaded_by_qemu") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("guest.img");
    let (known, guest) = Known::boot();
    drop(guest);
    copy_with(4, &[&qmp(&known.source), image.to_str().unwrap()]);
    known.prove_moved_to(&load_by_qemu(builder(), &image, 4));
    for how in [&["--stream", "--verify", "--paused"][..], &["--verify", "--paused"]] {
        let destination = waiting(builder());
        copy(&[how, &[image.to_str().unwrap(), &qmp(&destination)]].concat());
        known.prove_moved_to(&destination);
    }
}

#[test]
#[ignore = "nightly"]
fn from_an_image_of_qemus() {
    if !require_lab("from_an_image_of_qemus") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("guest.img");
    let (known, guest) = Known::boot();
    drop(guest);
    store_by_qemu(&known.source, &image, 2);
    let destination = waiting(builder());
    copy(&["--stream", "--paused", image.to_str().unwrap(), &qmp(&destination)]);
    known.prove_moved_to(&destination);
}

#[test]
#[ignore = "nightly"]
fn between_two_sockets() {
    if !require_lab("between_two_sockets") {
        return;
    }
    let (known, guest) = Known::boot();
    drop(guest);
    let destination = waiting(builder().paused());
    let there = listen(&destination, 4);
    let mut towline = start_copy(&["--json", "--multifd-channels", "4", "tcp:127.0.0.1:0", &there]);
    migrate(&known.source, &listening_on(&mut towline), 4);
    towline.wait_done(WITHIN).unwrap();
    wait_migrated(&known.source);
    destination.qmp().wait_migration("completed", WITHIN).unwrap();
    known.prove_moved_to(&destination);
}

/// Starts writing before a copy; returns the pages written before the copy began.
fn dirtying(guest: &mut LinuxGuest) -> u64 {
    guest.dirty(48 * MIB, 24 * MIB).unwrap();
    let pages = 24 * MIB / 4096;
    wait_until("guest that writes", WITHIN, || {
        let written = guest.dirtied_pages()?;
        Ok((written > pages).then_some(written))
    })
    .unwrap()
}

fn check_written(guest: &mut LinuxGuest, before: u64) {
    assert_eq!(guest.check().unwrap(), 24 * MIB / 4096);
    wait_until("guest that writes on", WITHIN, || Ok((guest.dirtied_pages()? > before).then_some(())))
        .unwrap();
    guest.stop_dirtying().unwrap();
    guest.check().unwrap();
}

#[test]
#[ignore = "nightly"]
fn writing_while_it_is_relayed() {
    if !require_lab("writing_while_it_is_relayed") {
        return;
    }
    for lanes in [0, 4] {
        let (known, mut guest) = Known::boot();
        let before = dirtying(&mut guest);
        drop(guest);
        let destination = waiting(builder());
        copy_with(lanes, &["--paused", &qmp(&known.source), &qmp(&destination)]);
        check_written(&mut known.prove_moved_to(&destination), before);
    }
}

#[test]
#[ignore = "nightly"]
fn writing_while_it_is_stored() {
    if !require_lab("writing_while_it_is_stored") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let (known, mut guest) = Known::boot();
    let before = dirtying(&mut guest);
    drop(guest);
    // Slow enough for several passes over the written range.
    copy_with(4, &["--max-bandwidth", "128M", "--downtime-limit", "150", &qmp(&known.source), &image]);
    let destination = waiting(builder());
    copy(&["--verify", "--stream", "--paused", &image, &qmp(&destination)]);
    check_written(&mut known.prove_moved_to(&destination), before);
}

#[test]
fn from_7_2_to_10_0() {
    if !require_lab("from_7_2_to_10_0") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let builder = |version| Row::Qemu7_2.builder_on(version).linux().processors(2).memory_mib(256);
    let (source, mut guest) = builder(Version::V7_2).boot(WITHIN).unwrap();
    guest.fill(64 * MIB, 5).unwrap();
    let (hash, tick) = (guest.hash().unwrap(), guest.wait_ticking(WITHIN).unwrap());
    drop(guest);
    // See `Row::boot_on`.
    crate::support::stop(&source);
    copy(&[&qmp(&source), &image]);
    let destination = waiting(builder(Version::V10_0));
    copy(&["--verify", "--paused", &image, &qmp(&destination)]);
    Known { source, hash, tick }.prove_moved_to(&destination);
}

#[test]
#[ignore = "nightly"]
fn a_linux_7_moves_between_10_0_and_the_newest_qemu() {
    let name = "a_linux_7_moves_between_10_0_and_the_newest_qemu";
    if !require_qemu(name, &[Version::Newest]) || !require_kernel(name, Kernel::Newest) {
        return;
    }
    let builder = |version| {
        let builder = Qemu::builder(version).machine(Version::V10_0.machine()).cpu("Nehalem").linux();
        builder.kernel(Kernel::Newest).processors(2).args(["-device", "virtio-rng-pci"])
    };
    // A guest that was started in a QEMU with enlarged virtqueues cannot go to the newest; one that was
    // started there can return.
    let (first, second) = if Version::V10_0.enlarges_virtqueues().unwrap() {
        (Version::Newest, Version::V10_0)
    } else {
        (Version::V10_0, Version::Newest)
    };
    let (mut qemu, mut guest) = builder(first).boot(WITHIN).unwrap();
    let kernel = guest.kernel().unwrap();
    assert!(kernel.split('.').next().unwrap().parse::<u32>().unwrap() >= 7, "{kernel}");
    let before = dirtying(&mut guest);
    let mut tick = guest.wait_ticking(WITHIN).unwrap();
    drop(guest);
    for (version, lanes) in [(second, "4"), (first, "0")] {
        let there = waiting(builder(version));
        let line = ["move", "--multifd-channels", lanes, &qmp(&qemu), &qmp(&there)];
        let moved = towline(line).unwrap().wait(WITHIN).unwrap();
        assert_eq!(moved.status.code(), Some(0), "{}; there: {}", moved.stderr, there.stderr());
        let mut guest = there.linux(WITHIN).unwrap();
        let now = guest.wait_ticking(WITHIN).unwrap();
        assert!(now > tick, "the counter is {now}, before it was {tick}");
        assert_eq!(guest.check().unwrap(), 24 * MIB / 4096);
        (qemu, tick) = (there, now);
    }
    check_written(&mut qemu.linux(WITHIN).unwrap(), before);
}
