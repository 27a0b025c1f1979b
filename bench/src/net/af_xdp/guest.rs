//! The driver and the application inside of the guest: this program, in a network namespace.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use towline_channel::Cancel;
use towline_frontend::Frontend;
use towline_frontend::net::{FRAME_BYTES_MAX, feature as net};

use super::super::card::{Card, Driver, Setup};
use super::super::hosts::GUEST_TAP;
use super::super::sys;
use super::entry::{INSIDE, OUT, OUTSIDE, REQUEST_PORT, SOCKET, STREAM_PORT};
use crate::vhost::latency::Latencies;
use crate::vhost::{Signals, window_of};

/// First word of the command line, before the role and the card's process.
pub(super) const OPTION: &str = "--af-xdp-guest";
const WITHIN: Duration = Duration::from_secs(30);

/// Returns the role and the card's process if this program was started as the application of a guest.
pub fn role(words: &[OsString]) -> Option<(&str, &str)> {
    match words {
        [_, option, role, card] if option == OPTION => Some((role.to_str()?, card.to_str()?)),
        _ => None,
    }
}

/// Measures one application, and prints its result.
///
/// # Errors
/// The card does not serve, or no packet comes back.
pub fn serve((role, card_pid): (&str, &str)) -> Result<()> {
    let role: Value = serde_json::from_str(role).context("role of an application")?;
    let number = |key: &str| role[key].as_u64().with_context(|| format!("{key} of the role"));
    let (size, length) = (usize::try_from(number("size")?)?, Duration::from_millis(number("window-ms")?));
    let signals: Arc<Signals> = Arc::default();
    let offloads = if role["offloads"] == "off" { 0 } else { net::OFFLOADS };
    let frontend = Frontend::connect(Path::new(SOCKET), WITHIN)?;
    let card = Card::start(frontend, Setup { offloads, ..Setup::of(Driver::Linux, FRAME_BYTES_MAX) })?;
    let tap = sys::tap(GUEST_TAP, false, card.offloads())?;
    run(&format!("ip link set {GUEST_TAP} address {OUT} arp off up"))?;
    run(&format!("ip address add {INSIDE}/24 dev {GUEST_TAP}"))?;
    let pump = card.pump(vec![tap], &signals);
    let is_stream = role["kind"] == "stream";
    let port = if is_stream { STREAM_PORT } else { REQUEST_PORT };
    let stream = connect(port)?;
    let of_application = (stream.try_clone()?, Arc::clone(&signals));
    let application = std::thread::spawn(move || {
        let (stream, signals) = of_application;
        if is_stream { send(stream, size, &signals) } else { request(stream, size, &signals) }
    });
    let measured = window_of(&signals, Some(card_pid.parse()?), length, &Cancel::new()?);
    signals.stop.store(true, Ordering::Relaxed);
    // An application that waits for its peer ends, too.
    let _ = stream.shutdown(Shutdown::Both);
    let mut latencies = application.join().expect("the thread does not panic")?;
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
            "p50-us": if is_stream { 0.0 } else { latencies.quantile(0.5) },
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

/// Connects, with retries while the card's socket is being bound: until then its frames take another path.
fn connect(port: u16) -> Result<TcpStream> {
    let address = format!("{OUTSIDE}:{port}").parse()?;
    let until = Instant::now() + WITHIN;
    loop {
        match TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
            Ok(stream) => {
                stream.set_read_timeout(Some(WITHIN))?;
                stream.set_write_timeout(Some(WITHIN))?;
                return Ok(stream);
            }
            Err(error) if Instant::now() > until => return Err(error).context("cannot connect"),
            Err(_) => {}
        }
    }
}

fn send(mut stream: TcpStream, size: usize, signals: &Signals) -> Result<Latencies> {
    let message = vec![0x5a; size];
    while !signals.is_over() {
        match stream.write_all(&message) {
            Ok(()) => signals.add(size as u64),
            Err(_) if signals.is_over() => break,
            Err(error) => return Err(error).context("sending"),
        }
    }
    Ok(Latencies::default())
}

fn request(mut stream: TcpStream, size: usize, signals: &Signals) -> Result<Latencies> {
    stream.set_nodelay(true)?;
    let (mut latencies, mut bytes) = (Latencies::default(), vec![0x5a; size]);
    while !signals.is_over() {
        let begun = Instant::now();
        let result = stream.write_all(&bytes).and_then(|()| stream.read_exact(&mut bytes));
        if signals.is_over() {
            break;
        }
        result.context("no response")?;
        signals.add(1);
        if signals.measuring.load(Ordering::Relaxed) {
            latencies.push(begun.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(latencies)
}
