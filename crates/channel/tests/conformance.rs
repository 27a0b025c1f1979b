//! The contract of the `Channel` trait, tested for every kind of channel and for every fault layer round one.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{open, pattern, recv_exact, recv_to_end, send_all, spawn_asleep, tcp, through, unix_address};
use std::net::Shutdown;
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use towline_channel::fault::{Capture, Cut, Delay, Direction, ShortIo, Throttle};
use towline_channel::{
    Capabilities, Channel, ChannelExt, Error, Flushed, IOV_MAX, IoBuf, IoBufMut, Listener, RecvFlags,
    SendFlags, pair,
};

/// Both ends of a connection: `rx` receives the bytes that `tx` sends.
struct Ends {
    tx: Arc<dyn Channel>,
    rx: Arc<dyn Channel>,
    /// True if a receiver waits for the sender, and a sender for the receiver.
    waits: bool,
    _directory: Option<TempDir>,
}

impl Ends {
    fn new((tx, rx): (Box<dyn Channel>, Box<dyn Channel>)) -> Self {
        Self { tx: Arc::from(tx), rx: Arc::from(rx), waits: true, _directory: None }
    }

    /// Returns true if both are one channel, whose other end echoes.
    fn is_echo(&self) -> bool {
        Arc::ptr_eq(&self.tx, &self.rx)
    }

    fn can(&self, capability: Capabilities) -> bool {
        self.tx.capabilities().contains(capability) && self.rx.capabilities().contains(capability)
    }
}

fn unix() -> Ends {
    let directory = TempDir::new().unwrap();
    let listener = Listener::bind(&unix_address(directory.path())).unwrap();
    Ends { _directory: Some(directory), ..Ends::new(through(&listener)) }
}

fn fd_socket() -> Ends {
    let (a, b) = UnixStream::pair().unwrap();
    Ends::new((open(&format!("fd:{}", a.into_raw_fd())), open(&format!("fd:{}", b.into_raw_fd()))))
}

fn fd_pipe() -> Ends {
    let (reader, writer) = std::io::pipe().unwrap();
    Ends::new((open(&format!("fd:{}", writer.into_raw_fd())), open(&format!("fd:{}", reader.into_raw_fd()))))
}

fn exec() -> Ends {
    let cat: Arc<dyn Channel> = Arc::from(open("exec:cat"));
    Ends { tx: Arc::clone(&cat), rx: cat, waits: true, _directory: None }
}

fn file() -> Ends {
    let directory = TempDir::new().unwrap();
    let address = format!("file:{},offset=0x1000", directory.path().join("f").display());
    let tx = open(&address);
    let rx =
        Listener::bind(&address.parse().unwrap()).unwrap().accept(common::soon(), &common::cancel()).unwrap();
    Ends { waits: false, _directory: Some(directory), ..Ends::new((tx, rx)) }
}

fn memory() -> Ends {
    let (a, b) = pair(5000);
    Ends::new((Box::new(a), Box::new(b)))
}

/// Both ends of a connection in a layer each.
fn layered(
    ends: (Box<dyn Channel>, Box<dyn Channel>),
    layer: impl Fn(Box<dyn Channel>) -> Box<dyn Channel>,
) -> Ends {
    Ends::new((layer(ends.0), layer(ends.1)))
}

fn memory_pair() -> (Box<dyn Channel>, Box<dyn Channel>) {
    let (a, b) = pair(5000);
    (Box::new(a), Box::new(b))
}

fn short_io() -> Ends {
    layered(tcp(), |inner| Box::new(ShortIo::new(inner, NonZeroUsize::new(3000).unwrap(), 1)))
}

fn delay() -> Ends {
    layered(memory_pair(), |inner| Box::new(Delay::new(inner, Duration::ZERO..=Duration::from_micros(20), 2)))
}

fn throttle() -> Ends {
    layered(tcp(), |inner| Box::new(Throttle::new(inner, NonZeroU64::new(1 << 30).unwrap())))
}

fn capture() -> Ends {
    layered(tcp(), |inner| Box::new(Capture::to_memory(inner).0))
}

