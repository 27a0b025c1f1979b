//! `cargo xtask bench vsock`: streams of a vsock backend, against vhost-device-vsock and a plain Unix socket.
//!
//! ```text
//!   application ── Unix socket ── backend ── rings in shared memory ── driver in this process (no guest is emulated)
//!   application ── Unix socket ── application                           the limit: the host's own part
//! ```
//! Every measurement has its own backend process. CPU time includes both sides: the backend, and this process with applications and
//! driver. The driver sleeps on its eventfd when idle, as a guest does.
//!
//! Limits: the driver does not copy data, so a guest's own work is not measured.

pub mod crowd;
mod entry;
mod guest;
mod host;
pub mod linux;
mod runs;
mod sys;
mod tables;

use anyhow::Result;

use crate::rounds::{self, Contender};
use crate::table::Table;
use crate::vhost::Window;
use entry::{Buffers, Carrier, Direction, Entry, Work};
pub use entry::{PEER, Parameters};
use runs::run;

/// Measures the tables; takes a quarter of an hour with [`Parameters::of`] and five runs.
///
/// # Errors
/// The run was cancelled. A contender that fails is a row with the reason.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    let entries = entries(parameters);
    let contenders: Vec<Contender> = entries.iter().map(Entry::contender).collect();
    let outcomes = rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| {
        run(parameters, entries[index])
    })?;
    Ok(tables::Run { parameters, entries, outcomes }.tables())
}

/// Measures one stream of 64 KiB messages from the guest through towline.
///
/// # Errors
/// The backend fails, or the run was cancelled.
pub(crate) fn one_stream(parameters: &Parameters) -> Result<Window> {
    let work = Work::Stream { size: 64 << 10, connections: 1, direction: Direction::FromGuest };
    let entry = Entry { work, buffers: Buffers::Linux, carrier: Carrier::Towline };
    run(parameters, entry).map(|figure| figure.window)
}

fn entries(parameters: &Parameters) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut add = |work, buffers| {
        let carriers = [Carrier::Towline, Carrier::Peer, Carrier::Socket];
        entries.extend(carriers.map(|carrier| Entry { work, buffers, carrier }));
    };
    let all = [Direction::ToGuest, Direction::FromGuest];
    for direction in all {
        for &connections in &parameters.connections {
            for buffers in [Buffers::Linux, Buffers::Large] {
                // Receive buffers do not affect streams from the guest.
                if direction == Direction::FromGuest && buffers == Buffers::Large {
                    continue;
                }
                for &size in &parameters.sizes {
                    add(Work::Stream { size, connections, direction }, buffers);
                }
            }
        }
    }
    for reconnects in [false, true] {
        for &connections in &parameters.connections {
            add(Work::Request { size: parameters.request_bytes, connections, reconnects }, Buffers::Linux);
        }
    }
    let wanted = |entry: &Entry| {
        let group = entry.contender().group;
        parameters.rows.is_empty() || parameters.rows.iter().any(|part| group.contains(part.as_str()))
    };
    entries.retain(wanted);
    entries
}
