//! A destination whose memory consists of huge pages receives them whole.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use towline_lab::{BootSector, Builder, Qemu, Version, require_lab, skip};

use crate::support::{
    Scratch, WITHIN, assert_each_page_once, assert_ended, completed, prove_alive, qmp, run, small, statuses,
    store, waiting,
};

const POOL: &str = "/proc/sys/vm/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// 64 MiB of 2 MiB each, and a few.
const PAGES: u64 = 36;

/// The machine has one pool: a test that finds enough free pages would not see that another one is about to take them.
static POOL_USER: Mutex<()> = Mutex::new(());

/// Huge pages, some of them allocated for the test.
struct HugePages {
    before: u64,
    _user: MutexGuard<'static, ()>,
}

fn read(path: &str) -> u64 {
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

impl HugePages {
    /// Reserves them. `None`, with the printed skip of `test`, without the lab or if there are too few and no more can be
    /// allocated.
    fn reserve(test: &str) -> Option<Self> {
        if !require_lab(test) {
            return None;
        }
        let user = POOL_USER.lock().unwrap_or_else(PoisonError::into_inner);
        let before = read(POOL);
        let pages = Self { before, _user: user };
        if read(FREE) < PAGES {
            let _ = fs::write(POOL, (before + PAGES).to_string());
        }
        if read(FREE) >= PAGES {
            return Some(pages);
        }
        skip(test, &format!("{PAGES} huge pages of 2 MiB cannot be allocated ({POOL})"));
        None
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if read(POOL) != self.before {
            let _ = fs::write(POOL, self.before.to_string());
        }
    }
}

fn huge() -> Builder {
    let memory = "memory-backend-memfd,id=pc.ram,size=64M,share=on,hugetlb=on,hugetlbsize=2M";
    let machine = "pc-q35-10.0,memory-backend=pc.ram";
    let builder = Qemu::builder(Version::V10_0).machine(machine).memory_mib(64);
    builder.boot_sector(BootSector::default()).args(["-object", memory])
}

#[test]
fn memory_of_huge_pages_comes_a_huge_page_at_a_time() {
    let name = "memory_of_huge_pages_comes_a_huge_page_at_a_time";
    let Some(_pages) = HugePages::reserve(name) else { return };
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
    let Some(_pages) = HugePages::reserve(name) else { return };
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
