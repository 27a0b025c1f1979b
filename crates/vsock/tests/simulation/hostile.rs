//! Hostile guests against the table: memory stays bounded, and violations are answered with resets.

use towline_vsock::packet::{HOST_CID, Operation, PacketHeader, SeqFlags, ShutdownFlags, SocketType};
use towline_vsock::{
    ClosedBy, ConnectionLimits, ConnectionState, ConnectionTable, Inbound, PENDING_RESETS_MAX,
};

const CID: u64 = 9;

fn header(operation: Operation, port: u32) -> PacketHeader {
    PacketHeader {
        source_cid: CID,
        destination_cid: HOST_CID,
        source_port: port,
        destination_port: 80,
        kind: SocketType::Stream.number(),
        operation: operation.number(),
        buf_alloc: 1000,
        ..PacketHeader::default()
    }
}

fn limits(connections: usize) -> ConnectionLimits {
    ConnectionLimits { connections, ..ConnectionLimits::default() }
}

fn open(table: &mut ConnectionTable, port: u32) -> towline_vsock::ConnectionId {
    let Inbound::Connect(id) = table.receive_from_guest(&header(Operation::Request, port), 0) else {
        panic!("no connection")
    };
    table.established(id);
    let response = table.next_control().unwrap();
    assert_eq!({ response.operation }, Operation::Response.number());
    id
}

fn expect_reset(table: &mut ConnectionTable, port: u32) {
    let reset = table.next_control().unwrap();
    assert_eq!((reset.operation, reset.destination_port), (Operation::Reset.number(), port));
    assert_eq!(table.next_control(), None);
}

#[test]
fn half_open_connections_are_limited() {
    let mut table = ConnectionTable::new(CID, limits(1000), 0);
    for port in 0..1_000_000 {
        if !table.accepts_packets() {
            // Resets are sent before more packets are processed.
            while table.next_control().is_some() {}
        }
        table.receive_from_guest(&header(Operation::Request, port), 0);
        assert!(table.len() <= 1000 && table.control_queue_len() <= PENDING_RESETS_MAX);
    }
    assert_eq!(table.len(), 1000);
    assert_eq!(table.statistics().refused_by_limit, 999_000);
}

#[test]
fn closed_connections_leave_nothing_in_the_control_queue() {
    let mut table = ConnectionTable::new(CID, limits(1000), 0);
    for port in 0..1_000_000 {
        let Inbound::Connect(id) = table.receive_from_guest(&header(Operation::Request, port), 0) else {
            panic!("{port}")
        };
        table.established(id);
        assert_eq!(
            table.receive_from_guest(&header(Operation::Reset, port), 0),
            Inbound::Closed(id, ClosedBy::Guest)
        );
        assert!(table.is_empty() && table.control_queue_len() <= 16, "{}", table.control_queue_len());
    }
    assert_eq!(table.next_control(), None);
}

#[test]
fn windows_are_reserved_within_the_limit_of_memory() {
    let memory = 1 << 20;
    let most = (memory / ConnectionLimits::cost(16 << 10, SocketType::Stream)) as usize;
    let mut table = ConnectionTable::new(CID, ConnectionLimits { memory, ..limits(100_000) }, 0);
    for port in 0..100_000 {
        table.receive_from_guest(&header(Operation::Request, port), 0);
        assert!(table.len() <= most, "{} connections of 16 KiB in 1 MiB", table.len());
        while !table.accepts_packets() {
            table.next_control();
        }
    }
    assert_eq!(table.len(), most);
}

#[test]
fn packets_of_unknown_connections_are_answered_with_resets_except_resets() {
    let mut table = ConnectionTable::new(CID, limits(10), 0);
    for operation in [
        Operation::Response,
        Operation::Shutdown,
        Operation::ReadWrite,
        Operation::CreditUpdate,
        Operation::CreditRequest,
    ] {
        assert_eq!(table.receive_from_guest(&header(operation, 5), 0), Inbound::Nothing);
        expect_reset(&mut table, 5);
    }
    table.receive_from_guest(&header(Operation::Reset, 5), 0);
    assert_eq!(table.next_control(), None);
    // An invalid type, and an invalid operation.
    for odd in [
        PacketHeader { kind: 3, ..header(Operation::Request, 6) },
        PacketHeader { operation: 0, ..header(Operation::Request, 6) },
    ] {
        table.receive_from_guest(&odd, 0);
        expect_reset(&mut table, 6);
    }
    // A forged source CID.
    let forged = PacketHeader { source_cid: 77, ..header(Operation::Request, 7) };
    assert_eq!(table.receive_from_guest(&forged, 0), Inbound::Nothing);
    assert_eq!((table.next_control(), table.statistics().dropped), (None, 1));
}