fn cut_never() -> Ends {
    layered(memory_pair(), |inner| Box::new(Cut::new(inner, u64::MAX, Direction::Send)))
}

/// The suite for each kind: `kind::promise`.
macro_rules! conformance {
    ($($kind:ident),*) => { $( mod $kind {
        #[test] fn keeps_order_in_pieces_of_any_size() { super::keeps_order(&super::$kind()); }
        #[test] fn thousands_of_buffers_are_sent_and_received() { super::thousands_of_buffers(&super::$kind()); }
        #[test] fn unsupported_operations_are_refused() { super::refuses(&super::$kind()); }
        #[test] fn peeks() { super::peeks(&super::$kind()); }
        #[test] fn ends_one_half() { super::ends_one_half(&super::$kind()); }
        #[test] fn wakes_a_receiver() { super::wakes_a_receiver(&super::$kind()); }
        #[test] fn wakes_a_sender() { super::wakes_a_sender(&super::$kind()); }
        #[test] fn times_out() { super::times_out(&super::$kind()); }
        #[test] fn an_end_of_the_inner_channel_is_reported() { super::an_end_of_the_inner_channel_is_reported(&super::$kind()); }
        #[test] fn takes_empty_buffers() { super::takes_empty_buffers(&super::$kind()); }
    } )* };
}
conformance!(
    tcp_kind,
    tcp_zero_copy,
    unix,
    fd_socket,
    fd_pipe,
    exec,
    file,
    memory,
    short_io,
    delay,
    throttle,
    capture,
    cut_never,
    tls_client_sends,
    tls_server_sends,
    tls_over_unix,
    tls_over_short_io,
    short_io_over_tls,
    websocket_client_sends,
    websocket_server_sends,
    websocket_over_tls,
    websocket_over_short_io
);

fn websocket_client_sends() -> Ends {
    Ends::new(common::websocket(tcp()))
}

fn websocket_server_sends() -> Ends {
    let (client, server) = common::websocket(tcp());
    Ends::new((server, client))
}

fn websocket_over_tls() -> Ends {
    Ends::new(common::websocket(common::tls(tcp())))
}

fn websocket_over_short_io() -> Ends {
    let (near, far) = tcp();
    Ends::new(common::websocket((short(near, 7), short(far, 8))))
}

fn tls_client_sends() -> Ends {
    Ends::new(common::tls(tcp()))
}

fn tls_server_sends() -> Ends {
    let (client, server) = common::tls(tcp());
    Ends::new((server, client))
}

fn tls_over_unix() -> Ends {
    let directory = TempDir::new().unwrap();
    let ends = through(&Listener::bind(&unix_address(directory.path())).unwrap());
    Ends::new(common::tls(ends))
}

fn short(inner: Box<dyn Channel>, seed: u64) -> Box<dyn Channel> {
    Box::new(ShortIo::new(inner, NonZeroUsize::new(3000).unwrap(), seed))
}

fn tls_over_short_io() -> Ends {
    let (near, far) = tcp();
    Ends::new(common::tls((short(near, 3), short(far, 4))))
}

fn short_io_over_tls() -> Ends {
    let (near, far) = common::tls(tcp());
    Ends::new((short(near, 5), short(far, 6)))
}

fn tcp_kind() -> Ends {
    Ends::new(tcp())
}

fn tcp_zero_copy() -> Ends {
    Ends::new(common::tcp_zero_copy())
}

/// Runs both sides at once, or one after the other where the receiver does not wait.
fn transfer<T: Send>(ends: &Ends, send: impl FnOnce() + Send, recv: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let sender = scope.spawn(send);
        if !ends.waits {
            sender.join().unwrap();
        }
        recv()
    })
}

fn keeps_order(ends: &Ends) {
    let data = pattern(1 << 19);
    let send = || {
        for (i, piece) in data.chunks(7777).enumerate() {
            let flags = if i % 2 == 0 { SendFlags::MORE } else { SendFlags::empty() };
            ends.tx.send_all(&[piece.into()], flags).unwrap();
        }
        assert_eq!(ends.tx.flush().unwrap(), Flushed::Done);
    };
    let received = transfer(ends, send, || {
        let mut all = Vec::new();
        while all.len() < data.len() {
            all.extend(recv_exact(&*ends.rx, 5001.min(data.len() - all.len())).unwrap());
        }
        all
    });
    assert!(received == data);
}

