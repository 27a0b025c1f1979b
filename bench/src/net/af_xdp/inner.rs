//! The driver and the application inside of the guest: this program, in a network namespace.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use towline_channel::Cancel;
use towline_frontend::Frontend;
use towline_frontend::net::{FRAME_BYTES_MAX, feature as net};

use super::super::card::{Card, Setup};
use super::super::hosts::{GUEST_TAP, INSIDE, OUTSIDE, dial};
use super::super::sys;
use super::{OUT, SOCKET};
use crate::applications::{Applications, Connections, CountedBy, Direction, Traffic};
use crate::vhost::{Signals, latencies, window_of};

/// First word of the command line, before the role and the card's process.
pub(crate) const APPLICATION: &str = "--af-xdp-guest";
const WITHIN: Duration = Duration::from_secs(30);

/// Measures one application, and prints its result.
///
/// # Errors
/// The card does not serve, or no packet comes back.
pub(crate) fn serve(role: &str, card_pid: &str) -> Result<()> {
    let role: Value = serde_json::from_str(role).context("role of an application")?;
    let size = usize::try_from(role["size"].as_u64().context("size of the role")?)?;
    let length = Duration::try_from_secs_f64(role["seconds"].as_f64().context("seconds of the role")?)?;
    let signals: Arc<Signals> = Arc::default();
    let offloads = if role["offloads"] == "off" { 0 } else { net::OFFLOADS };
    let frontend = Frontend::connect(Path::new(SOCKET), WITHIN)?;
    let card = Card::start(frontend, Setup { offloads, ..Setup::of(FRAME_BYTES_MAX) })?;
    let tap = sys::tap(GUEST_TAP, 1, card.offloads())?;
    run(&format!("ip link set {GUEST_TAP} address {OUT} arp off up"))?;
    run(&format!("ip address add {INSIDE}/24 dev {GUEST_TAP}"))?;
    let pump = card.pump(vec![tap], &signals);
    let mut application = Applications::new(&signals);
    if role["stream"] == true {
        let stream = dial(OUTSIDE, Traffic::Stream { direction: Direction::FromGuest, size, sessions: 1 })?;
        application.write(stream()?, size, CountedBy::Writer)?;
    } else {
        let connections = Connections::Kept;
        let dial = dial(OUTSIDE, Traffic::Request { connections, size, sessions: 1 })?;
        application.request(&dial, size, connections)?;
    }
    let measured = window_of(&signals, Some(card_pid.parse()?), length, &Cancel::new()?);
    let times = latencies(application.end()?);
    let all = signals.units.load(Ordering::Relaxed);
    signals.power_off.store(true, Ordering::Relaxed);
    pump.join().expect("the thread does not panic")?;
    let window = measured?;
    println!(
        "{}",
        json!({
            "units": window.units,
            "seconds": window.seconds,
            "card-seconds": window.backend_percent / 100.0 * window.seconds,
            "all-units": all,
            "p50-us": times.get("p50 µs"),
        })
    );
    Ok(())
}

fn run(line: &str) -> Result<()> {
    let words: Vec<&str> = line.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).output()?;
    ensure!(output.status.success(), "`{line}` failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
