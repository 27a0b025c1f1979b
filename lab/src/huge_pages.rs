//! Huge pages of the machine, set aside for a test.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::skip;

const POOL: &str = "/proc/sys/vm/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// The machine has one pool: a test that finds enough free pages would not see that another one is about to
/// take them.
static POOL_USER: Mutex<()> = Mutex::new(());

/// Huge pages of 2 MiB, some of them allocated for the test.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
    _user: MutexGuard<'static, ()>,
}

impl HugePages {
    /// Reserves this many. `None`, with the printed skip of `test`, if there are too few and no more can be
    /// allocated.
    #[must_use]
    pub fn reserve(test: &str, count: u64) -> Option<Self> {
        let user = POOL_USER.lock().unwrap_or_else(PoisonError::into_inner);
        let before = read(POOL);
        let pages = Self { before, _user: user };
        if read(FREE) < count {
            // What was allocated is seen below.
            let _ = fs::write(POOL, (before + count).to_string());
        }
        if read(FREE) >= count {
            return Some(pages);
        }
        skip(test, &format!("{count} huge pages of 2 MiB cannot be allocated ({POOL})"));
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

fn read(path: &str) -> u64 {
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