/// More buffers than one call takes, of uneven sizes, some of them empty; other ones at the other end.
fn thousands_of_buffers(ends: &Ends) {
    let buffers = 2 * IOV_MAX + 100;
    let sizes = |seed: usize| (0..buffers).map(move |i| (i * seed) % 150);
    let len = sizes(7).sum::<usize>();
    let data = pattern(len);
    let send = || {
        let mut rest = data.as_slice();
        let bufs: Vec<IoBuf<'_>> = sizes(7).map(|n| rest.split_off(..n).unwrap().into()).collect();
        ends.tx.send_all(&bufs, SendFlags::empty()).unwrap();
    };
    let received = transfer(ends, send, || {
        let mut memory = vec![0; len];
        let mut rest = memory.as_mut_slice();
        let mut bufs: Vec<IoBufMut<'_>> = Vec::new();
        for size in sizes(11) {
            bufs.push(rest.split_off_mut(..size.min(rest.len())).unwrap().into());
        }
        bufs.push(rest.into());
        let lengths: Vec<usize> = bufs.iter().map(IoBufMut::len).collect();
        ends.rx.recv_exact(&mut bufs).unwrap();
        assert_eq!(bufs.iter().map(IoBufMut::len).collect::<Vec<_>>(), lengths, "the array is its owner's");
        memory
    });
    assert!(received == data);
}

fn refuses(ends: &Ends) {
    let unsupported = |result: Result<usize, Error>, capability| {
        if !ends.can(capability) {
            assert!(matches!(result, Err(Error::Unsupported { .. })), "{capability:?}: {result:?}");
        }
    };
    let (bufs, mut room) = ([IoBuf::from(b"x")], [0]);
    if !ends.can(Capabilities::ZERO_COPY) {
        unsupported(ends.tx.send(&bufs, SendFlags::ZERO_COPY), Capabilities::ZERO_COPY);
        unsupported(ends.tx.send(&bufs, SendFlags::ZERO_COPY | SendFlags::MORE), Capabilities::ZERO_COPY);
        assert!(ends.tx.zero_copy_ticket().is_done().unwrap() && ends.tx.zero_copy_statistics().is_none());
    }
    if !ends.can(Capabilities::FD_PASSING) {
        unsupported(ends.tx.send_fds(b"x", &[]), Capabilities::FD_PASSING);
        unsupported(ends.rx.recv_fds(&mut room, &mut Vec::new()), Capabilities::FD_PASSING);
    }
    if !ends.rx.capabilities().contains(Capabilities::PEEK) {
        unsupported(ends.rx.recv(&mut [(&mut room).into()], RecvFlags::PEEK), Capabilities::PEEK);
    }
    if !ends.rx.capabilities().contains(Capabilities::SEND) {
        unsupported(ends.rx.send(&bufs, SendFlags::empty()), Capabilities::SEND);
    }
    if !ends.tx.capabilities().contains(Capabilities::RECV) {
        unsupported(ends.tx.recv(&mut [(&mut room).into()], RecvFlags::empty()), Capabilities::RECV);
    }
    let zero = ends.tx.set_timeouts(None, Some(Duration::ZERO));
    assert!(matches!(zero, Err(Error::Unsupported { .. })), "{zero:?}");
}

fn peeks(ends: &Ends) {
    if !ends.rx.capabilities().contains(Capabilities::PEEK) {
        return;
    }
    send_all(&*ends.tx, b"abcd").unwrap();
    let mut room = [0; 1];
    assert_eq!(ends.rx.recv(&mut [(&mut room).into()], RecvFlags::PEEK).unwrap(), 1);
    assert_eq!(&room, b"a");
    assert_eq!(recv_exact(&*ends.rx, 4).unwrap(), b"abcd");
}

