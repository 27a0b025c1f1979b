//! `towline ctl`.

use std::path::PathBuf;

/// Send a QMP command to a running towline or QEMU, or to a guest of `towline run`
///
/// Prints the reply. Without a command, prints the names of the available ones. Short names of commands:
/// `status` is query-status, `powerdown` is system_powerdown, `reset` is system_reset.
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
  State of a guest that `towline run` has started, and its end:
    towline ctl web-0 status
    towline ctl web-0 quit
  Arguments as JSON:
    towline ctl /run/vm/a.qmp qom-get '{\"path\": \"/machine\", \"property\": \"type\"}'
")]
pub(crate) struct CtlArgs {
    /// Unix socket of the QMP server (also as qmp:PATH), or name of a guest of `towline run`; ./NAME is a
    /// socket in this directory
    #[arg(value_name = "SOCKET|NAME")]
    pub(crate) socket: PathBuf,
    /// Command to execute; omit it to list the commands
    #[arg(value_name = "COMMAND")]
    pub(crate) command: Option<String>,
    /// Arguments: KEY=VALUE, where VALUE is JSON or text and dots in KEY address nested objects; or one JSON
    /// object
    #[arg(value_name = "ARGS")]
    pub(crate) arguments: Vec<String>,
}
