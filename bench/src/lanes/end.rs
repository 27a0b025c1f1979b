//! One end of a measured transfer, in a separate process, whose CPU time is measured. Requests are lines of JSON on standard input,
//! each with a reply on standard output.
//!
//! ```text
//!   source BYTES        fills memory once ─► ready      request ─► cost
//!   destination BYTES   touches memory once ─► ready    request ─► address ─► CPU time
//! ```

use std::io::{BufRead, BufReader, Write};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use towline_channel::{
    Address, Cancel, Channel, ConnectOptions, ListenOptions, Listener, TlsClient, TlsServer, connect_with,
};
use towline_memload::{BLOCK_NAME, Backing, Checked, Shape, Synthetic, configuration, memfd};
use towline_migration::memory::{self, BlockBacking, MemoryBlock};
use towline_migration::outgoing::ZeroCopySend;
use towline_migration::{Guest, Incoming, Outgoing, Session, Sink, Statistics, incoming, outgoing};

use super::transfer::{Conditions, Cost, Memory, Mode};
use crate::machine;
use crate::options::Bench;
use crate::table::Figures;

/// Option that has the program run an end; the role and the size of its memory follow.
pub(crate) const END: &str = "--end";
const WITHIN: Duration = Duration::from_secs(30);

/// Reply of an end: the text of its error, if it failed.
type Reply<T> = Result<T, String>;

/// A transfer, as both ends know it.
#[derive(Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) conditions: Conditions,
    pub(super) mode: Mode,
    /// Directory of the certificates, for TLS.
    pub(super) certificates: Option<PathBuf>,
    /// The destination's; empty until it listens.
    pub(super) address: String,
}

/// Reply of the source.
#[derive(Serialize, Deserialize)]
struct Sent {
    cost: Cost,
    /// Send calls of the lanes.
    calls: u64,
}

