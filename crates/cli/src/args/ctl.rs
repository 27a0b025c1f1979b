//! `towline ctl`.

use std::path::PathBuf;

/// Send a QMP command to a running towline or QEMU
///
/// Prints the reply. Without a command, prints the names of the available ones.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Progress of a copy that was started with `--qmp /run/towline/a.sock`:
    towline ctl /run/towline/a.sock query-migrate
  Raise its bandwidth limit, or cancel it:
    towline ctl /run/towline/a.sock migrate-set-parameters max-bandwidth=500000000
    towline ctl /run/towline/a.sock migrate_cancel
  Take a guest's link down (QEMU's own monitor):
    towline ctl /run/vm/a.qmp set_link name=net0 up=false
  Arguments as JSON:
    towline ctl /run/vm/a.qmp qom-get '{\"path\": \"/machine\", \"property\": \"type\"}'
")]
pub(crate) struct CtlArgs {
    /// Unix socket of the QMP server
    #[arg(value_name = "SOCKET")]
    pub(crate) socket: PathBuf,
    /// Command to execute; omit it to list the commands
    #[arg(value_name = "COMMAND")]
    pub(crate) command: Option<String>,
    /// Arguments: KEY=VALUE, where VALUE is JSON or text and dots in KEY address nested objects; or one JSON object
    #[arg(value_name = "ARGS")]
    pub(crate) arguments: Vec<String>,
    /// Timeout of the reply in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub(crate) timeout: u64,
}
