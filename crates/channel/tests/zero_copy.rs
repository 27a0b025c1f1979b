//! Zero-copy sends over the loopback interface, where the kernel copies them all and reports so.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{cancel, pattern, recv_exact, recv_to_end, soon, spawn_asleep, tcp_zero_copy};
use rustix::io::Errno;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use towline_channel::{
    Capabilities, Channel, ChannelExt, ConnectOptions, Error, Flushed, IoBuf, ListenOptions, Listener,
    SendFlags, TcpChannel, check_zero_copy, connect_with,
};

/// Sends that the kernel cannot join: each takes separate notification memory while the peer does not read.
fn send_apart(channel: &dyn Channel) -> Result<usize, Error> {
    let sent = channel.send(&[IoBuf::from(b"z")], SendFlags::ZERO_COPY);
    for _ in 0..2 {
        rustix::net::send(channel.as_fd().unwrap(), b"y", rustix::net::SendFlags::EOR).unwrap();
    }
    sent
}

/// A channel with a send under way that cannot finish, as the peer does not read.
fn stuck() -> (Box<dyn Channel>, Box<dyn Channel>) {
    let (near, far) = tcp_zero_copy();
    let limit = Some(Duration::from_millis(40));
    near.set_timeouts(None, limit).unwrap();
    let data = pattern(1 << 20);
    while near.send(&[IoBuf::from(data.as_slice())], SendFlags::ZERO_COPY).is_ok() {}
    near.set_timeouts(None, None).unwrap();
    (near, far)
}

fn is_timeout(error: &Error, wanted: &str) -> bool {
    matches!(error, Error::Timeout { op, .. } if *op == wanted)
}

#[test]
fn on_loopback_flush_reports_that_all_was_copied() {
    for address in ["tcp:127.0.0.1:0", "tcp:[::1]:0"] {
        let options = ListenOptions { zero_copy: true, ..Default::default() };
        let listener = match Listener::bind_with(&address.parse().unwrap(), &options) {
            Err(error) if error.raw_os_error() == Some(Errno::ADDRNOTAVAIL.raw_os_error()) => {
                println!("skipped: {address}: {error}");
                continue;
            }
            listener => listener.unwrap(),
        };
        let near = common::open(&listener.local_address().to_string());
        let far = listener.accept(soon(), &cancel()).unwrap();
        assert!(!near.capabilities().contains(Capabilities::ZERO_COPY), "only on request");
        assert!(far.capabilities().contains(Capabilities::ZERO_COPY));
        assert_eq!(far.flush().unwrap(), Flushed::Done);
        let data = pattern(3 << 20);
        std::thread::scope(|scope| {
            scope.spawn(|| far.send_all(&[IoBuf::from(data.as_slice())], SendFlags::ZERO_COPY).unwrap());
            assert!(recv_exact(&*near, data.len()).unwrap() == data);
        });
        assert_eq!(far.flush().unwrap(), Flushed::AllCopied);
        assert_eq!(far.flush().unwrap(), Flushed::Done, "nothing since the last one");
        let statistics = far.zero_copy_statistics().unwrap();
        assert_eq!(statistics.bytes, data.len() as u64);
        assert!(statistics.sends > 0 && statistics.copied == statistics.sends, "{statistics:?}");
        assert_eq!((statistics.zero_copied, statistics.no_memory, statistics.foreign), (0, 0, 0));
    }
}

#[test]
fn one_thread_sends_another_flushes_a_third_waits_for_tickets() {
    let (near, far) = tcp_zero_copy();
    let data = pattern(200 * 4096);
    let pages: Vec<IoBuf<'_>> = data.chunks(4096).map(IoBuf::from).collect();
    let sending = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..100 {
                near.send_all(&[IoBuf::from(b"header")], SendFlags::empty()).unwrap();
                near.send_all(&pages, SendFlags::ZERO_COPY).unwrap();
            }
            sending.store(false, Ordering::Release);
        });
        for _ in 0..2 {
            scope.spawn(|| {
                while sending.load(Ordering::Acquire) {
                    near.flush().unwrap();
                    let ticket = near.zero_copy_ticket();
                    ticket.wait(soon()).unwrap();
                    assert!(ticket.is_done().unwrap());
                }
            });
        }
        for _ in 0..100 {
            assert_eq!(recv_exact(&*far, 6).unwrap(), b"header");
            assert!(recv_exact(&*far, data.len()).unwrap() == data);
        }
    });
    near.flush().unwrap();
    let statistics = near.zero_copy_statistics().unwrap();
    assert_eq!((statistics.bytes, statistics.copied), (100 * data.len() as u64, statistics.sends));
}

