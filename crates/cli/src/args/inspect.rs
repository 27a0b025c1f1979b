//! `towline inspect`.

use std::path::PathBuf;

use super::Output;
use crate::endpoint::Endpoint;
use crate::sandbox::SandboxArgs;

/// Show the parts of a guest: blocks, pages, devices and their versions, checksums, sizes
///
/// Reads an image, or queries a `qmp:` guest. From `tcp:`, `unix:`, `fd:` or `exec:` the whole guest is
/// received, counted and discarded; its source is informed that the migration failed, and the guest continues
/// there. A stream that has lanes, TLS or no return path is copied to an image first.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline inspect guest.img
  towline inspect --verify --json guest.img
  towline inspect qmp:/run/vm/a.qmp
  towline inspect --verify s3://BUCKET/vm/a-monday
  towline inspect --html page.html tuesday.img monday.img

Exit status:
  0  done
  1  refused or failed, or damaged
  2  usage
")]
pub(crate) struct InspectArgs {
    /// Image, qmp:PATH, or stream (tcp:, unix:, fd:, exec:)
    #[arg(value_name = "SOURCE")]
    pub(crate) source: Endpoint,
    /// With --html: an image file that SOURCE is compared with
    #[arg(value_name = "BASE", requires = "html", value_hint = clap::ValueHint::FilePath)]
    pub(crate) base: Option<PathBuf>,
    /// Page about an image file: map of its memory, devices, differences from BASE; an existing page is
    /// replaced
    #[arg(long, value_name = "FILE.html", value_hint = clap::ValueHint::FilePath, help_heading = crate::args::OUTPUT)]
    pub(crate) html: Option<PathBuf>,
    /// Compare the whole image with its checksums
    #[arg(long)]
    pub(crate) verify: bool,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}
