//! `cargo xtask bench net`: frames and TCP of a vhost-user network card, against other backends, the tap itself and a veth pair.
//!
//! ```text
//!   frames   driver ── rings ── backend ── tap0 ── kernel, which drops them         and frames of a packet socket back
//!            write/read on the tap in a loop                                        the limit of backends on a tap
//!            driver ── rings ── towline ── xdp0 ── veth ── xdp1 ── kernel, which drops them (AF_XDP's copy mode)
//!   TCP      applications ── kernel ── tap1 ── driver ── rings ── backend ── tap0 ── kernel ── applications
//!            applications ── kernel ── tap1 ── a loop ── tap0 ── kernel ── applications          the limit of backends on a tap
//!            applications ── kernel ── veth ── kernel ── applications               the limit
//! ```
//! The driver of `towline-frontend` replaces the guest, so that only the backend is measured. For TCP it connects its rings to a tap in
//! a namespace of its own, whose kernel is the guest's. Everything shares this machine's processors; `norm` is the figure per percent
//! of one processor that the whole machine used.
//!
//! Limits: needs root, for namespaces and taps.

pub mod af_xdp;
mod card;
mod contenders;
mod frames;
mod hosts;
mod parameters;
mod relay;
mod sys;
mod tables;
mod tcp;

use std::io::{Read as _, Write as _};
use std::net::UdpSocket;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use towline_frontend::net::FRAME_BYTES_MAX;
use towline_lab::wait_until;

use crate::rounds::{self, Contender};
use crate::table::Table;
use crate::vhost::backend::Backend;
use crate::vhost::latency::Latencies;
use crate::vhost::{Signals, Window, cpu, window};
use card::{Card, Driver, Setup};
use contenders::{Carrier, Entry, Work, entries};
use frames::FrameKind;
use hosts::{GUEST_TAP, Host, INSIDE, OUTSIDE, TAP};
use parameters::Figure;
pub use parameters::{PASST, Parameters, TESTPMD, VHOST_USER_NET};
use tcp::{Applications, Traffic};

/// Interface of AF_XDP, and its peer.
const XDP: &str = "xdp0";
const XDP_PEER: &str = "xdp1";
/// Timeout of the creation of a backend's tap.
const TAP_WITHIN: Duration = Duration::from_secs(30);
/// Frames per call into the tap.
const INJECT_BATCH: usize = 32;
/// Passt's default.
const PASST_MTU: &str = "65520";
/// Memory for DPDK, in MiB.
const DPDK_MIB: &str = "1024";

/// Measures the tables.
///
/// # Errors
/// It was cancelled, or no row is selected. A contender that fails is a row with the reason.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let chosen = |entry: &Entry| {
        let name = entry.contender().group;
        parameters.rows.is_empty() || parameters.rows.iter().any(|text| name.contains(text))
    };
    let entries: Vec<Entry> = entries(parameters).into_iter().filter(chosen).collect();
    ensure!(!entries.is_empty(), "no row matches --rows {:?}: leave it out for all rows", parameters.rows);
    let contenders: Vec<Contender> = entries.iter().map(|entry| entry.contender()).collect();
    let outcomes = rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| {
        run(parameters, entries[index])
    })?;
    Ok(tables::Run { parameters, entries, outcomes }.tables())
}

/// Measures frames of 1514 bytes from the guest through towline.
///
/// # Errors
/// The backend fails, or the run was cancelled.
pub(crate) fn sent_frames(parameters: &Parameters) -> Result<Window> {
    let entry = Entry {
        work: Work::Transmit(FrameKind::Plain(1514)),
        queues: 1,
        carrier: Carrier::Towline,
        driver: Driver::Linux,
    };
    run(parameters, entry).map(|figure| figure.window)
}

fn run(parameters: &Parameters, entry: Entry) -> Result<Figure> {
    let signals = Arc::new(Signals::default());
    let outside = Host::new()?;
    let bench = Bench { parameters, entry, outside, signals };
    match (entry.work, entry.carrier) {
        (Work::Tcp(traffic), _) => bench.tcp(traffic),
        (_, Carrier::Limit) => bench.tap(),
        _ => bench.frames(),
    }
}

struct Bench<'a> {
    parameters: &'a Parameters,
    entry: Entry,
    outside: Host,
    signals: Arc<Signals>,
}

