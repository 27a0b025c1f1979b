//! `towline copy`.

use std::path::PathBuf;

use super::{GUEST, IMAGES, MORE, Output, POSTCOPY, SshArgs, TransferArgs};
use crate::endpoint::Endpoint;

/// Copy a guest: save it to an image, restore an image, or send it from one QEMU to another
///
/// A running SOURCE is left paused (QEMU's `postmigrate`), an image unchanged. The guest runs at a `qmp:`
/// DEST if it ran at SOURCE. After a failure the guest continues at SOURCE, unless it is already safe at
/// DEST.
#[derive(Debug, clap::Args)]
#[command(after_long_help = concat!("\
Examples:
  Save a running guest, which continues to run:
    towline copy --resume qmp:/run/vm/a.qmp guest.img
  Restore it into a QEMU started with `-incoming defer -qmp unix:/run/vm/b.qmp,server=on,wait=off`:
    towline copy --verify guest.img qmp:/run/vm/b.qmp
  Clone three guests from one image (docs/clones.md):
    towline copy guest.img qmp:/run/vm/b.qmp qmp:/run/vm/c.qmp qmp:/run/vm/d.qmp
  Save only what changed since, and later merge the chain into a full image:
    towline copy --resume --base guest.img qmp:/run/vm/a.qmp tuesday.img
    towline copy tuesday.img full.img
  The same for a guest with disks, which continue in overlays:
    towline copy --resume --with-disks --base guest.img qmp:/run/vm/a.qmp tuesday.img
  Save this instant while the guest continues to run:
    towline copy --live qmp:/run/vm/a.qmp guest.img
  Run a restored guest within milliseconds, and load its memory on demand:
    towline copy --postcopy guest.img qmp:/run/vm/b.qmp
  Receive the `migrate tcp:HOST:4444` of a remote QEMU, with its capability return-path on:
    towline copy tcp:0.0.0.0:4444 guest.img
  Compress the lanes to a towline with the same options on another host:
    towline copy --multifd-channels 4 --compression zstd guest.img tcp:OTHER:4444
  Measure a link with a guest that dirties 20 MiB/s, and verify it; the first command runs there:
    towline copy --multifd-channels 4 tcp:0.0.0.0:4444 mem:
    towline copy --multifd-channels 4 mem:2G,dirty=20M tcp:OTHER:4444
  Receive from a QEMU with tls-creds, with certificates in DIR (docs/tls.md):
    towline copy --tls-creds DIR tcp:0.0.0.0:4444 guest.img
  Save to an object store, where only new chunks are uploaded, and restore from it:
    towline copy --resume qmp:/run/vm/a.qmp s3://BUCKET/vm/a-monday
    towline copy s3://BUCKET/vm/a-monday qmp:/run/vm/b.qmp
  Save a guest to a file of another host:
    towline copy qmp:/run/vm/a.qmp ssh:OTHER//srv/a.img
  Fetch an image of another host, or restore it from there:
    towline copy ssh:OTHER//srv/a.img a.img
    towline copy ssh:OTHER//srv/a.img qmp:/run/vm/b.qmp
  Send through any filter:
    towline copy guest.img exec:'zstd -1 | ssh other \"zstd -d > guest.stream\"' --return-path off

", endpoints!()))]
#[command(after_help = MORE)]
pub(crate) struct CopyArgs {
    /// Endpoint that has the guest
    #[arg(value_name = "SOURCE")]
    pub(crate) source: Endpoint,
    /// Endpoint that receives it; several are possible if SOURCE is an image
    #[arg(value_name = "DEST", required = true, num_args = 1..)]
    pub(crate) destinations: Vec<Endpoint>,
    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
    /// Run the guest of a qmp: SOURCE again afterwards; also before, if an earlier copy left it paused
    #[arg(long, conflicts_with = "live", help_heading = GUEST)]
    pub(crate) resume: bool,
    /// Base image, an older state of the same guest; only chunks that differ from it are stored
    #[arg(long, value_name = "IMAGE", help_heading = IMAGES)]
    pub(crate) base: Option<Endpoint>,
    /// Image of this instant, while a qmp: SOURCE continues to run (QEMU's background-snapshot)
    #[arg(long, help_heading = IMAGES)]
    pub(crate) live: bool,
    #[command(flatten)]
    pub(crate) disks: DiskArgs,
    #[command(flatten)]
    pub(crate) stored: StoredSourceArgs,
    #[command(flatten)]
    pub(crate) ssh: SshArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Options for the disks of a guest that runs on after it was stored.
#[derive(Debug, clap::Args)]
pub(crate) struct DiskArgs {
    /// Keep the disks that the guest writes to as they are at the image's instant: with --resume, it continues
    /// in qcow2 overlays, STEM.N.qcow2 beside each
    #[arg(long, requires = "resume", conflicts_with = "memory_only", help_heading = IMAGES)]
    pub(crate) with_disks: bool,
    /// Directory of these overlays [default: that of each disk]
    #[arg(long, value_name = "DIR", requires = "with_disks", help_heading = IMAGES)]
    pub(crate) overlay_dir: Option<PathBuf>,
    /// Store only the memory of a guest that runs on and writes to disks, which will be of a later instant
    #[arg(long, help_heading = IMAGES)]
    pub(crate) memory_only: bool,
}

/// Options for an image as SOURCE.
#[derive(Debug, clap::Args)]
pub(crate) struct StoredSourceArgs {
    /// Compare an image with its checksums while it is read; a damaged one does not run
    #[arg(long, help_heading = IMAGES)]
    pub(crate) verify: bool,
    /// Stream an image to a qmp: DEST even where QEMU (9.0 and later) can load the file itself
    #[arg(long, hide_short_help = true, help_heading = IMAGES)]
    pub(crate) stream: bool,
    /// Continue an interrupted --postcopy of an image (QEMU's postcopy-paused)
    #[arg(long, requires = "postcopy", help_heading = POSTCOPY)]
    pub(crate) recover: bool,
}
