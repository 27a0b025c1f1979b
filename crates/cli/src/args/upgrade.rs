//! `towline upgrade`.

use std::ffi::OsString;
use std::path::PathBuf;

use towline_launch::Setting;

use super::Output;
use crate::endpoint::Endpoint;
use crate::report::ReportArgs;
use crate::units::milliseconds;

/// Replace the QEMU under a running guest; its RAM stays in place
///
/// The command line of the new QEMU is that of the old one, read from its process. Both map the same memory,
/// so only the state of the devices moves. The new QEMU is started and checked before the guest stops; a
/// failure before the guest runs there leaves it in the old QEMU. Then the old QEMU is ended, and its sockets
/// are the new one's. Clients of them are disconnected. Options that two QEMUs cannot share are refused, each
/// with the setting that changes it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  After a new package of QEMU was installed:
    towline upgrade qmp:/run/vm/a.qmp
  To another QEMU, first without changing anything:
    towline upgrade --dry-run --qemu /opt/qemu-11.1/bin/qemu-system-x86_64 qmp:/run/vm/a.qmp
    towline upgrade --qemu /opt/qemu-11.1/bin/qemu-system-x86_64 qmp:/run/vm/a.qmp
  A guest with a VNC server, which gets another port:
    towline upgrade --set vnc=127.0.0.1:2 qmp:/run/vm/a.qmp

Exit status: 0 the guest is in the new QEMU, or (--dry-run) it could be; 1 refused or failed, the
guest is in the old QEMU; 2 usage; 3 failed, and the guest needs attention: the message says where
it is.")]
pub(crate) struct UpgradeArgs {
    /// QEMU that runs the guest: qmp:PATH
    #[arg(value_name = "OLD")]
    pub(crate) old: Endpoint,
    /// The new QEMU [default: the program of the old one, as now on disk]
    #[arg(long, value_name = "BINARY")]
    pub(crate) qemu: Option<PathBuf>,
    /// Start and check the new QEMU, and end it again
    #[arg(long, conflicts_with = "report")]
    pub(crate) dry_run: bool,
    /// Copy memory that the new QEMU cannot map; without it such a guest is refused
    #[arg(long)]
    pub(crate) copy: bool,
    /// Have each `towline net` serve the new QEMU too: the guest keeps its network cards and their
    /// connections
    #[arg(long)]
    pub(crate) with_devices: bool,
    /// Unplug a vhost-user-vsock, which QEMU does not migrate, and plug it in again in the new QEMU;
    /// connections end, listeners in the guest continue
    #[arg(long)]
    pub(crate) detach_vsock: bool,
    /// Value for an option of the new QEMU (vnc=127.0.0.1:2, netdev.net0.hostfwd=tcp::2222-:22); an option
    /// with an empty value is removed (docs/upgrade.md)
    #[arg(long, value_name = "OPTION.KEY=VALUE")]
    pub(crate) set: Vec<Setting>,
    /// Maximum downtime in milliseconds, where memory is sent
    #[arg(long, value_name = "MS", value_parser = milliseconds, default_value_t = 300)]
    pub(crate) downtime_limit: u64,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
    #[command(flatten)]
    pub(crate) output: Output,
    /// Further arguments of the new QEMU; relative paths are those of the old QEMU's directory
    #[arg(value_name = "ARGUMENTS", last = true)]
    pub(crate) arguments: Vec<OsString>,
}
