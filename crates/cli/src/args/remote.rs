//! Options of another host (`ssh:`), and `towline agent`.

use std::path::PathBuf;

use towline_control::remote::DiskPolicy;
use towline_launch::{HostMap, Setting};

use super::HOSTS;

/// The way to another host.
#[derive(Debug, clap::Args)]
pub(crate) struct SshArgs {
    /// OpenSSH's client, with options
    #[arg(long, value_name = "COMMAND", default_value = "ssh", hide_short_help = true, help_heading = HOSTS)]
    pub(crate) ssh: String,
}

/// The place of a guest on another host.
#[derive(Debug, clap::Args)]
pub(crate) struct HostArgs {
    #[command(flatten)]
    pub(crate) ssh: SshArgs,
    /// Value of that host for an option of the QEMU that is started there (drive.disk0.file=/srv/a.raw), as
    /// with `towline run`
    #[arg(long, value_name = "OPTION.KEY=VALUE", help_heading = HOSTS)]
    pub(crate) set: Vec<Setting>,
    /// File with names of this host in the command line, and the names there, as `FROM=TO` lines: a value, or a
    /// directory that ends with a slash; --set counts more
    #[arg(long, value_name = "FILE", value_parser = host_map, hide_short_help = true, help_heading = HOSTS)]
    pub(crate) map: Option<HostMap>,
    /// The QEMU to start there [default: the guest's, by its name in PATH]
    #[arg(long, value_name = "BINARY", hide_short_help = true, help_heading = HOSTS)]
    pub(crate) qemu: Option<PathBuf>,
    /// Start it with the guest's own command line, files and programs
    #[arg(long, help_heading = HOSTS)]
    pub(crate) trust_command_line: bool,
    /// Copy its disks there too: to new files, or those of a waiting QEMU
    #[arg(long, help_heading = HOSTS, conflicts_with = "shared_disks")]
    pub(crate) with_disks: bool,
    /// Compare each copied disk with the guest's before that goes on there; what it writes while it runs is
    /// compared when it is stopped
    #[arg(long, hide_short_help = true, help_heading = HOSTS, requires = "with_disks")]
    pub(crate) verify_disks: bool,
    /// The guest's disks are the same on both hosts, also where that cannot be proven (block devices)
    #[arg(long, hide_short_help = true, help_heading = HOSTS)]
    pub(crate) shared_disks: bool,
}

fn host_map(path: &str) -> Result<HostMap, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    text.parse().map_err(|error: towline_launch::HostMapError| error.to_string())
}

impl HostArgs {
    /// Returns true if an option of a place is given.
    pub(crate) fn is_given(&self) -> bool {
        !self.set.is_empty()
            || self.map.is_some()
            || self.qemu.is_some()
            || self.trust_command_line
            || self.with_disks
            || self.shared_disks
    }

    /// Treatment of the guest's disks.
    pub(crate) fn disk_policy(&self) -> DiskPolicy {
        match (self.with_disks, self.shared_disks) {
            (true, _) => DiskPolicy::Copied,
            (false, true) => DiskPolicy::VouchedFor,
            (false, false) => DiskPolicy::Proven,
        }
    }
}

/// Receive a guest for a towline of another host, or send it an image, on standard input and output: started by `ssh:` through
/// OpenSSH, not by people
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Is there a towline on the other host, and does it have a session for this one?
    ssh OTHER towline agent < /dev/null
")]
pub(crate) struct AgentArgs {}
