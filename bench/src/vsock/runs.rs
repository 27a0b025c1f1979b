//! One run of a row.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Result, ensure};
use tempfile::TempDir;

use super::entry::{CID, Carrier, Direction, Entry, Figure, PEER, Parameters, Work};
use super::guest::Machine;
use super::host::{self, Host, PORT, Target};
use crate::vhost::backend::Backend;
use crate::vhost::latency::Latencies;
use crate::vhost::{Signals, Window, window};

pub(super) fn run(parameters: &Parameters, entry: Entry) -> Result<Figure> {
    let directory = TempDir::with_prefix("towline-bench-")?;
    let signals = Arc::new(Signals::default());
    if entry.carrier == Carrier::Socket {
        let target = Target::Socket(directory.path().join("limit.sock"));
        let mut host = Host::default();
        let measured = host::without_backend(&mut host, &signals, &target, entry.work)
            .and_then(|()| window(&signals, None, parameters.window, &parameters.cancel));
        return figure(measured, host.end(&signals));
    }
    let (socket, uds) = (directory.path().join("vhost.sock"), directory.path().join("uds.sock"));
    let mut backend = backend(parameters, entry.carrier, (&socket, &uds), directory.path())?;
    let frontend = backend.connect(&socket)?;
    let mut machine = match Machine::start(frontend, CID, entry.buffers, entry.work, &signals) {
        Ok(machine) => machine,
        Err(error) => return Err(backend.check().err().unwrap_or(error)),
    };
    let target = Target::Vsock { path: uds, port: PORT };
    let mut host = Host::default();
    let measured = (|| {
        if let Work::Stream { connections, direction: Direction::FromGuest, .. } = entry.work {
            host.read(&signals, &target.listener(), connections)?;
            machine.connect()?;
        }
        let thread = machine.spawn();
        let begun = match entry.work {
            Work::Stream { size, connections, direction: Direction::ToGuest } => {
                host.write(&signals, &target, (size, connections))
            }
            Work::Stream { .. } => Ok(()),
            Work::Request { size, connections, reconnects } => {
                host.request(&signals, &target, (size, connections, reconnects))
            }
        };
        let window =
            begun.and_then(|()| window(&signals, Some(&mut backend), parameters.window, &parameters.cancel));
        // The applications end before the guest that responds to them.
        Ok((window, thread))
    })();
    let (window, thread) = match measured {
        Ok((window, thread)) => (window, Some(thread)),
        Err(error) => (Err(error), None),
    };
    let latencies = host.end(&signals);
    signals.power_off.store(true, Ordering::Relaxed);
    let ended = thread.map_or(Ok(()), |thread| thread.join().expect("the thread does not panic"));
    let figure = figure(window, latencies)?;
    ended?;
    Ok(figure)
}

/// Returns the figure of a window and the latencies in it.
pub(super) fn figure(window: Result<Window>, latencies: Result<Latencies>) -> Result<Figure> {
    let (window, mut latencies) = (window?, latencies?);
    Ok(Figure { window, p50_us: latencies.quantile(0.5), p99_us: latencies.quantile(0.99) })
}

/// Starts the process of a contender, with these paths of the frontend's socket and of the clients'.
pub(super) fn backend(
    parameters: &Parameters,
    carrier: Carrier,
    (socket, uds): (&Path, &Path),
    directory: &Path,
) -> Result<Backend> {
    let (socket, uds, cid) = (socket.display().to_string(), uds.display().to_string(), CID.to_string());
    if carrier == Carrier::Towline {
        let arguments = ["vsock", "--socket", &socket, "--cid", &cid, "--uds", &uds];
        let sandbox = parameters.sandbox.map(|setting| ["--sandbox", setting]);
        let arguments = arguments.into_iter().chain(sandbox.into_iter().flatten());
        return Backend::start(directory, &parameters.towline, arguments);
    }
    let peer = parameters.peer.as_ref();
    ensure!(peer.is_some(), "{PEER} is missing; run `cargo xtask peers`");
    let arguments = [format!("--guest-cid={cid}"), format!("--socket={socket}"), format!("--uds-path={uds}")];
    Backend::start(directory, peer.expect("checked above"), arguments)
}
