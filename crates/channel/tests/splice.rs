//! Bytes that go from socket to socket without being seen.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_send_buffer_size, set_tcp_user_timeout};
use towline_channel::fault::Capture;
use towline_channel::{
    Channel, ChannelExt, Error, IoBuf, IoBufMut, SendFlags, Splice, TcpChannel, UnixChannel, pair,
};

#[test]
fn spliced_bytes_arrive_unchanged() {
    let (near, from) = UnixChannel::pair().unwrap();
    let (to, far) = UnixChannel::pair().unwrap();
    let bytes: Vec<u8> =
        (0..3 << 20).map(|index: u32| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let rest = b"behind";
    let received = thread::scope(|scope| {
        scope.spawn(|| {
            near.send_all(&[IoBuf::from(&bytes[..]), IoBuf::from(&rest[..])], SendFlags::empty()).unwrap();
        });
        scope.spawn(|| {
            let splice = Splice::new().unwrap();
            for part in bytes.chunks(512 << 10) {
                assert!(splice.move_exact(&from, &to, part.len()).unwrap() >= 2);
            }
        });
        let mut received = vec![0; bytes.len()];
        far.recv_exact(&mut [IoBufMut::from(&mut received[..])]).unwrap();
        received
    });
    assert!(received == bytes);
    // No byte more was taken.
    let mut found = [0; 6];
    from.recv_exact(&mut [IoBufMut::from(&mut found[..])]).unwrap();
    assert_eq!(&found, rest);
}

#[test]
fn each_end_of_a_splice_is_named_in_its_error() {
    let (near, from) = UnixChannel::pair().unwrap();
    let (to, far) = UnixChannel::pair().unwrap();
    let splice = Splice::new().unwrap();
    near.send_all(&[IoBuf::from(&[7; 10][..])], SendFlags::empty()).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    let error = splice.move_exact(&from, &to, 100).unwrap_err();
    assert!(matches!(&error, Error::Closed { peer, wanted: 100, got: 10 } if peer == from.peer()), "{error}");

    let (near, from) = UnixChannel::pair().unwrap();
    drop(far);
    near.send_all(&[IoBuf::from(&[7; 10][..])], SendFlags::empty()).unwrap();
    let error = Splice::new().unwrap().move_exact(&from, &to, 10).unwrap_err();
    assert!(matches!(&error, Error::Io { op: "send", peer, .. } if peer == to.peer()), "{error}");
}

#[test]
fn a_thread_that_waits_is_woken_by_shutdown() {
    let (_near, from) = UnixChannel::pair().unwrap();
    let (to, _far) = UnixChannel::pair().unwrap();
    let error = thread::scope(|scope| {
        let moving = scope.spawn(|| Splice::new().unwrap().move_exact(&from, &to, 10));
        from.shutdown(Shutdown::Both).unwrap();
        moving.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, Error::Closed { got: 0, .. }), "{error}");
}

/// Channels that transform or buffer bytes are never bypassed.
#[test]
fn only_bare_sockets_are_joined() {
    let (one, other) = UnixChannel::pair().unwrap();
    assert!(Splice::joins(&one, &other));
    let (memory, _) = pair(16);
    assert!(!Splice::joins(&one, &memory));
    let (captured, _far) = UnixChannel::pair().unwrap();
    let (captured, ..) = Capture::to_memory(Box::new(captured));
    assert!(!Splice::joins(&captured, &one));
    let error = Splice::new().unwrap().move_exact(&captured, &one, 1).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

/// The peer takes nothing any more while a packet is sent to it.
#[test]
fn the_reason_why_a_connection_failed_is_kept() {
    let (near, from) = UnixChannel::pair().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    set_socket_send_buffer_size(&to, 64 << 10).unwrap();
    let to = TcpChannel::new(to.into()).unwrap();
    set_tcp_user_timeout(to.as_fd().unwrap(), 1000).unwrap();
    let error = thread::scope(|scope| {
        scope.spawn(|| near.send_all(&[IoBuf::from(&[7; 8 << 20][..])], SendFlags::empty()));
        let error = Splice::new().unwrap().move_exact(&from, &to, 8 << 20).unwrap_err();
        from.shutdown(Shutdown::Both).unwrap();
        error
    });
    assert_eq!(error.raw_os_error(), Some(Errno::TIMEDOUT.raw_os_error()), "{error}");
}
