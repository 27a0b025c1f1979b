//! One end of a measured migration, in a process of its own, whose CPU time is measured. Requests are lines of JSON on standard input,
//! each with a reply on standard output.
//!
//! ```text
//!   {"source": {…}}       fills memory once ─► "ready"      {"address", "lanes", "mode", …} ─► seconds, CPU, calls
//!   {"destination": {…}}  touches memory once ─► "ready"    {"lanes", "cold"} ─► address ─► seconds, CPU
//!   {"spin": N}           N busy threads ─► "ready", until standard input ends
//! ```

use std::ffi::OsString;
use std::io::{BufRead, Write};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::{Value, json};
use towline_channel::{
    Address, Cancel, Channel, ConnectOptions, ListenOptions, Listener, TlsClient, TlsServer, connect_with,
};
use towline_migration::memory::{BlockBacking, MemoryBlock};
use towline_migration::outgoing::ZeroCopySend;
use towline_migration::synthetic::{self, BLOCK_NAME, Checked, Shape, Synthetic, configuration};
use towline_migration::{Guest, Incoming, Memory, Outgoing, Session, Sink, Statistics, incoming, outgoing};

use super::layers::{Calls, Counted, Linear, OnePage};
use crate::machine;
use crate::vhost::cpu;

/// Option that has the program run an end; its value is the role as JSON.
pub(super) const ROLE_OPTION: &str = "--end";
const WITHIN: Duration = Duration::from_secs(30);
/// Quarters of the guest's memory to prefault: more than the guest, as its backing uses huge pages too.
const PREFAULT_QUARTERS: u64 = 5;

/// Method of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Linear,
    OnePage,
    Vectored,
    ZeroCopy,
    Auto,
    Tls,
}

impl Mode {
    /// Methods without TLS.
    pub(super) const PLAIN: [Self; 5] =
        [Self::Linear, Self::OnePage, Self::Vectored, Self::ZeroCopy, Self::Auto];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Linear => "pages copied into 32 KiB",
            Self::OnePage => "one page a call",
            Self::Vectored => "vectored",
            Self::ZeroCopy => "zero-copy on",
            Self::Auto => "auto",
            Self::Tls => "vectored, TLS",
        }
    }

    fn of(name: &str) -> Result<Self> {
        let mut modes = Self::PLAIN.into_iter().chain([Self::Tls]);
        modes.find(|mode| mode.name() == name).with_context(|| format!("unknown mode {name:?}"))
    }

    fn layer(self, channel: Box<dyn Channel>) -> Arc<dyn Channel> {
        match self {
            Self::Linear => Arc::new(Linear::new(channel)),
            Self::OnePage => Arc::new(OnePage::new(channel)),
            _ => Arc::from(channel),
        }
    }

    fn options(self) -> outgoing::Options {
        let zero_copy_send = match self {
            Self::ZeroCopy => ZeroCopySend::On,
            Self::Auto => ZeroCopySend::Auto,
            _ => ZeroCopySend::Off,
        };
        outgoing::Options { zero_copy_send, ..outgoing::Options::default() }
    }

    fn is_zero_copy(self) -> bool {
        matches!(self, Self::ZeroCopy | Self::Auto)
    }
}

/// Returns the role of an end, if this is its command line.
pub fn role(words: &[OsString]) -> Option<&str> {
    match words {
        [_, option, role] if option == ROLE_OPTION => role.to_str(),
        _ => None,
    }
}

/// Runs an end until its standard input ends.
///
/// # Errors
/// A request is invalid, or a migration failed.
pub fn serve(role: &str) -> Result<()> {
    let role: Value = serde_json::from_str(role).context("role of an end")?;
    if let Some(threads) = role["spin"].as_u64() {
        return spin(threads);
    }
    if let Some(shape) = role.get("source") {
        return source(shape);
    }
    destination(role.get("destination").context("expected the role source, destination or spin")?)
}

