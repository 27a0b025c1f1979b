//! Output commit: frames that the driver sends are held until their epoch is released.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use towline_frontend::net::feature;
use towline_frontend::wire::RequestCode;
use towline_frontend::wire::feature::PROTOCOL_FEATURES;
use towline_net::{HoldError, Net, Options, Taps};
use towline_vhost_user::InFlightRecord;

use crate::{Bench, Kind, QueueShape, WITHIN, datagrams, frame, wait_until_sent};

fn generation(number: u64) -> NonZeroU64 {
    NonZeroU64::new(number).unwrap()
}

/// The card as it should be.
struct Model {
    bench: Bench,
    pair: u32,
    /// Where the transmit ring continues, while it is stopped.
    base: Option<u16>,
    generation: Option<NonZeroU64>,
    holding: bool,
    next: u32,
    /// In the stopped ring.
    waiting: Vec<Vec<u8>>,
    open: Vec<Vec<u8>>,
    closed: VecDeque<(u64, Vec<Vec<u8>>)>,
    epoch: Option<u64>,
    /// To arrive now.
    sent: Vec<Vec<u8>>,
}

impl Model {
    fn new(name: &str, pair: u32) -> Option<Self> {
        let shape = QueueShape { pair, receive_bytes: 1536, size: 256, features: feature::MRG_RXBUF };
        let bench = Bench::on(Kind::Tap, name, shape)?;
        let (waiting, open, sent) = (Vec::new(), Vec::new(), Vec::new());
        let (closed, epoch) = (VecDeque::new(), None);
        let (base, generation) = (None, None);
        Some(Self {
            bench,
            pair,
            base,
            generation,
            holding: false,
            next: 0,
            waiting,
            open,
            closed,
            epoch,
            sent,
        })
    }

    fn ring(&self) -> u32 {
        2 * self.pair + 1
    }

    fn step(&mut self, random: &mut fastrand::Rng) {
        match random.u8(..12) {
            0..=3 => self.transmit(random),
            4 => self.stop(),
            5 => self.start(),
            6 | 7 => {
                self.stop();
                self.mark(random);
            }
            8 => self.mark(random),
            9 => self.release(random),
            // Of the second pair they come only while its ring sends: the kernel steers flows by that, else by a hash.
            10 if self.pair == 0 => self.receive(random),
            10 => {}
            _ if random.u8(..3) == 0 => self.pass(random),
            _ => self.hold(random),
        }
        self.compare();
    }

    fn transmit(&mut self, random: &mut fastrand::Rng) {
        for _ in 0..random.usize(1..60) {
            let length = if random.u8(..8) == 0 { random.usize(..50_000) } else { random.usize(..200) };
            let datagram = [&self.next.to_le_bytes()[..], &vec![random.u8(..); length]].concat();
            let pair = &mut self.bench.driver.1;
            while pair.reclaim().unwrap() > 0 {}
            if !pair.transmit(&frame([0xff; 6], &datagram)) {
                break;
            }
            self.next += 1;
            self.waiting.push(datagram);
        }
        self.bench.driver.1.flush();
        self.run();
    }

    /// Waits until a ring that runs has no frame left.
    fn run(&mut self) {
        if self.base.is_none() {
            wait_until_sent(&mut self.bench.driver.1);
            let to = if self.holding { &mut self.open } else { &mut self.sent };
            to.append(&mut self.waiting);
        }
    }

    fn stop(&mut self) {
        let ring = self.ring();
        self.base.get_or_insert_with(|| self.bench.driver.0.stop(ring).unwrap());
    }

    fn start(&mut self) {
        let (frontend, pair) = &mut self.bench.driver;
        if let Some(base) = self.base.take() {
            frontend.start(pair.tx(), base).unwrap();
        }
        self.run();
    }

    /// A generation, usually that which holds the card. Checks that others are refused.
    fn known(&self, random: &mut fastrand::Rng) -> (NonZeroU64, Option<&'static str>) {
        let found = match self.generation {
            Some(current) if random.u8(..8) > 0 => return (current, None),
            Some(current) => generation((current.get() + u64::from(random.u8(..3))).saturating_sub(1).max(1)),
            None => generation(1),
        };
        let refused = match self.generation {
            Some(current) if found < current => Some("is stale: the card is held by generation"),
            Some(current) if found == current => None,
            _ => Some("has not held this card"),
        };
        (found, refused)
    }

