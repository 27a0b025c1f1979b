//! Checkpoints over a channel, from a primary that writes its bytes by hand.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use towline_channel::{Channel, ChannelExt, IoBuf, IoBufMut, PairChannel, RecvFlags, SendFlags, pair};
use towline_migration::checkpoints::{self, CheckpointQueue, CheckpointSink};
use towline_migration::incoming::{Connections, Options};
use towline_migration::{Error, Incoming, Memory, Session, Statistics};
use towline_protocol::colo::{Checkpoint, CheckpointBuffer, FirstCopy};
use towline_protocol::device_state;
use towline_protocol::{BlockIndex, PageRef};

const PAGE: usize = 4096;
const PAGES: u64 = 8;
const END: &[u8] = b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02";

fn send(channel: &PairChannel, bytes: &[u8]) {
    channel.send_all(&[IoBuf::from(bytes)], SendFlags::empty()).unwrap();
}

fn expect(channel: &PairChannel, bytes: &[u8]) {
    let mut found = vec![0; bytes.len()];
    channel.recv_exact(&mut [IoBufMut::from(&mut found[..])]).unwrap();
    assert_eq!(found, bytes);
}

/// A first copy whose pages are zero, with a return path and a ping.
fn first_stream() -> Vec<u8> {
    let total = ((PAGES * PAGE as u64) | 4).to_be_bytes();
    let length = (PAGES * PAGE as u64).to_be_bytes();
    let start = b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04";
    let head = b"QEVM\0\0\0\x03\x07\0\0\0\x06virt-9\x08\0\x01\0\0\x08\0\x02\0\x04\0\0\0\x01";
    let devices = device_state::encode(&[("timer", 2, b"0")]);
    [&head[..], start, &total, b"\x03ram", &length, END, b"\x03\0\0\0\x02", END, &devices].concat()
}

/// A checkpoint whose pages have this value, one of them in each.
fn checkpoint(value: u8) -> Vec<u8> {
    let word = ((u64::from(value) % PAGES * PAGE as u64) | 8).to_be_bytes();
    let zero = (((PAGES - 1) * PAGE as u64) | 0x22).to_be_bytes();
    let devices = device_state::encode(&[("timer", 2, &[value])]);
    let sections = &devices[..devices.iter().rposition(|&byte| byte == 0x7e).unwrap() + 5];
    let size = (sections.len() as u64 + 1).to_be_bytes();
    let page = [value; PAGE];
    [
        b"\x03\0\0\0\x02",
        &word[..],
        b"\x03ram",
        &page,
        &zero,
        &[0],
        END,
        &[0, 0, 0, 0, 4],
        &size,
        sections,
        &[0],
    ]
    .concat()
}

/// Receives the first copy; returns it with the primary's end and the memory.
fn protected() -> (PairChannel, Arc<dyn Channel>, Memory, FirstCopy) {
    let (primary, secondary) = pair(1 << 20);
    let secondary: Arc<dyn Channel> = Arc::new(secondary);
    let memory = Memory::adopting(1 << 20);
    send(&primary, &first_stream());
    let incoming =
        Incoming::new(Arc::new(Session::default()), Arc::new(Statistics::default()), Options::default());
    let first = incoming.run_first_copy(&Connections::single(Arc::clone(&secondary)), &memory).unwrap();
    // PONG 1, SHUT 0.
    expect(&primary, b"\0\x02\0\x04\0\0\0\x01\0\x01\0\x04\0\0\0\0");
    assert!(memory.is_committed());
    (primary, secondary, memory, first)
}

/// The primary of one checkpoint after the request.
fn answer(primary: &PairChannel, value: u8) {
    expect(primary, &[0, 0, 0, 2]);
    send(primary, &[0, 0, 0, 3]);
    send(primary, &checkpoint(value));
    expect(primary, &[0, 0, 0, 5, 0, 0, 0, 6]);
}

/// A ferry: its marks are sent to the test, and its checkpoints queued.
struct Ferry<'a> {
    queue: &'a CheckpointQueue,
    marks: Sender<u64>,
}

impl CheckpointSink for Ferry<'_> {
    fn buffer(&mut self) -> Result<CheckpointBuffer, Error> {
        self.queue.buffer()
    }

    fn mark(&mut self, number: u64) -> Result<(), Error> {
        self.marks.send(number).map_err(|_| Error::Cancelled)
    }

    fn put(&mut self, checkpoint: Checkpoint) -> Result<(), Error> {
        self.queue.put(checkpoint)
    }
}

