use std::os::unix::fs::FileExt as _;

use super::*;
use crate::message::VringAddress;

fn file() -> File {
    memfd_create("record", MemfdFlags::CLOEXEC).unwrap().into()
}

fn open(file: &File, queues: usize) -> Result<InFlightRecord, RecordError> {
    InFlightRecord::open(file.as_fd().try_clone_to_owned().unwrap(), queues, "it")
}

fn address() -> VringAddress {
    let [descriptors, available, used] = [0x1000, 0x2000, 0x3000];
    VringAddress { index: 0, flags: 0, descriptors, used, available, log: 0 }
}

#[test]
fn marked_heads_are_recovered_in_order() {
    let file = file();
    let queue = open(&file, 2).unwrap().queue(1);
    queue.begin(8, &address(), 7, 7);
    for (seq, head) in [(1, 5), (2, 3), (3, 0)] {
        queue.mark(head, seq);
    }
    queue.clear(3);
    let queue = open(&file, 2).unwrap().queue(1);
    let found = queue.recover(8, &address(), 7, |_| unreachable!("no chain was published"));
    assert_eq!(found, Some(queue::RecoveredRing { heads: vec![5, 0], published: 7, last_avail_idx: 9 }));
}

#[test]
fn a_record_of_another_ring_is_discarded() {
    let file = file();
    let queue = open(&file, 1).unwrap().queue(0);
    queue.begin(8, &address(), 7, 7);
    queue.mark(1, 1);
    let elsewhere = VringAddress { used: 0x4000, ..address() };
    assert_eq!(queue.recover(8, &elsewhere, 7, |_| 0), None);
    assert_eq!(queue.recover(16, &address(), 7, |_| 0), None);
    assert_eq!(queue.recover(8, &address(), 6, |_| 0), None, "the ring was reset in between");
    queue.begin_publish(9);
    assert_eq!(queue.recover(8, &address(), 9, |_| 8), None, "the used ring has no such head");
    queue.end();
    assert_eq!(queue.recover(8, &address(), 7, |_| 0), None, "it was stopped in order");
}

/// Error of a record in which these bytes were changed.
fn error_of_damaged(offset: usize, value: u64) -> String {
    let file = file();
    let record = open(&file, 2).unwrap();
    let queue = record.queue(1);
    queue.begin(8, &address(), 7, 7);
    queue.mark(0, 4);
    file.write_all_at(&value.to_le_bytes(), offset as u64).unwrap();
    open(&file, 2).unwrap_err().to_string()
}

#[test]
fn impossible_values_are_refused_by_name() {
    let queue = PAGE + QUEUE_BYTES;
    for (offset, value, expected) in [
        (0, 5, "it is not a record of descriptors in flight; name another file, or remove it"),
        (8, 2 | 2 << 32, "the record of descriptors in flight it has version 2, expected 1"),
        (8, 1 | 3 << 32, "the record of descriptors in flight it has 3 queues, expected 2"),
        (16, 64, "it is not a record of descriptors in flight"),
        (queue, 2, "it is damaged: queue 1: its state is 2, expected 0 or 1"),
        (queue + 8, 6, "queue 1: its ring has 6 entries, expected a power of two up to 32768"),
        (queue + 8, 1 << 40, "queue 1: its ring has 1099511627776 entries"),
        (queue + 48, 16, "queue 1: 16 chains were published, expected 7 to 8 more"),
        (queue + 48, 6, "queue 1: 6 chains were published, expected 7 to 8 more"),
        (queue + PAGE + 8, 4, "queue 1: two heads have the same sequence number"),
    ] {
        let found = error_of_damaged(offset, value);
        assert!(found.contains(expected), "{found}\n  instead of {expected}");
    }
}

#[test]
fn files_of_any_other_length_are_refused() {
    for length in [1, PAGE as u64 - 1, PAGE as u64, 3 * PAGE as u64] {
        let file = file();
        ftruncate(&file, length).unwrap();
        let error = open(&file, 1).unwrap_err().to_string();
        assert_eq!(error, "it is not a record of descriptors in flight; name another file, or remove it");
    }
    let file = file();
    drop(open(&file, 1).unwrap());
    ftruncate(&file, (PAGE + QUEUE_BYTES - 8) as u64).unwrap();
    let error = open(&file, 1).unwrap_err().to_string();
    assert!(error.contains("has 270328 bytes, expected 270336"), "{error}");
}

#[test]
fn two_processes_do_not_share_one() {
    let path = tempfile::NamedTempFile::new().unwrap();
    let open = || {
        let file = File::options().read(true).write(true).open(path.path()).unwrap();
        InFlightRecord::open(file.into(), 1, "it")
    };
    let first = open().unwrap();
    assert!(matches!(open().unwrap_err(), RecordError::InUse { .. }));
    drop(first);
    // A process that another test is starting may have the descriptor for a moment.
    let freed = File::open(path.path()).unwrap();
    flock(&freed, FlockOperation::LockExclusive).unwrap();
    flock(&freed, FlockOperation::Unlock).unwrap();
    open().unwrap();
}

#[test]
fn a_record_whose_file_is_truncated_ends_with_its_process() {
    let file = file();
    let record = open(&file, 1).unwrap();
    let (queue, word) = (record.queue(0), record.device_word());
    word.store(7);
    assert_eq!(open(&file, 1).unwrap().device_word().load(), 7);
    queue.begin(8, &address(), 7, 7);
    assert!(queue.is_durable() && !queue.is_lost());
    ftruncate(&file, 0).unwrap();
    queue.mark(3, 1);
    assert!(queue.is_lost() && !queue.is_durable());
    queue.begin(8, &address(), 7, 7);
    queue.mark(5, 1);
    let found = queue.recover(8, &address(), 7, |_| unreachable!("no chain was published"));
    assert_eq!(
        found.map(|found| found.heads),
        Some(vec![5]),
        "a frontend that connects again to this process"
    );
}

#[test]
fn all_of_a_record_is_reserved_when_it_is_opened() {
    let file = file();
    let _record = open(&file, 2).unwrap();
    let has = file.metadata().unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::blocks(&has) * 512, has.len());
}
