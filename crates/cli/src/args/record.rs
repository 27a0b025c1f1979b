//! `towline record`.

use std::path::PathBuf;
use std::time::Duration;

use towline_control::record::Keep;
use towline_launch::{GuestName, Setting};

use super::{IMAGES, Output};
use crate::endpoint::Endpoint;
use crate::units::{period, seconds};

/// Heading of the options of a drill.
const DRILL: &str = "Drill";

/// Record a running guest: an image of it at each interval, to run any of them later
///
/// A guest that runs on an image, as those of `towline run` do, is stopped at each interval for as long as what it has written since its
/// start is copied; with the disks of the same instant, it continues in a qcow2 overlay of each, in PLACE/disks. Any other guest is stored
/// by QEMU's background snapshot, and must not write to disks. An interval in which the guest is paused, or in which the image before is
/// not complete, is skipped. What fails is reported once, and tried again at the next interval, while the guest runs on.
///
/// --keep 1h,1d,30d keeps all images of the last hour, of the last day the newest of each hour, and of the last 30 days the newest of each
/// day: each further time is thinned to the newest of each period that is as long as the time before. As with `restic forget
/// --keep-within`, ages are relative to the newest image, which always stays. An image on which one that stays is based stays too, until
/// that one has been merged.
///
/// An image of PLACE is named by PLACE@newest, PLACE@-37s (so long before the newest, by a clock that no one steps), PLACE@42 (its number)
/// or PLACE@2026-11-26T14:03:05 (the last one until then, UTC, by the host's clock), for `run`, `copy` and `inspect`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Record a guest every second, and keep an hour, and the newest of each hour for a day:
    towline run guest.img --name web --detach
    towline record web /srv/records/web --every 1s --keep 1h,1d
  Run an image from 37 seconds before the newest one, or from a given time:
    towline run /srv/records/web@-37s --name then --trust-command-line --overlay
    towline run /srv/records/web@2026-11-26T14:03:05 --name then --trust-command-line --overlay
  Copy one of them to a file of your own; its disks are still those in PLACE/disks, which retention removes:
    towline copy /srv/records/web@newest web.img
  See whether the newest one would run, without the recorded guest's monitor on the host:
    towline record --verify-restore /srv/records/web --trust-command-line --set serial.0=null
  List them:
    towline store ls /srv/records/web
  To an object store, where images share what they have in common:
    towline record qmp:/run/vm/a.qmp s3://BUCKET/vm/a --every 1min --keep 1d,30d

Exit status: 0 ended by Ctrl-C (SIGINT, SIGTERM), after the image under way; 1 refused, or the first image was not
stored, or the guest of a drill did not run; 2 usage; 3 a standby has taken the guest over; 7 the guest's QEMU has ended, else it runs on.")]
pub(crate) struct RecordArgs {
    /// Guest that runs: its name (`towline ps`), or qmp:PATH
    #[arg(value_name = "GUEST", required_unless_present = "verify_restore")]
    pub(crate) guest: Option<PathBuf>,
    /// Directory of image files, which is made if it is missing, or prefix of a store (s3://BUCKET/PREFIX, store:PATH): of this record
    /// alone
    #[arg(value_name = "PLACE", required_unless_present = "verify_restore")]
    pub(crate) place: Option<Endpoint>,
    /// Time from one image to the next: 500ms, 1s, 5min
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = seconds, help_heading = IMAGES)]
    pub(crate) every: Duration,
    /// Images that stay: all of the first time, and the newest of each period of the time before for each further one
    #[arg(long, value_name = "TIME[,TIME…]", default_value = "1h", value_parser = keep, help_heading = IMAGES)]
    pub(crate) keep: Keep,
    /// Drill: run the newest image of PLACE, isolated from the network and on temporary overlays of its disks; fail
    /// unless the guest runs after the time of --for
    #[arg(long, value_name = "PLACE", conflicts_with_all = ["guest", "place", "every", "keep"], help_heading = DRILL)]
    pub(crate) verify_restore: Option<Endpoint>,
    /// Time for which its guest is to run
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = seconds, requires = "verify_restore", help_heading = DRILL)]
    pub(crate) run_for: Duration,
    /// Name of the guest of the drill
    #[arg(long, value_name = "NAME", default_value = "drill", requires = "verify_restore", help_heading = DRILL)]
    pub(crate) name: GuestName,
    /// Value of this host for an option of the drill's QEMU, as for `run`: of sockets that the recorded guest has
    #[arg(long, value_name = "OPTION.KEY=VALUE", requires = "verify_restore", help_heading = DRILL)]
    pub(crate) set: Vec<Setting>,
    /// Use the recorded command line unchanged, with its files and programs, as `run` does: only of records that you trust like a program
    #[arg(long, requires = "verify_restore", help_heading = DRILL)]
    pub(crate) trust_command_line: bool,
    /// The QEMU of the drill [default: qemu-system-x86_64]
    #[arg(long, value_name = "BINARY", requires = "verify_restore", help_heading = DRILL)]
    pub(crate) qemu: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

fn keep(text: &str) -> Result<Keep, String> {
    let windows = text.split(',').map(period).collect::<Result<_, _>>()?;
    Keep::new(windows).ok_or_else(|| format!("{text:?}: expected times that increase, such as 1h,1d,30d"))
}
