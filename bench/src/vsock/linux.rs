//! `cargo xtask bench vsock-linux`: streams, requests and connections of a Linux guest through towline and vhost-device-vsock.
//!
//! ```text
//!   application ── Unix socket ── backend ── rings ── Linux, emulated by QEMU ── application: this program
//! ```
//! Each backend has a guest of its own, and both guests run during the whole measurement. Guests are emulated, so figures are
//! compared with each other only. CPU time is the backend's.

mod application;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tempfile::TempDir;
use towline_lab::{LinuxGuest, MemoryBackend, ProgramDisk, Qemu, Version, wait_until};

use super::entry::{Carrier, Figure, Figures, Parameters, bytes};
use super::host::{Host, Target};
use super::runs::{backend, figure};
use crate::rounds::{self, Contender};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};
use crate::vhost::backend::Backend;
use crate::vhost::{Signals, window};

use application::{ECHO_PORT, RECEIVE_PORT, SEND_PORT};
pub use application::{is_application, serve};

const WITHIN: Duration = Duration::from_secs(60);
/// Length of a window; an emulated guest is slow.
const WINDOW: Duration = Duration::from_secs(2);
const CARRIERS: [Carrier; 2] = [Carrier::Towline, Carrier::Peer];
const WORKS: [Work; 6] = [
    Work::ToGuest(4 << 10),
    Work::ToGuest(64 << 10),
    Work::FromGuest(4 << 10),
    Work::FromGuest(64 << 10),
    Work::Requests,
    Work::Connections,
];

/// Work of the applications; sizes of messages in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    ToGuest(usize),
    FromGuest(usize),
    Requests,
    Connections,
}

impl Work {
    fn name(self, request_bytes: usize) -> String {
        match self {
            Self::ToGuest(size) => format!("to the guest, {}", bytes(size)),
            Self::FromGuest(size) => format!("from the guest, {}", bytes(size)),
            Self::Requests => format!("request and response, {}", bytes(request_bytes)),
            Self::Connections => format!("connect, request, close, {}", bytes(request_bytes)),
        }
    }

    fn is_stream(self) -> bool {
        matches!(self, Self::ToGuest(_) | Self::FromGuest(_))
    }
}

/// A guest on its backend.
struct Machine {
    uds: PathBuf,
    // Ended in this order: the guest, its QEMU, the backend.
    _guest: LinuxGuest,
    _qemu: Qemu,
    backend: Backend,
    _directory: TempDir,
}

/// Measures the table.
///
/// # Errors
/// A guest does not start, or the run was cancelled.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let wanted = |work: &Work| {
        let name = work.name(parameters.request_bytes);
        parameters.rows.is_empty() || parameters.rows.iter().any(|part| name.contains(part.as_str()))
    };
    let works: Vec<Work> = WORKS.into_iter().filter(wanted).collect();
    ensure!(!works.is_empty(), "no row matches --rows {:?}: leave it out for all rows", parameters.rows);
    let mut machines = CARRIERS
        .into_iter()
        .map(|carrier| Machine::start(parameters, carrier))
        .collect::<Result<Vec<_>>>()?;
    let contenders: Vec<Contender> = works
        .iter()
        .flat_map(|work| {
            CARRIERS.map(|carrier| Contender {
                group: work.name(parameters.request_bytes),
                label: carrier.name().into(),
            })
        })
        .collect();
    let outcomes = rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| {
        machines[index % CARRIERS.len()].run(parameters, works[index / CARRIERS.len()])
    })?;
    Ok(vec![table(parameters, &works, &contenders, &outcomes)])
}

impl Machine {
    fn start(parameters: &Parameters, carrier: Carrier) -> Result<Self> {
        let directory = TempDir::with_prefix("towline-bench-")?;
        let (socket, uds) = (directory.path().join("vhost.sock"), directory.path().join("uds.sock"));
        let mut backend = backend(parameters, carrier, (&socket, &uds), directory.path())?;
        wait_until("the backend's socket", WITHIN, || {
            backend.check()?;
            Ok(socket.exists().then_some(()))
        })?;
        let programs = ProgramDisk::pack(&[&parameters.own])?;
        let chardev = format!("socket,id=vsock,path={}", socket.display());
        let qemu = Qemu::builder(Version::V10_0)
            .memory_backend(MemoryBackend::Memfd { prealloc: false })
            .linux()
            .memory_mib(512)
            .args(programs.arguments())
            .args(["-chardev", &chardev, "-device", "vhost-user-vsock-pci,chardev=vsock"])
            .start()?;
        let mut guest = qemu.linux(WITHIN)?;
        guest.unpack_programs()?;
        start_application(&mut guest, &parameters.own)?;
        Ok(Self { uds, _guest: guest, _qemu: qemu, backend, _directory: directory })
    }

