//! `towline standby`.

use std::path::PathBuf;
use std::time::Duration;

use towline_launch::{GuestName, Setting};

use super::Output;
use crate::endpoint::Endpoint;
use crate::units::seconds;

/// Stand by for a recorded guest: run its newest image here once its host is off
///
/// PLACE is the directory of a record (`towline record`) on storage of both hosts. A program of yours says when the host that runs the
/// guest is off and stays off: fenced by a cluster, by its power switch, or by a person. That a host does not answer is not enough, since
/// its guest may run on. Of several standbys, also on several hosts, one takes the guest over. What the guest has done since its newest
/// image is lost: about an interval of the record.
///
/// exec:COMMAND is run by a shell, again and again, with the names PLACE and the number of the newest image in TOWLINE_PLACE and
/// TOWLINE_IMAGE. Its exit status: 0 the host is off, and stays off; 1 it is not, or that is not known. Any other status, and no end within
/// 30 seconds, is reported once, and taken for 1.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Stand by on a second host for a guest that node1 records (`towline record web /srv/shared/web`),
  until an operator or a fence agent has switched node1 off:
    towline standby /srv/shared/web --name web --trust-command-line --arbiter \\
      'exec:ipmitool -H node1-bmc -U admin -f /etc/bmc power status | grep -q \"is off\"'
  Take it over now, having switched its host off:
    towline standby /srv/shared/web --primary-is-dead --name web --trust-command-line

Exit status: 0 the guest runs here, detached; 1 it was taken over by another host, or cannot be run,
or the record cannot be read; 2 usage; 3 what is in PLACE/takeovers is not so, as the message says.")]
pub(crate) struct StandbyArgs {
    /// Directory of the record
    #[arg(value_name = "PLACE")]
    pub(crate) place: Endpoint,
    /// Program that says whether the host of the guest is off and stays off
    #[arg(long, value_name = "exec:COMMAND", value_parser = command, required_unless_present = "primary_is_dead")]
    pub(crate) arbiter: Option<String>,
    /// The host of the guest is off and stays off, or its QEMU was ended: take it over now
    #[arg(long, conflicts_with = "arbiter")]
    pub(crate) primary_is_dead: bool,
    /// Number of takeovers (PLACE/takeovers) that this one follows: 1 to stand by for the guest of the first one, with an arbiter that
    /// speaks of that host
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub(crate) after: u64,
    /// Time between two runs of the program
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = seconds)]
    pub(crate) every: Duration,
    /// Name of the guest here [default: that of the image]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<GuestName>,
    /// Value of this host for an option of its QEMU, as for `run`
    #[arg(long, value_name = "OPTION.KEY=VALUE")]
    pub(crate) set: Vec<Setting>,
    /// Use the recorded command line unchanged, with its files and programs, as `run` does: only of records that you trust like a program
    #[arg(long)]
    pub(crate) trust_command_line: bool,
    /// The QEMU [default: qemu-system-x86_64]
    #[arg(long, value_name = "BINARY")]
    pub(crate) qemu: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

fn command(text: &str) -> Result<String, String> {
    let command = text.strip_prefix("exec:").filter(|command| !command.trim().is_empty());
    command.map(str::to_owned).ok_or_else(|| format!("{text:?}: expected exec:COMMAND"))
}
