//! One end of a measured transfer, in a separate process, whose CPU time is measured. Requests are lines of JSON on standard input,
//! each with a reply on standard output.
//!
//! ```text
//!   {"source": BYTES}       fills memory once ─► "ready"      {"address", "lanes", "mode", …} ─► figures
//!   {"destination": BYTES}  touches memory once ─► "ready"    {"lanes", "cold"} ─► address ─► CPU
//! ```

use std::io::{BufRead, BufReader, Write};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use towline_channel::{
    Address, Cancel, Channel, ConnectOptions, ListenOptions, Listener, TlsClient, TlsServer, connect_with,
};
use towline_memload::{BLOCK_NAME, Backing, Checked, MemfdPages, Shape, Synthetic, configuration, memfd};
use towline_migration::memory::{BlockBacking, MemoryBlock};
use towline_migration::{Guest, Incoming, Memory, Outgoing, Session, Sink, Statistics, incoming, outgoing};

use super::transfer::{Cost, Mode, Transfer};
use crate::machine;
use crate::options::Bench;
use crate::table::Figures;

/// Option that has the program run an end; its value is the role as JSON.
pub(crate) const END: &str = "--end";
const WITHIN: Duration = Duration::from_secs(30);

/// An end as seen by the benchmark, which ends when this is dropped.
pub(super) struct End {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl End {
    /// Starts a process with this role, and waits until it is ready.
    pub(super) fn start(bench: &Bench, role: &str, bytes: u64) -> Result<Self> {
        let mut command = Command::new(&bench.own);
        command.args([END, &json!({ role: bytes }).to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            command.spawn().with_context(|| format!("{} cannot be started", bench.own.display()))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("standard output")?);
        let mut end = Self { child, input, output };
        let ready = end.receive()?;
        ensure!(ready == "ready", "{role}: unexpected reply {ready}, expected \"ready\"");
        Ok(end)
    }

    /// Sends the guest to `destination`.
    pub(super) fn send(
        &mut self,
        destination: &mut Self,
        transfer: Transfer,
        mode: Mode,
        certificates: &Path,
    ) -> Result<Figures> {
        let Transfer { memory, lanes, .. } = transfer;
        let tls = (mode == Mode::Tls).then_some(certificates);
        destination.request(&json!({ "lanes": lanes, "cold": memory == super::Memory::Cold, "tls": tls }))?;
        let address = destination.receive()?["address"].take();
        self.request(&json!({ "address": address, "lanes": lanes, "mode": mode.name(), "tls": tls }))?;
        let (sent, received) = (self.receive(), destination.receive());
        let (sent, received) = (sent?, received?);
        let number =
            |value: &Value, key: &str| value[key].as_f64().with_context(|| format!("{value} without {key}"));
        let cost = Cost {
            seconds: number(&sent, "seconds")?,
            cpu_seconds: number(&sent, "cpu")? + number(&received, "cpu")?,
            bytes: number(&sent, "bytes")?,
        };
        let mut figures = cost.figures();
        figures.insert("calls", number(&sent, "calls")?);
        Ok(figures)
    }

    fn request(&mut self, request: &Value) -> Result<()> {
        let input = self.input.as_mut().context("standard input is closed")?;
        writeln!(input, "{request}")?;
        Ok(input.flush()?)
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("an end exited: {}", self.child.wait()?);
        }
        let value: Value = serde_json::from_str(&line)?;
        match value["failed"].as_str() {
            Some(text) => bail!("{text}"),
            None => Ok(value),
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // It exits at the end of its input; a hanging one is killed.
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs an end until its standard input ends.
///
/// # Errors
/// The role or a request is invalid.
pub(crate) fn serve_end(role: &str) -> Result<()> {
    let role: Value = serde_json::from_str(role).context("role of an end")?;
    match (role["source"].as_u64(), role["destination"].as_u64()) {
        (Some(bytes), _) => source(bytes),
        (_, Some(bytes)) => destination(bytes),
        _ => bail!("expected the role source or destination"),
    }
}

/// Replies to each line.
fn serve_requests(mut work: impl FnMut(&Value) -> Result<Value>) -> Result<()> {
    write_line(&json!("ready"))?;
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        let reply = work(&request).unwrap_or_else(|error| json!({ "failed": format!("{error:#}") }));
        write_line(&reply)?;
    }
    Ok(())
}

fn write_line(value: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}")?;
    Ok(out.flush()?)
}

fn source(length: u64) -> Result<()> {
    // Without zero pages, so that all pages are sent.
    let backing = Backing::Memfd;
    let guest = Synthetic::new(Shape { zero_percent: 0, backing, ..Shape::of_length(length) })?;
    serve_requests(|request| guest.run(|guest| send(guest, request))?)
}

fn send(guest: &dyn Guest, request: &Value) -> Result<Value> {
    let mode = Mode::ALL.into_iter().find(|mode| request["mode"] == mode.name()).context("unknown mode")?;
    let address: Address = request["address"].as_str().unwrap_or_default().parse()?;
    let lanes = request["lanes"].as_u64().unwrap_or_default();
    let statistics = Arc::<Statistics>::default();
    let (cancel, begun, cpu) = (Cancel::new()?, Instant::now(), machine::own_seconds());
    let tls =
        request["tls"].as_str().map(|directory| TlsClient::load(Path::new(directory), None)).transpose()?;
    let one = |zero_copy| -> Result<Arc<dyn Channel>> {
        let options = ConnectOptions { zero_copy, tls: tls.clone(), ..ConnectOptions::default() };
        Ok(Arc::from(connect_with(&address, Instant::now() + WITHIN, &cancel, &options)?))
    };
    let main = one(false)?;
    let zero_copy_send = mode.zero_copy_send();
    let is_zero_copy = matches!(mode, Mode::ZeroCopy | Mode::Auto);
    let lanes = (0..lanes).map(|_| one(is_zero_copy)).collect::<Result<Vec<_>>>()?;
    let connections = outgoing::Connections { main, lanes, uuid: [0; 16], introduced: false };
    let options = outgoing::Options { zero_copy_send, ..outgoing::Options::default() };
    Outgoing::new(Arc::<Session>::default(), Arc::clone(&statistics), options).run(&connections, guest)?;
    let (seconds, cpu) = (begun.elapsed().as_secs_f64(), machine::own_seconds() - cpu);
    let moved = statistics.snapshot();
    Ok(json!({
        "seconds": seconds,
        "cpu": cpu,
        "bytes": moved.normal_bytes,
        "calls": moved.vectored_calls + moved.plain_calls,
    }))
}

fn destination(length: u64) -> Result<()> {
    let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let file = memfd(length, MemfdPages::Base)?;
    let backing = BlockBacking::Shared { file: file.as_fd(), offset: 0 };
    let warm = Memory::new(configuration(), &[MemoryBlock { name: BLOCK_NAME, length, backing }])?;
    warm.populate(threads)?;
    let warm = Checked::new(warm, threads);
    let mut is_verified = false;
    serve_requests(|request| {
        let lanes = request["lanes"].as_u64().unwrap_or_default() as usize;
        let tls =
            request["tls"].as_str().map(|directory| TlsServer::load(Path::new(directory))).transpose()?;
        if request["cold"] == true {
            machine::prefault(length)?;
            return receive(&Checked::new(Memory::adopting(length), threads).without_check(), lanes, tls);
        }
        // The first copy is verified; later ones have the same contents.
        if std::mem::replace(&mut is_verified, true) {
            receive(warm.memory(), lanes, tls)
        } else {
            receive(&warm, lanes, tls)
        }
    })
}

fn receive(sink: &dyn Sink, lanes: usize, tls: Option<TlsServer>) -> Result<Value> {
    let cancel = Cancel::new()?;
    let options = ListenOptions { tls, ..ListenOptions::default() };
    let listener = Listener::bind_with(&Address::Tcp { host: "127.0.0.1".into(), port: 0 }, &options)?;
    write_line(&json!({ "address": listener.local_address().to_string() }))?;
    let connections = incoming::gather(listener, lanes, Instant::now() + WITHIN, WITHIN, &cancel)?;
    let cpu = machine::own_seconds();
    let engine =
        Incoming::new(Arc::<Session>::default(), Arc::<Statistics>::default(), incoming::Options::default());
    engine.run(&connections, sink)?;
    Ok(json!({ "cpu": machine::own_seconds() - cpu }))
}
