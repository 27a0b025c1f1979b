//! Observation of a running command: its control socket (`--qmp`) and its metrics (`--metrics`).

mod net;
mod protection;
mod vsock;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use towline_channel::Cancel;
use towline_control::device::{DeviceCommands, ManagedDevice};
use towline_control::plan::{CopyRequest, CopyResult, Observer};
use towline_control::statistics::StatsSource;
use towline_control::status_server::StatusServer;
use towline_qmp::{Commands, Server};

use crate::errors;
use crate::metrics::Metrics;
use crate::sandbox::Policy;
use crate::sockets::private;

pub(crate) use net::{card, counters};
pub(crate) use protection::ProtectionCounters;
pub(crate) use vsock::guest;

/// Addresses to listen on.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct ObservabilityArgs {
    /// Unix socket of a QMP server, for `towline ctl`, `towline check ctl:PATH` and QEMU's own tools
    #[arg(long, value_name = "PATH", help_heading = crate::args::PROCESS)]
    pub(crate) qmp: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
}

/// Address of metrics.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct MetricsArgs {
    /// TCP address of Prometheus metrics, without authentication (http://ADDRESS:PORT/metrics)
    #[arg(long = "metrics", value_name = "ADDRESS:PORT", help_heading = crate::args::PROCESS)]
    pub(crate) address: Option<SocketAddr>,
}

/// Running servers, which end when this is dropped.
type Observers = (Option<Server>, Option<Metrics>);

impl ObservabilityArgs {
    /// Returns true if either is requested.
    pub(crate) fn is_requested(&self) -> bool {
        self.qmp.is_some() || self.metrics.address.is_some()
    }

    /// Permits the sockets.
    pub(crate) fn extend_policy(&self, policy: &mut Policy) {
        self.qmp.iter().for_each(|path| policy.listens_unix(path));
        self.metrics.extend_policy(policy);
    }

    /// Starts the servers of these devices; their QMP command `quit` calls the function.
    pub(crate) fn of_devices(
        &self,
        devices: Vec<Box<dyn ManagedDevice>>,
        quit: impl Fn() + Send + Sync + 'static,
    ) -> Result<Observers> {
        let monitor = Arc::new(DeviceCommands::new(devices, quit));
        let commands = Arc::clone(&monitor) as Arc<dyn Commands>;
        self.start(|path| Ok(Server::start(path, commands)?), monitor)
    }

    /// Runs `copy` with the servers of a copy, by which others observe and cancel it.
    pub(crate) fn observe(
        &self,
        options: &CopyRequest,
        cancel: &Cancel,
        observer: &dyn Observer,
        copy: impl FnOnce(&dyn Observer) -> CopyResult,
    ) -> Result<CopyResult> {
        if !self.is_requested() {
            return Ok(copy(observer));
        }
        let monitor = Arc::new(StatusServer::new(options, cancel));
        let observers = self.start(|path| Ok(monitor.serve(path)?), monitor.clone())?;
        let copied = copy(&(observer, &*monitor));
        monitor.ended(copied.as_ref().map_err(|failure| errors::worded(failure)));
        drop(observers);
        Ok(copied)
    }

    /// Starts the QMP server by `serve`, and the metrics.
    fn start(
        &self,
        serve: impl FnOnce(&Path) -> Result<Server>,
        counting: Arc<dyn StatsSource>,
    ) -> Result<Observers> {
        let start =
            |path: &PathBuf| private(|| serve(path)).with_context(|| format!("--qmp {}", path.display()));
        let server = self.qmp.as_ref().map(start).transpose()?;
        Ok((server, self.metrics.start(counting)?))
    }
}

impl MetricsArgs {
    /// Permits the socket.
    pub(crate) fn extend_policy(&self, policy: &mut Policy) {
        self.address.iter().for_each(|address| policy.bind.add(address.port()));
    }

    /// Serves the metrics until the result is dropped.
    pub(crate) fn start(&self, counting: Arc<dyn StatsSource>) -> Result<Option<Metrics>> {
        let start =
            |address| Metrics::start(address, counting).with_context(|| format!("--metrics {address}"));
        self.address.map(start).transpose()
    }
}
