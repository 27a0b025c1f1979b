//! Memory that is touched for the first time while the guest arrives.

use super::Pair;
use crate::report::Findings;

/// Below this, the time of first touches is negligible.
const LARGE_BYTES: u64 = 4 << 30;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some(destination) = pair.destination_qemu() else { return };
    for backend in destination.memory_backends.iter().flatten() {
        if backend.bytes >= LARGE_BYTES && !backend.prealloc {
            findings.note(
                format!(
                    "memory {:?} of {} MiB there is touched for the first time while the guest arrives, which on many hosts costs more than the network",
                    backend.id,
                    backend.bytes >> 20
                ),
                "prealloc=on, or -mem-prealloc",
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;
    use crate::facts::MemoryBackend;

    #[test]
    fn only_large_ones_are_worth_a_word() {
        let count = |bytes, prealloc| {
            let backend = MemoryBackend { bytes, prealloc, ..MemoryBackend::default() };
            between(run, |_, destination| destination.memory_backends = Some(vec![backend])).len()
        };
        assert_eq!((count(1 << 30, false), count(8 << 30, false), count(8 << 30, true)), (0, 1, 0));
    }
}
