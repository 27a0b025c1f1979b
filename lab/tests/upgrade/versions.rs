//! Guests continue in another QEMU.

use std::process::Command;

use towline_lab::{HugePages, Version, require_lab, require_qemu, wait_until};

use crate::support::{Guest, MIB, Memory, WITHIN, builder, events, program};

/// Bytes that an upgrade sends: everything but the guest's RAM.
const SENT_MAX: u64 = MIB;

/// Of 2 MiB each: a guest of 256 MiB, and a few.
const HUGE_PAGES: u64 = 132;

fn sent(completed: &serde_json::Value) -> u64 {
    completed["ram"]["transferred"].as_u64().unwrap()
}

fn a_guest_goes_on(memory: Memory, from: Version, to: Version) -> Guest {
    let guest = Guest::boot(|place| builder(from, from, memory, place));
    let completed = guest.upgrade_to(to);
    println!("{from:?} to {to:?}, {memory:?}: {} ms, {} bytes", completed["downtime"], sent(&completed));
    assert_eq!(completed["source-state"], "ended");
    assert_eq!(completed["destination-state"], "running");
    wait_until("the old QEMU's end", WITHIN, || Ok(guest.first.exited()?.map(drop))).unwrap();
    guest.assert_runs_in(to);
    guest
}

#[test]
#[ignore = "nightly"]
fn a_guest_of_7_2_continues_in_10_0_and_then_in_another_10_0() {
    if !require_lab("a_guest_of_7_2_continues_in_10_0_and_then_in_another_10_0") {
        return;
    }
    let guest = a_guest_goes_on(Memory::Memfd, Version::V7_2, Version::V10_0);
    // The memory of the first is that of the second by a name of /proc, and the sockets have been renamed.
    let completed = guest.upgrade_to(Version::V10_0);
    assert!(sent(&completed) <= SENT_MAX, "{completed}");
    guest.assert_runs_in(Version::V10_0);
    assert_eq!(guest.qemus().len(), 1);
}

#[test]
fn a_guest_in_a_named_file_continues_and_its_pages_are_not_sent() {
    if !require_lab("a_guest_in_a_named_file_continues_and_its_pages_are_not_sent") {
        return;
    }
    let guest = a_guest_goes_on(Memory::NamedFile, Version::V10_0, Version::V10_0);
    let finished = guest.upgrade(&["--qemu", &program(Version::V10_0)], &[]).wait(WITHIN).unwrap();
    let completed = towline_lab::expect::completed(&finished);
    assert!(sent(&completed) <= SENT_MAX, "{completed}");
    // Clients of each socket have to connect again.
    for socket in [guest.first.directory().join("lab.qmp"), guest.first.serial_path()] {
        let text = format!("{} is the new QEMU's; its clients were disconnected", socket.display());
        assert!(
            events(&finished, "notice").iter().any(|event| event["text"] == text),
            "{text}: {}",
            finished.stdout
        );
    }
    guest.assert_runs_in(Version::V10_0);
}

/// QEMU 10.0 sends the pages of a memfd with any capabilities: they are received and dropped.
#[test]
#[ignore = "nightly"]
fn a_guest_of_10_0_in_a_memfd_continues() {
    if require_lab("a_guest_of_10_0_in_a_memfd_continues") {
        a_guest_goes_on(Memory::Memfd, Version::V10_0, Version::V10_0);
    }
}

#[test]
fn guests_of_7_2_and_10_0_continue_in_the_newest_and_back() {
    if !require_qemu("guests_of_7_2_and_10_0_continue_in_the_newest_and_back", &[Version::Newest]) {
        return;
    }
    let guest = a_guest_goes_on(Memory::Memfd, Version::V7_2, Version::Newest);
    // Its machine type is one that 10.0 has.
    guest.upgrade_to(Version::V10_0);
    guest.assert_runs_in(Version::V10_0);
    a_guest_goes_on(Memory::NamedFile, Version::V10_0, Version::Newest);
}

/// The blocks of several NUMA nodes are each mapped from a separate file.
#[test]
#[ignore = "nightly"]
fn memory_of_several_numa_nodes_is_not_sent() {
    if !require_lab("memory_of_several_numa_nodes_is_not_sent") {
        return;
    }
    let guest = Guest::boot(|place| {
        let nodes = ["m0", "m1"].into_iter().zip(0..).flat_map(|(id, cpu)| {
            let path = place.join(id).display().to_string();
            let object = format!("memory-backend-file,id={id},size=128M,mem-path={path},share=on");
            ["-object".to_owned(), object, "-numa".to_owned(), format!("node,memdev={id},cpus={cpu}")]
        });
        builder(Version::V10_0, Version::V10_0, Memory::Private, place).memory_mib(256).args(nodes)
    });
    let completed = guest.upgrade_to(Version::V10_0);
    assert!(sent(&completed) <= SENT_MAX, "{completed}");
    guest.assert_runs_in(Version::V10_0);
}