/// Replies to each line.
fn serve_requests(mut work: impl FnMut(&Value) -> Result<Value>) -> Result<()> {
    write_line(&json!("ready"))?;
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        let cpus: Option<Vec<usize>> = request["cpus"]
            .as_array()
            .map(|cpus| cpus.iter().filter_map(|cpu| Some(cpu.as_u64()? as usize)).collect());
        pin(cpus.as_deref())?;
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

/// Pins this thread; threads that are started later inherit that.
fn pin(cpus: Option<&[usize]>) -> Result<()> {
    let mut set = CpuSet::new();
    match cpus {
        Some(cpus) => cpus.iter().for_each(|&cpu| set.set(cpu)),
        None => (0..CpuSet::MAX_CPU).for_each(|cpu| set.set(cpu)),
    }
    Ok(sched_setaffinity(None, &set)?)
}

fn source(shape: &Value) -> Result<()> {
    let length = shape["bytes"].as_u64().context("bytes")?;
    let zero_percent = shape["zero-percent"].as_u64().unwrap_or(0) as u8;
    let shape = Shape { zero_percent, backing: synthetic::Backing::Memfd, ..Shape::of_length(length) };
    let guest = Synthetic::new(shape)?;
    serve_requests(|request| {
        let mode = Mode::of(request["mode"].as_str().unwrap_or_default())?;
        guest.run(|guest| send(guest, mode, request))?
    })
}

fn send(guest: &dyn Guest, mode: Mode, request: &Value) -> Result<Value> {
    let address: Address = request["address"].as_str().unwrap_or_default().parse()?;
    let lanes = request["lanes"].as_u64().unwrap_or_default();
    let (calls, statistics) = (Arc::<Calls>::default(), Arc::<Statistics>::default());
    let (cancel, begun, cpu) = (Cancel::new()?, Instant::now(), cpu::of_process());
    let tls =
        request["tls"].as_str().map(|directory| TlsClient::load(Path::new(directory), None)).transpose()?;
    let one = |zero_copy| -> Result<Arc<dyn Channel>> {
        let options = ConnectOptions { zero_copy, tls: tls.clone(), ..ConnectOptions::default() };
        let channel = connect_with(&address, Instant::now() + WITHIN, &cancel, &options)?;
        Ok(mode.layer(Box::new(Counted::new(channel, &calls))))
    };
    let main = one(false)?;
    let lanes = (0..lanes).map(|_| one(mode.is_zero_copy())).collect::<Result<Vec<_>>>()?;
    let connections = outgoing::Connections { main, lanes, uuid: [0; 16], introduced: false };
    let engine = Outgoing::new(Arc::<Session>::default(), Arc::clone(&statistics), mode.options());
    engine.run(&connections, guest)?;
    let (seconds, cpu) = (begun.elapsed().as_secs_f64(), cpu::of_process() - cpu);
    let moved = statistics.snapshot();
    Ok(json!({
        "seconds": seconds,
        "cpu": cpu,
        "bytes": moved.normal_bytes,
        "plain-pages": moved.normal,
        "duplicate-pages": moved.duplicate,
        "sends": calls.sends(),
        "vectored-calls": moved.vectored_calls,
        "plain-calls": moved.plain_calls,
        "send-ns": calls.call_ns(),
    }))
}

fn destination(shape: &Value) -> Result<()> {
    let length = shape["bytes"].as_u64().context("bytes")?;
    let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let file = synthetic::memfd(length, synthetic::MemfdPages::Base)?;
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
            machine::prefault(length / 4 * PREFAULT_QUARTERS)?;
            let cold = Checked::new(Memory::adopting(length), threads).without_check();
            return receive(&cold, lanes, tls);
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
    let (begun, cpu) = (Instant::now(), cpu::of_process());
    let engine =
        Incoming::new(Arc::<Session>::default(), Arc::<Statistics>::default(), incoming::Options::default());
    engine.run(&connections, sink)?;
    Ok(json!({ "seconds": begun.elapsed().as_secs_f64(), "cpu": cpu::of_process() - cpu }))
}

fn spin(threads: u64) -> Result<()> {
    if threads > 1024 {
        bail!("{threads} busy threads: expected at most 1024");
    }
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let result = serve_requests(|_| Ok(Value::Null));
        is_over.store(true, Ordering::Relaxed);
        result
    })
}