    fn mark(&mut self, random: &mut fastrand::Rng) {
        let (generation, refused) = self.known(random);
        let number = self.epoch.unwrap_or(0) + u64::from(random.u8(..3));
        let marked = self.bench.net.mark(generation, number);
        if let Some(text) = refused {
            return check_refused(marked, text);
        }
        match (self.holding, self.base, self.epoch) {
            (false, ..) => assert!(matches!(marked, Err(HoldError::Passing)), "{marked:?}"),
            (_, None, _) => {
                let ring = self.ring() as usize;
                assert!(
                    matches!(marked, Err(HoldError::Running { ring: found }) if found == ring),
                    "{marked:?}"
                );
            }
            (.., Some(last)) if number <= last => {
                assert!(matches!(marked, Err(HoldError::NotNext { .. })), "{marked:?}");
            }
            _ => {
                assert_eq!(marked.unwrap().epoch, Some(number));
                self.epoch = Some(number);
                self.closed.push_back((number, std::mem::take(&mut self.open)));
            }
        }
    }

    fn release(&mut self, random: &mut fastrand::Rng) {
        let (generation, refused) = self.known(random);
        let number = (self.epoch.unwrap_or(0) + 1).saturating_sub(random.u64(..4));
        let released = self.bench.net.release(generation, number);
        if let Some(text) = refused {
            return check_refused(released, text);
        }
        if self.epoch.is_none_or(|last| number > last) {
            return check_refused(released, "is not marked");
        }
        released.unwrap();
        while self.closed.front().is_some_and(|(epoch, _)| *epoch <= number) {
            self.sent.extend(self.closed.pop_front().unwrap().1);
        }
    }

    fn hold(&mut self, random: &mut fastrand::Rng) {
        let current = self.generation.map_or(0, NonZeroU64::get);
        let found = generation(
            (current + u64::from(random.u8(..8) / 5)).max(1) - u64::from(current > 1 && random.u8(..8) == 0),
        );
        let held = self.bench.net.hold(found);
        if found.get() < current {
            return check_refused(held, "is stale");
        }
        assert!(held.unwrap().is_holding);
        if found.get() > current {
            let closed = self.closed.drain(..).flat_map(|(_, frames)| frames).collect::<Vec<_>>();
            self.open.splice(0..0, closed);
            self.epoch = None;
        }
        (self.generation, self.holding) = (Some(found), true);
    }

    fn pass(&mut self, random: &mut fastrand::Rng) {
        let (generation, refused) = self.known(random);
        let announced = random.bool().then_some([2, 0, 0, 9, 0, 2]);
        let passed = self.bench.net.pass(generation, announced);
        if let Some(text) = refused {
            return check_refused(passed, text);
        }
        assert!(!passed.unwrap().is_holding);
        self.sent.extend(self.closed.drain(..).flat_map(|(_, frames)| frames));
        self.sent.append(&mut self.open);
        self.holding = false;
    }

    /// Frames to the guest are not held.
    fn receive(&mut self, random: &mut fastrand::Rng) {
        let datagrams = datagrams(random.usize(1..20), 2000);
        self.bench.send(&datagrams);
        self.bench.expect(&datagrams);
    }

    /// Frames that were sent have arrived, and no others; the rest is held.
    fn compare(&mut self) {
        let mut found = vec![0; 1 << 16];
        for (index, wanted) in self.sent.drain(..).enumerate() {
            let (length, _) = self.bench.socket.recv_from(&mut found).unwrap();
            assert!(found[..length] == wanted[..], "{index}: {:?}, expected {:?}", &found[..4], &wanted[..4]);
        }
        self.bench.socket.set_nonblocking(true).unwrap();
        let more = self.bench.socket.recv_from(&mut found);
        assert_eq!(more.unwrap_err().kind(), ErrorKind::WouldBlock, "frame {:?} was sent", &found[..4]);
        self.bench.socket.set_nonblocking(false).unwrap();
        let held = self.bench.net.held(Duration::ZERO);
        let closed = self.closed.iter().map(|(_, frames)| frames.len()).sum::<usize>();
        assert_eq!((held.frames, held.open_frames), (closed + self.open.len(), self.open.len()));
        assert_eq!(
            (held.is_holding, held.generation, held.epoch),
            (self.holding, self.generation, self.epoch)
        );
    }
}

fn check_refused<T: std::fmt::Debug>(result: Result<T, HoldError>, text: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(text), "{error}");
}

#[test]
fn held_frames_leave_by_epochs_in_their_order() {
    let name = "held_frames_leave_by_epochs_in_their_order";
    let number = |name, otherwise| std::env::var(name).map_or(otherwise, |value| value.parse().unwrap());
    let (seeds, first): (u64, u64) = (number("TOWLINE_SEEDS", 6), number("TOWLINE_FIRST_SEED", 0));
    for seed in first..first + seeds {
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let Some(mut model) = Model::new(name, u32::try_from(seed % 2).unwrap()) else { return };
        set_socket_recv_buffer_size_force(&model.bench.socket, 256 << 20).unwrap();
        if seed % 4 > 0 {
            model.hold(&mut fastrand::Rng::with_seed(0));
        }
        (0..250).for_each(|_| model.step(&mut random));
    }
}

