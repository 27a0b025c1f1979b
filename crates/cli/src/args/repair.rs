//! `towline repair`.

use super::Output;
use crate::endpoint::Endpoint;

/// Undo what a killed `copy` or `move` left in a QEMU or beside an image
///
/// While it works on a QEMU, towline keeps a journal of the migration settings that it changes, the devices
/// that it unplugs and its temporary files. After it was killed, the next `copy` or `move` with this QEMU
/// undoes them first; this command does only that.
///
/// For an image: removes the partial files (`.NAME.partial`) of killed writers, but none of running ones. For
/// a directory: lists its partial files. Exit status: 0 done, or nothing to do; 1 failed, or another towline
/// works on this QEMU; 2 usage.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline repair qmp:/run/vm/a.qmp
  towline repair /images
  towline repair /images/guest.img
")]
pub(crate) struct RepairArgs {
    /// QEMU (qmp:PATH), image or directory
    #[arg(value_name = "QEMU|IMAGE|DIRECTORY")]
    pub(crate) target: Endpoint,
    #[command(flatten)]
    pub(crate) output: Output,
}
