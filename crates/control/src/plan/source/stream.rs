//! The stream of a source: QEMU is configured, migrates to a socket of ours, and its connections are accepted.

use std::thread;
use std::time::{Duration, Instant};

use towline_channel::{Cancel, Listener};
use towline_migration::incoming::{Connections, gather};
use towline_qmp as qmp;
use towline_qmp::commands::{Migrate, MigrationStatus};

use super::super::error::Error;
use super::super::request::Request;
use super::qmp_source::{QmpSource, STREAM_SOCKET};
use crate::qemu::{self, AppliedSettings};

/// Timeout for lanes to connect after the main channel.
pub(in super::super) const LANES_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for a source whose copy is cancelled to connect.
const CANCELLED_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of queries while its connections are awaited.
const CONNECT_QUERY_INTERVAL: Duration = Duration::from_millis(100);

impl QmpSource {
    /// Configures QEMU and has it migrate to this process.
    pub(in super::super) fn start(
        &mut self,
        lanes: usize,
        options: &Request,
        cancel: &Cancel,
    ) -> Result<Connections, Error> {
        let settings = self.migration_settings(lanes, options);
        self.settings = Some(AppliedSettings::apply(&mut self.qemu, &settings)?);
        let path = self.stream_path();
        let listener = self.dir.listen(STREAM_SOCKET)?;
        self.wait_migration_cleanup()?;
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        self.start_migration(&Migrate::to_uri(format!("unix:{}", path.display())))?;
        let deadline = Instant::now() + options.connect_timeout;
        self.accept_connections(listener, lanes, deadline, cancel).map_err(|error| self.explain(error))
    }

    /// Resumes a guest that an earlier copy has paused, and has QEMU migrate it.
    pub(super) fn start_migration(&mut self, migrate: &Migrate) -> Result<(), Error> {
        if self.resumes {
            self.qemu.cont()?;
            self.resumed = true;
        }
        self.started = true;
        let accepted = self.qemu.migrate(migrate);
        if matches!(accepted, Err(qemu::Error::Qmp(qmp::Error::Refusal { .. }))) {
            self.started = false;
        }
        accepted?;
        Ok(())
    }

    /// Waits for QEMU's connections, and queries meanwhile if it failed or exited.
    ///
    /// A cancellation waits for them too: a QEMU (10.0) whose connections break while it makes them may never
    /// complete that migration, and accepts no other.
    pub(super) fn accept_connections(
        &mut self,
        listener: Listener,
        lanes: usize,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Connections, Error> {
        let (watcher, ends) = (thread::current(), Cancel::new()?);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let connections = gather(listener, lanes, deadline, LANES_TIMEOUT, &ends);
                watcher.unpark();
                connections
            });
            let (mut reason, mut cancelled) = (None, None);
            while !waiter.is_finished() {
                thread::park_timeout(CONNECT_QUERY_INTERVAL);
                if reason.is_none() && !ends.is_cancelled() {
                    reason = self.check_not_failed().err();
                }
                if cancel.is_cancelled() {
                    cancelled.get_or_insert_with(Instant::now);
                }
                if reason.is_some() || cancelled.is_some_and(|at| at.elapsed() >= CANCELLED_CONNECT_TIMEOUT) {
                    ends.cancel();
                }
            }
            match (waiter.join(), reason) {
                (Ok(Ok(connections)), _) if cancelled.is_some() => {
                    connections.refuse();
                    Err(Error::Cancelled)
                }
                (Ok(Ok(connections)), _) => Ok(connections),
                (Ok(Err(_)), Some(reason)) => Err(reason),
                (Ok(Err(error)), None) => Err(error.into()),
                (Err(panic), _) => std::panic::resume_unwind(panic),
            }
        })
    }

    pub(super) fn check_not_failed(&mut self) -> Result<(), Error> {
        let Some(migration) = self.qemu.try_query(|qemu| qemu.migration())? else { return Ok(()) };
        if migration.status == Some(MigrationStatus::FAILED) {
            let text = migration.error_desc.unwrap_or_else(|| "QEMU reports no reason".into());
            return Err(Error::SourceFailed { socket: self.qemu.socket().into(), text });
        }
        Ok(())
    }
}
