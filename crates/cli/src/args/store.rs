//! `towline store`.

use std::time::Duration;

use clap::Subcommand;

use super::Output;
use crate::endpoint::Endpoint;
use crate::sandbox::SandboxArgs;
use crate::units::hours;

/// List, check and remove the images of a store or a directory
///
/// PLACE is the prefix of a store (s3://BUCKET/PREFIX, gs://, az://, store:PATH) or a directory of image
/// files. Images of a prefix share chunks; image files share memory with their base images.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  List the images of a prefix, and the disk space of each, alone and shared:
    towline store ls s3://BUCKET/vm
    towline store du s3://BUCKET/vm
  Compare every image with its checksums:
    towline store verify s3://BUCKET/vm
  Remove an image, and then the chunks that no other image references:
    towline store rm s3://BUCKET/vm/a-monday
    towline store gc s3://BUCKET/vm
  The same with image files:
    towline store ls /var/lib/vm
    towline store rm /var/lib/vm/tuesday.img

Exit status: 0 done; 1 refused or failed, or an image is damaged; 2 usage.
")]
pub(crate) struct StoreArgs {
    #[command(subcommand)]
    pub(crate) command: StoreCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// List the images: memory, age, source, base images, readers
    Ls(PlaceArgs),
    /// Show the disk space of each image: alone, own, and shared
    ///
    /// Alone: what it would occupy without the others. Own: what its removal frees (in a store, after `gc`).
    Du(PlaceArgs),
    /// Remove images; refused if a running restore or an increment needs one
    ///
    /// Refused are an image of a store that a process reads, an image file that a process has open or mapped,
    /// and an image file that is the base of another one in its directory. Chunks of a store that no other
    /// image references become garbage, which `gc` removes.
    Rm(RemoveArgs),
    /// Remove garbage: unreferenced chunks of a store, partial files of writers that were killed
    ///
    /// Refused during an upload below the same prefix. Chunks that a running restore needs are kept.
    Gc(CollectArgs),
    /// Compare images with their checksums; of a prefix or directory all of them
    Verify(PlaceArgs),
}

impl StoreCommand {
    pub(crate) fn sandbox(&self) -> Option<&SandboxArgs> {
        match self {
            Self::Ls(args) | Self::Du(args) | Self::Verify(args) => Some(&args.sandbox),
            Self::Rm(_) | Self::Gc(_) => None,
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlaceArgs {
    /// Prefix of a store, or a directory; for `verify` also one image
    #[arg(value_name = "PLACE")]
    pub(crate) place: Endpoint,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RemoveArgs {
    /// Images
    #[arg(value_name = "IMAGE", required = true, num_args = 1..)]
    pub(crate) images: Vec<Endpoint>,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CollectArgs {
    /// Prefix of a store, or a directory
    #[arg(value_name = "PLACE")]
    pub(crate) place: Endpoint,
    /// List the garbage only
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Minimum age in hours of unreferenced chunks; younger ones are kept for uploads that are resumed
    /// [default: 24]
    #[arg(long, value_name = "HOURS", value_parser = hours)]
    pub(crate) min_age: Option<Duration>,
    #[command(flatten)]
    pub(crate) output: Output,
}