/// The new QEMU maps the same huge pages.
#[test]
fn huge_pages_are_not_sent() {
    let name = "huge_pages_are_not_sent";
    if !require_lab(name) {
        return;
    }
    let Some(_pages) = HugePages::reserve(name, HUGE_PAGES) else { return };
    let guest = Guest::boot(|place| {
        let object = "memory-backend-memfd,id=pc.ram,size=256M,share=on,hugetlb=on,hugetlbsize=2M";
        let machine = format!("{},memory-backend=pc.ram", Version::V7_2.machine());
        let builder = builder(Version::V7_2, Version::V7_2, Memory::Private, place).memory_mib(256);
        builder.machine(&machine).args(["-object", object])
    });
    let completed = guest.upgrade_to(Version::V10_0);
    assert!(sent(&completed) <= SENT_MAX, "{completed}");
    guest.assert_runs_in(Version::V10_0);
}

/// QEMU's locks are released and acquired as in a migration, and nothing that the guest wrote is lost.
#[test]
#[ignore = "nightly"]
fn drives_of_both_formats_keep_their_content() {
    if !require_lab("drives_of_both_formats_keep_their_content") {
        return;
    }
    let guest = Guest::boot(|place| {
        let mut arguments = Vec::new();
        for (format, id) in [("raw", "one"), ("qcow2", "two")] {
            let path = place.join(id).display().to_string();
            let made = Command::new("qemu-img").args(["create", "-q", "-f", format, &path, "64M"]).status();
            assert!(made.unwrap().success());
            arguments.extend(["-drive".into(), format!("file={path},format={format},if=none,id={id}")]);
            arguments.extend(["-device".into(), format!("virtio-blk-pci,drive={id},id=disk-{id}")]);
        }
        builder(Version::V10_0, Version::V10_0, Memory::NamedFile, place).args(arguments)
    });
    let mut linux = guest.linux();
    linux.shell("test -b /dev/vda && test -b /dev/vdb", WITHIN).unwrap();
    linux
        .shell(
            "for d in vda vdb; do head -c 8388608 /dev/urandom >/dev/$d; sync; md5sum /dev/$d; done >/sums",
            WITHIN,
        )
        .unwrap();
    drop(linux);
    guest.upgrade_to(Version::V10_0);
    guest.assert_runs_in(Version::V10_0);
    let mut linux = guest.linux();
    linux.shell("echo 3 >/proc/sys/vm/drop_caches; md5sum -c /sums", WITHIN).unwrap();
    linux.shell("echo again >/dev/vda && sync", WITHIN).unwrap();
    // The new QEMU has the locks.
    let path = guest.place.path().join("two").display().to_string();
    let second = Command::new("qemu-io").args(["-f", "qcow2", "-c", "quit", &path]).output().unwrap();
    let text =
        String::from_utf8_lossy(&second.stderr).into_owned() + &String::from_utf8_lossy(&second.stdout);
    assert!(!second.status.success() && text.contains("lock"), "{text}");
}

#[test]
#[ignore = "nightly"]
fn private_memory_is_copied_on_request() {
    if !require_lab("private_memory_is_copied_on_request") {
        return;
    }
    let guest = Guest::boot(|place| builder(Version::V10_0, Version::V10_0, Memory::Private, place));
    let page = guest.place.path().join("upgrade.html").display().to_string();
    let completed = guest.upgrade_with(Version::V10_0, &["--copy", "--report", &page]);
    assert!(sent(&completed) > 64 * MIB, "{completed}");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, downtime) = page.split_once("<h2>Downtime</h2>").unwrap();
    for part in ["> switchover</th>", "> cut-over</th>", "QEMU reports a downtime of "] {
        assert!(downtime.contains(part), "{part}: {page}");
    }
    guest.assert_runs_in(Version::V10_0);
}

/// A paused guest stays paused, and can be resumed.
#[test]
fn a_paused_guest_stays_paused() {
    if !require_lab("a_paused_guest_stays_paused") {
        return;
    }
    let guest = Guest::boot(|place| builder(Version::V10_0, Version::V10_0, Memory::NamedFile, place));
    guest.first.qmp().execute("stop", serde_json::Value::Null).unwrap();
    let page = guest.place.path().join("upgrade.html").display().to_string();
    let completed = guest.upgrade_with(Version::V10_0, &["--report", &page]);
    assert_eq!(completed["destination-state"], "paused");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("> switchover</th>") && page.contains("<td>done</td>"), "{page}");
    assert!(!page.contains("Downtime"), "a guest that is paused has none: {page}");
    let monitor = guest.monitor();
    assert_eq!(monitor.status().unwrap(), "paused");
    monitor.execute("cont", serde_json::Value::Null).unwrap();
    guest.assert_ticks();
}
