//! `towline fork`.

use std::path::PathBuf;

use super::StartArgs;

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
