//! Both ends of a measured transfer: the source in this process, the destination in another one. Requests are lines of JSON on its
//! standard input, with replies on its standard output.
//!
//! ```text
//!   --destination BYTES   touches memory once ─► ready    request ─► address ─► CPU time
//! ```

use std::io::{BufRead, BufReader, Write};
use std::num::NonZeroUsize;
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
use towline_memload::{Backing, Checked, Shape, Synthetic, memfd, populated};
use towline_migration::{
    Guest, Incoming, Outgoing, Session, Sink, Statistics, ZeroCopySend, incoming, outgoing,
};

use super::transfer::{Conditions, Cost, Memory};
use crate::machine;
use crate::options::Bench;
use crate::table::Figures;

/// Option that has the program be a destination; the size of its memory follows.
pub(crate) const DESTINATION: &str = "--destination";
const WITHIN: Duration = Duration::from_secs(30);

/// Reply of the destination: the text of its error, if it failed.
type Reply<T> = Result<T, String>;

/// A transfer, as both ends know it.
#[derive(Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) conditions: Conditions,
    /// Directory of the certificates, for TLS.
    pub(super) certificates: Option<PathBuf>,
}

/// The ends of all transfers. The destination ends when this is dropped.
pub(super) struct Ends {
    source: Synthetic,
    destination: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Ends {
    /// Fills so much memory of the source, and starts a destination and waits until it is ready.
    pub(super) fn start(bench: &Bench, bytes: u64) -> Result<Self> {
        // Without zero pages, so that all pages are sent.
        let shape = Shape { zero_percent: 0, backing: Backing::Memfd, ..Shape::of_length(bytes) };
        let source = Synthetic::new(shape)?;
        let mut command = Command::new(&bench.own);
        command.args([DESTINATION, &bytes.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut destination =
            command.spawn().with_context(|| format!("{} cannot be started", bench.own.display()))?;
        let input = destination.stdin.take().context("standard input")?;
        let output = BufReader::new(destination.stdout.take().context("standard output")?);
        let mut ends = Self { source, destination, input, output };
        ends.receive::<()>()?;
        Ok(ends)
    }

    /// Sends the guest.
    pub(super) fn send(&mut self, request: &Request, zero_copy_send: ZeroCopySend) -> Result<Figures> {
        writeln!(self.input, "{}", serde_json::to_string(request)?)?;
        let address = self.receive::<String>()?.parse()?;
        let statistics = Arc::<Statistics>::default();
        let sent = self.source.run(|guest| send(guest, &address, request, zero_copy_send, &statistics));
        // Read whatever has failed here: the next reply is that to the next request.
        let received = self.receive::<f64>();
        let mut cost = sent??;
        cost.cpu_seconds += received?;
        let (mut figures, moved) = (cost.figures(), statistics.snapshot());
        figures.insert("calls", (moved.vectored_calls + moved.plain_calls) as f64);
        Ok(figures)
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("the destination exited: {}", self.destination.wait()?);
        }
        let reply: Reply<T> = serde_json::from_str(&line)?;
        reply.map_err(|text| anyhow!(text))
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.destination.kill();
        let _ = self.destination.wait();
    }
}

fn send(
    guest: &dyn Guest,
    address: &Address,
    request: &Request,
    zero_copy_send: ZeroCopySend,
    statistics: &Arc<Statistics>,
) -> Result<Cost> {
    let (cancel, begun, cpu) = (Cancel::new()?, Instant::now(), machine::own_seconds());
    let tls = request.certificates.as_ref().map(|directory| TlsClient::load(directory, None)).transpose()?;
    let one = |zero_copy| -> Result<Arc<dyn Channel>> {
        let options = ConnectOptions { zero_copy, tls: tls.clone(), ..ConnectOptions::default() };
        Ok(Arc::from(connect_with(address, Instant::now() + WITHIN, &cancel, &options)?))
    };
    let main = one(false)?;
    let is_zero_copy = zero_copy_send != ZeroCopySend::Off;
    let lanes = (0..request.conditions.lanes).map(|_| one(is_zero_copy)).collect::<Result<Vec<_>>>()?;
    let connections = outgoing::Connections { main, lanes, uuid: [0; 16], introduced: false };
    let options = outgoing::Options { zero_copy_send, ..outgoing::Options::default() };
    Outgoing::new(Arc::<Session>::default(), Arc::clone(statistics), options).run(&connections, guest)?;
    let (seconds, cpu_seconds) = (begun.elapsed().as_secs_f64(), machine::own_seconds() - cpu);
    Ok(Cost { seconds, cpu_seconds, bytes: statistics.snapshot().normal_bytes as f64 })
}

/// Runs a destination until its standard input ends.
///
/// # Errors
/// A request is invalid.
pub(crate) fn serve(bytes: &str) -> Result<()> {
    let length = bytes.parse().context("memory of a destination")?;
    let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let file = memfd(length, Backing::Memfd)?;
    let warm = Checked::new(populated(&file, length, threads)?, threads);
    let mut is_verified = false;
    reply(&Ok(()))?;
    for line in std::io::stdin().lock().lines() {
        let request: Request = serde_json::from_str(&line?)?;
        let received = if request.conditions.memory == Memory::Cold {
            let cold = Checked::new(towline_migration::Memory::adopting(length), threads).without_check();
            machine::prefault(length).and_then(|()| receive(&cold, &request))
        } else if is_verified {
            receive(warm.memory(), &request)
        } else {
            // The first copy is verified; later ones have the same contents.
            is_verified = true;
            receive(&warm, &request)
        };
        reply(&received.map_err(|error| format!("{error:#}")))?;
    }
    Ok(())
}

fn reply(reply: &Reply<impl Serialize>) -> Result<()> {
    // Standard output is flushed at each end of a line.
    Ok(writeln!(std::io::stdout(), "{}", serde_json::to_string(reply)?)?)
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
