//! A destination whose memory consists of huge pages receives them whole.

use towline_lab::{Builder, HugePages, Qemu, Version, require_lab};

use crate::support::{
    Scratch, WITHIN, assert_each_page_once, assert_ended, completed, prove_alive, qmp, run, small, spinning,
    statuses, store, waiting,
};

/// 64 MiB of 2 MiB each, and a few.
const PAGES: u64 = 36;

fn huge() -> Builder {
    let memory = "memory-backend-memfd,id=pc.ram,size=64M,share=on,hugetlb=on,hugetlbsize=2M";
    let machine = "pc-q35-10.0,memory-backend=pc.ram";
    let builder = Qemu::builder(Version::V10_0).machine(machine).memory_mib(64);
    builder.boot_sector(spinning()).args(["-object", memory])
}

#[test]
fn memory_of_huge_pages_comes_a_huge_page_at_a_time() {
    let name = "memory_of_huge_pages_comes_a_huge_page_at_a_time";
    if !require_lab(name) {
        return;
    }
    let Some(_pages) = HugePages::reserve(name, PAGES) else { return };
    let scratch = Scratch::new();
    let image = scratch.text("guest.img");
    let count = store(&small(Version::V10_0), &image);
    for options in ["", " --postcopy-preempt", " --max-bandwidth 16M"] {
        let destination = waiting(&huge());
        let finished = run(&format!("copy --postcopy{options} --json {image} {}", qmp(&destination)));
        let completed = completed(&finished);
        assert_eq!(completed["destination-state"], "running");
        assert_each_page_once(&completed);
        prove_alive(&destination, count);
    }
}

#[test]
fn a_move_between_different_pages_is_refused_before_anything_is_sent() {
    let name = "a_move_between_different_pages_is_refused_before_anything_is_sent";
    if !require_lab(name) {
        return;
    }
    let Some(_pages) = HugePages::reserve(name, PAGES) else { return };
    let (source, destination) = (small(Version::V10_0).start().unwrap(), waiting(&huge()));
    let count = source.wait_counting(WITHIN).unwrap();
    let finished = run(&format!("move --postcopy {} {}", qmp(&source), qmp(&destination)));
    let remedy = "back both with the same pages, or leave --postcopy out";
    assert_ended(&finished, 1, &["in pages of 4096 bytes in the guest, there in pages of 2097152", remedy]);
    assert_eq!(statuses(&source), Vec::<String>::new(), "its migration never began");
    assert_eq!(destination.qmp().status().unwrap(), "inmigrate");
    assert!(source.wait_counting(WITHIN).unwrap() > count);
    let checked = run(&format!("check --postcopy {} {}", qmp(&source), qmp(&destination)));
    assert_ended(&checked, 1, &[]);
    assert!(checked.stdout.contains(remedy), "{}", checked.stdout);
}
