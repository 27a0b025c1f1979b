//! Body of the fuzz target `vsock_packet`: arbitrary packets and events of the host's side against the table.
#![allow(dead_code, unreachable_pub, reason = "the fuzz target uses it")]

use towline_vsock::packet::{Operation, PacketHeader, SeqFlags, ShutdownFlags};
use towline_vsock::{ConnectionId, ConnectionLimits, ConnectionTable, Inbound, PENDING_RESETS_MAX};

const CID: u64 = 3;
const CONNECTIONS: usize = 8;
const MEMORY: u64 = 256 << 10;

/// Bytes of one step.
const STEP: usize = 16;

/// Runs an input. Each step is 16 bytes: event, port, operation, type, flags, length, credit.
pub fn packets(data: &[u8]) {
    let limits = ConnectionLimits {
        connections: CONNECTIONS,
        buf_alloc: 64 << 10,
        memory: MEMORY,
        ..ConnectionLimits::default()
    };
    let mut table = ConnectionTable::new(CID, limits, 0);
    let mut ids: Vec<ConnectionId> = Vec::new();
    for step in data.chunks_exact(STEP) {
        let word = |at: usize| u32::from_le_bytes(step[at..at + 4].try_into().expect("four bytes"));
        let id = ids.get(usize::from(step[1]) % ids.len().max(1)).copied();
        match (step[0] % 8, id) {
            (0..=3, _) => {
                if let Some(id) = packet(&mut table, step, word) {
                    ids.push(id);
                }
            }
            (4, _) => ids.extend(table.open(u32::from(step[1] % 4), kind(step[3]), 2)),
            (5, Some(id)) => {
                table.established(id);
                table.forwarded(id, word(8).min(table.unforwarded(id)));
            }
            (6, Some(id)) => host(&mut table, id, step[2], word(8)),
            _ => control(&mut table, usize::from(step[1])),
        }
        assert!(
            table.len() <= CONNECTIONS
                && table.control_queue_len() <= PENDING_RESETS_MAX + 2 * CONNECTIONS + 2
        );
        let kept: u64 = ids.iter().map(|id| u64::from(table.unforwarded(*id))).sum();
        assert!(kept <= table.reserved(), "{kept} bytes are buffered, {} are reserved", table.reserved());
        assert!(table.reserved() <= MEMORY, "{} bytes are reserved", table.reserved());
        ids.retain(|id| table.get(*id).is_some());
    }
    control(&mut table, usize::MAX);
    assert_eq!(table.control_queue_len(), 0);
}

fn kind(byte: u8) -> towline_vsock::packet::SocketType {
    use towline_vsock::packet::SocketType;
    if byte & 1 == 0 { SocketType::Stream } else { SocketType::Seqpacket }
}

fn packet(table: &mut ConnectionTable, step: &[u8], word: impl Fn(usize) -> u32) -> Option<ConnectionId> {
    let header = PacketHeader {
        source_cid: if step[0] & 0x80 == 0 { CID } else { u64::from(word(8)) },
        destination_cid: 2,
        source_port: u32::from(step[1] % 4),
        destination_port: u32::from(step[1] >> 6),
        len: u32::from(u16::from_le_bytes([step[6], step[7]])),
        kind: u16::from(step[3] % 4),
        operation: u16::from(step[2] % 10),
        flags: u32::from(step[4]),
        buf_alloc: word(8),
        fwd_cnt: word(12),
    };
    let before = table.accepts_packets();
    let inbound = table.receive_from_guest(&header, header.len.saturating_sub(u32::from(step[5] & 1)));
    assert!(before || !table.accepts_packets());
    match inbound {
        Inbound::Connect(id) => {
            assert_eq!(Operation::from_number(header.operation), Some(Operation::Request));
            Some(id)
        }
        Inbound::Payload(id, _) => {
            assert!(table.unforwarded(id) >= header.len);
            None
        }
        _ => None,
    }
}

fn host(table: &mut ConnectionTable, id: ConnectionId, what: u8, amount: u32) {
    match what % 5 {
        0 => table.shutdown(id, ShutdownFlags::SEND),
        1 => table.shutdown(id, ShutdownFlags::RECEIVE),
        2 => table.close(id),
        3 => table.reset(id),
        _ => {
            let len = table.peer_credit(id).min(amount).min(65536);
            if let Some(mut headers) = table.data_headers(id).filter(|_| len > 0) {
                let header = headers.next(len, SeqFlags::empty());
                assert_eq!({ header.len }, len);
            }
        }
    }
}

fn control(table: &mut ConnectionTable, most: usize) {
    for _ in 0..most {
        let Some(header) = table.next_control() else { return };
        assert!(Operation::from_number(header.operation).is_some());
        assert_eq!((header.len, header.destination_cid == CID || header.source_cid == 2), (0, true));
    }
}

#[test]
fn arbitrary_packets_keep_the_table_within_its_limits() {
    let mut rng = fastrand::Rng::with_seed(3);
    for _ in 0..20_000 {
        let mut data = vec![0; STEP * rng.usize(1..100)];
        rng.fill(&mut data);
        // Small numbers are the interesting ones.
        for step in data.chunks_exact_mut(STEP) {
            if rng.bool() {
                step[9..12].fill(0);
                step[13..16].fill(0);
                step[0] &= 0x7f;
            }
        }
        packets(&data);
    }
}
