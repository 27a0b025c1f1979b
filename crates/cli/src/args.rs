//! The command line. What can be refused without looking at anything is refused here.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use towline_control::plan::Tls;
use towline_migration::{Compression, ZeroCopySend};

use crate::ctl::CtlArgs;
use crate::endpoint::Endpoint;
use crate::generate::{CompletionsArgs, ManArgs};
use crate::net::NetArgs;
use crate::sandbox::SandboxArgs;
#[cfg(feature = "store")]
use crate::units::hours;
use crate::units::{bytes, seconds};
use crate::vsock::VsockArgs;
use crate::watch::WatchArgs;

/// Moves running QEMU guests: their memory and devices, between hosts and into images.
#[derive(Debug, Parser)]
#[command(name = "towline", version, propagate_version = true, max_term_width = 110)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// What to log on standard error: error, warn, info, debug or trace, or targets with their levels [env: TOWLINE_LOG]
    /// [default: warn]
    #[arg(long, value_name = "FILTER", global = true)]
    pub(crate) log: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Copy(CopyArgs),
    Move(MoveArgs),
    Check(CheckArgs),
    Inspect(InspectArgs),
    Repair(RepairArgs),
    Moves(MovesArgs),
    Resume(ResumeArgs),
    Net(NetArgs),
    Ctl(CtlArgs),
    Vsock(VsockArgs),
    Bench(BenchArgs),
    Completions(CompletionsArgs),
    #[command(hide = true)]
    Man(ManArgs),
}

const ENDPOINTS: &str = "\
Endpoints:
  qmp:PATH         a QEMU by its QMP socket: as SOURCE one that runs a guest, as DEST one that waits with
                   `-incoming defer`
  tcp:HOST:PORT    as SOURCE: listen there for somebody's `migrate`; as DEST: connect to a QEMU or a towline
  unix:PATH        the same over a Unix socket
  ws://HOST[:PORT][/PATH]
                   the same over a WebSocket, binary messages; wss:// over TLS, with --tls-creds
  fd:N             an open file descriptor
  exec:COMMAND     the standard input and output of a shell command
  file:PATH, PATH  an image: QEMU's mapped-ram file, and beside it PATH.manifest.json with checksums
  s3://BUCKET/PREFIX/NAME
                   an image in an object store: chunks that all images of the PREFIX share, and NAME's index; also gs://, az://,
                   http(s):// (read-only) and store:PATH, a directory. Credentials come from the environment or the usual
                   files, S3's endpoint from AWS_ENDPOINT_URL (docs/store.md)
  mem:SIZE         as SOURCE: a synthetic guest of so many bytes (K, M, G) with a checked pattern; options behind
                   commas: dirty=BYTES a second (0), zero=PERCENT of its pages (25), seed=N, threads=N that write,
                   backing=private|memfd|hugetlb
  mem:             as DEST: receive into memory, populated ahead, and verify the pattern, or tell the hashes of any
                   other guest; with a SIZE the memory is made before the source is asked
  null:            as DEST: count and drop; the source keeps its guest

Exit codes: 0 done; 1 refused or failed, the guest is safe at its source; 2 usage; 3 failed, and the guest's state
must be looked at: the message says where it is.";

