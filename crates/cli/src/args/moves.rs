//! `towline moves` and `towline resume`.

use clap::ValueEnum;

use super::Output;

/// List moves that were interrupted at their switchover, with advice
///
/// A `copy` or `move` between two QEMUs records each decision about the guest at both ends before it acts,
/// and removes the record once the outcome is known. The listed moves are undecided: towline or the
/// connection failed in between. Sources that stay paused while their guest runs elsewhere are listed too.
/// Covers the records of this user on this host, and changes nothing. Exit status: 0, also if there are
/// moves; 1 a record cannot be read.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline moves
  towline moves --json
  On both hosts of a move, which has the same id there:
    towline moves; ssh OTHER towline moves
")]
pub(crate) struct MovesArgs {
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Finish a move that was interrupted at its switchover
///
/// Queries the QEMUs on this host: process, run state, migration. If these and the record leave no doubt,
/// the move is finished: the guest runs at DEST and the SOURCE of a `move` is ended, or the guest stays at
/// SOURCE. A guest that lacks memory on another host gets the rest from a SOURCE here. Otherwise nothing is
/// changed, the message says what to check, and the exit status is 3; decide with --run-here or --discard.
/// A choice that contradicts the state found is refused: a guest that runs twice destroys its disks. Exit
/// status: 0 finished; 1 refused, nothing was changed; 2 usage, or an unknown id; 3 still undecided.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Finish a move if there is no doubt:
    towline resume 3f2a
  At the destination, once SOURCE is known to be `postmigrate` or to have exited:
    towline resume 3f2a --run-here
  Then at the source, to end its QEMU:
    towline resume 3f2a --discard
  Keep the guest at the source instead: first at the destination, then at the source:
    towline resume 3f2a --discard
    towline resume 3f2a --run-here
  In a script, with the state that `towline resume --json` has reported on the other host:
    towline resume 3f2a --json --other-end done
  With both ends on this host:
    towline resume 3f2a --run-here=source
")]
pub(crate) struct ResumeArgs {
    /// Id of the move, or its first digits
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Run the guest at the QEMU of this host; END, source or destination, is needed if both ends are here
    #[arg(long, value_name = "END", num_args = 0..=1, require_equals = true, default_missing_value = "here", group = "choice")]
    pub(crate) run_here: Option<EndArg>,
    /// End the QEMU of this host (`quit`), as the guest is at the other end
    #[arg(long, value_name = "END", num_args = 0..=1, require_equals = true, default_missing_value = "here", group = "choice")]
    pub(crate) discard: Option<EndArg>,
    /// State of the end on the other host, with which the move is finished here if that leaves no doubt
    #[arg(long, value_name = "STATE", group = "choice")]
    pub(crate) other_end: Option<OtherEndArg>,
    /// Remove the record and change no QEMU: both ends are in order already
    #[arg(long, group = "choice")]
    pub(crate) forget: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// State of the end on the other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OtherEndArg {
    /// Source: it has sent the guest, and is paused (postmigrate). Destination: discarded, and has not run it
    Done,
    /// It has the guest, or runs it
    HasIt,
    /// That host is off
    Fenced,
}

/// An end of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EndArg {
    /// The end on this host
    Here,
    /// The source
    Source,
    /// The destination
    Destination,
}
