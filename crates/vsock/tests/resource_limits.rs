//! Neither a guest nor a client of the host can keep an idle device busy, keep it from stopping, make it use
//! more memory than is stated, or shut out other clients.
//!
//! The tests run one at a time, because CPU time and memory of the process are measured.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags, SocketAddrUnix};
use towline_frontend::vsock::{
    BUF_ALLOC, HOST_CID, PacketHeader, PortPair, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, VsockEvent, VsockGuest, op,
};
use towline_frontend::{Queue, QueueBuffer, QueueOptions};
use towline_vsock::ConnectionLimits;

use common::{CID, Served, TIMEOUT, bytes, listen_seqpacket, poll_until, seqpacket_socket};

/// `VIRTIO_VSOCK_SEQ_EOM`.
const END_OF_MESSAGE: u32 = 1;
/// Time for which an idle device is observed, and maximum CPU time in it.
const OBSERVED: Duration = Duration::from_millis(500);
const CPU_TIME_MAX: Duration = Duration::from_millis(50);
/// Limit of a guest's memory where that is measured, and tolerance for the driver and the allocator.
const MEMORY: u64 = 2 << 20;
const MEMORY_OTHERS: u64 = 1 << 20;

/// Locks out the other tests.
fn exclusive() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the CPU time of all workers in this process.
fn cpu_time() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
    let ticks = stats.filter(|stat| stat.contains("(vsock-0)")).map(|stat| {
        let fields: Vec<u64> = stat
            .rsplit(')')
            .next()
            .unwrap()
            .split_whitespace()
            .map(|field| field.parse().unwrap_or(0))
            .collect();
        fields[11] + fields[12]
    });
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// Asserts that the device becomes idle: it uses no CPU time then. It needs a moment, and more on a busy host.
fn assert_becomes_idle(guest: &mut VsockGuest) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let (before, since) = (cpu_time(), Instant::now());
        while let Some(left) = OBSERVED.checked_sub(since.elapsed()) {
            guest.wait(false, left).unwrap();
            guest.poll(|_, _| ()).unwrap();
        }
        let used = cpu_time() - before;
        if used <= CPU_TIME_MAX {
            return;
        }
        assert!(Instant::now() < deadline, "the idle device used {used:?} of {OBSERVED:?}");
    }
}

/// Returns the private memory of this process in bytes.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

fn message_header(ports: PortPair, len: usize, flags: u32) -> PacketHeader {
    PacketHeader {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: ports.0,
        dst_port: ports.1,
        len: u32::try_from(len).unwrap(),
        kind: 2,
        op: op::RW,
        flags,
        buf_alloc: BUF_ALLOC,
        fwd_cnt: 0,
    }
}

/// Waits until the device has processed `count` data packets.
fn wait_for_packets(served: &Served, guest: &mut VsockGuest, count: u64) {
    let deadline = Instant::now() + TIMEOUT;
    while served.device.report().statistics.totals.packets_from_guest < count {
        assert!(Instant::now() < deadline, "{:?}", served.device.report().statistics);
        guest.poll(|_, _| ()).unwrap();
    }
}

/// A message has more memory segments than one system call takes, most of them in a chain that is retained
/// already.
#[test]
fn a_message_with_more_segments_than_a_call_takes_arrives() {
    let _exclusive = exclusive();
    let served = Served::new(ConnectionLimits::default());
    let (mut frontend, mut guest) = served.guest_with_rings(2048);
    let listener = listen_seqpacket(&served.path("v_5000"));
    let ports = (6000, 5000);
    guest.request_seqpacket(ports);
    poll_until(&mut guest, |_, event| (event == VsockEvent::Connected(ports)).then_some(()));
    let host = rustix::net::accept(&listener).unwrap();
    let content = bytes(8192);
    // 1024 descriptors, which are retained: the message has no end yet.
    assert!(guest.put_in_pieces(&message_header(ports, content.len(), 0), &content, 8));
    guest.poll(|_, _| ()).unwrap();
    wait_for_packets(&served, &mut guest, 1);
    assert!(guest.put_in_pieces(&message_header(ports, 1, 0), b"+", 8));
    guest.poll(|_, _| ()).unwrap();
    // A device in an endless loop would process neither this nor a stop.
    wait_for_packets(&served, &mut guest, 2);
    assert!(guest.put_in_pieces(&message_header(ports, 1, END_OF_MESSAGE), b"!", 8));
    guest.poll(|_, _| ()).unwrap();
    let mut found = vec![0; 10_000];
    let (_, len) = rustix::net::recv(&host, &mut found[..], RecvFlags::empty()).unwrap();
    assert!(found[..len] == [&content[..], b"+!"].concat(), "{len} bytes");
    assert_becomes_idle(&mut guest);
    frontend.stop(1).unwrap();
}

