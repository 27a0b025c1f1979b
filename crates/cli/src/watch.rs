//! How a running command is watched: its control socket (`--qmp`) and its metrics (`--metrics`).

mod net;
mod vsock;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use towline_control::device::{DeviceStatusServer, ManagedDevice};
use towline_control::statistics::StatsSource;
use towline_qmp::{Commands, Server};

use crate::metrics::Metrics;
use crate::sandbox::Policy;
use crate::sockets::private;

pub(crate) use net::card;
pub(crate) use vsock::guest;

/// Where to listen.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct WatchArgs {
    /// Listen there for QMP while it runs: `towline ctl`, `towline check ctl:PATH`, or any tool that speaks to a QEMU
    #[arg(long, value_name = "PATH")]
    pub(crate) qmp: Option<PathBuf>,
    /// Show statistics there to Prometheus (http://ADDRESS:PORT/metrics); whoever can reach it can read them
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) metrics: Option<SocketAddr>,
}

/// Both, as long as it is kept.
#[derive(Debug)]
pub(crate) struct Watched {
    _server: Option<Server>,
    _metrics: Option<Metrics>,
}

impl WatchArgs {
    /// Whether anybody may watch.
    pub(crate) fn is_wanted(&self) -> bool {
        self.qmp.is_some() || self.metrics.is_some()
    }

    /// What this process does for that later.
    pub(crate) fn allow(&self, policy: &mut Policy) {
        self.qmp.iter().for_each(|path| policy.listens_unix(path));
        self.metrics.iter().for_each(|address| policy.listens_tcp(address.port()));
    }

    /// Lets these devices be watched, and ended by `quit`.
    pub(crate) fn devices(
        &self,
        devices: Vec<Box<dyn ManagedDevice>>,
        quit: impl Fn() + Send + Sync + 'static,
    ) -> Result<Watched> {
        let monitor = Arc::new(DeviceStatusServer::new(devices, quit));
        let server = match &self.qmp {
            Some(path) => {
                let commands = Arc::clone(&monitor) as Arc<dyn Commands>;
                let start = || Ok(Server::start(path, commands)?);
                Some(private(start).with_context(|| format!("--qmp {}", path.display()))?)
            }
            None => None,
        };
        self.with(server, &(monitor as Arc<dyn StatsSource>))
    }

    /// Beside a server that there is, metrics if they are wanted.
    pub(crate) fn with(&self, server: Option<Server>, counting: &Arc<dyn StatsSource>) -> Result<Watched> {
        let metrics = self
            .metrics
            .map(|address| Metrics::start(address, counting).with_context(|| format!("--metrics {address}")));
        Ok(Watched { _server: server, _metrics: metrics.transpose()? })
    }
}