#[test]
fn a_violation_resets_the_connection() {
    let data = |len: u32| PacketHeader { len, ..header(Operation::ReadWrite, 5) };
    let cases: [(&str, Vec<(PacketHeader, u32)>); 8] = [
        ("more than its window", (0..9).map(|_| (data(60_000), 60_000)).collect()),
        ("a header that exceeds the packet", vec![(data(100), 99)]),
        ("more than the maximum payload", vec![(data(70_000), 70_000)]),
        (
            "a fwd_cnt beyond the bytes sent",
            vec![(PacketHeader { fwd_cnt: 1, ..header(Operation::CreditUpdate, 5) }, 0)],
        ),
        (
            "data after a shutdown",
            vec![
                (PacketHeader { flags: ShutdownFlags::SEND.bits(), ..header(Operation::Shutdown, 5) }, 0),
                (data(1), 1),
            ],
        ),
        ("another socket type", vec![(PacketHeader { kind: 2, ..data(1) }, 1)]),
        ("a response without a request", vec![(header(Operation::Response, 5), 0)]),
        ("a second request", vec![(header(Operation::Request, 5), 0)]),
    ];
    for (what, packets) in cases {
        let mut table = ConnectionTable::new(CID, limits(10), 0);
        let id = open(&mut table, 5);
        let last = packets
            .iter()
            .map(|(header, payload)| table.receive_from_guest(header, *payload))
            .find(|inbound| matches!(inbound, Inbound::Closed(..)));
        assert_eq!(last, Some(Inbound::Closed(id, ClosedBy::Violation)), "{what}");
        assert_eq!(table.get(id).unwrap().state, ConnectionState::Resetting, "{what}");
        expect_reset(&mut table, 5);
        assert!(table.is_empty(), "{what}");
    }
}

#[test]
fn credit_may_shrink_to_nothing() {
    let mut table = ConnectionTable::new(CID, limits(10), 0);
    let id = open(&mut table, 5);
    assert_eq!(table.peer_credit(id), 1000);
    table.data_headers(id).unwrap().next(600, SeqFlags::empty());
    for (buf_alloc, credit) in [(100u32, 0), (0, 0), (700, 100), (u32::MAX, u32::MAX - 600)] {
        let update = PacketHeader { buf_alloc, ..header(Operation::CreditUpdate, 5) };
        assert_eq!(table.receive_from_guest(&update, 0), Inbound::Credit(id));
        assert_eq!(table.peer_credit(id), credit, "{buf_alloc}");
    }
}

/// A guest that resets a connection while the device's own reset waits for a buffer leaves no state.
#[test]
fn a_reset_by_the_guest_removes_a_connection_that_is_being_reset() {
    let mut table = ConnectionTable::new(CID, limits(10), 0);
    let id = open(&mut table, 5);
    let data = PacketHeader { len: 100, ..header(Operation::ReadWrite, 5) };
    assert_eq!(table.receive_from_guest(&data, 100), Inbound::Payload(id, SeqFlags::empty()));
    let shutdown = PacketHeader { flags: ShutdownFlags::SEND.bits(), ..header(Operation::Shutdown, 5) };
    assert_eq!(table.receive_from_guest(&shutdown, 0), Inbound::Shutdown(id));
    table.reset(id);
    assert_eq!(
        table.receive_from_guest(&header(Operation::Reset, 5), 0),
        Inbound::Closed(id, ClosedBy::Guest)
    );
    assert!(table.is_empty() && table.reserved() == 0);
    assert_eq!(table.next_control(), None);
}
