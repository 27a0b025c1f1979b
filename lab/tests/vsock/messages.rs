//! Messages (SEQPACKET): each arrives whole, with its boundaries.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind, connect,
    listen, recv, socket_with,
};
use towline_lab::{skip, wait_until};

use crate::support::{Fixture, WITHIN};

fn socket() -> OwnedFd {
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    patient(fd)
}

fn patient(fd: OwnedFd) -> OwnedFd {
    set_socket_timeout(&fd, Timeout::Recv, Some(WITHIN)).unwrap();
    set_socket_timeout(&fd, Timeout::Send, Some(Duration::from_secs(60))).unwrap();
    fd
}

fn receive(fd: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    let (count, _) = recv(fd, &mut bytes[..], RecvFlags::empty()).unwrap();
    bytes.truncate(count);
    bytes
}

fn send(fd: &OwnedFd, bytes: &[u8]) {
    assert_eq!(rustix::net::send(fd, bytes, SendFlags::NOSIGNAL).unwrap(), bytes.len());
}

fn text(fd: &OwnedFd) -> String {
    String::from_utf8(receive(fd)).unwrap()
}

/// Returns false if the guest has no messages.
pub(crate) fn keep_boundaries(fixture: &mut Fixture) -> bool {
    let listener = socket();
    rustix::io::ioctl_fionbio(&listener, true).unwrap();
    let address = SocketAddrUnix::new(fixture.scratch.path().join("v_6010")).unwrap();
    bind(&listener, &address).unwrap();
    listen(&listener, 8).unwrap();
    fixture.perl("messages-ask", "connect seqpacket 6010 ask one two-and-a-half three");
    let Some(fd) = accept_or_refused(fixture, &listener) else {
        let reason = "the guest is not offered VIRTIO_VSOCK_F_SEQPACKET by this QEMU";
        skip(&format!("messages::keep_boundaries ({:?})", fixture.version), reason);
        return false;
    };
    assert_eq!([text(&fd), text(&fd), text(&fd)], ["one", "two-and-a-half", "three"]);
    assert!(receive(&fd).is_empty(), "the guest has ended");
    send(&fd, b"an answer");
    drop(fd);
    fixture.wait_output("messages-ask", "answered an answer");
    let path = fixture.scratch.path().join("m");
    lengths(fixture, &path);
    true
}

/// Accepts the guest's connection; `None` if its kernel cannot create one.
fn accept_or_refused(fixture: &mut Fixture, listener: &OwnedFd) -> Option<OwnedFd> {
    let outcome = wait_until("a connection of the guest's", WITHIN, || {
        if let Ok(fd) = accept(listener) {
            return Ok(Some(Some(patient(fd))));
        }
        let output = fixture.guest.shell("cat /tmp/messages-ask", WITHIN)?;
        Ok(output.contains("refused").then_some(None))
    });
    outcome.unwrap()
}

/// Linux limits the number of packets that a program has not read, and resets a connection that exceeds it.
pub(crate) fn short_ones_reach_a_late_reader(fixture: &mut Fixture) {
    fixture.perl("late-stream", "listen stream 5020 late");
    let stream = fixture.connect(5020);
    short_messages(fixture, 5020, &stream.into());
    fixture.wait_output("late-stream", "ended 300000");
    fixture.perl("late-messages", "listen seqpacket 5021 late");
    let fd = socket();
    connect(&fd, &SocketAddrUnix::new(fixture.scratch.path().join("m")).unwrap()).unwrap();
    send(&fd, b"CONNECT 5021\n");
    assert!(text(&fd).starts_with("OK "));
    short_messages(fixture, 5021, &fd);
    let output = fixture.wait_output("late-messages", "ended 300000");
    assert!(output.contains("reads 1500\n"), "{output}");
}

/// Sends messages at a pace at which each is a packet. The guest's program reads when no more can be sent.
fn short_messages(fixture: &mut Fixture, port: u32, fd: &OwnedFd) {
    let (message, mut sent) = ([7; 200], 0);
    set_socket_timeout(fd, Timeout::Send, Some(Duration::from_secs(1))).unwrap();
    while sent < 1500 && rustix::net::send(fd, &message, SendFlags::NOSIGNAL) == Ok(message.len()) {
        sent += 1;
        std::thread::sleep(Duration::from_micros(200));
    }
    fixture.shell(&format!("touch /tmp/go{port}"));
    set_socket_timeout(fd, Timeout::Send, Some(WITHIN)).unwrap();
    (sent..1500).for_each(|_| send(fd, &message));
    rustix::net::shutdown(fd, rustix::net::Shutdown::Write).unwrap();
}

/// Sends messages of all sizes, from one that fits into a buffer to one larger than the ring.
fn lengths(fixture: &mut Fixture, path: &Path) {
    fixture.perl("messages", "listen seqpacket 5010 messages");
    let fd = socket();
    connect(&fd, &SocketAddrUnix::new(path).unwrap()).unwrap();
    send(&fd, b"CONNECT 5010\n");
    assert!(text(&fd).starts_with("OK "));
    for length in [1, 2, 3700, 4096, 65_536, 65_537, 150_000, 1] {
        send(&fd, &vec![7; length]);
        assert_eq!(text(&fd), length.to_string());
    }
    // Many messages in flight keep their boundaries.
    for length in 1..100 {
        send(&fd, &vec![7; length * 10]);
    }
    for length in 1..100 {
        assert_eq!(text(&fd), (length * 10).to_string());
    }
}
