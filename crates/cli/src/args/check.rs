//! `towline check`.

use std::path::PathBuf;
use std::time::Duration;

use super::protect::CHECKPOINT_MAX;
use super::{HostArgs, LIMITS, Output};
use crate::endpoint::Endpoint;
use crate::units::{bytes, seconds};

/// Check whether a guest can be migrated to DEST, without moving anything
///
/// Queries both ends and changes nothing. `copy` and `move` run the same check first. The verdict assumes
/// that towline configures both ends; a different result for QEMU's own `migrate` with the present settings
/// is reported too. Exit status: 0 yes, also with notes; 1 no; 2 usage; 4 could not tell. Rules and remedies:
/// docs/check.md.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Endpoints:
  qmp:PATH          as SOURCE a QEMU that runs a guest, as DEST one started with `-incoming defer`
  file:PATH, PATH   as SOURCE: an image
  ssh:HOST/PLACE    as DEST: another host, by OpenSSH and the towline there. PLACE is qmp:PATH, or the
                    NAME of a guest whose QEMU is started there, and ended after the check
  facts:FILE        a file written by --facts-out, or by a QEMU binary's -dump-vmstate
  exec:COMMAND      a command that prints the same
  attr:PATH         a migration_version attribute: the source's value is written to DEST's
  ctl:SOCKET        a `towline net` or `towline vsock` with `--qmp SOCKET`: version, features, limits

Examples:
  Against a QEMU that waits on this host:
    towline check qmp:/run/vm/a.qmp qmp:/run/vm/b.qmp
  On another host, with a QEMU that is started there for the check:
    towline check qmp:/run/vm/a.qmp ssh:OTHER
  Could it be protected, and what would that cost it:
    towline check --protect qmp:/run/vm/a.qmp ssh:OTHER --trust-command-line
  Between hosts without a connection:
    towline check --facts-out a.facts qmp:/run/vm/a.qmp       (then copy the file)
    towline check facts:a.facts qmp:/run/vm/b.qmp
  Between two versions of QEMU, whose device states are compared field by field:
    towline check exec:'qemu-10.0/qemu-system-x86_64 -M pc-q35-7.2 -dump-vmstate /dev/stdout' \\
                  exec:'qemu-10.1/qemu-system-x86_64 -M pc-q35-7.2 -dump-vmstate /dev/stdout'
  Two towline network cards, one through a forwarded socket:
    towline check ctl:/run/vm/net0.qmp ctl:/run/there/net0.qmp
  A mediated device:
    towline check attr:/sys/bus/mdev/devices/UUID/mdev_type/migration_version \\
      attr:/mnt/there/migration_version
")]
pub(crate) struct CheckArgs {
    /// Endpoint that has the guest
    #[arg(value_name = "SOURCE")]
    pub(crate) source: Endpoint,
    /// Endpoint that would receive it
    #[arg(value_name = "DEST", required_unless_present_any = ["facts_out", "protect"], conflicts_with = "facts_out")]
    pub(crate) destination: Option<Endpoint>,
    /// File for the facts of SOURCE, for a later check with facts:FILE
    #[arg(long, value_name = "FILE")]
    pub(crate) facts_out: Option<PathBuf>,
    /// Migration by postcopy, as with `move --postcopy`
    #[arg(long)]
    pub(crate) postcopy: bool,
    #[command(flatten)]
    pub(crate) protection: ProtectionArgs,
    #[command(flatten)]
    pub(crate) host: HostArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Protection that is planned.
#[derive(Debug, clap::Args)]
pub(crate) struct ProtectionArgs {
    /// Check whether `protect` would take the guest, and estimate what that costs, from what the guest writes now. SOURCE is qmp:PATH,
    /// DEST ssh:HOST[/NAME]; without it only this host is asked
    #[arg(long, conflicts_with_all = ["postcopy", "facts_out", "with_disks", "shared_disks"])]
    pub(crate) protect: bool,
    /// Time from one checkpoint to the next, as for `protect` [default: 25ms, 50ms and 100ms are compared]
    #[arg(long, value_name = "TIME", value_parser = seconds, requires = "protect", help_heading = LIMITS)]
    pub(crate) epoch: Option<Duration>,
    /// Maximum size of a checkpoint, as for `protect`
    #[arg(long, value_name = "SIZE", default_value = CHECKPOINT_MAX, value_parser = bytes, hide_short_help = true, requires = "protect", help_heading = LIMITS)]
    pub(crate) max_checkpoint: u64,
    /// Permit other networks than cards of towline, as for `protect`
    #[arg(long, requires = "protect")]
    pub(crate) leak_output: bool,
}
