//! A real Linux, which hashes its memory while it is still arriving.

use towline_lab::{Builder, Qemu, Version, require_lab};

use crate::support::{
    Scratch, WITHIN, assert_each_page_once, assert_ended, completed, qmp, run, start, wait_running, waiting,
};

const MIB: u64 = 1 << 20;

fn builder() -> Builder {
    Qemu::builder(Version::V10_0).cpu("Nehalem").linux().memory_mib(256).processors(2)
}

/// Stores a Linux with `bytes` of content; returns its hash.
fn store(image: &str, bytes: u64) -> String {
    let (source, mut guest) = builder().boot(WITHIN).unwrap();
    guest.fill(bytes, 5).unwrap();
    let hash = guest.hash().unwrap();
    drop(guest);
    assert_ended(&run(&format!("copy {} {image}", qmp(&source))), 0, &[]);
    hash
}

#[test]
#[ignore = "nightly"]
fn linux_hashes_its_memory_while_it_arrives() {
    if !require_lab("linux_hashes_its_memory_while_it_arrives") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let hash = store(&image, 48 * MIB);
    for options in ["", "--postcopy-preempt --verify"] {
        let destination = waiting(&builder());
        let line =
            format!("copy --postcopy {options} --max-bandwidth 12M --json {image} {}", qmp(&destination));
        let mut towline = start(&line);
        wait_running(&mut towline);
        let mut guest = destination.linux(WITHIN).unwrap();
        assert_eq!(guest.hash().unwrap(), hash);
        guest.wait_ticking(WITHIN).unwrap();
        let completed = completed(&towline.wait(WITHIN).unwrap());
        assert!(completed["postcopy"]["faults"]["served"].as_u64().unwrap() > 0, "{completed}");
        assert_each_page_once(&completed);
        destination.qmp().wait_migration("completed", WITHIN).unwrap();
        assert_eq!(guest.hash().unwrap(), hash);
        std::fs::remove_file(scratch.path("guest.img.working-set.json")).unwrap();
    }
}

/// Restores it, hashes its memory while that arrives, and returns the number of its faults.
fn faults_of_a_restore(image: &str, hash: &str) -> u64 {
    let destination = waiting(&builder());
    let line = format!("copy --postcopy --max-bandwidth 6M --json {image} {}", qmp(&destination));
    let mut towline = start(&line);
    wait_running(&mut towline);
    let mut guest = destination.linux(WITHIN).unwrap();
    assert_eq!(guest.hash().unwrap(), hash);
    drop(guest);
    let completed = completed(&towline.wait(WITHIN).unwrap());
    completed["postcopy"]["faults"]["requests"].as_u64().unwrap()
}

#[test]
fn the_recorded_working_set_is_sent_first_the_next_time() {
    if !require_lab("the_recorded_working_set_is_sent_first_the_next_time") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let hash = store(&image, MIB);
    let first = faults_of_a_restore(&image, &hash);
    assert!(scratch.path("guest.img.working-set.json").is_file());
    let second = faults_of_a_restore(&image, &hash);
    println!("{second} faults, the first time {first}");
    assert!(second * 10 <= first, "{second} faults, the first time {first}");
}