#[test]
fn a_late_sender_delays_the_reply_and_never_the_guest() {
    let (primary, secondary, memory, first) = protected();
    let queue = CheckpointQueue::new((0..2).map(|_| CheckpointBuffer::new(1 << 20)).collect());
    let (marks, marked) = channel();
    thread::scope(|scope| {
        let taken =
            scope.spawn(|| checkpoints::take(secondary.as_ref(), first, &mut Ferry { queue: &queue, marks }));
        expect(&primary, &[0, 0, 0, 0]);
        // Both are acknowledged at once, though the sender has done nothing.
        for value in 1..=2 {
            send(&primary, &[0, 0, 0, 1]);
            answer(&primary, value);
            assert_eq!(marked.recv(), Ok(value.into()));
        }
        send(&primary, &[0, 0, 0, 1]);
        primary.set_timeouts(Some(Duration::from_millis(50)), None).unwrap();
        let replied = primary.recv(&mut [IoBufMut::from(&mut [0; 4][..])], RecvFlags::empty());
        assert!(replied.is_err(), "the guest runs while no buffer is free");
        primary.set_timeouts(None, None).unwrap();
        for value in 1..=2 {
            let checkpoint = queue.next().unwrap();
            assert_eq!(checkpoint.number(), value);
            checkpoints::apply(&checkpoint, &memory).unwrap();
            let mut page = [0; PAGE];
            memory.read(PageRef { block: BlockIndex(0), offset: value * PAGE as u64 }, &mut page);
            assert_eq!(page, [value as u8; PAGE]);
            assert_eq!(
                checkpoint.device_state().content(&checkpoint.device_state().devices()[0]),
                [value as u8]
            );
            queue.release(checkpoint);
        }
        answer(&primary, 3);
        queue.close();
        send(&primary, &[0, 0, 0, 1]);
        assert!(matches!(taken.join().unwrap(), Err(Error::Cancelled)));
        assert!(matches!(queue.next(), Err(Error::Cancelled)));
    });
}

#[test]
fn a_primary_that_ends_in_a_checkpoint_leaves_none() {
    let (primary, secondary, _memory, first) = protected();
    let queue = CheckpointQueue::new(vec![CheckpointBuffer::new(1 << 20)]);
    let (marks, marked) = channel();
    thread::scope(|scope| {
        let taken =
            scope.spawn(|| checkpoints::take(secondary.as_ref(), first, &mut Ferry { queue: &queue, marks }));
        expect(&primary, &[0, 0, 0, 0]);
        send(&primary, &[0, 0, 0, 1]);
        expect(&primary, &[0, 0, 0, 2]);
        send(&primary, &[0, 0, 0, 3]);
        let checkpoint = checkpoint(1);
        send(&primary, &checkpoint[..checkpoint.len() - 1]);
        assert_eq!(marked.recv(), Ok(1));
        drop(primary);
        let error = taken.join().unwrap().unwrap_err();
        assert!(error.to_string().ends_with("while the device state of a checkpoint was awaited"), "{error}");
    });
    queue.close();
    assert!(queue.next().is_err());
}

/// Passes a first copy on, and checkpoints of these values; returns the memory of the further secondary.
fn passed_on(values: &[u8]) -> Memory {
    let (primary, ferry) = pair(1 << 20);
    let (passing, standby) = pair(1 << 20);
    let [ferry, passing, standby]: [Arc<dyn Channel>; 3] =
        [Arc::new(ferry), Arc::new(passing), Arc::new(standby)];
    let memory = Memory::adopting(1 << 20);
    let queue = CheckpointQueue::new(vec![CheckpointBuffer::new(1 << 20)]);
    send(&primary, &first_stream());
    thread::scope(|scope| {
        let keeps = scope.spawn(|| {
            let incoming = Incoming::new(
                Arc::new(Session::default()),
                Arc::new(Statistics::default()),
                Options::default(),
            );
            let first = incoming.run_first_copy(&Connections::single(Arc::clone(&standby)), &memory).unwrap();
            checkpoints::take(standby.as_ref(), first, &mut Applied { memory: &memory }).unwrap_err()
        });
        let first = checkpoints::pass_on_first_copy(&ferry, &passing).unwrap();
        // Acknowledged once the further secondary has it, and awaits checkpoints.
        expect(&primary, b"\0\x02\0\x04\0\0\0\x01\0\x01\0\x04\0\0\0\0");
        let (marks, _marked) = channel();
        let taken = scope.spawn({
            let queue = &queue;
            move || checkpoints::take(ferry.as_ref(), first, &mut Ferry { queue, marks })
        });
        expect(&primary, &[0, 0, 0, 0]);
        for value in values {
            send(&primary, &[0, 0, 0, 1]);
            answer(&primary, *value);
            let checkpoint = queue.next().unwrap();
            checkpoints::pass_on(passing.as_ref(), &checkpoint).unwrap();
            queue.release(checkpoint);
        }
        queue.close();
        primary.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(taken.join().unwrap().is_err());
        passing.shutdown(std::net::Shutdown::Both).unwrap();
        assert!(matches!(keeps.join().unwrap(), Error::Ended { .. }));
    });
    memory
}

/// A secondary that writes checkpoints to its memory.
struct Applied<'a> {
    memory: &'a Memory,
}

impl CheckpointSink for Applied<'_> {
    fn buffer(&mut self) -> Result<CheckpointBuffer, Error> {
        Ok(CheckpointBuffer::new(1 << 20))
    }

    fn mark(&mut self, _number: u64) -> Result<(), Error> {
        Ok(())
    }

    fn put(&mut self, checkpoint: Checkpoint) -> Result<(), Error> {
        checkpoints::apply(&checkpoint, self.memory)
    }
}

#[test]
fn a_further_secondary_has_what_was_passed_on_to_it() {
    let memory = passed_on(&[1, 2, 9]);
    let page = |index: u64| {
        let mut bytes = [0; PAGE];
        memory.read(PageRef { block: BlockIndex(0), offset: index * PAGE as u64 }, &mut bytes);
        bytes
    };
    // 9 is at the place of 1.
    assert_eq!((page(1), page(2), page(3)), ([9; PAGE], [2; PAGE], [0; PAGE]));
}