fn ends_one_half(ends: &Ends) {
    send_all(&*ends.tx, b"abc").unwrap();
    ends.tx.shutdown(Shutdown::Write).unwrap();
    ends.tx.shutdown(Shutdown::Write).unwrap();
    assert_eq!(recv_to_end(&*ends.rx).unwrap(), b"abc");
    let refused = send_all(&*ends.tx, b"d").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::PIPE.raw_os_error()), "{refused}");
    if ends.can(Capabilities::BIDIRECTIONAL) && !ends.is_echo() {
        send_all(&*ends.rx, b"still").unwrap();
        assert_eq!(recv_exact(&*ends.tx, 5).unwrap(), b"still");
    }
}

fn wakes_a_receiver(ends: &Ends) {
    if !ends.waits {
        return;
    }
    std::thread::scope(|scope| {
        let receiver = spawn_asleep(scope, || ends.rx.recv(&mut [(&mut [0; 9]).into()], RecvFlags::empty()));
        ends.rx.shutdown(Shutdown::Read).unwrap();
        assert_eq!(receiver.join().unwrap().unwrap(), 0);
    });
}

fn wakes_a_sender(ends: &Ends) {
    if !ends.waits {
        return;
    }
    std::thread::scope(|scope| {
        let sender = spawn_asleep(scope, || {
            let data = pattern(1 << 16);
            loop {
                if let Err(error) = send_all(&*ends.tx, &data) {
                    return error;
                }
            }
        });
        ends.tx.shutdown(Shutdown::Both).unwrap();
        let error = sender.join().unwrap();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::PIPE.raw_os_error()), "{error}");
    });
}

fn times_out(ends: &Ends) {
    // A whole number of ticks at each of the kernel's usual clock rates.
    let limit = Some(Duration::from_millis(40));
    ends.tx.set_timeouts(limit, limit).unwrap();
    ends.rx.set_timeouts(limit, limit).unwrap();
    if !ends.waits {
        return;
    }
    let nothing = ends.rx.recv(&mut [(&mut [0; 9]).into()], RecvFlags::empty()).unwrap_err();
    assert!(
        matches!(nothing, Error::Timeout { op: "recv", after, .. } if Some(after) == limit),
        "{nothing:?}"
    );
    let data = pattern(1 << 16);
    let full = loop {
        if let Err(error) = send_all(&*ends.tx, &data) {
            break error;
        }
    };
    assert!(matches!(full, Error::Timeout { op: "send", after, .. } if Some(after) == limit), "{full:?}");
}

fn an_end_of_the_inner_channel_is_reported(ends: &Ends) {
    send_all(&*ends.tx, b"abcde").unwrap();
    ends.tx.shutdown(Shutdown::Write).unwrap();
    let error = recv_exact(&*ends.rx, 8).unwrap_err();
    assert!(
        matches!(&error, Error::Closed { peer, wanted: 8, got: 5 } if peer == ends.rx.peer()),
        "{error:?}"
    );
}

fn takes_empty_buffers(ends: &Ends) {
    assert_eq!(ends.tx.send(&[], SendFlags::empty()).unwrap(), 0);
    assert_eq!(ends.tx.send(&[IoBuf::from(b"")], SendFlags::empty()).unwrap(), 0);
    assert_eq!(ends.rx.recv(&mut [], RecvFlags::empty()).unwrap(), 0);
    assert_eq!(ends.rx.recv(&mut [(&mut []).into()], RecvFlags::empty()).unwrap(), 0);
    // A byte follows more empty buffers than a call accepts: 0 would mean the end of the stream.
    let mut bufs = vec![IoBuf::from(b""); IOV_MAX + 1];
    bufs.push(IoBuf::from(b"x"));
    assert_eq!(ends.tx.send(&bufs, SendFlags::empty()).unwrap(), 1);
    let mut byte = [0];
    let mut bufs: Vec<IoBufMut<'_>> = (0..=IOV_MAX).map(|_| IoBufMut::from(&mut [])).collect();
    bufs.push(IoBufMut::from(&mut byte));
    assert_eq!(ends.rx.recv(&mut bufs, RecvFlags::empty()).unwrap(), 1);
    assert_eq!(&byte, b"x");
}