    fn run(&mut self, parameters: &Parameters, work: Work) -> Result<Figure> {
        let signals: Arc<Signals> = Arc::default();
        let mut host = Host::default();
        let target = |port| Target::Vsock { path: self.uds.clone(), port };
        let begun = match work {
            Work::ToGuest(size) => host.write_counted(&signals, &target(RECEIVE_PORT), size),
            Work::FromGuest(size) => host.receive(&signals, &target(SEND_PORT), size),
            Work::Requests | Work::Connections => {
                let reconnects = work == Work::Connections;
                host.request(&signals, &target(ECHO_PORT), (parameters.request_bytes, 1, reconnects))
            }
        };
        let measured =
            begun.and_then(|()| window(&signals, Some(&mut self.backend), WINDOW, &parameters.cancel));
        figure(measured, host.end(&signals))
    }
}

/// Starts the application in the guest and waits until it listens.
fn start_application(guest: &mut LinuxGuest, own: &Path) -> Result<()> {
    let name = own.file_name().context("a program has a name")?.to_string_lossy();
    let line = format!("{name} {} > /tmp/application 2>&1 & echo", application::OPTION);
    guest.shell(&line, WITHIN)?;
    let said = wait_until("the application in the guest", WITHIN, || {
        let output = guest.shell("cat /tmp/application", WITHIN)?;
        Ok((!output.trim().is_empty()).then_some(output))
    })?;
    ensure!(said.trim() == application::READY, "the application in the guest: {said}");
    Ok(())
}

fn table(parameters: &Parameters, works: &[Work], contenders: &[Contender], outcomes: &[Figures]) -> Table {
    let rows = outcomes.iter().zip(contenders).enumerate().map(|(index, (figures, contender))| {
        let work = works[index / CARRIERS.len()];
        let peer = &outcomes[index / CARRIERS.len() * CARRIERS.len() + CARRIERS.len() - 1];
        let content = match &figures.failure {
            Some(reason) => Content::Missing(reason.clone()),
            None => content(work, figures, peer),
        };
        Row { group: contender.group.clone(), label: contender.label.clone(), content }
    });
    Table {
        name: "vsock-linux",
        title: format!("vsock of a Linux guest, {} runs, median (min–max)", parameters.runs),
        columns: vec!["what", "Gbit/s or 1/s", "× peer", "p50 µs", "p99 µs", "CPU of the backend"],
        rows: rows.collect(),
        notes: vec![
            "one stream; the guest is emulated by QEMU, so only ratios count".into(),
            "CPU of the backend: ms for a gigabyte, µs for a request or connection".into(),
        ],
    }
}

fn content(work: Work, figures: &Figures, peer: &Figures) -> Content {
    let all = |figures: &Figures, figure: fn(&Figure) -> f64| -> Vec<f64> {
        figures.values.iter().map(figure).collect()
    };
    let text = |values: &[f64], digits: usize| {
        let summary = Summary::of(values.iter().copied());
        summary.map_or_else(|| "–".into(), |it| format!("{it:.digits$}"))
    };
    let rate: fn(&Figure) -> f64 =
        if work.is_stream() { Figure::gigabits } else { |figure| figure.window.rate() };
    let cpu: fn(&Figure) -> f64 = if work.is_stream() {
        |figure| figure.window.backend_percent / 100.0 / figure.window.rate() * 1e12
    } else {
        |figure| figure.window.backend_percent / 100.0 / figure.window.rate() * 1e6
    };
    let rates = all(figures, rate);
    let ratio = Summary::of_ratios(&rates, &all(peer, rate));
    let latency = |figure| if work.is_stream() { "–".into() } else { text(&all(figures, figure), 0) };
    let cells = vec![
        text(&rates, if work.is_stream() { 2 } else { 0 }),
        ratio.map_or_else(|| "–".into(), |it| format!("{it:.2}")),
        latency(|figure| figure.p50_us),
        latency(|figure| figure.p99_us),
        text(&all(figures, cpu), 1),
    ];
    Content::Measured { cells, data: json!({ "rate": rates, "cpu": all(figures, cpu) }) }
}
