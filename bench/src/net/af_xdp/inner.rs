//! The driver and the application inside of the guest: this program, in a network namespace.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use towline_channel::Cancel;
use towline_frontend::Frontend;
use towline_frontend::net::{FRAME_BYTES_MAX, feature as net};

use super::super::card::{Card, Setup};
use super::super::hosts::{GUEST_TAP, INSIDE, OUTSIDE, dial};
use crate::applications::{Applications, CountedBy, Traffic};
use crate::sys;
use crate::vhost::window;

/// First word of the command line, before the role and the card's process.
pub(crate) const APPLICATION: &str = "--af-xdp-guest";
/// Address of the interfaces on the way out.
pub(super) const OUT: &str = "52:54:00:63:00:01";
/// Socket of the card.
pub(super) const SOCKET: &str = "/tmp/net.sock";
const WITHIN: Duration = Duration::from_secs(30);

/// Work of the application.
#[derive(Serialize, Deserialize)]
pub(super) struct Role {
    pub(super) traffic: Traffic,
    pub(super) window: Duration,
    /// True if the driver negotiates them.
    pub(super) offloads: bool,
}

/// Result of the application.
#[derive(Serialize, Deserialize)]
pub(super) struct Outcome {
    pub(super) rate: f64,
    /// CPU time of the card, in seconds for each unit.
    pub(super) card_seconds: f64,
    /// Units of the whole connection.
    pub(super) all_units: u64,
    /// For requests only.
    pub(super) p50_us: Option<f64>,
}

/// Measures one application, and prints its result.
///
/// # Errors
/// The card does not serve, or no packet comes back.
pub(crate) fn serve(role: &str, card_pid: &str) -> Result<()> {
    let Role { traffic, window: length, offloads } =
        serde_json::from_str(role).context("role of an application")?;
    let offloads = if offloads { net::OFFLOADS } else { 0 };
    let frontend = Frontend::connect(Path::new(SOCKET), WITHIN)?;
    let card = Card::start(frontend, Setup { offloads, ..Setup::of(FRAME_BYTES_MAX) })?;
    let tap = sys::tap(GUEST_TAP, 1, card.offloads())?;
    run(&format!("ip link set {GUEST_TAP} address {OUT} arp off up"))?;
    run(&format!("ip address add {INSIDE}/24 dev {GUEST_TAP}"))?;
    let mut application = Applications::default();
    let signals = Arc::clone(&application.signals);
    application.guest(move |signals| card.pump(vec![tap], signals));
    application.connect(&dial(OUTSIDE, traffic)?, traffic, CountedBy::Writer)?;
    let measured = window(&signals, Some(card_pid.parse()?), length, &Cancel::new()?);
    let p50_us = application.end()?.get("p50 µs").copied();
    let (window, all_units) = (measured?, signals.units.load(Ordering::Relaxed));
    let (rate, card_seconds) = (window.rate(), window.backend_seconds());
    let outcome = Outcome { rate, card_seconds, all_units, p50_us };
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}

fn run(line: &str) -> Result<()> {
    let words: Vec<&str> = line.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).output()?;
    ensure!(output.status.success(), "`{line}` failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
