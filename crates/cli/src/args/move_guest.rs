//! `towline move`.

use std::path::PathBuf;

use super::{
    GUEST, HOSTS, HostArgs, IfNotConverging, LIMITS, MORE, Output, TransferArgs, Via, key_and_value,
};
use crate::endpoint::Endpoint;
use crate::units::{Unit, whole};

/// Move a running guest: copy it, and end SOURCE once the guest is at DEST
///
/// As `copy`; at the end SOURCE receives `quit`: once the guest runs at a `qmp:` DEST (or is loaded and
/// paused there, if it was paused), once an image is complete and synced, or, with a stream, once SOURCE
/// reports `completed`. After an earlier failure the guest continues at SOURCE.
#[derive(Debug, clap::Args)]
#[command(after_long_help = concat!("\
Examples:
  To a QEMU on this host, started with `-incoming defer -qmp unix:/run/vm/b.qmp,server=on,wait=off`:
    towline move qmp:/run/vm/a.qmp qmp:/run/vm/b.qmp
  To another host, where its QEMU is started, with a disk that both hosts have:
    towline move qmp:/run/vm/a.qmp ssh:OTHER \\
      --set drive.disk0.file=/srv/a.qcow2 --set drive.disk0.format=qcow2
  With its disks, to new files of the same names:
    towline move qmp:/run/vm/a.qmp ssh:OTHER --with-disks --trust-command-line
  The same, and its disks are compared there before it runs:
    towline move qmp:/run/vm/a.qmp ssh:OTHER --with-disks --verify-disks --trust-command-line
  To a QEMU that waits there:
    towline move qmp:/run/vm/a.qmp ssh:OTHER/qmp:/run/vm/b.qmp
  From QEMU to QEMU, without copies in the kernel, and without TLS:
    towline move qmp:/run/vm/a.qmp ssh:OTHER/qmp:/run/vm/b.qmp --via direct --zero-copy-send on
  Without giving up on a guest that writes faster than it is sent:
    towline move qmp:/run/vm/a.qmp ssh:OTHER --trust-command-line --if-not-converging postcopy
  Every guest of this host, two at a time:
    towline move --all ssh:OTHER --trust-command-line --parallel 2
  Without ssh; the first command runs there:
    towline copy --multifd-channels 4 tcp:0.0.0.0:4444 qmp:/run/vm/b.qmp
    towline move --multifd-channels 4 qmp:/run/vm/a.qmp tcp:OTHER:4444
  With a check of the guest's towline network cards, which were started with --qmp:
    towline move --device-ctl /run/vm/net-a.qmp=/run/vm/net-b.qmp \\
      qmp:/run/vm/a.qmp qmp:/run/vm/b.qmp
  Into an image:
    towline move qmp:/run/vm/a.qmp guest.img

", endpoints!()))]
#[command(after_help = MORE)]
pub(crate) struct MoveArgs {
    /// Unplug a vhost-user-vsock, which QEMU does not migrate, and plug it in again at a qmp: DEST with the
    /// same -chardev and pcie-root-port; connections end, listeners in the guest continue
    #[arg(long, help_heading = GUEST)]
    pub(crate) detach_vsock: bool,
    /// Control sockets (--qmp) of a towline device at the source and its counterpart at the destination,
    /// whose compatibility is checked before the move, as by `towline check ctl:SRC ctl:DST`; may be repeated
    #[arg(long, value_name = "SRC=DST", value_parser = device_pair, help_heading = GUEST)]
    pub(crate) device_ctl: Vec<(PathBuf, PathBuf)>,
    /// QEMU that runs the guest: qmp:PATH
    #[arg(value_name = "SOURCE", required_unless_present = "all")]
    pub(crate) source: Option<Endpoint>,
    /// Endpoint that receives the guest
    #[arg(value_name = "DEST", required_unless_present = "all")]
    pub(crate) destination: Option<Endpoint>,
    /// Move every guest that `towline ps` lists to this host: ssh:HOST
    #[arg(long, value_name = "DEST", conflicts_with_all = ["source", "destination"], help_heading = HOSTS)]
    pub(crate) all: Option<Endpoint>,
    /// Number of guests that are moved at a time; --max-bandwidth is that of all together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = |text: &str| whole::<usize>(text, Unit::None, 1..=64), requires = "all", help_heading = HOSTS)]
    pub(crate) parallel: usize,
    /// Way to another host: direct, from QEMU to QEMU; relay, through both towlines; auto, relay unless the
    /// guest (VFIO, virtio-mem, dirty bitmaps) or --zero-copy-send on needs the other
    #[arg(long, value_name = "AUTO|DIRECT|RELAY", default_value = "auto", hide_short_help = true, help_heading = HOSTS)]
    pub(crate) via: Via,
    /// Move a guest that a cluster runs (`towline ocf`), and does not look after now (docs/cluster.md)
    #[arg(long, hide_short_help = true, help_heading = HOSTS)]
    pub(crate) unmanaged: bool,
    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
    /// Treatment of a guest that writes faster than it is sent, for several passes
    #[arg(long, value_name = "POSTCOPY|THROTTLE|GIVE-UP", default_value = "give-up", conflicts_with = "postcopy", hide_short_help = true, help_heading = LIMITS)]
    pub(crate) if_not_converging: IfNotConverging,
    #[command(flatten)]
    pub(crate) host: HostArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

impl MoveArgs {
    /// Returns true if the guest may be switched to postcopy.
    pub(crate) fn permits_postcopy(&self) -> bool {
        self.transfer.postcopy.postcopy || self.if_not_converging == IfNotConverging::Postcopy
    }
}

fn device_pair(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (source, destination) =
        key_and_value(text).ok_or("expected SRC=DST, the control sockets of two devices")?;
    Ok((source.into(), destination.into()))
}
