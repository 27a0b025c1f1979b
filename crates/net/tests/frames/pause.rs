//! Frames that a tap receives while its guest goes to another card.

use std::time::Duration;

use towline_frontend::net::feature;
use towline_net::{PassError, PassedFrames};

use crate::{Bench, datagrams};

impl Bench {
    /// Stops the receive ring. Returns where it continues.
    fn stop_receiving(&mut self) -> u16 {
        self.driver.0.stop(0).unwrap()
    }

    fn start_receiving(&mut self, base: u16) {
        let (frontend, pair) = &mut self.driver;
        frontend.start(pair.rx(), base).unwrap();
    }

    fn take(&self) -> PassedFrames {
        self.net.take_frames(Duration::from_millis(100)).unwrap()
    }

    /// Takes all frames, and gives them to a card.
    fn pass_all(&self, to: &Self) {
        loop {
            let passed = self.take();
            assert!(passed.is_stopped);
            if passed.frames.is_empty() {
                return;
            }
            to.net.give_frames(&passed, false).unwrap();
        }
    }
}

fn none(series: u64) -> PassedFrames {
    PassedFrames { series, is_stopped: true, features: 0, frames: Vec::new() }
}

#[test]
fn frames_of_a_pause_precede_those_of_the_tap_where_the_rings_run() {
    let name = "frames_of_a_pause_precede_those_of_the_tap_where_the_rings_run";
    for (receive_bytes, features) in
        [(1536, feature::MRG_RXBUF), (4096, feature::MRG_RXBUF | feature::OFFLOADS), (68 << 10, 0)]
    {
        let bench = || Bench::new(name, receive_bytes, 64, features);
        let (Some(mut here), Some(mut there)) = (bench(), bench()) else { return };
        assert!(!here.take().is_stopped);
        let bases = [here.stop_receiving(), there.stop_receiving()];
        // Received by the other host's rings, too.
        there.send(&datagrams(3, 100));
        there.net.give_frames(&here.take(), false).unwrap();
        let (passed, own) = (datagrams(200, 20_000), datagrams(50, 999));
        here.send(&passed[..150]);
        here.pass_all(&there);
        there.send(&own);
        there.start_receiving(bases[1]);
        there.expect(&passed[..150]);
        here.send(&passed[150..]);
        here.pass_all(&there);
        assert_eq!(there.net.give_frames(&none(0), true), Ok(false), "nothing was sent there");
        there.expect(&[&passed[150..], &own].concat());
        // Had the guest gone on here, it would have got them here.
        here.send(&own);
        here.start_receiving(bases[0]);
        here.expect(&[&passed[..], &own].concat());
        assert_eq!(here.take().series, 1, "another pause");
    }
}

/// An idle guest's former host passes none, and the rings wait for them as long as they may.
#[test]
fn frames_of_its_own_tap_wait_for_buffers_where_none_were_passed() {
    let name = "frames_of_its_own_tap_wait_for_buffers_where_none_were_passed";
    let Some(mut there) = Bench::new(name, 1536, 64, feature::MRG_RXBUF) else { return };
    let base = there.stop_receiving();
    there.net.give_frames(&none(0), false).unwrap();
    let own = datagrams(200, 100);
    there.send(&own);
    there.start_receiving(base);
    there.expect(&own);
}

#[test]
fn frames_that_are_dropped_or_come_late_are_given_to_nobody() {
    let name = "frames_that_are_dropped_or_come_late_are_given_to_nobody";
    let bench = || Bench::new(name, 1536, 64, feature::MRG_RXBUF);
    let (Some(mut here), Some(mut there)) = (bench(), bench()) else { return };
    assert_eq!(there.net.give_frames(&none(0), false), Err(PassError::NotAwaited), "its guest runs");
    let bases = [here.stop_receiving(), there.stop_receiving()];
    here.take();
    there.net.give_frames(&none(0), false).unwrap();
    assert_eq!(there.net.take_frames(Duration::ZERO), Err(PassError::Expected));
    let (first, second) = (datagrams(9, 100), datagrams(8, 100));
    here.send(&first);
    here.pass_all(&there);
    // The guest went on, and has got them; then it stopped again.
    there.net.give_frames(&none(1), false).unwrap();
    there.start_receiving(bases[1]);
    there.send(&second);
    there.expect(&second);
    let passed = PassedFrames { series: 1, ..here.take() };
    assert_eq!(there.net.give_frames(&passed, false), Err(PassError::NotAwaited), "its rings have waited");
    here.net.drop_frames();
    here.start_receiving(bases[0]);
    here.send(&second);
    here.expect(&second);
}

#[test]
fn damaged_and_endless_frames_are_refused() {
    let name = "damaged_and_endless_frames_are_refused";
    let Some(mut bench) = Bench::new(name, 1536, 64, feature::MRG_RXBUF) else { return };
    bench.stop_receiving();
    let frame = |pair: u16, length: u32, bytes: usize| {
        [&pair.to_le_bytes()[..], &length.to_le_bytes(), &vec![0; bytes]].concat()
    };
    let give = |frames| {
        bench.net.give_frames(&PassedFrames { frames, features: feature::MRG_RXBUF, ..none(0) }, false)
    };
    for damaged in
        [vec![0], frame(0, 60, 59), frame(0, 11, 11), frame(0, 70_000, 70_000), frame(0, u32::MAX, 9)]
    {
        assert_eq!(give(damaged), Err(PassError::Damaged));
    }
    // No pair of the card.
    assert_eq!(give(frame(9, 60, 60)), Ok(false));
    let given = (0..1 << 20).find(|_| give(frame(0, 12, 12)).is_err());
    assert_eq!(given, Some((16 << 10) - 1), "the limit");
    assert_eq!(give(frame(0, 12, 12)), Err(PassError::TooMany));
}
