//! `cargo xtask bench net`: frames and TCP of a vhost-user network card, against other backends, the tap itself and a veth pair.
//!
//! ```text
//!   frames   driver ── rings ── backend ── tap0 ── kernel, which drops them         and frames of a packet socket back
//!            write/read on the tap in a loop                                        the limit of backends on a tap
//!   TCP      applications ── kernel ── tap1 ── driver ── rings ── backend ── tap0 ── kernel ── applications
//!            applications ── kernel ── tap1 ── a loop ── tap0 ── kernel ── applications          the limit of backends on a tap
//!            applications ── kernel ── veth ── kernel ── applications               the limit
//! ```
//! The driver of `towline-frontend` replaces the guest, so that only the backend is measured. For TCP it connects its rings to a tap in
//! a namespace of its own, whose kernel is the guest's. Everything shares this machine's processors; `norm` is the figure per percent
//! of one processor that the whole machine used.
//!
//! Limits: needs root, for namespaces and taps.

pub(crate) mod af_xdp;
mod card;
mod hosts;
mod rows;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::UdpSocket;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Result;
use towline_frontend::Frontend;
use towline_frontend::net::FRAME_BYTES_MAX;
use towline_lab::{Network, wait_until};

use crate::applications::{Applications, CountedBy, Kind, Traffic};
use crate::machine;
use crate::options::Bench;
use crate::sys;
use crate::table::{self, Figures, Table};
use crate::vhost::{Window, connect};
use card::{Card, Setup};
use hosts::{GUEST_TAP, Hosts, INSIDE, OUTSIDE, SOCKET, TAP, dial, host, serve};
use rows::{Carrier, Path, Run, Work};

/// Timeout of the creation of a backend's tap.
const TAP_WITHIN: Duration = Duration::from_secs(30);
const WINDOW: Duration = Duration::from_secs(1);
/// Frames per call into the tap.
const INJECT_BATCH: usize = 32;
/// Passt's default.
const PASST_MTU: &str = "65520";

/// Measures the tables of one queue.
///
/// # Errors
/// The run was cancelled, or no row is selected.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    tables(bench, Path::single())
}

/// Measures the tables of several queues.
///
/// # Errors
/// As [`measure`].
pub(crate) fn measure_queues(bench: &Bench) -> Result<Vec<Table>> {
    tables(bench, Path::multiqueue())
}

fn tables(bench: &Bench, all: Vec<Run>) -> Result<Vec<Table>> {
    let results = table::measure(bench, bench.chosen(all)?, |run| {
        let hosts = Hosts { bench, run, outside: host()? };
        match (run.row.work, run.contender.kind) {
            (Work::Tcp(traffic), _) => hosts.tcp(traffic),
            (Work::Transmit(len) | Work::Receive(len), Carrier::Tap) => hosts.tap(len),
            (Work::Transmit(len) | Work::Receive(len), _) => hosts.frames(len),
        }
    })?;
    Ok(vec![
        results.table("net-frames", "Frames", &rows::FRAMES, Path::is_frames).with_notes(rows::NOTES),
        results.table("net-streams", "TCP streams", &rows::STREAMS, Path::is_stream).with_notes(rows::NOTES),
        results
            .table("net-requests", "TCP requests and connections", &rows::REQUESTS, Path::is_request)
            .with_notes(rows::NOTES),
    ])
}

