//! A loop between the taps of both hosts, without rings and without a backend: what the taps themselves allow for TCP.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use anyhow::{Context as _, Result};
use towline_frontend::net::{FRAME_BYTES_MAX, HEADER_BYTES};
use towline_frontend::wait_any;

use super::card::SLEEP;
use crate::threads::at_once;
use crate::vhost::Signals;

/// Forwards frames between two taps until the end, with a thread for each direction.
pub(super) fn relay(taps: [File; 2], signals: &Arc<Signals>) -> JoinHandle<Result<()>> {
    let signals = Arc::clone(signals);
    std::thread::spawn(move || {
        let ([outside, inside], signals) = (&taps, &signals);
        let ways = [(outside, inside), (inside, outside)];
        at_once(ways.map(|(from, to)| move || forward(from, to, signals)))
    })
}

fn forward(mut from: &File, mut to: &File, signals: &Signals) -> Result<()> {
    let mut frame = vec![0; HEADER_BYTES + FRAME_BYTES_MAX];
    while !signals.power_off.load(Ordering::Relaxed) {
        match from.read(&mut frame) {
            // A full tap drops frames, as a card's ring does.
            Ok(length) => drop(to.write(&frame[..length])),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                wait_any(&[from.as_fd()], SLEEP)?;
            }
            Err(error) => return Err(error).context("a tap"),
        }
    }
    Ok(())
}
