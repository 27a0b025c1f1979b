use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use towline_channel::{
    Cancel, ConnectOptions, IoBufMut, Listener, RecvFlags, UnixChannel, ZeroCopyStatistics, connect_with,
};

use super::*;

/// A channel with zero-copy sends that records the flags of each send.
#[derive(Debug)]
struct Spy {
    can: Capabilities,
    calls: Mutex<Vec<(usize, SendFlags)>>,
    /// Zero-copy calls that are refused for lack of memory, from the first on.
    refusals: Mutex<u32>,
    /// Results of the flushes.
    flushed: Mutex<VecDeque<Flushed>>,
}

impl Spy {
    fn new(can: Capabilities) -> Arc<Self> {
        let (calls, refusals, flushed) = Default::default();
        Arc::new(Self { can: can | Capabilities::SEND, calls, refusals, flushed })
    }

    fn calls(&self) -> Vec<(usize, SendFlags)> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

impl Channel for Spy {
    fn peer(&self) -> &str {
        "spy:"
    }

    fn capabilities(&self) -> Capabilities {
        self.can
    }

    fn send(&self, bufs: &[IoBuf<'_>], flags: SendFlags) -> towline_channel::Result<usize> {
        let mut refusals = self.refusals.lock().unwrap();
        if flags.contains(SendFlags::ZERO_COPY) && *refusals > 0 {
            *refusals -= 1;
            return Err(ChannelError::ZeroCopyMemory {
                peer: "spy:".into(),
                after: Duration::ZERO,
                optmem_max: "1".into(),
                memlock: "2".into(),
                source: ErrorKind::OutOfMemory.into(),
            });
        }
        let bytes = total_len(bufs);
        self.calls.lock().unwrap().push((bytes, flags));
        Ok(bytes)
    }

    fn recv(&self, _: &mut [IoBufMut<'_>], _: RecvFlags) -> towline_channel::Result<usize> {
        Ok(0)
    }

    fn flush(&self) -> towline_channel::Result<Flushed> {
        match self.flushed.lock().unwrap().pop_front() {
            Some(flushed) => Ok(flushed),
            None => Err(ChannelError::Cancelled),
        }
    }

    fn zero_copy_statistics(&self) -> Option<ZeroCopyStatistics> {
        Some(ZeroCopyStatistics::default())
    }

    fn shutdown(&self, _: Shutdown) -> towline_channel::Result<()> {
        Ok(())
    }

    fn set_timeouts(&self, _: Option<Duration>, _: Option<Duration>) -> towline_channel::Result<()> {
        Ok(())
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

static HEADER: [u8; 100] = [1; 100];
static PAGES: [u8; 128 << 10] = [2; 128 << 10];

fn sender(spy: &Arc<Spy>, asked: ZeroCopySend) -> (PacketSender, Arc<Statistics>) {
    let statistics = Arc::<Statistics>::default();
    let channel = Arc::clone(spy) as Arc<dyn Channel>;
    (PacketSender::new(channel, Arc::clone(&statistics), asked, Compression::None), statistics)
}

fn contents() -> [IoBuf<'static>; 2] {
    let (first, second) = PAGES.split_at(4096);
    [IoBuf::from(first), IoBuf::from(second)]
}

#[test]
fn headers_are_copied_and_pages_are_not() {
    let spy = Spy::new(Capabilities::ZERO_COPY);
    let (mut sender, _) = sender(&spy, ZeroCopySend::On);
    sender.send(&HEADER, &contents()).unwrap();
    sender.send(&HEADER, &[]).unwrap();
    let expected = [
        (HEADER.len(), SendFlags::MORE),
        (PAGES.len(), SendFlags::ZERO_COPY),
        (HEADER.len(), SendFlags::empty()),
    ];
    assert_eq!(spy.calls(), expected);
}

#[test]
fn a_plain_packet_is_one_call() {
    for (can, asked) in
        [(Capabilities::ZERO_COPY, ZeroCopySend::Off), (Capabilities::empty(), ZeroCopySend::Auto)]
    {
        let spy = Spy::new(can);
        let (mut sender, _) = sender(&spy, asked);
        sender.send(&HEADER, &contents()).unwrap();
        assert_eq!(spy.calls(), [(HEADER.len() + PAGES.len(), SendFlags::empty())]);
    }
}

#[test]
fn without_memory_auto_sends_the_rest_plainly_and_on_fails() {
    let spy = Spy::new(Capabilities::ZERO_COPY);
    *spy.refusals.lock().unwrap() = 1;
    let (mut auto, statistics) = sender(&spy, ZeroCopySend::Auto);
    auto.send(&HEADER, &contents()).unwrap();
    auto.send(&HEADER, &contents()).unwrap();
    let expected = [
        (HEADER.len(), SendFlags::MORE),
        (PAGES.len(), SendFlags::empty()),
        (HEADER.len() + PAGES.len(), SendFlags::empty()),
    ];
    assert_eq!(spy.calls(), expected);
    assert_eq!(statistics.lane_sends()[0].reason, SendReason::NoMemory);

    *spy.refusals.lock().unwrap() = 1;
    let (mut on, _) = sender(&spy, ZeroCopySend::On);
    let error = on.send(&HEADER, &contents()).unwrap_err();
    assert!(matches!(error, Error::Channel(ChannelError::ZeroCopyMemory { .. })), "{error}");
}

#[test]
fn passes_that_the_kernel_copied_are_counted_where_it_was_asked_not_to() {
    for (asked, expected) in [(ZeroCopySend::On, 2), (ZeroCopySend::Auto, 0), (ZeroCopySend::Off, 0)] {
        let spy = Spy::new(Capabilities::ZERO_COPY);
        spy.flushed.lock().unwrap().extend([Flushed::AllCopied, Flushed::Done, Flushed::AllCopied]);
        let (sender, statistics) = sender(&spy, asked);
        for _ in 0..3 {
            sender.flush().unwrap();
        }
        assert_eq!(statistics.snapshot().dirty_sync_missed_zero_copy, expected);
        assert!(matches!(sender.flush(), Err(Error::Channel(ChannelError::Cancelled))));
    }
}

#[test]
fn unavailable_zero_copy_is_refused_with_the_reason() {
    let lane = |can| Spy::new(can) as Arc<dyn Channel>;
    let both = [lane(Capabilities::ZERO_COPY), lane(Capabilities::empty())];
    let zlib = Compression::Zlib { level: 1 };
    for (compression, lanes, why) in [
        (Compression::None, &both[..], "the connection to spy: has none"),
        (zlib, &both[..1], "compressed pages lie in a buffer"),
        (Compression::None, &[], "there are no lanes"),
    ] {
        let error = check(ZeroCopySend::On, compression, lanes).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        check(ZeroCopySend::Auto, compression, lanes).unwrap();
        check(ZeroCopySend::Off, compression, lanes).unwrap();
    }
    check(ZeroCopySend::On, Compression::None, &both[..1]).unwrap();
}

/// Packets of a relay's lane: they arrive on a Unix socket and are forwarded over TCP.
#[test]
fn packets_from_a_socket_are_received_or_spliced_whatever_costs_less() {
    const PACKETS: usize = 120;
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let (deadline, cancel) = (Instant::now() + Duration::from_secs(20), Cancel::new().unwrap());
    let options = ConnectOptions { zero_copy: true, ..Default::default() };
    let out = connect_with(listener.local_address(), deadline, &cancel, &options).unwrap();
    let far = listener.accept(deadline, &cancel).unwrap();
    let (source, from) = UnixChannel::pair().unwrap();
    let statistics = Arc::<Statistics>::default();
    let mut sender =
        PacketSender::new(out.into(), Arc::clone(&statistics), ZeroCopySend::Auto, Compression::None);
    let packet = |number: usize| vec![number as u8; PAGES.len()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..PACKETS {
                source.send_all(&[IoBuf::from(&packet(number)[..])], SendFlags::empty()).unwrap();
            }
        });
        scope.spawn(|| {
            let (mut header, mut pages) = ([0; HEADER.len()], vec![0; PAGES.len()]);
            for number in 0..PACKETS {
                far.recv_exact(&mut [IoBufMut::from(&mut header), IoBufMut::from(&mut pages[..])]).unwrap();
                assert!(header == HEADER && pages == packet(number), "packet {number}");
            }
        });
        let mut pages = vec![0; PAGES.len()];
        for _ in 0..PACKETS {
            if sender.splices_from(&from, PAGES.len()).unwrap() {
                assert!(sender.splice(&HEADER, &from, PAGES.len()).unwrap() >= 2);
            } else {
                from.recv_exact(&mut [IoBufMut::from(&mut pages[..])]).unwrap();
                sender.send(&HEADER, &[IoBuf::from(&pages[..])]).unwrap();
                sender.flush().unwrap();
            }
        }
    });
    let lane = statistics.lane_sends()[0];
    let is_decided = matches!(lane.reason, SendReason::Copied | SendReason::SpliceCostsLess);
    assert!(is_decided && lane.zero_copy.packets == 1, "the loopback copies: {lane:?}");
    assert!(lane.spliced.measured_packets >= policy::SAMPLES as u64, "{lane:?}");
    assert!(lane.plain.measured_packets >= policy::SAMPLES as u64, "{lane:?}");
}