/// The sender is killed in the middle of a message: its kernel ends both directions and resets the
/// connection.
#[test]
fn a_connection_with_an_unfinished_message_ends_with_its_sender() {
    let _exclusive = exclusive();
    let served = Served::new(ConnectionLimits::default());
    let (mut frontend, mut guest) = served.guest_with_rings(64);
    let listener = listen_seqpacket(&served.path("v_5000"));
    let ports = (6000, 5000);
    guest.request_seqpacket(ports);
    poll_until(&mut guest, |_, event| (event == VsockEvent::Connected(ports)).then_some(()));
    let host = rustix::net::accept(&listener).unwrap();
    assert!(guest.send(ports, b"whole", END_OF_MESSAGE));
    assert!(guest.send(ports, b"unfinished", 0));
    guest.poll(|_, _| ()).unwrap();
    wait_for_packets(&served, &mut guest, 2);
    guest.shutdown(ports, SHUTDOWN_RECEIVE | SHUTDOWN_SEND);
    guest.reset(ports);
    guest.poll(|_, _| ()).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while served.device.report().statistics.connections > 0 {
        assert!(Instant::now() < deadline, "{:?}", served.device.report().statistics);
        guest.poll(|_, _| ()).unwrap();
    }
    // The complete message is delivered, and nothing of the other one.
    let mut found = [0; 64];
    let (_, len) = rustix::net::recv(&host, &mut found[..], RecvFlags::empty()).unwrap();
    assert_eq!(&found[..len], b"whole");
    let (_, len) = rustix::net::recv(&host, &mut found[..], RecvFlags::empty()).unwrap();
    assert_eq!(len, 0);
    frontend.stop(1).unwrap();
}

/// Several threads of a client send empty messages faster than the device drops them.
#[test]
fn empty_messages_of_a_client_do_not_keep_a_device_from_stopping() {
    let _exclusive = exclusive();
    let served = Served::with_settings(ConnectionLimits::default(), CID, |settings, directory| {
        settings.uds_seqpacket = Some(directory.join("m"));
    });
    let (mut frontend, mut guest) = served.guest();
    let client = seqpacket_socket();
    rustix::net::connect(&client, &SocketAddrUnix::new(served.path("m")).unwrap()).unwrap();
    rustix::net::send(&client, b"CONNECT 22\n", SendFlags::empty()).unwrap();
    poll_until(&mut guest, |guest, event| match event {
        VsockEvent::Request(ports) => {
            guest.accept(ports);
            Some(())
        }
        _ => None,
    });
    guest.poll(|_, _| ()).unwrap();
    let (done, sent) = (AtomicBool::new(false), AtomicBool::new(false));
    let most = Instant::now() + Duration::from_secs(30);
    std::thread::scope(|scope| {
        for _ in 0..7 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) && Instant::now() < most {
                    // The connection may have been reset.
                    let _ = rustix::net::send(&client, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
                    sent.store(true, Ordering::Relaxed);
                }
            });
        }
        while !sent.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        for _ in 0..20 {
            let base = frontend.stop(0).unwrap();
            assert!(Instant::now() < most, "the device stops only when the client stops");
            frontend.start(guest.rx(), base).unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_becomes_idle(&mut guest);
}

/// The bookkeeping of messages is within the limit too: a guest sends messages of one byte to programs that
/// never read.
#[test]
fn messages_of_one_byte_use_no_more_memory_than_is_stated() {
    let _exclusive = exclusive();
    let served = Served::new(ConnectionLimits { memory: MEMORY, ..ConnectionLimits::default() });
    let (_frontend, mut guest) = served.guest_with_rings(1024);
    let listener = listen_seqpacket(&served.path("v_5000"));
    let mut hosts = Vec::new();
    let mut connected = Vec::new();
    for port in 0..1000 {
        let ports = (port, 5000);
        guest.request_seqpacket(ports);
        let is_connected = poll_until(&mut guest, |_, event| match event {
            VsockEvent::Connected(found) => Some(found == ports),
            VsockEvent::Reset(_) => Some(false),
            _ => None,
        });
        if !is_connected {
            break;
        }
        hosts.push(rustix::net::accept(&listener).unwrap());
        connected.push(ports);
    }
    assert!(connected.len() > 20, "{} connections", connected.len());
    let before = private_bytes();
    let mut idle = 0;
    while idle < 20 {
        let mut sent = false;
        for ports in &connected {
            for _ in 0..32 {
                sent |= guest.can_send() && guest.send(*ports, b"x", END_OF_MESSAGE);
            }
            guest.poll(|_, _| ()).unwrap();
        }
        idle = if sent { 0 } else { idle + 1 };
        if !sent {
            guest.wait(false, Duration::from_millis(10)).unwrap();
        }
    }
    let report = served.device.report();
    let grown = private_bytes().saturating_sub(before);
    assert!(report.buffered_bytes as u64 > MEMORY / 4, "{} bytes are buffered", report.buffered_bytes);
    let most = MEMORY + MEMORY / 10 + MEMORY_OTHERS;
    assert!(
        grown <= most,
        "with {} bytes buffered the process grew by {grown}, at most {most}",
        report.buffered_bytes
    );
    drop(hosts);
    assert_becomes_idle(&mut guest);
}