/// Copy a guest: into an image, out of one, or from a QEMU to another
///
/// A running SOURCE is left paused (QEMU's `postmigrate`), an image as it was. A `qmp:` DEST runs afterwards if the guest
/// ran. Whatever fails before the guest is safe at DEST leaves it at SOURCE, where it runs on.
#[derive(Debug, clap::Args)]
#[command(after_long_help = concat!("\
Examples:
  Save a running guest, and let it run on:
    towline copy --resume qmp:/run/vm/a.qmp guest.img
  Bring it back in a QEMU started with `-incoming defer -qmp unix:/run/vm/b.qmp,server,nowait`:
    towline copy --verify guest.img qmp:/run/vm/b.qmp
  Make three guests of one image at once (docs/clones.md says what they have in common):
    towline copy guest.img qmp:/run/vm/b.qmp qmp:/run/vm/c.qmp qmp:/run/vm/d.qmp
  Store only what changed since, and make a whole image of the chain later:
    towline copy --resume --base guest.img qmp:/run/vm/a.qmp tuesday.img
    towline copy tuesday.img whole.img
  Take an image of this instant while the guest runs on:
    towline copy --live qmp:/run/vm/a.qmp guest.img
  Have it run there in milliseconds, whatever its size, while its memory follows:
    towline copy --postcopy guest.img qmp:/run/vm/b.qmp
  Take what `migrate tcp:HOST:4444` of a QEMU elsewhere sends (its capability return-path must be on):
    towline copy tcp:0.0.0.0:4444 guest.img
  Compress on the way to a towline on another host, which has the same options:
    towline copy --multifd-channels 4 --compression zstd guest.img tcp:OTHER:4444
  Measure the way to another host with a guest that dirties 20 MiB/s and is verified there (`towline copy tcp:0.0.0.0:4444 mem:`):
    towline copy --multifd-channels 4 mem:2G,dirty=20M tcp:OTHER:4444
  Encrypted from a QEMU elsewhere, whose `migrate` has tls-creds set, with certificates in DIR (docs/tls.md):
    towline copy --tls-creds DIR tcp:0.0.0.0:4444 guest.img
  Into an object store, which gets only what it does not have yet, and from there into a QEMU that waits:
    towline copy --resume qmp:/run/vm/a.qmp s3://BUCKET/vm/a-monday
    towline copy s3://BUCKET/vm/a-monday qmp:/run/vm/b.qmp
  Or through any filter:
    towline copy guest.img exec:'zstd -1 | ssh other \"zstd -d > guest.stream\"' --return-path off
