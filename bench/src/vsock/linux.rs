//! `cargo xtask bench vsock-linux`: streams and connections of a real Linux guest, through towline and vhost-device-vsock in turns.
//!
//! ```text
//!   QEMU (emulated CPU) with one guest ── vhost-user-vsock-pci, plugged for each turn ── backend ── applications in this process
//!     └ Perl at vsock port 1024: reads and drops, sends, or echoes
//! ```
//! The guest keeps running; only its device changes, and with it the backend. Its own work is most of the time, since its CPU is
//! emulated, so the rates say little and their ratio says what a guest of this machine gets. The backend's CPU time is its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use tempfile::TempDir;
use towline_lab::{LinuxGuest, MemoryBackend, Qemu, Version, wait_until};

use super::host::{Host, PORT, Target};
use super::{CID, Carrier, Direction, PEER, Parameters, Work, backend, bytes};
use crate::rounds::{self, Contender, Outcome};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};
use crate::vhost::{Signals, Window, window};

const WITHIN: Duration = Duration::from_secs(120);
const WINDOW: Duration = Duration::from_millis(1500);
const ROOT_PORT: &str = "pcie-root-port,id=plug,chassis=1,slot=1";
const PROGRAMS: [&str; 1] = ["/usr/bin/perl"];
/// `perl v.pl sink|echo|source SIZE`.
const PERL: &str = r#"
$SIG{CHLD} = 'IGNORE'; $SIG{PIPE} = 'IGNORE';
my ($mode, $size) = @ARGV; my $b;
sub address { pack('SSLLx4', 40, 0, $_[1], $_[0]) }
if ($mode eq 'source') {
  $b = 'x' x $size;
  for (1 .. 600) {
    socket(my $s, 40, 1, 0) or die "socket $!";
    if (connect($s, address(2, 1024))) { while (syswrite($s, $b)) {} exit }
    close $s; select(undef, undef, undef, 0.1);
  }
  exit;
}
socket(my $s, 40, 1, 0) or die "socket $!";
bind($s, address(0xffffffff, 1024)) or die "bind $!";
listen($s, 128) or die "listen $!";
while (accept(my $c, $s)) {
  if ($mode eq 'echo') { my $n = sysread($c, $b, 65536); syswrite($c, $b) if $n; sysread($c, $b, 65536); close $c; next }
  if (!fork) { close $s; while (sysread($c, $b, 262144)) {} exit }
  close $c;
}
"#;
const WORKS: [Work; 7] = [
    stream(64, Direction::ToGuest),
    stream(4 << 10, Direction::ToGuest),
    stream(64 << 10, Direction::ToGuest),
    stream(64, Direction::FromGuest),
    stream(4 << 10, Direction::FromGuest),
    stream(64 << 10, Direction::FromGuest),
    Work::Request { size: 64, connections: 1, reconnects: true },
];
const CARRIERS: [Carrier; 2] = [Carrier::Towline, Carrier::Peer];

const fn stream(size: usize, direction: Direction) -> Work {
    Work::Stream { size, connections: 1, direction }
}

/// Measures the table.
///
/// # Errors
/// The lab was not set up, the guest fails, or the run was cancelled.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let machine = Machine::boot()?;
    let contenders: Vec<Contender> = WORKS
        .iter()
        .flat_map(|work| {
            CARRIERS.map(|carrier| Contender { group: name(*work), label: carrier.name().into() })
        })
        .collect();
    let mut guest = machine.qemu.linux(WITHIN)?;
    install(&mut guest)?;
    let mut turn = 0;
    let outcomes = rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| {
        turn += 1;
        let (work, carrier) = (WORKS[index / CARRIERS.len()], CARRIERS[index % CARRIERS.len()]);
        machine.turn(parameters, &mut guest, Turn { number: turn, work, carrier })
    })?;
    Ok(vec![table(parameters, &contenders, &outcomes)])
}

/// QEMU, which has a free port for the device.
struct Machine {
    qemu: Qemu,
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
struct Turn {
    number: usize,
    work: Work,
    carrier: Carrier,
}

impl Machine {
    fn boot() -> Result<Self> {
        let builder = Qemu::builder(Version::V10_0).memory_backend(MemoryBackend::Memfd { prealloc: false });
        let builder = builder.linux().guest_programs(PROGRAMS.map(PathBuf::from));
        let qemu = builder.args(["-device", ROOT_PORT].map(str::to_owned)).start()?;
        Ok(Self { qemu })
    }

    fn turn(&self, parameters: &Parameters, guest: &mut LinuxGuest, turn: Turn) -> Result<Window> {
        let directory = TempDir::with_prefix("towline-bench-")?;
        let (socket, uds) = (directory.path().join("vhost.sock"), directory.path().join("uds.sock"));
        let mut backend = backend(parameters, turn.carrier, (&socket, &uds), directory.path())?;
        wait_until("the backend's socket", WITHIN, || {
            backend.check()?;
            Ok(socket.exists().then_some(()))
        })?;
        let (chardev, device) = (format!("c{}", turn.number), format!("d{}", turn.number));
        self.plug(&socket, &chardev, &device)?;
        let signals = Arc::new(Signals::default());
        let mut host = Host::default();
        let target = Target::Vsock(uds);
        let measured = begin(guest, &mut host, &signals, &target, turn.work)
            .and_then(|()| window(&signals, Some(&mut backend), WINDOW, &parameters.cancel));
        let ended = host.end(&signals);
        signals.power_off.store(true, Ordering::Relaxed);
        guest.shell("kill $(busybox pidof perl); true", WITHIN)?;
        self.unplug(&chardev, &device)?;
        let window = measured?;
        ended?;
        Ok(window)
    }

