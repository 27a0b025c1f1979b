//! The stream of a source: QEMU is configured, migrates to a socket of this process, and its connections are
//! accepted.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use towline_channel::{Cancel, Error as ChannelError, Listener};
use towline_migration::incoming::{Connections, gather};
use towline_qmp::commands::{Migrate, MigrationStatus};
use towline_qmp::{self as qmp, Client};

use super::super::context::Context;
use super::super::error::Error;
use super::super::private_dir::QemuLink;
use super::qmp_source;
use super::qmp_source::{QmpSource, STREAM_SOCKET};
use crate::qemu::{self, AppliedSettings};

/// Timeout for a source whose copy is cancelled to connect.
const CANCELLED_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which its events are read while its connections are awaited.
const CONNECT_CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl QmpSource {
    /// Configures QEMU and has it migrate to this process.
    pub(in super::super) fn start(&mut self, context: &Context<'_>) -> Result<Connections, Error> {
        let settings = self.migration_settings(context);
        self.settings = Some(AppliedSettings::apply(&mut self.qemu, &settings)?);
        let listener = if self.qemu.process().has_own_root() {
            self.link = QemuLink::pass(&mut self.qemu)?;
            Listener::bind(&self.link.address)?
        } else {
            self.dir.listen(STREAM_SOCKET)?
        };
        qmp_source::check_run_state(&mut self.qemu, context.options)?;
        context.check_cancelled()?;
        self.start_migration(&Migrate::to_uri(&self.link.uri))?;
        self.accept_connections(listener, context).map_err(|error| self.explain(error))
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

    /// Waits for QEMU's connections, and reads its events, in case it fails or exits.
    ///
    /// Nothing is queried without such an event: a QEMU replies only when its stream has been read if it is
    /// completing its migration, which it does at once with a stopped guest. Reading starts when this
    /// function returns.
    ///
    /// A cancellation waits for them too: a QEMU (10.0) whose connections break while it makes them may never
    /// complete that migration, and accepts no other.
    fn accept_connections(
        &mut self,
        listener: Listener,
        context: &Context<'_>,
    ) -> Result<Connections, Error> {
        let (lanes, within) = (context.lanes(), context.options.connect_timeout);
        let deadline = Instant::now() + within;
        let ends = &Cancel::new()?;
        let (returns, returned) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let gather = move || {
                let _returns = returns;
                gather(listener, lanes, deadline, within, ends)
            };
            let waiter = Builder::new().spawn_scoped(scope, gather).map_err(ChannelError::NoThread)?;
            let (mut reason, mut cancelled) = (None, None);
            while returned.recv_timeout(CONNECT_CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if reason.is_none() && !ends.is_cancelled() {
                    reason = self.check_not_failed().err();
                }
                if context.cancel.is_cancelled() {
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

    fn check_not_failed(&mut self) -> Result<(), Error> {
        if !reports_failure(self.qemu.client()).map_err(qemu::Error::from)? {
            return Ok(());
        }
        match self.qemu.try_query(|qemu| qemu.migration())? {
            Some(found) if found.status == Some(MigrationStatus::FAILED) => {
                Err(self.failed(found.error_desc))
            }
            _ => Ok(()),
        }
    }
}

/// Reads the events that have arrived, without a command. Returns true if a migration failed.
fn reports_failure(client: &mut Client) -> Result<bool, qmp::Error> {
    let mut has_failed = false;
    while let Some(event) = client.next_event(Duration::ZERO)? {
        has_failed |= MigrationStatus::of_event(&event) == Some(MigrationStatus::FAILED);
    }
    Ok(has_failed)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::{Map, Value, json};
    use tempfile::TempDir;
    use towline_qmp::{CommandError, Commands, Options, Server};

    use super::*;

    const WITHIN: Duration = Duration::from_secs(20);

    /// Counts commands.
    #[derive(Default)]
    struct Counter(AtomicUsize);

    impl Commands for Counter {
        fn names(&self) -> &[&'static str] {
            &["query-migrate"]
        }

        fn execute(&self, _: &str, _: &Map<String, Value>) -> Result<Value, CommandError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(json!({ "status": "failed" }))
        }
    }

    #[test]
    fn a_failure_is_found_by_its_event_without_a_command() {
        let (directory, counter) = (TempDir::new().unwrap(), Arc::new(Counter::default()));
        let path = directory.path().join("qmp.sock");
        let server = Server::start(&path, Arc::clone(&counter) as _).unwrap();
        let mut client = Client::connect(&path, &Options::default()).unwrap();
        let emit = |name: &str, status: &str| {
            let Value::Object(data) = json!({ "status": status }) else { unreachable!() };
            server.emitter().emit(name, data);
        };
        assert!(!reports_failure(&mut client).unwrap());
        emit("MIGRATION", "setup");
        emit("MIGRATION", "active");
        emit("OTHER", "failed");
        emit("MIGRATION", "failed");
        let begun = Instant::now();
        while !reports_failure(&mut client).unwrap() {
            assert!(begun.elapsed() < WITHIN);
            thread::yield_now();
        }
        assert!(!reports_failure(&mut client).unwrap());
        assert_eq!(counter.0.load(Ordering::Relaxed), 0);
        drop(server);
        while reports_failure(&mut client).is_ok() {
            assert!(begun.elapsed() < WITHIN);
            thread::yield_now();
        }
    }
}