"))]
#[command(after_help = ENDPOINTS)]
pub(crate) struct CopyArgs {
    /// Where the guest comes from
    #[arg(value_name = "SOURCE")]
    pub(crate) source: Endpoint,
    /// Where it goes; several only from an image
    #[arg(value_name = "DEST", required = true, num_args = 1..)]
    pub(crate) destinations: Vec<Endpoint>,
    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
    /// Let a qmp: SOURCE run on afterwards, and run it on first if it was copied before
    #[arg(long, conflicts_with = "live")]
    pub(crate) resume: bool,
    /// Store only what differs from this image, which must be an older state of the same guest
    #[arg(long, value_name = "IMAGE")]
    pub(crate) base: Option<Endpoint>,
    /// Take an image of this instant while a qmp: SOURCE runs on (QEMU's background-snapshot)
    #[arg(long)]
    pub(crate) live: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Move a running guest: copy it, and once DEST runs, end SOURCE
///
/// As `copy`, and at the very end SOURCE is told `quit`: when a `qmp:` DEST runs (or is loaded and paused, if the guest
/// was paused), when an image is complete and synced, or, with a stream, when SOURCE says `completed`. Whatever fails
/// before that leaves the guest at SOURCE.
#[derive(Debug, clap::Args)]
#[command(after_long_help = concat!("\
Examples:
  To a QEMU on this host, started with `-incoming defer -qmp unix:/run/vm/b.qmp,server,nowait`:
    towline move qmp:/run/vm/a.qmp qmp:/run/vm/b.qmp
  To another host, where `towline copy --multifd-channels 4 tcp:0.0.0.0:4444 qmp:/run/vm/b.qmp` waits:
    towline move --multifd-channels 4 qmp:/run/vm/a.qmp tcp:OTHER:4444
  A guest with a network card of towline's, here and there started with --qmp, so that the cards are asked too:
    towline move --device-ctl /run/vm/net-a.qmp=/run/vm/net-b.qmp qmp:/run/vm/a.qmp qmp:/run/vm/b.qmp
  Into an image, for another day:
    towline move qmp:/run/vm/a.qmp guest.img
"))]
#[command(after_help = ENDPOINTS)]
pub(crate) struct MoveArgs {
    /// Take a vhost-user-vsock, which QEMU does not migrate, out of the guest (it must be behind a pcie-root-port), and put it in
    /// again at a qmp: DEST that has its -chardev and its port; connections end, listeners in the guest go on
    #[arg(long)]
    pub(crate) detach_vsock: bool,
    /// Compare two devices of towline's beforehand, as `towline check ctl:SRC ctl:DST` does, by their --qmp sockets: that which serves
    /// the guest here, and that which will there; refused if it does not fit. For each device once more
    #[arg(long, value_name = "SRC=DST", value_parser = device_pair)]
    pub(crate) device_ctl: Vec<(PathBuf, PathBuf)>,
    /// Where the guest runs: qmp:PATH
    #[arg(value_name = "SOURCE")]
    pub(crate) source: Endpoint,
    /// Where it goes
    #[arg(value_name = "DEST")]
    pub(crate) destination: Endpoint,
    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
    /// Refused: a guest that is moved does not run on at SOURCE
    #[arg(long, hide = true)]
    pub(crate) resume: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Would the guest run there? A verdict with reasons, before anything moves
///
/// Both ends are asked and nothing is changed; every `copy` and `move` between ends that can be asked does this first. The
/// verdict is for towline, which sets both ends alike; where QEMU's own `migrate`, with what is set now, would fare otherwise,
/// that is said too. Exit codes: 0 yes, also with notes; 1 no; 2 usage; 4 could not tell. Rules and remedies: docs/check.md.
#[derive(Debug, clap::Args)]
#[command(after_long_help = concat!("\
Endpoints:
  qmp:PATH          as SOURCE a QEMU that runs a guest, as DEST one that waits with `-incoming defer`
  file:PATH, PATH   as SOURCE: an image
  facts:FILE        what --facts-out wrote, or what a QEMU binary's -dump-vmstate did
  exec:COMMAND      a command that prints the same
  attr:PATH         a migration_version attribute: the source's is read, and its string is written to the destination's
  ctl:SOCKET        a `towline net` or `towline vsock` with `--qmp SOCKET`: its string likewise, and its features and numbers

Examples:
  Would it run in the QEMU that waits there?
    towline check qmp:/run/vm/a.qmp qmp:/run/vm/b.qmp
  Two hosts that do not see each other:
    towline check --facts-out a.facts qmp:/run/vm/a.qmp       (here; then take the file there)
    towline check facts:a.facts qmp:/run/vm/b.qmp
  Would the guests of today's package run in tomorrow's? Device states compared field by field:
    towline check exec:'qemu-10.0/qemu-system-x86_64 -M pc-q35-7.2 -dump-vmstate /dev/stdout' \\
                  exec:'qemu-10.1/qemu-system-x86_64 -M pc-q35-7.2 -dump-vmstate /dev/stdout'
  A network card of towline's, and the one that waits at the other end of a forwarded socket:
    towline check ctl:/run/vm/net0.qmp ctl:/run/there/net0.qmp
  A mediated device:
    towline check attr:/sys/bus/mdev/devices/UUID/mdev_type/migration_version attr:/mnt/there/migration_version
"))]
pub(crate) struct CheckArgs {
    /// Where the guest is
    #[arg(value_name = "SOURCE")]
    pub(crate) source: Endpoint,
    /// Where it would go
    #[arg(value_name = "DEST", required_unless_present = "facts_out", conflicts_with = "facts_out")]
    pub(crate) destination: Option<Endpoint>,
    /// Write down what is known of SOURCE, to be compared elsewhere or later as facts:FILE
    #[arg(long, value_name = "FILE")]
    pub(crate) facts_out: Option<PathBuf>,
    /// Lanes that the guest would go by; 0: none
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) multifd_channels: usize,
    /// For `move --postcopy`: the guest would run at DEST before all of its memory is there
    #[arg(long)]
    pub(crate) postcopy: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// How to copy or to move.
#[derive(Debug, clap::Args)]
pub(crate) struct TransferArgs {
    /// Lanes (multifd channels) at both ends; 0: none. Default: 4 where QMP can set them, else 0
    #[arg(long, value_name = "N")]
    pub(crate) multifd_channels: Option<usize>,
    /// Compress the lanes; a stream's other end must do the same (QEMU's multifd-compression)
    #[arg(long, value_name = "METHOD", default_value = "none")]
    pub(crate) compression: Method,
    /// How hard zlib tries: 0 (not at all) to 9 (best) [default: 1]
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=9))]
    pub(crate) multifd_zlib_level: Option<u8>,
    /// How hard zstd tries: 1 (fastest) to 20 (best), 0 is zstd's own default [default: 1]
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=20))]
    pub(crate) multifd_zstd_level: Option<u8>,
    /// Whether the kernel reads pages on TCP lanes where they are: auto (where that pays), on (or fail), off
    #[arg(long, value_name = "AUTO|ON|OFF", default_value = "auto")]
    pub(crate) zero_copy_send: ZeroCopy,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Bytes per second (suffixes K, M, G); default: as fast as it goes
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub(crate) max_bandwidth: Option<u64>,
    /// How long a running guest may stand still, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300)]
    pub(crate) downtime_limit: u64,
    /// Slow the guest of a qmp: SOURCE down if it writes faster than it can be sent (QEMU's auto-converge)
    #[arg(long)]
    pub(crate) throttle: bool,
    /// Compare an image with its checksums while it is read; no guest runs from a damaged one
    #[arg(long)]
    pub(crate) verify: bool,
    /// Run the guest at a qmp: DEST, whatever it did before
    #[arg(long, conflicts_with = "paused")]
    pub(crate) run: bool,
    /// Leave the guest at a qmp: DEST paused, whatever it did before
    #[arg(long)]
    pub(crate) paused: bool,
    /// Whether streams have a return path; `off` for one that goes to or comes from a file, where nobody can answer
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub(crate) return_path: Switch,
    /// Stream an image to a qmp: DEST even where QEMU (9.0 and later) could load the file itself
    #[arg(long)]
    pub(crate) stream: bool,
    /// Replace an image that exists
    #[arg(long)]
    pub(crate) overwrite: bool,
    #[command(flatten)]
    pub(crate) postcopy: PostcopyArgs,
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
    /// How long the other end may take to be reached and to answer, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub(crate) connect_timeout: std::time::Duration,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

