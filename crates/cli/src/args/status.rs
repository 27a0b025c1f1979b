//! `towline status`.

use std::path::PathBuf;

use super::Output;

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
