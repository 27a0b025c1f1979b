//! The command line: one file for each command, or a few that belong together, and what several commands share. This module reads its
//! arguments only.

/// Endpoints and exit status of `copy` and `move`, as a literal for `concat!`.
macro_rules! endpoints {
    () => {
        "\
Endpoints:
  qmp:PATH         a QEMU by its QMP socket: as SOURCE one that runs a guest, as DEST one started
                   with `-incoming defer`
  ssh:[USER@]HOST[:PORT]/PLACE
                   another host, by OpenSSH and the towline there. As DEST: PLACE is qmp:PATH, an
                   image or a store there, or for `move` the NAME of a guest whose QEMU is started
                   there [default: the name that it has] (docs/move.md); as SOURCE of `copy`: an
                   image or a store there
  tcp:HOST:PORT    as SOURCE: listen for the `migrate` of a QEMU, or for another towline;
                   as DEST: connect to one
  unix:PATH        the same over a Unix socket
  ws://HOST[:PORT][/PATH]
                   the same over a WebSocket, binary messages; wss:// over TLS, with --tls-creds
  fd:N             an open file descriptor
  exec:COMMAND     standard input and output of a shell command
  file:PATH, PATH  an image: QEMU's mapped-ram file, with checksums in PATH.manifest.json
  s3://BUCKET/PREFIX/NAME
                   an image in an object store, which shares the chunks of all images of PREFIX;
                   also gs://, az://, http(s):// (read-only) and store:PATH, a directory.
                   Credentials come from the environment or the usual files, S3's endpoint
                   from AWS_ENDPOINT_URL (docs/store.md)
  mem:SIZE         as SOURCE: a synthetic guest of SIZE bytes (suffixes K, M, G) with a
                   verifiable pattern. Options, separated by commas: dirty=BYTES per second (0),
                   zero=PERCENT of the pages (25), seed=N, threads=N that write,
                   backing=private|memfd|hugetlb
  mem:             as DEST: receive into preallocated memory, and verify the pattern, or print
                   the hashes of another guest; with a SIZE the memory is allocated before the
                   source is contacted
  null:            as DEST: discard (dry run); the guest stays at its source

Exit status:
  0  done
  1  refused or failed; the last lines say where the guest is, unchanged
  2  usage
  3  failed, and the guest needs attention: the message says where it is and what to do"
    };
}

mod check;
mod common;
mod copy;
mod ctl;
mod generate;
mod guest;
mod inspect;
mod move_guest;
mod moves;
mod net;
mod ocf;
mod protect;
mod record;
mod remote;
mod repair;
mod run;
mod standby;
mod store;
mod transfer;
mod upgrade;
mod vsock;

use clap::{ArgMatches, Parser, Subcommand};

use crate::sandbox::SandboxArgs;
pub(crate) use check::CheckArgs;
pub(crate) use common::{
    GUEST, HOSTS, IMAGES, IfNotConverging, LANES, LIMITS, OUTPUT, OnOff, Output, POSTCOPY, PROCESS, TlsArgs,
    Via,
};
use common::{MORE, key_and_value, zero_copy_send};
pub(crate) use copy::{CopyArgs, DiskArgs, StoredSourceArgs};
pub(crate) use ctl::CtlArgs;
pub(crate) use generate::{CompletionsArgs, ManArgs};
pub(crate) use guest::{GuestSpec, read as read_guests};
pub(crate) use inspect::InspectArgs;
pub(crate) use move_guest::MoveArgs;
pub(crate) use moves::{EndArg, MovesArgs, OtherEndArg, ResumeArgs};
pub(crate) use net::NetArgs;
pub(crate) use ocf::{OcfAgent, OcfArgs};
pub(crate) use protect::{Epoch, FerryArgs, ProtectArgs};
pub(crate) use record::RecordArgs;
pub(crate) use remote::{AgentArgs, HostArgs, SshArgs};
pub(crate) use repair::RepairArgs;
pub(crate) use run::{ForkArgs, PsArgs, RunArgs, StartArgs, StatusArgs};
pub(crate) use standby::StandbyArgs;
pub(crate) use store::{CollectArgs, PlaceArgs, RemoveArgs, StoreArgs, StoreCommand};
pub(crate) use transfer::TransferArgs;
pub(crate) use upgrade::UpgradeArgs;
pub(crate) use vsock::{ConnectArgs, ConnectTarget, VsockArgs, VsockCommand};

/// Move running QEMU guests, save and restore them; multiqueue network cards and vsock devices for guests
/// (vhost-user)
#[derive(Debug, Parser)]
#[command(name = "towline", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Help of a command: towline COMMAND --help, or man towline-COMMAND. Guides: /usr/share/doc/towline"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Log filter for standard error: error, warn, info, debug or trace, or targets with levels such as
    /// warn,towline_net=debug [env: TOWLINE_LOG] [default: warn]
    #[arg(long, value_name = "FILTER", global = true, help_heading = OUTPUT)]
    pub(crate) log: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Copy(Box<CopyArgs>),
    Move(Box<MoveArgs>),
    Run(RunArgs),
    Fork(ForkArgs),
    Record(RecordArgs),
    Standby(StandbyArgs),
    Protect(Box<ProtectArgs>),
    Ps(PsArgs),
    Status(StatusArgs),
    Upgrade(UpgradeArgs),
    Check(CheckArgs),
    Inspect(InspectArgs),
    Store(StoreArgs),
    Repair(RepairArgs),
    Moves(MovesArgs),
    Resume(ResumeArgs),
    Agent(AgentArgs),
    Ferry(FerryArgs),
    Ocf(OcfArgs),
    Net(NetArgs),
    Ctl(CtlArgs),
    Vsock(VsockArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

impl Command {
    /// The sandbox of this process; `None` for a command that has none.
    pub(crate) fn sandbox(&self) -> Option<&SandboxArgs> {
        match self {
            Self::Copy(args) => Some(&args.transfer.sandbox),
            Self::Move(args) => Some(&args.transfer.sandbox),
            Self::Inspect(args) => Some(&args.sandbox),
            Self::Store(args) => args.command.sandbox(),
            Self::Net(args) => Some(&args.sandbox),
            Self::Vsock(args) => Some(&args.sandbox),
            _ => None,
        }
    }
}

/// Returns true if the result of the command is events (`--json`).
pub(crate) fn writes_events(matches: &ArgMatches) -> bool {
    matches!(matches.try_get_one::<bool>("json"), Ok(Some(true)))
        || matches.subcommand().is_some_and(|(_, command)| writes_events(command))
}