/// Whether and how a guest runs at its destination before its memory is there.
#[derive(Debug, clap::Args)]
pub(crate) struct PostcopyArgs {
    /// Run the guest of an image at DEST at once; its memory follows, what it waits for first (docs/instant-restore.md)
    #[arg(long)]
    pub(crate) postcopy: bool,
    /// Send pages that the guest waits for on a channel of their own; the other QEMU's postcopy-preempt must be as here
    #[arg(long, requires = "postcopy")]
    pub(crate) postcopy_preempt: bool,
    /// Go on with a guest that was begun with --postcopy and whose memory stopped coming (QEMU's postcopy-paused)
    #[arg(long, requires = "postcopy")]
    pub(crate) recover: bool,
    /// Remember beside the image (IMAGE.working-set.json) what the guest needed at once, and send that first the next time
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub(crate) record_working_set: Switch,
}

/// Show what a guest consists of: blocks, pages, devices and their versions, checksums, sizes
///
/// An image is only read; a `qmp:` guest is only asked. From `tcp:`, `unix:`, `fd:` or `exec:` the whole guest is received,
/// counted and dropped, and its source is told that it did not arrive, so it runs on there.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline inspect guest.img
  towline inspect --verify --json guest.img
  towline inspect qmp:/run/vm/a.qmp
  towline inspect --verify s3://BUCKET/vm/a-monday
Which chunks in a store no image needs, and to remove them:
  towline inspect --garbage s3://BUCKET/vm
  towline inspect --remove-garbage s3://BUCKET/vm
")]
pub(crate) struct InspectArgs {
    /// What to look at: an image, qmp:PATH, a store's prefix, or a stream (tcp:, unix:, fd:, exec:)
    #[arg(value_name = "SOURCE")]
    pub(crate) source: Endpoint,
    /// Compare the whole image with its checksums
    #[arg(long)]
    pub(crate) verify: bool,
    #[cfg(feature = "store")]
    #[command(flatten)]
    pub(crate) garbage: GarbageArgs,
    /// Lanes that a stream has; 0: none
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) multifd_channels: usize,
    /// How a stream's lanes are compressed
    #[arg(long, value_name = "METHOD", default_value = "none")]
    pub(crate) compression: Method,
    /// Whether a stream has a return path
    #[arg(long, value_name = "ON|OFF", default_value = "on")]
    pub(crate) return_path: Switch,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Undo what a killed `copy` or `move` left changed in a QEMU, or beside an image
///
/// While it works on a QEMU, towline keeps a journal of the migration settings it changes, the devices it unplugs and its temporary files.
/// If towline is killed, the next `copy` or `move` with this QEMU undoes them first; this command does only that.
///
/// With an image's path: removes the partial files (`.NAME.partial`) that killed writers of this image left, but none that a process
/// writes. With a directory: lists the partial files in it and removes none. Exit codes: 0 done, or
/// nothing to do; 1 failed, or another towline works on this QEMU; 2 usage.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline repair qmp:/run/vm/a.qmp
  towline repair /images
  towline repair /images/guest.img