/// The ring stops at the bound, and continues when there is room. Nothing is lost.
#[test]
fn a_transmit_ring_waits_for_room_while_too_many_frames_are_held() {
    let name = "a_transmit_ring_waits_for_room_while_too_many_frames_are_held";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF) else { return };
    set_socket_recv_buffer_size_force(&bench.socket, 1 << 30).unwrap();
    bench.net.hold(generation(1)).unwrap();
    let datagram = |number: u32| [number.to_le_bytes().to_vec(), vec![7; 60_000]].concat();
    let mut offered = 0;
    let mut offer = |bench: &mut Bench| {
        let pair = &mut bench.driver.1;
        while pair.reclaim().unwrap() > 0 {}
        let more = pair.transmit(&frame([0xff; 6], &datagram(offered)));
        pair.flush();
        offered += u32::from(more);
        more
    };
    let until = Instant::now() + WITHIN;
    while !bench.net.held(Duration::ZERO).is_full {
        // Not by a wait for room, which never comes if the ring waits by now.
        offer(&mut bench);
        assert!(Instant::now() < until, "{:?}", bench.net.held(Duration::ZERO));
    }
    while offer(&mut bench) {}
    let full = bench.net.held(Duration::ZERO);
    assert!(full.bytes <= 64 << 20 && full.bytes > 58 << 20, "{full:?}");
    let left = bench.driver.1.tx().in_flight();
    assert!(left > 200, "{left} chains wait in the ring");
    // At the next epoch it still has them.
    let base = bench.driver.0.stop(1).unwrap();
    let marked = bench.net.mark(generation(1), 1).unwrap();
    assert_eq!(marked.frames, full.frames);
    bench.driver.0.start(bench.driver.1.tx(), base).unwrap();
    bench.wait_for_held("a ring that waits", |held| held.is_full && held.open_frames == 0);
    bench.net.release(generation(1), 1).unwrap();
    wait_until_sent(&mut bench.driver.1);
    let open = bench.net.held(Duration::ZERO);
    assert_eq!(full.frames + open.open_frames, offered as usize);
    bench.net.pass(generation(1), None).unwrap();
    let mut found = vec![0; 1 << 16];
    for number in 0..offered {
        let (length, _) = bench.socket.recv_from(&mut found).unwrap();
        assert!(found[..length] == datagram(number)[..], "{:?} instead of {number}", &found[..4]);
    }
    assert_eq!(bench.net.statistics()[0][1].packets, u64::from(offered));
}

/// While the driver sends all the time, nothing leaves between `hold` and `pass`, and all that it sends arrives in its order.
#[test]
fn no_frame_leaves_once_frames_are_held_although_the_driver_sends() {
    let name = "no_frame_leaves_once_frames_are_held_although_the_driver_sends";
    let Some(mut bench) = Bench::new(name, 1536, 256, feature::MRG_RXBUF) else { return };
    set_socket_recv_buffer_size_force(&bench.socket, 256 << 20).unwrap();
    let (rounds, until) = (100, Instant::now() + WITHIN);
    let Bench { driver: (_, pair), socket, net, .. } = &mut bench;
    socket.set_nonblocking(true).unwrap();
    let (mut found, mut next, ends) = ([0; 100], 0u32, AtomicBool::new(false));
    let mut arrived = || {
        let before = next;
        while socket.recv_from(&mut found).is_ok() {
            assert_eq!(found[..4], next.to_le_bytes());
            next += 1;
        }
        next - before
    };
    let sent = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sent = 0u32;
            while !ends.load(Relaxed) && Instant::now() < until {
                while pair.transmit(&frame([0xff; 6], &sent.to_le_bytes())) {
                    sent += 1;
                }
                pair.flush();
                pair.wait_room(WITHIN).unwrap();
                pair.reclaim().unwrap();
            }
            wait_until_sent(pair);
            sent
        });
        for round in 0..rounds {
            net.hold(generation(1)).unwrap();
            arrived();
            while net.held(WITHIN).frames < 500 {
                assert!(Instant::now() < until, "round {round}: {:?}", net.held(Duration::ZERO));
            }
            assert_eq!(arrived(), 0, "round {round}");
            net.pass(generation(1), None).unwrap();
        }
        ends.store(true, Relaxed);
        sender.join().unwrap()
    });
    arrived();
    assert_eq!(next, sent);
}