impl Bench<'_> {
    fn window(&self, backend: Option<&mut Backend>) -> Result<Window> {
        window(&self.signals, backend, self.parameters.window, &self.parameters.cancel)
    }

    /// Measures frames through a backend.
    fn frames(&self) -> Result<Figure> {
        let directory = TempDir::with_prefix("towline-bench-")?;
        let socket = directory.path().join("net.sock");
        let is_xdp = self.entry.carrier == Carrier::Xdp;
        if is_xdp {
            self.outside.run(&["ip", "link", "add", XDP, "type", "veth", "peer", "name", XDP_PEER])?;
            self.outside.run(&["ip", "link", "set", XDP_PEER, "up"])?;
            self.outside.run(&["ip", "link", "set", XDP, "up"])?;
        }
        let mut backend = self.backend(&socket, directory.path())?;
        let started = (|| match self.entry.work {
            Work::Receive(kind) => {
                let card = Card::start(backend.connect(&socket)?, Setup::of(self.entry.driver, kind.len()))?;
                self.tap_is_up()?;
                Ok((kind, card.receive(kind, &self.signals), Some(self.inject(kind)?)))
            }
            Work::Transmit(kind) => {
                let card = Card::start(backend.connect(&socket)?, Setup::of(self.entry.driver, kind.len()))?;
                self.tap_is_up()?;
                Ok((kind, card.transmit(kind, &self.signals)?, None))
            }
            Work::Tcp(_) => anyhow::bail!("TCP is measured elsewhere"),
        })();
        let (kind, card, injector) = match started {
            Ok(started) => started,
            Err(error) => {
                self.signals.stop.store(true, Ordering::Relaxed);
                return Err(backend.check().err().unwrap_or(error));
            }
        };
        let measured = self.window(Some(&mut backend));
        // Read before the driver ends, as a backend may end with it and remove its tap.
        let total = self.signals.units.load(Ordering::Relaxed) as f64;
        let taken = self.outside.within(|| hosts::frames(if is_xdp { XDP_PEER } else { TAP }));
        self.signals.stop.store(true, Ordering::Relaxed);
        let ended = card.join().expect("the thread does not panic");
        if let Some(injector) = injector {
            injector.join().expect("the thread does not panic")?;
        }
        let mut window = measured?;
        ended?;
        match self.entry.work {
            // Completed frames count only if the other end has received them.
            Work::Transmit(kind) => {
                let packets = if is_xdp { kind.segments() } else { 1 };
                window.units *= (taken?.0 as f64 / packets as f64 / total).min(1.0);
            }
            _ if kind == FrameKind::Super => window.units /= kind.len() as f64,
            _ => {}
        }
        Ok(Figure {
            frame_ns: 1e7 * window.backend_percent / window.rate(),
            window,
            p50_us: 0.0,
            p99_us: 0.0,
        })
    }

    /// Waits for the backend's tap, and configures it.
    fn tap_is_up(&self) -> Result<()> {
        wait_until("the backend's tap", TAP_WITHIN, || {
            self.parameters.cancel.check()?;
            Ok(self.outside.run(&["ip", "link", "set", TAP, "up"]).is_ok().then_some(()))
        })?;
        // A backend may have set an address of its own.
        let _ = self.outside.run(&["ip", "address", "flush", "dev", TAP]);
        self.outside.run(&["ip", "address", "add", &format!("{OUTSIDE}/24"), "dev", TAP])
    }

    /// Sends frames from the kernel into the tap at its full rate.
    fn inject(&self, kind: FrameKind) -> Result<JoinHandle<Result<()>>> {
        let (path, signals) = (self.outside.path()?, Arc::clone(&self.signals));
        Ok(std::thread::spawn(move || {
            hosts::enter(Path::new(&path))?;
            let injector = sys::Injector::new(TAP)?;
            let mut bytes = kind.bytes();
            // A packet socket's header does not have the number of buffers.
            bytes.drain(10..12);
            while !signals.is_over() {
                match injector.send(&bytes, INJECT_BATCH) {
                    Ok(INJECT_BATCH) => {}
                    // Full: the reader may need this processor.
                    _ => std::thread::yield_now(),
                }
            }
            Ok(())
        }))
    }

    /// Measures frames through the tap, by calls in a loop.
    fn tap(&self) -> Result<Figure> {
        let mut tap = self.outside.within(|| sys::tap(TAP, false, true))?;
        self.tap_is_up()?;
        let signals = Arc::clone(&self.signals);
        let (kind, receives) = match self.entry.work {
            Work::Transmit(kind) => (kind, false),
            Work::Receive(kind) => (kind, true),
            Work::Tcp(_) => anyhow::bail!("TCP is measured elsewhere"),
        };
        let injector = receives.then(|| self.inject(kind)).transpose()?;
        let thread = std::thread::spawn(move || -> Result<f64> {
            let (mut bytes, mut frames) = (kind.bytes(), 0.0);
            while !signals.is_over() {
                let moved = if receives { tap.read(&mut bytes).map(drop) } else { tap.write_all(&bytes) };
                match moved {
                    Ok(()) => {
                        signals.add(1);
                        frames += 1.0;
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        towline_frontend::wait_any(&[tap.as_fd()], Duration::from_millis(20))?;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(cpu::of_thread() / frames)
        });
        let measured = self.window(None);
        self.signals.stop.store(true, Ordering::Relaxed);
        let ended = thread.join().expect("the thread does not panic");
        if let Some(injector) = injector {
            injector.join().expect("the thread does not panic")?;
        }
        Ok(Figure { frame_ns: 1e9 * ended?, window: measured?, p50_us: 0.0, p99_us: 0.0 })
    }

    fn tcp(&self, traffic: Traffic) -> Result<Figure> {
        let (directory, inside) = (TempDir::with_prefix("towline-bench-")?, Host::new()?);
        let address = |interface: &str| -> Result<()> {
            inside.run(&["ip", "address", "add", &format!("{INSIDE}/24"), "dev", interface])?;
            inside.run(&["ip", "link", "set", interface, "up"])
        };
        let (mut backend, pump) = match self.entry.carrier {
            Carrier::Limit => {
                let holder = inside.path()?;
                let peer = holder.split('/').nth(2).context("the namespace has no process")?;
                let line =
                    ["ip", "link", "add", TAP, "type", "veth", "peer", "name", GUEST_TAP, "netns", peer];
                self.outside.run(&line)?;
                (None, None)
            }
            Carrier::Loop => {
                let outer = self.outside.within(|| sys::tap(TAP, false, true))?;
                let inner = inside.within(|| sys::tap(GUEST_TAP, false, true))?;
                (None, Some(relay::relay([outer, inner], &self.signals)))
            }
            carrier => {
                if carrier == Carrier::Passt {
                    self.without_tap()?;
                }
                let (backend, pump) = self.connected(&inside, directory.path())?;
                (Some(backend), Some(pump))
            }
        };
        let mut set_up = self.tap_is_up().and_then(|()| address(GUEST_TAP));
        if self.entry.carrier == Carrier::Passt {
            // The MTU that its DHCP gives a guest: without super-frames long frames are its way to few system calls.
            set_up = set_up.and_then(|()| inside.run(&["ip", "link", "set", GUEST_TAP, "mtu", PASST_MTU]));
            set_up = set_up.and_then(|()| inside.within(announce));
        }
        let measured = set_up.and_then(|()| {
            let hosts = (self.outside.path()?, inside.path()?);
            let applications = Applications::start(traffic, (&hosts.0, &hosts.1), &self.signals)?;
            let measured = self.window(backend.as_mut());
            Ok((measured, applications.end(&self.signals)))
        });
        self.signals.power_off.store(true, Ordering::Relaxed);
        let ended = pump.map_or(Ok(()), |pump| pump.join().expect("the thread does not panic"));
        let (window, latencies) = measured?;
        let (window, mut latencies): (Window, Latencies) = (window?, latencies?);
        ended?;
        let [p50_us, p99_us] = [0.5, 0.99].map(|part| latencies.quantile(part));
        Ok(Figure { window, p50_us, p99_us, frame_ns: 0.0 })
    }

    /// Creates what takes the tap's place: passt opens no interface, and listens at the guest's address.
    fn without_tap(&self) -> Result<()> {
        self.outside.run(&["ip", "link", "add", TAP, "type", "bridge"])?;
        self.tap_is_up()?;
        self.outside.run(&["ip", "link", "set", "lo", "up"])?;
        self.outside.run(&["ip", "address", "add", &format!("{INSIDE}/32"), "dev", "lo"])?;
        self.outside.run(&["ip", "route", "add", "default", "dev", TAP])
    }

    /// Starts the backend, and connects its card to a tap of the inner namespace.
    fn connected(&self, inside: &Host, directory: &Path) -> Result<(Backend, JoinHandle<Result<()>>)> {
        let socket = directory.join("net.sock");
        let mut backend = self.backend(&socket, directory)?;
        // The kernel's super-frames have any length: a frame that exceeds a buffer would be truncated, and resent.
        let queues = self.entry.queues;
        let setup = Setup { queues, ..Setup::of(self.entry.driver, FRAME_BYTES_MAX) };
        let card = match Card::start(backend.connect(&socket)?, setup) {
            Ok(card) => card,
            Err(error) => return Err(backend.check().err().unwrap_or(error)),
        };
        let offloads = card.offloads();
        let taps = inside.within(|| (0..queues).map(|_| sys::tap(GUEST_TAP, queues > 1, offloads)).collect());
        Ok((backend, card.pump(taps?, &self.signals)))
    }

    /// Starts the backend in the outer namespace.
    fn backend(&self, socket: &Path, directory: &Path) -> Result<Backend> {
        let (socket, queues) = (socket.display().to_string(), self.entry.queues.to_string());
        let (program, missing) = match self.entry.carrier {
            Carrier::Towline | Carrier::Sleeping | Carrier::Xdp => (Some(&self.parameters.towline), ""),
            Carrier::VhostUserNet => (
                self.parameters.vhost_user_net.as_ref(),
                "vhost_user_net is missing; give --peer vhost_user_net=PATH",
            ),
            Carrier::Testpmd => {
                (self.parameters.testpmd.as_ref(), "dpdk-testpmd is missing; run `cargo xtask peers`")
            }
            Carrier::Passt => (self.parameters.passt.as_ref(), "passt is missing; run `cargo xtask peers`"),
            Carrier::Loop | Carrier::Limit => (None, "the limit has no backend"),
        };
        let program = program.context(missing)?.display().to_string();
        let arguments: Vec<String> = match self.entry.carrier {
            Carrier::VhostUserNet => {
                let rings = 2 * self.entry.queues;
                let options = format!(
                    "ip={OUTSIDE},mask=255.255.255.0,socket={socket},client=off,num_queues={rings},queue_size=256,tap={TAP}"
                );
                vec!["--net-backend".into(), options]
            }
            Carrier::Testpmd => testpmd(&socket, &queues),
            Carrier::Passt => passt(&socket),
            carrier => {
                let line = ["net", "--socket", &socket, "--tap", TAP, "--queues", &queues];
                let own: &[&str] = match carrier {
                    Carrier::Sleeping => &["--poll-us", "0"],
                    Carrier::Xdp => &["--af-xdp", XDP, "--af-xdp-copy"],
                    _ => &[],
                };
                let sandbox = self.parameters.sandbox.map(|setting| ["--sandbox", setting]);
                let options = own.iter().copied().chain(sandbox.into_iter().flatten());
                line.into_iter().chain(options).map(str::to_owned).collect()
            }
        };
        ensure!(!program.is_empty(), "no program");
        let prefix = self.outside.prefix();
        let line = prefix[1..].iter().cloned().chain([program]).chain(arguments);
        Backend::start(directory, Path::new(&prefix[0]), line)
    }
}

/// Sends a packet from the guest, of which passt learns its address: until then its frames are broadcasts, which carry no TCP.
fn announce() -> Result<()> {
    let socket = UdpSocket::bind((INSIDE, 0))?;
    // Port 9 discards what it receives (RFC 863).
    socket.send_to(&[0], (OUTSIDE, 9))?;
    Ok(())
}

/// Returns the arguments of passt for a guest at [`INSIDE`], which reaches [`OUTSIDE`] as it is.
fn passt(socket: &str) -> Vec<String> {
    let port = tcp::PORT.to_string();
    let line = format!(
        "--vhost-user --socket {socket} --foreground --quiet --ipv4-only --interface {TAP} --address {INSIDE} --netmask 24 \
         --gateway {OUTSIDE} --map-host-loopback none --no-dhcp --udp-ports none --tcp-ports {INSIDE}/{port}"
    );
    line.split(' ').map(str::to_owned).collect()
}

/// Returns the arguments of DPDK without huge pages, between its vhost and its tap driver.
fn testpmd(socket: &str, queues: &str) -> Vec<String> {
    let vhost = format!("net_vhost0,iface={socket},queues={queues},client=0");
    let tap = format!("net_tap0,iface={TAP}");
    let eal = [
        "-l",
        "0,1",
        "--no-huge",
        "-m",
        DPDK_MIB,
        "--no-pci",
        "--no-shconf",
        "--no-telemetry",
        "--log-level",
        "error",
    ];
    let forward =
        ["--forward-mode", "io", "--auto-start", "--stats-period", "3600", "--rxq", queues, "--txq", queues];
    let all = eal.into_iter().chain(["--vdev", &vhost, "--vdev", &tap, "--"]).chain(forward);
    all.map(str::to_owned).collect()
}