")]
pub(crate) struct RepairArgs {
    /// The QEMU (qmp:PATH), image or directory
    #[arg(value_name = "QEMU|IMAGE|DIRECTORY")]
    pub(crate) target: Endpoint,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// List the moves that were interrupted when the guest was handed over, and what to do
///
/// A `copy` or `move` between two QEMUs records at each end what it decides about the guest, before it acts, and removes the record when the
/// outcome is known. What is listed is undecided: towline or the connection died at that moment. Also listed are sources that stay paused while
/// their guest runs elsewhere. Only the records of this user on this host; nothing is changed. Exit codes: 0 also if there are some; 1 a
/// record cannot be read.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline moves
  towline moves --json
  On both hosts of a move, which has one id:
    towline moves; ssh OTHER towline moves
")]
pub(crate) struct MovesArgs {
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Finish a move that was interrupted when the guest was handed over
///
/// The QEMUs on this host are looked at again: process, run state, migration. If that and the record leave no doubt, the move is finished: the
/// guest is run at DEST if SOURCE is done with it, and SOURCE is ended if it was a `move`; or it is left at SOURCE. Otherwise nothing is touched,
/// the message says what to look at, exit code 3, and it is for you to choose: --run-here or --discard. A choice that what is seen
/// contradicts is refused. A guest that runs twice destroys its disks. Exit codes: 0 finished; 1 refused, nothing was touched; 2 usage, also an
/// id that is not recorded; 3 still undecided.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Look, and finish it if there is no doubt:
    towline resume 3f2a
  At the destination, once SOURCE was seen to be `postmigrate` or to have exited:
    towline resume 3f2a --run-here
  Then at the source, to end its QEMU:
    towline resume 3f2a --discard
  The other way: take the guest back. At the destination first, then at the source:
    towline resume 3f2a --discard
    towline resume 3f2a --run-here
  Both ends on this host, and one does not answer the question by itself:
    towline resume 3f2a --run-here=source
")]
pub(crate) struct ResumeArgs {
    /// The move's id, or its first digits
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Run the guest at the QEMU of this host; with both ends here, say which: source or destination
    #[arg(long, value_name = "END", num_args = 0..=1, require_equals = true, default_missing_value = "here", group = "choice")]
    pub(crate) run_here: Option<Side>,
    /// End the QEMU of this host (`quit`): the guest is at the other end
    #[arg(long, value_name = "END", num_args = 0..=1, require_equals = true, default_missing_value = "here", group = "choice")]
    pub(crate) discard: Option<Side>,
    /// Remove the record and touch no QEMU: you have put both ends in order yourself
    #[arg(long, group = "choice")]
    pub(crate) forget: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// An end of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Side {
    /// The one on this host
    Here,
    Source,
    Destination,
}

/// Measure on real guests, side by side with the peers that this machine has
///
/// Tables: `ram` (save and restore of a guest's memory against QEMU's own), `live` (a busy guest through towline against QEMU to
/// QEMU), `instant` (a guest that runs at once and waits for its memory, against QEMU's own restore and postcopy), `lanes` (memory over lanes against QEMU's multifd and iperf3), `lanes-busy` (the same on a busy machine, and pinned),
/// `calls` (pages copied into a linear buffer against vectors), `vsock` (streams and requests against vhost-device-vsock and a
/// plain Unix socket), `net` (frames and TCP against vhost_user_net, dpdk-testpmd, a tap and a veth pair), `net-queues` (the same with
/// several queues), `sandbox` (devices and a copy, confined and not); `cargo xtask peers` brings peers. Needs the lab: `cargo xtask setup` in a checkout.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline bench ram
  towline bench ram --report report/
  towline bench instant --sizes 1G --runs 1
  towline bench vsock --runs 3
  towline bench net --peer vhost_user_net=/opt/vhost_user_net
  towline bench net-queues --runs 1 --rows 'TCP_CRR, 1 B' --rows 'TCP_RR, 1 B'
")]
pub(crate) struct BenchArgs {
    /// Which tables; all if none is named
    #[arg(value_name = "TABLE")]
    pub(crate) tables: Vec<String>,
    /// Also write each table as text and JSON into this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) report: Option<PathBuf>,
    /// Runs of each row; the median is printed
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) runs: usize,
    /// Memory of the guests, for `instant` [default: 1G,4G,8G]
    #[arg(long, value_name = "BYTES", value_parser = bytes, value_delimiter = ',')]
    pub(crate) sizes: Vec<u64>,
    /// Only rows whose name has one of these in it, for `net`, `net-queues` and `vsock`: "TCP_RR, 64 B"; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) rows: Vec<String>,
    /// Where a peer's program is that is not found by itself: `vhost_user_net=PATH`, `vhost-device-vsock=PATH`
    #[arg(long = "peer", value_name = "NAME=PATH", value_parser = peer)]
    pub(crate) peers: Vec<(String, PathBuf)>,
    /// This process is one end of a measured migration
    #[arg(long, value_name = "ROLE", hide = true, exclusive = true)]
    pub(crate) end: Option<String>,
}

/// What no image of a store needs.
#[cfg(feature = "store")]
#[derive(Debug, clap::Args)]
pub(crate) struct GarbageArgs {
    /// SOURCE is a store's prefix: list the chunks that no image in it names
    #[arg(long)]
    pub(crate) garbage: bool,
    /// As --garbage, and remove them; refused while somebody uploads there
    #[arg(long)]
    pub(crate) remove_garbage: bool,
    /// Chunks that are younger are left alone: an upload that broke off may go on with them
    #[arg(long, value_name = "HOURS", default_value = "24", value_parser = hours)]
    pub(crate) garbage_age: std::time::Duration,
}

fn device_pair(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (source, destination) = halves(text).ok_or("expected SRC=DST, the control sockets of two devices")?;
    Ok((source.into(), destination.into()))
}

/// What stands before and behind the first `=`, if both is something.
fn halves(text: &str) -> Option<(&str, &str)> {
    text.split_once('=').filter(|(before, behind)| !before.is_empty() && !behind.is_empty())
}

fn peer(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = halves(text).ok_or("expected NAME=PATH")?;
    Ok((name.to_owned(), path.into()))
}

/// How streams are encrypted.
#[derive(Debug, clap::Args)]
pub(crate) struct TlsArgs {
    /// Encrypt streams (tcp:, unix:, wss://), with certificates of QEMU's file names in this directory (tls-creds-x509)
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_creds: Option<PathBuf>,
    /// The name that a DEST's certificate is for [default: the host of its address]
    #[arg(long, value_name = "NAME", requires = "tls_creds")]
    pub(crate) tls_hostname: Option<String>,
}

impl TlsArgs {
    pub(crate) fn tls(&self) -> Option<Tls> {
        let credentials = self.tls_creds.clone()?;
        Some(Tls { credentials, hostname: self.tls_hostname.clone() })
    }
}

/// How to say it.
#[derive(Debug, clap::Args)]
pub(crate) struct Output {
    /// One JSON object per line and event, on standard output
    #[arg(long)]
    pub(crate) json: bool,
    /// Nothing but errors
    #[arg(long, conflicts_with = "json")]
    pub(crate) quiet: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// QEMU's `zero-copy-send`, with a middle way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ZeroCopy {
    Auto,
    On,
    Off,
}

impl From<ZeroCopy> for ZeroCopySend {
    fn from(asked: ZeroCopy) -> Self {
        match asked {
            ZeroCopy::Auto => Self::Auto,
            ZeroCopy::On => Self::On,
            ZeroCopy::Off => Self::Off,
        }
    }
}

/// QEMU's `multifd-compression`, as far as it needs no hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Method {
    None,
    Zlib,
    Zstd,
}

impl Method {
    /// With a level where one was given.
    pub(crate) fn at(self, zlib_level: Option<u8>, zstd_level: Option<u8>) -> Compression {
        let level = |level: Option<u8>| level.unwrap_or(Compression::LEVEL_DEFAULT);
        match self {
            Self::None => Compression::None,
            Self::Zlib => Compression::Zlib { level: level(zlib_level) },
            Self::Zstd => Compression::Zstd { level: level(zstd_level) },
        }
    }
}
