//! `cargo xtask bench vsock-linux`: streams, requests and connections of a Linux guest through towline and vhost-device-vsock.
//!
//! ```text
//!   application ── Unix socket ── backend ── rings ── Linux, emulated by QEMU ── application: this program
//! ```
//! Each backend has a guest of its own, and both guests run during the whole measurement. Guests are emulated, so figures are
//! compared with each other only. CPU time is the backend's.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use towline_lab::{LinuxGuest, MemoryBackend, Qemu, Towline as Process, Version, wait_until};

use super::{Carrier, REQUEST_BYTES, Run, Sockets, TOWLINE, VHOST_DEVICE};
use crate::applications::{Applications, CountedBy, Kind, Service, Traffic};
use crate::options::Bench;
use crate::sys::listen_vsock;
use crate::table::{self, Column, Entry, Figures, Table};

/// Only word of the command line of the application inside of the guest: this program.
pub(crate) const APPLICATION: &str = "--vsock-linux-guest";
/// Printed when it serves all ports.
const READY: &str = "listening";
const ECHO_PORT: u32 = 1024;
const RECEIVE_PORT: u32 = 1025;
const SEND_PORT: u32 = 1026;
/// Number of connections that each port serves at a time.
const SESSIONS: usize = 4;
const WITHIN: Duration = Duration::from_secs(60);
/// Length of a window; an emulated guest is slow.
const WINDOW: Duration = Duration::from_secs(2);

const STREAMS: [Column<Traffic, Carrier>; 4] = [
    Column::spread("Gbit/s", 2),
    Column::ratio("× peer", "Gbit/s", |run| run.with(VHOST_DEVICE)),
    Column::spread("backend ms/GB", 1),
    Column::ratio("× peer's", "backend ms/GB", |run| run.with(VHOST_DEVICE)),
];
const REQUESTS: [Column<Traffic, Carrier>; 6] = [
    Column::spread("1/s", 0),
    Column::ratio("× peer", "1/s", |run| run.with(VHOST_DEVICE)),
    Column::spread("p50 µs", 0),
    Column::spread("p99 µs", 0),
    Column::spread("backend µs", 1),
    Column::ratio("× peer's", "backend µs", |run| run.with(VHOST_DEVICE)),
];
const NOTES: [&str; 2] = [
    "one stream; the guest is emulated by QEMU, so only ratios count",
    "backend: its CPU time for a gigabyte, a request or a connection",
];

/// Measures the tables.
///
/// # Errors
/// A guest does not start, or the run was cancelled.
pub(crate) fn measure(bench: &Bench) -> Result<Vec<Table>> {
    let streams = Traffic::all(Kind::STREAMS, &[4 << 10, 64 << 10], &[1]);
    let requests = Traffic::all(Kind::REQUESTS, &[REQUEST_BYTES], &[1]);
    let all = bench.chosen(Entry::all([streams, requests].concat(), &[TOWLINE, VHOST_DEVICE]))?;
    let mut own = Machine::start(bench, Carrier::Towline)?;
    let mut peer = Machine::start(bench, Carrier::Peer)?;
    let results = table::measure(bench, all, |run| {
        if run.contender == VHOST_DEVICE { peer.run(bench, run) } else { own.run(bench, run) }
    })?;
    let title = "vsock streams of a Linux guest";
    let streams = results.table("vsock-linux", title, &STREAMS, Traffic::is_stream);
    let title = "vsock requests to a Linux guest";
    let requests = results.table("vsock-linux-requests", title, &REQUESTS, |row| !row.is_stream());
    Ok(vec![streams.with_notes(NOTES), requests.with_notes(NOTES)])
}

/// A guest on its backend.
struct Machine {
    sockets: Sockets,
    // Ended in this order: the guest, its QEMU, the backend.
    _guest: LinuxGuest,
    _qemu: Qemu,
    backend: Process,
    _directory: TempDir,
}

impl Machine {
    fn start(bench: &Bench, carrier: Carrier) -> Result<Self> {
        let directory = bench.directory()?;
        let sockets = Sockets::within(directory.path());
        let mut backend = sockets.serve(bench, carrier)?;
        wait_until("the backend's socket", WITHIN, || {
            backend.check()?;
            Ok(sockets.vhost.exists().then_some(()))
        })?;
        let chardev = format!("socket,id=vsock,path={}", sockets.vhost.display());
        let qemu = Qemu::builder(Version::V10_0)
            .memory_backend(MemoryBackend::Memfd { prealloc: false })
            .linux()
            .memory_mib(512)
            .guest_programs([&bench.own])
            .args(["-chardev", &chardev, "-device", "vhost-user-vsock-pci,chardev=vsock"])
            .start()?;
        let mut guest = qemu.linux(WITHIN)?;
        let name = bench.own.file_name().context("a program has a name")?.to_string_lossy();
        guest.shell(&format!("{name} {APPLICATION} > /tmp/application 2>&1 & echo"), WITHIN)?;
        let said = wait_until("the application in the guest", WITHIN, || {
            let output = guest.shell("cat /tmp/application", WITHIN)?;
            Ok((!output.trim().is_empty()).then_some(output))
        })?;
        ensure!(said.trim() == READY, "the application in the guest: {said}");
        Ok(Self { sockets, _guest: guest, _qemu: qemu, backend, _directory: directory })
    }

    fn run(&mut self, bench: &Bench, run: Run) -> Result<Figures> {
        let mut applications = Applications::default();
        let begun = self.begin(run.row, &mut applications);
        applications.measure(begun, Some(&mut self.backend), bench, WINDOW, run.row)
    }

    fn begin(&self, traffic: Traffic, applications: &mut Applications) -> Result<()> {
        let port = match traffic.kind {
            Kind::ToGuest => RECEIVE_PORT,
            Kind::FromGuest => SEND_PORT,
            Kind::Request | Kind::Connection => ECHO_PORT,
        };
        let dial = self.sockets.dial(port);
        if traffic.kind != Kind::FromGuest {
            return applications.connect(&dial, traffic, CountedBy::Writer);
        }
        let mut stream = dial()?;
        std::io::Write::write_all(&mut stream, &u32::try_from(traffic.size)?.to_le_bytes())?;
        applications.read(stream)
    }
}

/// Serves connections of the host to three ports, inside of the guest, until that ends.
///
/// # Errors
/// The guest has no vsock device.
pub(crate) fn serve() -> Result<()> {
    let mut applications = Applications::default();
    // Of both kinds; a kept one is never silent.
    applications.serve(listen_vsock(ECHO_PORT)?, Service::EchoOnce, SESSIONS);
    applications.serve(listen_vsock(RECEIVE_PORT)?, Service::Read, SESSIONS);
    applications.serve(listen_vsock(SEND_PORT)?, Service::Send, SESSIONS);
    println!("{READY}");
    applications.wait()
}