#[test]
fn a_lack_of_notification_memory_is_reported_with_the_limit_to_raise() {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    // So small a window is soon closed, and then nothing finishes.
    rustix::net::sockopt::set_socket_recv_buffer_size(listener.as_fd().unwrap(), 1).unwrap();
    let options = ConnectOptions { zero_copy: true, ..Default::default() };
    let near = connect_with(listener.local_address(), soon(), &cancel(), &options).unwrap();
    let far = listener.accept(soon(), &cancel()).unwrap();
    // Notification memory has to end before the send buffer does, which is small within a host.
    let fd = near.as_fd().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size_force(fd, 4 << 20)
        .or_else(|_| rustix::net::sockopt::set_socket_send_buffer_size(fd, 4 << 20))
        .unwrap();
    near.set_timeouts(None, Some(Duration::from_millis(300))).unwrap();
    let mut sent = 0;
    let error = loop {
        match send_apart(&*near) {
            Ok(1) if sent < 10_000 => sent += 1,
            other => break other.unwrap_err(),
        }
    };
    assert!(
        matches!(&error, Error::ZeroCopyMemory { peer, .. } if peer == near.peer()),
        "after {sent}: {error:?}"
    );
    assert_eq!(error.raw_os_error(), Some(Errno::NOBUFS.raw_os_error()));
    let optmem = std::fs::read_to_string("/proc/sys/net/core/optmem_max").unwrap();
    let expected = format!("net.core.optmem_max is {} bytes and RLIMIT_MEMLOCK", optmem.trim());
    assert!(error.to_string().contains(&expected), "{error}");
    // The memory comes back when the peer reads: then the same send is taken.
    near.set_timeouts(None, None).unwrap();
    std::thread::scope(|scope| {
        let sender = spawn_asleep(scope, || {
            let sent = send_apart(&*near);
            near.shutdown(Shutdown::Write).unwrap();
            sent
        });
        let bytes = recv_to_end(&*far).unwrap();
        assert_eq!(sender.join().unwrap().unwrap(), 1);
        assert_eq!(bytes.iter().filter(|byte| **byte == b'z').count(), sent + 1);
    });
    assert_eq!(near.flush().unwrap(), Flushed::AllCopied);
    assert!(near.zero_copy_statistics().unwrap().no_memory > 0);
}

#[test]
fn flush_meets_the_send_timeout_and_is_woken() {
    let (near, _far) = stuck();
    near.set_timeouts(None, Some(Duration::from_millis(40))).unwrap();
    assert!(is_timeout(&near.flush().unwrap_err(), "flush"));
    near.set_timeouts(None, None).unwrap();
    std::thread::scope(|scope| {
        let flusher = spawn_asleep(scope, || near.flush());
        near.shutdown(Shutdown::Both).unwrap();
        let error = flusher.join().unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::PIPE.raw_os_error()), "{error}");
    });
    let error = near.flush().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::PIPE.raw_os_error()), "the buffers are still the kernel's");
}

#[test]
fn a_ticket_outlives_the_channel_and_the_peer_sees_the_end() {
    let (near, far) = stuck();
    let ticket = near.zero_copy_ticket();
    assert!(!ticket.is_done().unwrap());
    let soon_over = Instant::now() + Duration::from_millis(30);
    assert!(is_timeout(&ticket.wait(soon_over).unwrap_err(), "wait for a ticket"));
    let sent = near.zero_copy_statistics().unwrap().bytes;
    drop(near);
    assert_eq!(recv_to_end(&*far).unwrap().len() as u64, sent);
    ticket.wait(soon()).unwrap();
    assert!(ticket.is_done().unwrap());
}

#[test]
fn a_reset_frees_the_memory_of_a_peer_that_does_not_read() {
    let (near, far) = stuck();
    let ticket = near.zero_copy_ticket();
    near.shutdown(Shutdown::Both).unwrap();
    let soon_over = Instant::now() + Duration::from_millis(30);
    assert!(is_timeout(&ticket.wait(soon_over).unwrap_err(), "wait for a ticket"));
    near.reset().unwrap();
    ticket.wait(soon()).unwrap();
    near.reset().unwrap();
    let error = recv_to_end(&*far).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::CONNRESET.raw_os_error()), "{error}");
    check_zero_copy().unwrap();
}

#[test]
fn a_ticket_is_for_what_was_sent_before_it() {
    let (near, far) = tcp_zero_copy();
    assert!(near.zero_copy_ticket().is_done().unwrap());
    near.send_all(&[IoBuf::from(b"first")], SendFlags::ZERO_COPY).unwrap();
    let ticket = near.zero_copy_ticket();
    recv_exact(&*far, 5).unwrap();
    near.set_timeouts(None, Some(Duration::from_millis(40))).unwrap();
    let data = pattern(1 << 20);
    while near.send(&[IoBuf::from(data.as_slice())], SendFlags::ZERO_COPY).is_ok() {}
    ticket.wait(soon()).unwrap();
    assert!(!near.zero_copy_ticket().is_done().unwrap());
}

#[test]
fn every_send_completes_when_the_peer_disconnects() {
    let (near, far) = stuck();
    let ticket = near.zero_copy_ticket();
    drop(far);
    ticket.wait(soon()).unwrap();
    near.flush().unwrap();
    assert!(near.send(&[IoBuf::from(b"x")], SendFlags::ZERO_COPY).is_err());
}

#[test]
fn a_socket_whose_former_owner_used_it_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut first = TcpChannel::new(near.try_clone().unwrap().into()).unwrap();
    first.enable_zero_copy().unwrap();
    first.enable_zero_copy().unwrap();
    let mut second = TcpChannel::new(near.into()).unwrap();
    assert!(matches!(second.enable_zero_copy(), Err(Error::Unsupported { .. })));
    assert!(!second.capabilities().contains(Capabilities::ZERO_COPY));
}

#[test]
fn other_kinds_open_without_it() {
    let directory = tempfile::TempDir::new().unwrap();
    let listener = Listener::bind(&common::unix_address(directory.path())).unwrap();
    let options = ConnectOptions { zero_copy: true, ..Default::default() };
    let near = connect_with(listener.local_address(), soon(), &cancel(), &options).unwrap();
    assert!(!near.capabilities().contains(Capabilities::ZERO_COPY));
}
