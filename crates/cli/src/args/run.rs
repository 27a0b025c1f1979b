//! `towline run`, `towline fork`, `towline ps` and `towline status`.

use std::ffi::OsString;
use std::path::PathBuf;

use towline_launch::{GuestName, Setting};

use super::Output;
use crate::endpoint::Endpoint;
use crate::errors;
use crate::report::ReportArgs;
use crate::units::{Unit, whole};

/// Run the guest of an image: start a QEMU for it, restore it there, and supervise it
///
/// The command line is the one that was recorded with the image, and the arguments after `--`. An image may
/// come from anyone: only options that are known to be harmless are used, and files, sockets, interfaces and
/// programs come from --set and those arguments alone. All else in the image is refused by name. The command
/// is printed before it is run. The guest's memory is mapped from the image, copy-on-write, where that is
/// possible; the image must not change while it runs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Save a guest and run it again:
    towline copy qmp:/run/vm/a.qmp guest.img
    towline run guest.img
  With its disk, which an image cannot name:
    towline run guest.img --set drive.disk0.file=/srv/a.qcow2 --set drive.disk0.format=qcow2
  Three clones, each with its own serial port:
    towline run guest.img --count 3 --name web \\
      --set serial.0=unix:/run/vm/{name}.sock,server=on,wait=off
  An image without a command line needs all arguments:
    towline run guest.img -- -machine pc-q35-10.0 -cpu Nehalem -m 512M -nodefaults
  Four clones that outlive this command, each with its own disk on top of the given one:
    towline run guest.img --count 4 --name web --detach --overlay \\
      --set drive.disk0.file=/srv/a.qcow2 --set drive.disk0.format=qcow2
  See the guests that run, talk to one, and end it:
    towline ps
    towline ctl web-0 status
    towline ctl web-0 quit
  From an object store, at once and before its memory is here:
    towline run --postcopy s3://BUCKET/vm/a

Exit status: 0 all guests ran and have ended, by themselves or by Ctrl-C, or run with --detach; 1
refused, failed, or a QEMU ended with an error; the guest is safe in its image; 2 usage.")]
pub(crate) struct RunArgs {
    /// Image in a file or in an object store
    #[arg(value_name = "IMAGE")]
    pub(crate) image: Endpoint,
    #[command(flatten)]
    pub(crate) start: StartArgs,
    /// Fail if memory cannot be mapped from the image
    #[arg(long, conflicts_with = "copy")]
    pub(crate) share: bool,
    /// Copy the memory instead
    #[arg(long)]
    pub(crate) copy: bool,
    /// Run the guest at once, and load its memory on demand (docs/instant-restore.md)
    #[arg(long, conflicts_with_all = ["share", "copy"])]
    pub(crate) postcopy: bool,
    /// Give each guest a qcow2 overlay for each disk that it writes; the disks are not changed
    #[arg(long)]
    pub(crate) overlay: bool,
    /// Directory of the overlays [default: that of the image; of an image in a store the working directory]
    #[arg(long, value_name = "DIR", requires = "overlay")]
    pub(crate) overlay_dir: Option<PathBuf>,
    /// Directory of the files of images from object stores, which all guests of this user share
    /// [default: /var/cache/towline/images for root, else $XDG_CACHE_HOME/towline/images]
    #[arg(long, value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Use the image's command line unchanged, with its files and programs: only for images that you trust
    /// like a program
    #[arg(long)]
    pub(crate) trust_command_line: bool,
    /// Further arguments of QEMU; all of them if the image has no command line
    #[arg(value_name = "QEMU-ARGUMENTS", last = true)]
    pub(crate) arguments: Vec<OsString>,
}

