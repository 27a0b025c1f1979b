//! Fault layers are exact to the byte, wake up, and replay.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{pattern, recv_exact, recv_to_end, send_all, spawn_asleep, tcp};
use std::net::Shutdown;
use std::num::{NonZeroU64, NonZeroUsize};
use std::time::Duration;
use towline_channel::fault::{Capture, Cut, Delay, Direction, FlipReceived, ShortIo, Throttle};
use towline_channel::{
    Capabilities, Channel, Error, IoBuf, IoBufMut, PairChannel, RecvFlags, SendFlags, UnixChannel, pair,
};

const HOUR: Duration = Duration::from_secs(3600);

fn short(inner: impl Channel + 'static, seed: u64) -> Box<dyn Channel> {
    Box::new(ShortIo::new(Box::new(inner), NonZeroUsize::new(9).unwrap(), seed))
}

fn memory() -> (PairChannel, PairChannel) {
    pair(1 << 16)
}

#[test]
fn a_cut_in_sending_lets_exactly_n_bytes_through() {
    for n in [0, 1, 2, 8, 9, 10, 63, 64, 99, 100, 101] {
        let (near, far) = memory();
        let cut = Cut::new(short(near, n), n, Direction::Send);
        let result = send_all(&cut, &pattern(100));
        if n < 100 {
            let Err(Error::Fault { peer, what }) = result else { panic!("{n}: {result:?}") };
            assert_eq!(
                (peer.as_str(), what),
                ("memory:1", format!("the connection was cut after {n} bytes sent"))
            );
            assert_eq!(recv_to_end(&far).unwrap(), pattern(100)[..n as usize]);
        } else {
            result.unwrap();
            assert_eq!(recv_exact(&far, 100).unwrap(), pattern(100));
            assert_eq!(send_all(&far, b"x").is_ok(), n > 100, "{n}: ends as soon as byte N has passed");
        }
    }
}

#[test]
fn a_flip_changes_one_byte_however_it_comes() {
    for at in [0, 1, 50, 99, 100] {
        let (near, far) = memory();
        send_all(&far, &pattern(100)).unwrap();
        far.shutdown(Shutdown::Write).unwrap();
        let flip = FlipReceived::new(short(near, at), at, 0x81);
        let mut seen = [0; 100];
        flip.recv(&mut [(&mut seen).into()], RecvFlags::PEEK).unwrap();
        let mut expected = pattern(100);
        if let Some(byte) = expected.get_mut(at as usize) {
            *byte ^= 0x81;
        }
        assert_eq!(recv_to_end(&flip).unwrap(), expected, "byte {at}");
    }
}

#[test]
fn a_cut_in_receiving_lets_exactly_n_bytes_through() {
    for n in [0, 1, 7, 99, 100] {
        let (near, far) = memory();
        send_all(&far, &pattern(100)).unwrap();
        let cut = Cut::new(short(near, n), n, Direction::Recv);
        let mut seen = [0; 100];
        let peeked = cut.recv(&mut [(&mut seen).into()], RecvFlags::PEEK).unwrap();
        assert!(peeked as u64 <= n);
        assert_eq!(recv_to_end(&cut).unwrap(), pattern(100)[..n as usize]);
        let refused = send_all(&far, b"x").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::PIPE.raw_os_error()), "{refused}");
    }
}

#[test]
fn a_cut_of_a_real_connection_ends_it_for_both_threads() {
    let (near, far) = tcp();
    let cut = Cut::new(near, 70_000, Direction::Send);
    std::thread::scope(|scope| {
        let waiting = spawn_asleep(scope, || recv_to_end(&cut));
        let seen = scope.spawn(|| recv_to_end(&*far));
        assert!(matches!(send_all(&cut, &pattern(100_000)), Err(Error::Fault { .. })));
        assert_eq!(seen.join().unwrap().unwrap(), pattern(70_000));
        assert_eq!(waiting.join().unwrap().unwrap(), b"");
    });
}