impl Bench {
    fn wait_for_held(&self, what: &str, wanted: impl Fn(&towline_net::HoldStatus) -> bool) {
        let held = || self.net.held(Duration::from_millis(10));
        let found = towline_lab::wait_until(what, WITHIN, || Ok(wanted(&held()).then_some(())));
        found.unwrap_or_else(|error| panic!("{error}: {:?}", held()));
    }

    /// Transmits a datagram, and waits until its chain is used.
    fn transmit(&mut self, payload: &[u8]) {
        let pair = &mut self.driver.1;
        assert!(pair.transmit(&frame([0xff; 6], payload)));
        pair.flush();
        wait_until_sent(pair);
    }
}

#[test]
fn held_frames_have_the_header_of_the_driver_that_has_the_tap_then() {
    let name = "held_frames_have_the_header_of_the_driver_that_has_the_tap_then";
    let Some(mut bench) = Bench::new(name, 1536, 64, feature::MRG_RXBUF) else { return };
    bench.net.hold(generation(1)).unwrap();
    bench.transmit(b"twelve bytes");
    (0..2).for_each(|ring| assert!(bench.driver.0.stop(ring).is_ok()));
    bench.net.mark(generation(1), 1).unwrap();
    bench.driver.0.set_features(PROTOCOL_FEATURES).unwrap();
    bench.net.release(generation(1), 1).unwrap();
    let mut found = [0; 100];
    let (length, _) = bench.socket.recv_from(&mut found).unwrap();
    assert_eq!(found[..length], *b"twelve bytes");
}

#[test]
fn an_announcement_is_held_and_held_frames_of_a_guest_that_is_gone_are_dropped() {
    let name = "an_announcement_is_held_and_held_frames_of_a_guest_that_is_gone_are_dropped";
    let Some(mut bench) = Bench::new(name, 1536, 64, feature::MRG_RXBUF) else { return };
    bench.net.hold(generation(7)).unwrap();
    bench.driver.0.request(RequestCode::SEND_RARP, &[2, 0, 0, 9, 0, 2, 0, 0], &[]).unwrap();
    bench.transmit(b"never sent");
    assert_eq!(bench.net.held(WITHIN).open_frames, 2);
    bench.served = None;
    assert_eq!(bench.net.held(Duration::ZERO).frames, 2, "until another frontend connects");
    bench.connect_again();
    assert_eq!(bench.net.held(Duration::ZERO).frames, 0);
    bench.driver.0.enable(1, true).unwrap();
    bench.transmit(b"sent");
    assert_eq!(bench.net.pass(generation(7), Some([2, 0, 0, 9, 0, 2])).unwrap().frames, 0);
    let mut found = [0; 100];
    let (length, _) = bench.socket.recv_from(&mut found).unwrap();
    assert_eq!(found[..length], *b"sent");
    assert_eq!(bench.net.statistics()[0][1].packets, 1);
}

/// Returns true if this thread's network has a tap.
fn has_tap() -> std::io::Result<bool> {
    Ok(std::fs::read_to_string("/proc/thread-self/net/dev")?.contains("tap0:"))
}

#[test]
fn the_next_process_of_a_card_that_holds_frames_holds_them_too() {
    let name = "the_next_process_of_a_card_that_holds_frames_holds_them_too";
    let Some(network) = crate::network(name) else { return };
    let record = InFlightRecord::new(2).unwrap();
    // A process that another test starts has the descriptors of a dropped card, too, until it executes its program.
    let is_gone = || Ok((!network.enter(has_tap)??).then_some(()));
    let card = |hold| {
        towline_lab::wait_until("the end of the last card's tap", WITHIN, is_gone).unwrap();
        let taps = network.enter(|| Taps::open("tap0", 1)).unwrap().unwrap();
        Net::new(taps, Options { hold, word: Some(record.device_word()), ..Options::default() })
    };
    let net = card(false);
    assert!(!net.held(Duration::ZERO).is_holding);
    net.hold(generation(5)).unwrap();
    net.set_link(false);
    drop(net);
    let net = card(false);
    assert!(net.held(Duration::ZERO).is_holding && !net.is_link_up());
    check_refused(net.hold(generation(4)), "generation 4 is stale: the card is held by generation 5");
    check_refused(net.pass(generation(6), None), "generation 6 has not held this card");
    net.set_link(true);
    assert_eq!(net.pass(generation(5), None).unwrap().generation, Some(generation(5)));
    drop(net);
    let net = card(false);
    assert!(!net.held(Duration::ZERO).is_holding && net.is_link_up());
    check_refused(net.pass(generation(4), None), "is stale");
    drop(net);
    assert!(!card(true).held(Duration::ZERO).is_holding, "its own state counts for more than the option");
}