impl Hosts<'_> {
    /// Returns true if frames go to the guest.
    fn receives(&self) -> bool {
        matches!(self.run.row.work, Work::Receive(_))
    }

    /// Measures frames through a backend.
    fn frames(&self, len: usize) -> Result<Figures> {
        let (directory, receives) = (self.bench.directory()?, self.receives());
        let mut backend = self.backend(directory.path())?;
        let socket = directory.path().join(SOCKET);
        let mut movers = Applications::default();
        let started = (|| {
            let card = Card::start(connect(&mut backend, &socket)?, Setup::of(len))?;
            self.tap_is_up()?;
            if !receives {
                movers.spawn(move |signals| card.transmit(len, signals));
                return Ok(());
            }
            movers.spawn(move |signals| card.receive(signals));
            self.inject(len, &mut movers)
        })();
        let measured = movers.window(started, Some(&mut backend), self.bench, WINDOW);
        // Read before the driver ends, as a backend may end with it and remove its tap.
        let total = movers.signals.units.load(Ordering::Relaxed) as f64;
        let taken = self.outside.received_packets(TAP);
        let ended = movers.end();
        let mut window = measured?;
        ended?;
        if !receives {
            // Completed frames count only if the other end has received them.
            window.units *= (taken? as f64 / total).min(1.0);
        }
        Ok(frame_figures(&window, len, window.backend_seconds()))
    }

    /// Waits for the backend's tap, and configures it.
    fn tap_is_up(&self) -> Result<()> {
        wait_until("the backend's tap", TAP_WITHIN, || {
            self.bench.cancel.check()?;
            Ok(self.outside.run(&["ip", "link", "set", TAP, "up"]).is_ok().then_some(()))
        })?;
        // A backend may have set an address of its own.
        let _ = self.outside.run(&["ip", "address", "flush", "dev", TAP]);
        self.outside.run(&["ip", "address", "add", &format!("{OUTSIDE}/24"), "dev", TAP])
    }

    /// Sends frames from the kernel into the tap at its full rate.
    fn inject(&self, len: usize, movers: &mut Applications) -> Result<()> {
        let injector = self.outside.enter(|| sys::Injector::new(TAP))??;
        let mut bytes = card::frame(len);
        // A packet socket's header does not have the number of buffers.
        bytes.drain(10..12);
        movers.spawn(move |signals| {
            while !signals.is_over() {
                match injector.send(&bytes, INJECT_BATCH) {
                    Ok(INJECT_BATCH) => {}
                    // Full: the reader may need this processor.
                    _ => std::thread::yield_now(),
                }
            }
            Ok(())
        });
        Ok(())
    }

    /// Measures frames through the tap, by calls in a loop.
    fn tap(&self, len: usize) -> Result<Figures> {
        let mut tap = self.outside.enter(|| sys::tap(TAP, 1, sys::Offloads::On))??;
        self.tap_is_up()?;
        let (receives, mut movers) = (self.receives(), Applications::default());
        if receives {
            self.inject(len, &mut movers)?;
        }
        let (spent, cpu_seconds) = mpsc::channel();
        movers.spawn(move |signals| {
            let mut bytes = card::frame(len);
            while !signals.is_over() {
                let moved = if receives { tap.read(&mut bytes).map(drop) } else { tap.write_all(&bytes) };
                match moved {
                    Ok(()) => signals.add(1),
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        towline_frontend::wait_any(&[tap.as_fd()], card::SLEEP)?;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(spent.send(machine::own_thread_seconds() / signals.units.load(Ordering::Relaxed) as f64)?)
        });
        let measured = movers.window(Ok(()), None, self.bench, WINDOW);
        movers.end()?;
        Ok(frame_figures(&measured?, len, cpu_seconds.recv()?))
    }

    fn tcp(&self, traffic: Traffic) -> Result<Figures> {
        let (directory, inside) = (self.bench.directory()?, host()?);
        let (mut backend, mut applications) = (None, Applications::default());
        let started = (|| {
            match self.run.contender.kind {
                Carrier::Veth => self.outside.connect(TAP, &inside, GUEST_TAP)?,
                Carrier::Loop => {
                    let outer = self.outside.enter(|| sys::tap(TAP, 1, sys::Offloads::On))??;
                    let inner = inside.enter(|| sys::tap(GUEST_TAP, 1, sys::Offloads::On))??;
                    applications.guest(move |signals| card::relay([outer, inner], signals));
                }
                carrier => {
                    if carrier == Carrier::Passt {
                        self.without_tap()?;
                    }
                    let backend = backend.insert(self.backend(directory.path())?);
                    let frontend = connect(backend, &directory.path().join(SOCKET))?;
                    self.start_guest(frontend, &inside, &mut applications)?;
                }
            }
            self.set_up(&inside)?;
            self.start(traffic, &inside, &mut applications)
        })();
        applications.measure(started, backend.as_mut(), self.bench, WINDOW, traffic)
    }

    /// Brings both ends of the path up.
    fn set_up(&self, inside: &Network) -> Result<()> {
        self.tap_is_up()?;
        inside.run(&["ip", "address", "add", &format!("{INSIDE}/24"), "dev", GUEST_TAP])?;
        inside.run(&["ip", "link", "set", GUEST_TAP, "up"])?;
        if self.run.contender.kind == Carrier::Passt {
            // The MTU that its DHCP gives a guest: without super-frames long frames are its way to few system calls.
            inside.run(&["ip", "link", "set", GUEST_TAP, "mtu", PASST_MTU])?;
            inside.enter(announce)??;
        }
        Ok(())
    }

    /// Starts servers, then clients. The receiver of a stream listens.
    fn start(&self, traffic: Traffic, inside: &Network, applications: &mut Applications) -> Result<()> {
        let from_guest = traffic.kind == Kind::FromGuest;
        let (here, there, address) =
            if from_guest { (&self.outside, inside, OUTSIDE) } else { (inside, &self.outside, INSIDE) };
        serve(here, address, traffic, applications)?;
        there.enter(|| applications.connect(&dial(address, traffic)?, traffic, CountedBy::Reader))?
    }

    /// Creates what takes the tap's place: passt opens no interface, and listens at the guest's address.
    fn without_tap(&self) -> Result<()> {
        self.outside.run(&["ip", "link", "add", TAP, "type", "bridge"])?;
        self.tap_is_up()?;
        self.outside.run(&["ip", "address", "add", &format!("{INSIDE}/32"), "dev", "lo"])?;
        self.outside.run(&["ip", "route", "add", "default", "dev", TAP])
    }

    /// Starts the guest, whose card is connected to a tap of the inner namespace.
    fn start_guest(
        &self,
        frontend: Frontend,
        inside: &Network,
        applications: &mut Applications,
    ) -> Result<()> {
        // The kernel's super-frames have any length: a frame that exceeds a buffer would be truncated, and resent.
        let queues = self.run.row.queues;
        let card = Card::start(frontend, Setup { queues, ..Setup::of(FRAME_BYTES_MAX) })?;
        let offloads = card.offloads();
        let open = || (0..queues).map(|_| sys::tap(GUEST_TAP, queues, offloads)).collect::<Result<_>>();
        let taps: Vec<File> = inside.enter(open)??;
        applications.guest(move |signals| card.pump(taps, signals));
        Ok(())
    }
}

/// Sends a packet from the guest, of which passt learns its address: until then its frames are broadcasts, which carry no TCP.
fn announce() -> Result<()> {
    let socket = UdpSocket::bind((INSIDE, 0))?;
    // Port 9 discards what it receives (RFC 863).
    socket.send_to(&[0], (OUTSIDE, 9))?;
    Ok(())
}

/// Figures of frames; `cpu_seconds` for each are those of the thread that moves them between rings and tap.
fn frame_figures(window: &Window, len: usize, cpu_seconds: f64) -> Figures {
    let rate = window.rate();
    Figures::from([
        ("Mpps", rate / 1e6),
        ("Gbit/s", rate * len as f64 * 8e-9),
        ("ns/frame", cpu_seconds * 1e9),
        ("frames/CPU s", 1.0 / cpu_seconds),
        ("backend % CPU", window.backend_percent),
        ("norm kpps", rate / window.machine_percent / 1e3),
    ])
}