/// Messages in transit are within the limit too: those that do not fit into the guest's buffers wait for each
/// other.
#[test]
fn messages_wait_for_memory_and_arrive() {
    let _exclusive = exclusive();
    // Beside the windows there is memory for one message.
    let served = Served::new(ConnectionLimits { memory: 256 << 10, ..ConnectionLimits::default() });
    let (_frontend, mut guest) = served.guest_with_rings(16);
    let listener = listen_seqpacket(&served.path("v_5000"));
    let content = bytes(100_000);
    let mut hosts = Vec::new();
    for port in 0..3 {
        let ports = (port, 5000);
        guest.request_seqpacket(ports);
        poll_until(&mut guest, |_, event| (event == VsockEvent::Connected(ports)).then_some(()));
        hosts.push(rustix::net::accept(&listener).unwrap());
    }
    // The driver returns no buffers until then, so the first message is in transit when the others are ready.
    for host in &hosts {
        assert_eq!(rustix::net::send(host, &content, SendFlags::NOSIGNAL).unwrap(), content.len());
    }
    let (mut received, mut ended, memory) = ([0; 3], [0; 3], Arc::clone(guest.memory()));
    poll_until(&mut guest, |_, event| {
        if let VsockEvent::Data { ports, guest, len, flags } = event {
            let (port, len) = (ports.0 as usize, len as usize);
            let is_right = memory.bytes(guest, len) == content[received[port]..received[port] + len];
            assert!(is_right, "{len} bytes at {} of message {port}", received[port]);
            received[port] += len;
            ended[port] += flags & END_OF_MESSAGE;
        }
        (ended.iter().sum::<u32>() == 3).then_some(())
    });
    assert_eq!((received, ended), ([content.len(); 3], [1; 3]));
    let found = served.device.report().statistics;
    // The second may find the memory of the first released, and the third may wait for both others.
    assert!((1..=3).contains(&found.memory_waits), "{found:?}");
    drop(hosts);
    assert_becomes_idle(&mut guest);
}

/// Most frontends leave the event queue to the device, and drivers post buffers there.
#[test]
fn event_buffers_do_not_keep_a_device_busy() {
    let _exclusive = exclusive();
    let served = Served::new(ConnectionLimits::default());
    let (mut frontend, mut guest) = served.guest();
    let memory = Arc::clone(guest.memory());
    let features = frontend.negotiated().features;
    let mut events = Queue::new(&memory, 2, QueueOptions { size: 8, features }).unwrap();
    for token in 0..4 {
        assert!(events.add(&[], &[QueueBuffer { guest: memory.alloc(8, 8), len: 8 }], token));
    }
    events.publish();
    frontend.start(&events, 0).unwrap();
    events.force_kick();
    assert_becomes_idle(&mut guest);
}

#[test]
fn clients_that_send_nothing_do_not_shut_out_others() {
    let _exclusive = exclusive();
    towline_vsock::raise_descriptor_limit();
    let served = Served::new(ConnectionLimits::default());
    let (_frontend, mut guest) = served.guest();
    let connect = || UnixStream::connect(served.path("v")).unwrap();
    let mut silent: Vec<UnixStream> = (0..1100).map(|_| connect()).collect();
    let _client = served.connect(22);
    let deadline = Instant::now() + TIMEOUT;
    poll_until(&mut guest, |_, event| matches!(event, VsockEvent::Request(_)).then_some(()));
    assert!(Instant::now() < deadline);
    // A client that is not among the oldest is still connected: the handshake of the other one did not wait
    // for timeouts.
    let other = &mut silent[500];
    other.set_nonblocking(true).unwrap();
    let error = other.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

/// A read stops at the mark of urgent data, although there is data after it.
#[test]
fn data_after_urgent_data_is_received() {
    let _exclusive = exclusive();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rule = format!("guest:5000=tcp:{}", listener.local_addr().unwrap());
    let served = Served::with_rules(ConnectionLimits::default(), CID, &[rule]);
    let (_frontend, mut guest) = served.guest();
    let ports = (6000, 5000);
    guest.request(ports);
    poll_until(&mut guest, |_, event| (event == VsockEvent::Connected(ports)).then_some(()));
    let (mut host, _): (TcpStream, _) = listener.accept().unwrap();
    for round in 0..100 {
        host.write_all(b"before").unwrap();
        rustix::net::send(&host, b"!", SendFlags::OOB).unwrap();
        host.write_all(b"after").unwrap();
        let mut found = 0;
        poll_until(&mut guest, |_, event| {
            if let VsockEvent::Data { len, .. } = event {
                found += len;
            }
            (found == 11).then_some(())
        });
        assert_eq!(found, 11, "round {round}");
    }
    assert_becomes_idle(&mut guest);
}