    fn plug(&self, socket: &Path, chardev: &str, device: &str) -> Result<()> {
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let socket = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        let qmp = self.qemu.qmp();
        qmp.execute("chardev-add", json!({ "id": chardev, "backend": socket }))?;
        let device =
            json!({ "driver": "vhost-user-vsock-pci", "id": device, "chardev": chardev, "bus": "plug" });
        qmp.execute("device_add", device).context("the device cannot be plugged")?;
        Ok(())
    }

    fn unplug(&self, chardev: &str, device: &str) -> Result<()> {
        let qmp = self.qemu.qmp();
        qmp.execute("device_del", json!({ "id": device }))?;
        loop {
            let event = qmp.wait_event("DEVICE_DELETED", WITHIN)?;
            if event["data"]["device"] == device {
                break;
            }
        }
        qmp.execute("chardev-remove", json!({ "id": chardev }))?;
        Ok(())
    }
}

/// Writes the guest's program.
fn install(guest: &mut LinuxGuest) -> Result<()> {
    let escaped = PERL.replace('\\', "\\\\").replace('\'', "'\\''").replace('\n', "\\n").replace('%', "%%");
    guest.shell(&format!("printf '{escaped}' > /tmp/v.pl; /usr/bin/perl -c /tmp/v.pl"), WITHIN)?;
    Ok(())
}

/// Starts the programs of both ends.
fn begin(
    guest: &mut LinuxGuest,
    host: &mut Host,
    signals: &Arc<Signals>,
    target: &Target,
    work: Work,
) -> Result<()> {
    let mut start = |arguments: &str| {
        guest.shell(&format!("/usr/bin/perl /tmp/v.pl {arguments} > /tmp/v.log 2>&1 & echo"), WITHIN)
    };
    match work {
        Work::Stream { size, connections, direction: Direction::FromGuest } => {
            host.read(signals, &target.listener(), connections)?;
            start(&format!("source {size}"))?;
            // The connection is there when bytes come.
            wait_until("bytes of the guest", WITHIN, || {
                Ok((signals.units.load(Ordering::Relaxed) > 0).then_some(()))
            })
        }
        Work::Stream { size, connections, direction: Direction::ToGuest } => {
            start("sink")?;
            wait_for_listener(target)?;
            host.write(signals, target, (size, connections))
        }
        Work::Request { size, connections, reconnects } => {
            start("echo")?;
            wait_for_listener(target)?;
            host.request(signals, target, (size, connections, reconnects))
        }
    }
}

/// Waits until the guest has its device, and its program listens.
fn wait_for_listener(target: &Target) -> Result<()> {
    wait_until(&format!("a listener at port {PORT} of the guest"), WITHIN, || Ok(target.connect().ok()))?;
    Ok(())
}

fn name(work: Work) -> String {
    match work {
        Work::Stream { size, direction: Direction::ToGuest, .. } => format!("to the guest, {}", bytes(size)),
        Work::Stream { size, direction: Direction::FromGuest, .. } => {
            format!("from the guest, {}", bytes(size))
        }
        Work::Request { size, .. } => format!("connect, request, close, {}", bytes(size)),
    }
}

fn table(parameters: &Parameters, contenders: &[Contender], outcomes: &[Outcome<Window>]) -> Table {
    let rows = contenders.iter().enumerate().map(|(index, contender)| {
        let (outcome, peer) = (&outcomes[index], &outcomes[index / CARRIERS.len() * CARRIERS.len() + 1]);
        let is_stream = matches!(WORKS[index / CARRIERS.len()], Work::Stream { .. });
        let content = match &outcome.failure {
            Some(reason) => Content::Missing(reason.clone()),
            None => measured(outcome, peer, is_stream.then_some(8.0 / 1e6)),
        };
        Row { group: contender.group.clone(), label: contender.label.clone(), content }
    });
    Table {
        name: "vsock-linux",
        title: format!("A Linux guest on an emulated CPU, {} runs, median (min–max)", parameters.runs),
        columns: vec!["what", "Mbit/s or 1/s", "× peer", "per % CPU of the backend", "× peer's"],
        rows: rows.collect(),
        notes: vec![format!(
            "CID {CID}; one stream; one guest, whose device is plugged for each turn; peer: {PEER} 0.3"
        )],
    }
}

/// Returns the cells of a row; `scale` converts bytes per second of a stream.
fn measured(outcome: &Outcome<Window>, peer: &Outcome<Window>, scale: Option<f64>) -> Content {
    let scale = scale.unwrap_or(1.0);
    let rates =
        |outcome: &Outcome<Window>| outcome.values.iter().map(|it| it.rate() * scale).collect::<Vec<f64>>();
    let efficiencies = |outcome: &Outcome<Window>| {
        outcome.values.iter().map(|it| it.rate() * scale / it.backend_percent).collect::<Vec<f64>>()
    };
    let text = |summary: Option<Summary>, digits: usize| {
        summary.map_or_else(|| "–".into(), |it| format!("{it:.digits$}"))
    };
    let cells = vec![
        text(Summary::of(rates(outcome)), 0),
        text(Summary::of_ratios(&rates(outcome), &rates(peer)), 2),
        text(Summary::of(efficiencies(outcome)), 0),
        text(Summary::of_ratios(&efficiencies(outcome), &efficiencies(peer)), 2),
    ];
    Content::Measured { cells, data: json!({ "rate": rates(outcome), "per-percent": efficiencies(outcome) }) }
}