#[test]
fn descriptors_count_by_their_bytes() {
    let (near, far) = UnixChannel::pair().unwrap();
    let cut = Cut::new(Box::new(near), 3, Direction::Send);
    let (reader, writer) = std::io::pipe().unwrap();
    use std::os::fd::AsFd;
    assert_eq!(cut.send_fds(b"abcdef", &[writer.as_fd()]).unwrap(), 3);
    let (mut bytes, mut fds) = ([0; 8], Vec::new());
    assert_eq!(far.recv_fds(&mut bytes, &mut fds).unwrap(), 3);
    assert_eq!(fds.len(), 1);
    drop(reader);
    assert!(matches!(cut.send_fds(b"x", &[]), Err(Error::Fault { .. })));
}

#[test]
fn a_shutdown_ends_a_delay() {
    let (near, _far) = memory();
    let delay = Delay::new(Box::new(near), HOUR..=HOUR, 0);
    std::thread::scope(|scope| {
        let sender = spawn_asleep(scope, || send_all(&delay, b"x"));
        let receiver = spawn_asleep(scope, || recv_to_end(&delay));
        delay.shutdown(Shutdown::Both).unwrap();
        assert!(matches!(sender.join().unwrap(), Err(Error::Io { op: "send", .. })));
        assert_eq!(receiver.join().unwrap().unwrap(), b"");
    });
}

#[test]
fn a_throttle_passes_a_hundredth_at_a_time_and_a_shutdown_ends_its_wait() {
    let (near, far) = memory();
    let throttle = Throttle::new(Box::new(near), NonZeroU64::new(200).unwrap());
    assert_eq!(throttle.send(&[IoBuf::from(b"abcdef")], SendFlags::empty()).unwrap(), 2);
    assert_eq!(recv_exact(&far, 2).unwrap(), b"ab");
    let slow = Throttle::new(Box::new(far), NonZeroU64::new(1).unwrap());
    std::thread::scope(|scope| {
        let sender = spawn_asleep(scope, || send_all(&slow, &pattern(3600)));
        slow.shutdown(Shutdown::Both).unwrap();
        assert!(matches!(sender.join().unwrap(), Err(Error::Io { op: "send", .. })));
    });
}

#[test]
fn a_capture_has_both_streams() {
    let (near, far) = memory();
    let (capture, sent, received) = Capture::to_memory(short(near, 3));
    let data = pattern(1000);
    send_all(&capture, &data).unwrap();
    send_all(&far, b"answer").unwrap();
    capture.recv(&mut [IoBufMut::from(&mut [0; 4])], RecvFlags::PEEK).unwrap();
    recv_exact(&capture, 6).unwrap();
    assert_eq!((sent.bytes(), received.bytes()), (data, b"answer".to_vec()));
}

#[test]
fn a_seed_replays_and_directions_do_not_disturb_each_other() {
    let sizes = |seed, receives: usize| {
        let (near, far) = memory();
        send_all(&far, &pattern(1000)).unwrap();
        let short = short(near, seed);
        let data = pattern(100);
        let send = || short.send(&[IoBuf::from(data.as_slice())], SendFlags::empty()).unwrap();
        (0..20)
            .map(|_| {
                for _ in 0..receives {
                    assert!(
                        short.recv(&mut [IoBufMut::from(&mut [0; 10])], RecvFlags::empty()).unwrap() <= 9
                    );
                }
                send()
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(sizes(42, 0), sizes(42, 3));
    assert_ne!(sizes(42, 0), sizes(43, 0));
    assert!(sizes(42, 0).iter().all(|size| (1..=9).contains(size)));
}

#[test]
fn layers_report_the_capabilities_of_the_inner_channel() {
    let (a, _b) = UnixChannel::pair().unwrap();
    let inside = a.capabilities();
    let layered = Throttle::new(short(a, 0), NonZeroU64::MAX);
    assert_eq!(layered.capabilities(), inside);
    assert!(layered.capabilities().contains(Capabilities::FD_PASSING));
    assert_eq!(layered.peer(), "unix:pair:1");
    assert!(layered.as_fd().is_some());
}