/// An end as seen by the benchmark, which ends when this is dropped.
pub(super) struct End {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl End {
    /// Starts a process with this role and so much memory, and waits until it is ready.
    pub(super) fn start(bench: &Bench, role: &str, bytes: u64) -> Result<Self> {
        let mut command = Command::new(&bench.own);
        command.args([END, role, &bytes.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            command.spawn().with_context(|| format!("{} cannot be started", bench.own.display()))?;
        let input = child.stdin.take().context("standard input")?;
        let output = BufReader::new(child.stdout.take().context("standard output")?);
        let mut end = Self { child, input, output };
        end.receive::<()>()?;
        Ok(end)
    }

    /// Sends the guest to `destination`.
    pub(super) fn send(&mut self, destination: &mut Self, mut request: Request) -> Result<Figures> {
        destination.request(&request)?;
        request.address = destination.receive()?;
        self.request(&request)?;
        let (sent, received) = (self.receive::<Sent>(), destination.receive::<f64>());
        let Sent { mut cost, calls } = sent?;
        cost.cpu_seconds += received?;
        let mut figures = cost.figures();
        figures.insert("calls", calls as f64);
        Ok(figures)
    }

    fn request(&mut self, request: &Request) -> Result<()> {
        Ok(writeln!(self.input, "{}", serde_json::to_string(request)?)?)
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("an end exited: {}", self.child.wait()?);
        }
        let reply: Reply<T> = serde_json::from_str(&line)?;
        reply.map_err(|text| anyhow!(text))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs an end until its standard input ends.
///
/// # Errors
/// The role or a request is invalid.
pub(crate) fn serve_end(role: &str, bytes: &str) -> Result<()> {
    let bytes = bytes.parse().context("memory of an end")?;
    if role == "source" { source(bytes) } else { destination(bytes) }
}

/// Replies to each line.
fn serve_requests<T: Serialize>(mut work: impl FnMut(&Request) -> Result<T>) -> Result<()> {
    reply(&Ok(()))?;
    for line in std::io::stdin().lock().lines() {
        let request = serde_json::from_str(&line?)?;
        reply(&work(&request).map_err(|error| format!("{error:#}")))?;
    }
    Ok(())
}

fn reply(reply: &Reply<impl Serialize>) -> Result<()> {
    // Standard output is flushed at each end of a line.
    Ok(writeln!(std::io::stdout(), "{}", serde_json::to_string(reply)?)?)
}

fn source(length: u64) -> Result<()> {
    // Without zero pages, so that all pages are sent.
    let backing = Backing::Memfd;
    let guest = Synthetic::new(Shape { zero_percent: 0, backing, ..Shape::of_length(length) })?;
    serve_requests(|request| guest.run(|guest| send(guest, request))?)
}

fn send(guest: &dyn Guest, request: &Request) -> Result<Sent> {
    let address: Address = request.address.parse()?;
    let statistics = Arc::<Statistics>::default();
    let (cancel, begun, cpu) = (Cancel::new()?, Instant::now(), machine::own_seconds());
    let tls = request.certificates.as_ref().map(|directory| TlsClient::load(directory, None)).transpose()?;
    let one = |zero_copy| -> Result<Arc<dyn Channel>> {
        let options = ConnectOptions { zero_copy, tls: tls.clone(), ..ConnectOptions::default() };
        Ok(Arc::from(connect_with(&address, Instant::now() + WITHIN, &cancel, &options)?))
    };
    let main = one(false)?;
    let (zero_copy_send, is_zero_copy) = match request.mode {
        Mode::ZeroCopy => (ZeroCopySend::On, true),
        Mode::Auto => (ZeroCopySend::Auto, true),
        Mode::Vectored | Mode::Tls => (ZeroCopySend::Off, false),
    };
    let lanes = (0..request.conditions.lanes).map(|_| one(is_zero_copy)).collect::<Result<Vec<_>>>()?;
    let connections = outgoing::Connections { main, lanes, uuid: [0; 16], introduced: false };
    let options = outgoing::Options { zero_copy_send, ..outgoing::Options::default() };
    Outgoing::new(Arc::<Session>::default(), Arc::clone(&statistics), options).run(&connections, guest)?;
    let (seconds, cpu_seconds) = (begun.elapsed().as_secs_f64(), machine::own_seconds() - cpu);
    let moved = statistics.snapshot();
    let cost = Cost { seconds, cpu_seconds, bytes: moved.normal_bytes as f64 };
    Ok(Sent { cost, calls: moved.vectored_calls + moved.plain_calls })
}

fn destination(length: u64) -> Result<()> {
    let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let file = memfd(length, Backing::Memfd)?;
    let backing = BlockBacking::Shared { file: file.as_fd(), offset: 0 };
    let warm = memory::Memory::new(configuration(), &[MemoryBlock { name: BLOCK_NAME, length, backing }])?;
    warm.populate(threads)?;
    let warm = Checked::new(warm, threads);
    let mut is_verified = false;
    serve_requests(|request| {
        if request.conditions.memory == Memory::Cold {
            machine::prefault(length)?;
            let memory = memory::Memory::adopting(length);
            return receive(&Checked::new(memory, threads).without_check(), request);
        }
        // The first copy is verified; later ones have the same contents.
        if std::mem::replace(&mut is_verified, true) {
            receive(warm.memory(), request)
        } else {
            receive(&warm, request)
        }
    })
}

/// Receives the guest. Returns the CPU time in seconds.
fn receive(sink: &dyn Sink, request: &Request) -> Result<f64> {
    let cancel = Cancel::new()?;
    let tls = request.certificates.as_deref().map(TlsServer::load).transpose()?;
    let options = ListenOptions { tls, ..ListenOptions::default() };
    let listener = Listener::bind_with(&Address::Tcp { host: "127.0.0.1".into(), port: 0 }, &options)?;
    reply(&Ok(listener.local_address().to_string()))?;
    let lanes = request.conditions.lanes;
    let connections = incoming::gather(listener, lanes, Instant::now() + WITHIN, WITHIN, &cancel)?;
    let cpu = machine::own_seconds();
    let engine =
        Incoming::new(Arc::<Session>::default(), Arc::<Statistics>::default(), incoming::Options::default());
    engine.run(&connections, sink)?;
    Ok(machine::own_seconds() - cpu)
}
