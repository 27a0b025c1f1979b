//! Descriptors: those that travel over a Unix socket, and those that channels are made of.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{cancel, open, recv_exact, send_all, soon, tcp};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags as NetFlags, sendmsg};
use std::io::{IoSlice, PipeReader, PipeWriter, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use towline_channel::{Address, Capabilities, Channel, Error, FDS_MAX, Listener, UnixChannel, connect};

/// `count` writing ends of one pipe.
fn pipes(count: usize) -> (PipeReader, Vec<PipeWriter>) {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut writers: Vec<_> = (1..count).map(|_| writer.try_clone().unwrap()).collect();
    writers.push(writer);
    (reader, writers)
}

fn borrow(writers: &[PipeWriter]) -> Vec<BorrowedFd<'_>> {
    writers.iter().map(AsFd::as_fd).collect()
}

/// Reads to the end of a pipe; returns only when every writing end is closed.
fn drain(mut reader: PipeReader) -> Vec<u8> {
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn descriptors_travel_with_their_bytes() {
    let (near, far) = UnixChannel::pair().unwrap();
    let (reader, writers) = pipes(FDS_MAX);
    assert_eq!(near.send_fds(b"hello", &borrow(&writers)).unwrap(), 5);
    send_all(&near, b"plain").unwrap();
    drop(writers);
    let (mut bytes, mut fds) = ([0; 64], Vec::<OwnedFd>::new());
    assert_eq!(far.recv_fds(&mut bytes, &mut fds).unwrap(), 5, "ends after the bytes they came with");
    assert_eq!((&bytes[..5], fds.len()), (b"hello".as_slice(), FDS_MAX));
    for fd in fds.drain(..) {
        assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
        PipeWriter::from(fd).write_all(b".").unwrap();
    }
    assert_eq!(drain(reader), [b'.'; FDS_MAX]);
    assert_eq!(far.recv_fds(&mut bytes, &mut fds).unwrap(), 5);
    assert_eq!((&bytes[..5], fds.len()), (b"plain".as_slice(), 0));
}

#[test]
fn too_many_descriptors_are_refused_here() {
    let (near, _far) = UnixChannel::pair().unwrap();
    let (_reader, writers) = pipes(FDS_MAX + 1);
    let error = near.send_fds(b"x", &borrow(&writers)).unwrap_err();
    assert!(matches!(error, Error::TooManyFds { count: 17, limit: FDS_MAX, .. }), "{error:?}");
    let error = near.send_fds(b"", &borrow(&writers[..1])).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
}

#[test]
fn too_many_descriptors_from_a_peer_are_an_error_and_all_are_closed() {
    for count in [FDS_MAX + 1, FDS_MAX + 2, FDS_MAX + 3, 100] {
        let (near, far) = UnixStream::pair().unwrap();
        let far = UnixChannel::new(far.into(), "unix:test").unwrap();
        let (reader, writers) = pipes(count);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(100))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = borrow(&writers);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&near, &[IoSlice::new(b"x")], &mut ancillary, NetFlags::empty()).unwrap();
        drop(writers);
        let mut received = Vec::new();
        let error = far.recv_fds(&mut [0; 8], &mut received).unwrap_err();
        assert!(matches!(error, Error::FdsTruncated { limit: FDS_MAX, .. }), "{count}: {error:?}");
        // They are the caller's to close, on a thread that may wait.
        drop(received);
        assert_eq!(drain(reader), b"", "none is left open");
    }
}

#[test]
fn a_descriptor_number_becomes_its_kind_of_channel() {
    let (a, b) = UnixStream::pair().unwrap();
    let (a, b) = (open(&format!("fd:{}", a.into_raw_fd())), open(&format!("fd:{}", b.into_raw_fd())));
    assert!(a.capabilities().contains(Capabilities::FD_PASSING | Capabilities::BIDIRECTIONAL));
    let (reader, writer) = std::io::pipe().unwrap();
    a.send_fds(b"!", &[writer.as_fd()]).unwrap();
    let mut fds = Vec::new();
    b.recv_fds(&mut [0], &mut fds).unwrap();
    let output = open(&format!("fd:{}", fds.remove(0).into_raw_fd()));
    assert_eq!(output.capabilities(), Capabilities::SEND | Capabilities::SHUTDOWN);
    let input = open(&format!("fd:{}", reader.into_raw_fd()));
    assert_eq!(input.capabilities(), Capabilities::RECV | Capabilities::SHUTDOWN);
    send_all(&*output, b"through").unwrap();
    assert_eq!(recv_exact(&*input, 7).unwrap(), b"through");

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let tcp = open(&format!("fd:{}", stream.into_raw_fd()));
    assert_eq!(tcp.peer(), format!("tcp:{}", listener.local_addr().unwrap()));

    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
    let null = open(&format!("fd:{}", null.into_raw_fd()));
    send_all(&*null, b"gone").unwrap();
    assert!(matches!(recv_exact(&*null, 1), Err(Error::Closed { wanted: 1, got: 0, .. })));
}

#[test]
fn only_stream_descriptors_are_accepted() {
    let why = |number: i32| match connect(&Address::Fd(number), soon(), &cancel()) {
        Err(Error::BadAddress { address, why }) if address == format!("fd:{number}") => why,
        other => panic!("fd:{number}: {other:?}"),
    };
    assert!(why(1_000_000).starts_with("it is not open in this process"));
    let datagram = UdpSocket::bind("127.0.0.1:0").unwrap();
    assert_eq!(why(datagram.into_raw_fd()), "it is a datagram socket; expected a stream socket");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_eq!(why(listener.into_raw_fd()), "it is a listening socket; expected a connected one");
    let directory = std::fs::File::open("/").unwrap();
    assert_eq!(why(directory.into_raw_fd()), "it is a directory; expected a socket, a pipe or a file");
}

#[test]
fn a_pipe_gets_its_mode_back() {
    let (reader, writer) = std::io::pipe().unwrap();
    let witness = writer.try_clone().unwrap();
    let is_nonblocking = || fcntl_getfl(&witness).unwrap().contains(OFlags::NONBLOCK);
    let channel = open(&format!("fd:{}", writer.into_raw_fd()));
    assert!(is_nonblocking());
    channel.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(!is_nonblocking());
    drop((channel, reader));
    assert!(!is_nonblocking());
}

#[test]
fn other_kinds_carry_no_descriptors() {
    let (near, far) = tcp();
    assert!(matches!(near.send_fds(b"x", &[]), Err(Error::Unsupported { .. })));
    assert!(matches!(far.recv_fds(&mut [0], &mut Vec::new()), Err(Error::Unsupported { .. })));
}

#[test]
fn a_listener_on_a_number_yields_it_once() {
    let (near, far) = UnixStream::pair().unwrap();
    let listener = Listener::bind(&Address::Fd(far.into_raw_fd())).unwrap();
    let far = listener.accept(soon(), &cancel()).unwrap();
    (&near).write_all(b"once").unwrap();
    assert_eq!(recv_exact(&*far, 4).unwrap(), b"once");
    assert!(matches!(listener.accept(soon(), &cancel()), Err(Error::Unsupported { .. })));
}
