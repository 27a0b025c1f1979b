//! `towline protect`, and `towline ferry`.

use std::path::PathBuf;
use std::time::Duration;

use towline_control::arbiter::Arbiter;
use towline_launch::Setting;

use super::{HOSTS, LIMITS, Output, SshArgs};
use crate::endpoint::Endpoint;
use crate::observability::MetricsArgs;
use crate::units::{bytes, seconds};

/// Default of --max-checkpoint.
pub(super) const CHECKPOINT_MAX: &str = "1G";

/// Protect a running guest: another host goes on with it when this one is lost
///
/// The other host gets the guest's memory and devices many times a second, by QEMU's COLO, and has a QEMU that waits with them. What the
/// guest sends is held by its cards (`towline net`) until the other host has the state from which it was sent: whatever the network has
/// seen of the guest, it has done there too, and its connections go on.
///
/// When one host loses the other, both claim the guest's next generation, and the arbiter gives it to one of them. The standby runs the
/// guest then; or its host lets the output go and protects it again. The one that loses ends its own. The arbiter is a directory on storage of
/// both hosts, a store, or a program. Output stays held for as long as it does not decide.
///
/// exec:COMMAND is run by a shell on both hosts. With TOWLINE_ACTION=newest it prints the highest generation of TOWLINE_GUEST that was
/// claimed, or 0. With TOWLINE_ACTION=claim it gives TOWLINE_GENERATION to TOWLINE_CLAIMANT (of TOWLINE_HOST), unless it was given to another
/// one, and prints the claimant that has it. Any other output, any exit status but 0, and no end within 30 seconds: that is not known.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Protect a guest whose card is `towline net --socket /run/vm/net0.sock --qmp /run/vm/net0.qmp`, as there:
    towline protect web ssh:OTHER --arbiter /srv/shared/web --trust-command-line
  A shorter delay of what it sends, for more work on both hosts:
    towline protect qmp:/run/vm/a.qmp ssh:OTHER --arbiter /srv/shared/web --epoch 25ms --trust-command-line
  The shortest delay, for a guest that answers requests:
    towline protect web ssh:OTHER --arbiter /srv/shared/web --epoch output --trust-command-line
  Practise a failover: end the guest's QEMU, and see it at the other host:
    kill -9 $(pgrep -f name=guest=web); ssh OTHER towline ps
  End the protection of a guest whose towline was killed; the guest runs on:
    towline repair qmp:/run/vm/a.qmp

Exit status: 0 ended by Ctrl-C (SIGINT, SIGTERM), and the guest runs on here; 1 refused, or never
protected, and the guest runs on here; 2 usage; 3 it is not decided who goes on with the guest, or
its state here must be checked; 7 the guest has ended here: by itself, or the other host has it.")]
pub(crate) struct ProtectArgs {
    /// Guest that runs: its name (`towline ps`), or qmp:PATH
    #[arg(value_name = "GUEST")]
    pub(crate) guest: PathBuf,
    /// The other host: ssh:HOST, or ssh:USER@HOST:PORT/NAME with the name of the guest there
    #[arg(value_name = "DEST")]
    pub(crate) destination: Endpoint,
    /// Arbiter, which decides who goes on with the guest: an absolute path of a directory on storage of both hosts, a prefix of an object store
    /// (s3://BUCKET/PREFIX), pacemaker for the cluster of both hosts, or exec:COMMAND
    #[arg(long, value_name = "DIR|STORE|pacemaker|exec:COMMAND")]
    pub(crate) arbiter: Arbiter,
    /// Time from one checkpoint to the next, by which replies of the guest are delayed; output: as soon as it sends something, at most
    /// each 5 ms
    #[arg(long, value_name = "TIME|output", default_value = "50ms", value_parser = epoch, help_heading = LIMITS)]
    pub(crate) epoch: Epoch,
    /// Silence after which the other host is lost
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = seconds, help_heading = LIMITS)]
    pub(crate) peer_timeout: Duration,
    /// Maximum size of a checkpoint, of which each host has up to two in memory; a guest that writes more in an epoch is not protected
    #[arg(long, value_name = "SIZE", default_value = CHECKPOINT_MAX, value_parser = bytes, hide_short_help = true, help_heading = LIMITS)]
    pub(crate) max_checkpoint: u64,
    /// Protect a guest with other networks than cards of towline, too: what they send is not held, so it may be of a state that is lost
    #[arg(long)]
    pub(crate) leak_output: bool,
    #[command(flatten)]
    pub(crate) ssh: SshArgs,
    /// Value of that host for an option of the QEMU that is started there, as for `move`
    #[arg(long, value_name = "OPTION.KEY=VALUE", help_heading = HOSTS)]
    pub(crate) set: Vec<Setting>,
    /// The QEMU to start there [default: the guest's, by its name in PATH]
    #[arg(long, value_name = "BINARY", hide_short_help = true, help_heading = HOSTS)]
    pub(crate) qemu: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
    /// Start it with the guest's own command line, files and programs
    #[arg(long, help_heading = HOSTS)]
    pub(crate) trust_command_line: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// End of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Epoch {
    /// After this time.
    Interval(Duration),
    /// When the guest sends something.
    Output,
}

fn epoch(text: &str) -> Result<Epoch, String> {
    match text {
        "output" => Ok(Epoch::Output),
        time => Ok(Epoch::Interval(seconds(time)?)),
    }
}

/// Take checkpoints for `towline protect`, on standard input: started by it, not by people
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  It is a separate process, so the guest keeps running if either of the two exits:
    pgrep -fa 'towline ferry'
")]
pub(crate) struct FerryArgs {}