/// Options of guests that are started, from an image or as forks.
#[derive(Debug, clap::Args)]
pub(crate) struct StartArgs {
    /// Name of the guest; with --count the clones' names are NAME-0, NAME-1, … [default: the image's file
    /// name; of a fork GUEST-fork]
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub(crate) name: Option<GuestName>,
    /// Number of clones
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = |text: &str| whole::<u32>(text, Unit::None, 1..=1024))]
    pub(crate) count: u32,
    /// Leave the guests running when this command ends, which it does once they run
    #[arg(long)]
    pub(crate) detach: bool,
    /// Value of this host for an option of the guest's QEMU (drive.disk0.file=/srv/a.raw); an option with an
    /// empty value is removed. Here and in QEMU-ARGUMENTS {name} is the name of the clone, and n in braces its
    /// number (docs/run.md)
    #[arg(long, value_name = "OPTION.KEY=VALUE")]
    pub(crate) set: Vec<Setting>,
    /// The QEMU to start [default: qemu-system-x86_64; of a fork that of GUEST]
    #[arg(long, value_name = "BINARY")]
    pub(crate) qemu: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

impl StartArgs {
    /// Options of one guest.
    pub(crate) fn one(name: Option<GuestName>, output: Output) -> Self {
        let (set, report) = (Vec::new(), ReportArgs::default());
        Self { name, count: 1, detach: false, set, qemu: None, report, output }
    }
}

/// List the guests that `towline run` has started on this host
///
/// Covers the guests of this user that run, supervised or detached. Exit status: 0, also if there are none; 1
/// the directory of guests cannot be read.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline ps
  towline ps --json
")]
pub(crate) struct PsArgs {
    #[command(flatten)]
    pub(crate) output: Output,
}

fn name(text: &str) -> Result<GuestName, String> {
    text.parse().map_err(|error| errors::worded(&error))
}

/// Fork a running guest: start copies of it, each as it is at one instant, while it runs on
///
/// The guest is stopped for as long as the pages that it has written since its start are read, and its devices are saved. Its forks
/// map the image that it was started from, as it does, and get those pages. So it must run on an image, as a guest of `towline run` does.
///
/// Each disk that it writes stays as it is at that instant: the guest continues in a qcow2 overlay of it, and each fork in another one. The
/// forks' network cards are connected to nothing, with their link down, unless --set gives them a network.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Run a guest of an image, and fork it once it is ready:
    towline run guest.img --name web --detach
    towline fork web --detach
  Ten forks, each with its own serial port:
    towline fork web --count 10 --name job --detach \\
      --set serial.0=unix:/run/vm/{name}.sock,server=on,wait=off
  A fork with its card in another bridge:
    towline fork web --set netdev.net0.br=br-test
  A fork to look at, which does not run:
    towline fork web --name then --paused --detach

Exit status: 0 all forks ran and have ended, by themselves or by Ctrl-C, or run with --detach; 1
refused, failed, or a QEMU ended with an error; the guest runs on; 2 usage.")]
pub(crate) struct ForkArgs {
    /// Guest that runs: its name (`towline ps`), or qmp:PATH
    #[arg(value_name = "GUEST")]
    pub(crate) guest: PathBuf,
    /// Leave the forks paused, until `towline ctl NAME cont`
    #[arg(long)]
    pub(crate) paused: bool,
    /// Leave the forks in the networks of the guest, in which they have its addresses
    #[arg(long)]
    pub(crate) same_network: bool,
    /// Directory of the overlays of disks [default: that of the image]
    #[arg(long, value_name = "DIR")]
    pub(crate) overlay_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) start: StartArgs,
}

/// Print whether a guest runs, by the exit status
///
/// Asks QEMU's monitor if it answers within a second, and otherwise inspects the processes, so another client
/// of the monitor does not matter. Changes nothing. Exit status: 0 running; 1 failed; 2 usage; 4 unknown: its
/// QEMU lives, and its monitor is held by another client or does not answer; 5 paused; 6 the QEMU waits for a
/// guest; 7 the QEMU has ended; 8 there is no such guest.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline status web
  towline status --json qmp:/run/vm/a.qmp
")]
pub(crate) struct StatusArgs {
    /// Name of a guest of `towline run`, or the QMP socket of a QEMU: qmp:PATH or PATH
    #[arg(value_name = "GUEST")]
    pub(crate) guest: PathBuf,
    #[command(flatten)]
    pub(crate) output: Output,
}
