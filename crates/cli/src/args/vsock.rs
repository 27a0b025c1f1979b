//! `towline vsock`.

use std::path::PathBuf;

use towline_vsock::{ForwardingRule, guest_cid};

use super::{Guest, ZeroCopy};
use crate::observability::ObservabilityArgs;
use crate::sandbox::SandboxArgs;
use crate::sockets::SocketArgs;
use crate::units::{bytes, number, poll_us};

/// Connect a guest's vsock to sockets of this host (vhost-user)
///
/// Follows Firecracker's convention for Unix sockets: a client connects to the --uds path, sends `CONNECT PORT\n`, and
/// receives `OK PORT\n` once the guest has accepted; a guest's connection to PORT of the host (CID 2) goes to the socket
/// `UDS_PORT`. The directions of a connection close independently. Connections without a rule are refused.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Rules (--forward), with numeric addresses:
  guest:PORT=tcp:ADDRESS:PORT    from the guest to PORT of the host: connect to a TCP port
  guest:PORT=unix:PATH           the same, to a Unix socket
  guest:PORT=vsock:CID:PORT      the same, to the host's own vsock
  tcp:ADDRESS:PORT=guest:PORT    listen on a TCP port, and connect to PORT of the guest
  unix:PATH=guest:PORT           the same, on a Unix socket
  vsock:PORT=guest:PORT          the same, on the host's own vsock
  cid:N=uds:PATH                 from the guest to guest N, whose device has --uds PATH

Examples:
  One guest, by Firecracker's convention:
    towline vsock --socket /run/vm/vsock.sock --cid 3 --uds /run/vm/v.sock
    qemu-system-x86_64 ... -object memory-backend-memfd,id=mem,size=1G,share=on \\
      -machine q35,memory-backend=mem \\
      -chardev socket,id=vsock,path=/run/vm/vsock.sock -device vhost-user-vsock-pci,chardev=vsock
    socat - UNIX-CONNECT:/run/vm/v.sock      (then type: CONNECT 22)
  The guest's ssh on a TCP port, and a service of the host for the guest:
    towline vsock --socket /run/vm/vsock.sock --cid 3 --forward tcp:127.0.0.1:2222=guest:22 \\
      --forward guest:80=tcp:127.0.0.1:8080
  Two guests that may also connect to each other by CID:
    towline vsock --guest cid=3,socket=a.sock,uds=a.v,group=lab \\
      --guest cid=4,socket=b.sock,uds=b.v,group=lab
  The same from a file: towline vsock --config guests.toml
    [[guest]]                               one for each guest, with the keys of --guest
    cid = 3
    socket = \"a.sock\"
    uds = \"a.v\"
    forward = [\"guest:80=tcp:127.0.0.1:8080\"]
    group = [\"lab\"]
  Statistics of each guest and connection: kill -USR1 PID; also printed at the end.")]
pub(crate) struct VsockArgs {
    /// Unix socket to listen on for QEMU or another VMM [default: the service manager's, unless --fd]
    #[arg(long, value_name = "PATH", visible_alias = "socket-path", conflicts_with_all = ["fd", "guest", "config"])]
    pub(crate) socket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) access: SocketArgs,
    /// Inherited socket, listening or connected
    #[arg(long, value_name = "N", value_parser = number::<i32>, conflicts_with_all = ["guest", "config"])]
    pub(crate) fd: Option<i32>,
    /// Guest CID, 3 or higher, unique on this host
    #[arg(long, value_name = "N", value_parser = guest_cid, required_unless_present_any = ["guest", "config"],
          conflicts_with_all = ["guest", "config"])]
    pub(crate) cid: Option<u64>,
    /// Unix socket for CONNECT requests, and prefix of the sockets PATH_PORT that the guest connects to
    #[arg(long, value_name = "PATH", conflicts_with_all = ["guest", "config"])]
    pub(crate) uds: Option<PathBuf>,
    /// The same for sockets that preserve message boundaries (SOCK_SEQPACKET)
    #[arg(long, value_name = "PATH", conflicts_with_all = ["guest", "config"])]
    pub(crate) uds_seqpacket: Option<PathBuf>,
    /// Forwarding rule, see below; may be repeated
    #[arg(long, value_name = "RULE", conflicts_with_all = ["guest", "config"])]
    pub(crate) forward: Vec<ForwardingRule>,
    /// Record of descriptors in flight, with which a restarted device completes each of them once: a file (on a tmpfs), or
    /// `fd-store`, the service manager's store (`FileDescriptorStoreMax=1`)
    #[arg(long, value_name = "FILE|fd-store", conflicts_with_all = ["guest", "config"])]
    pub(crate) state: Option<PathBuf>,
    /// One of several guests: cid=N,socket=PATH and optionally uds=, uds-seqpacket=, forward=, group=NAME, state=, as the
    /// options; may be repeated
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) guest: Vec<Guest>,
    /// TOML file of guests, in addition to those of --guest; see below
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Receive buffer of a connection in bytes (virtio's buf_alloc; suffixes K, M, G)
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "1M")]
    pub(crate) buf_alloc: u64,
    /// Maximum memory of all connections of a guest in bytes, bookkeeping included (suffixes K, M, G)
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "512M")]
    pub(crate) memory_limit: u64,
    /// Maximum number of connections of a guest [default: 16384, or its share of the process's descriptors]
    #[arg(long, value_name = "N", value_parser = number::<usize>)]
    pub(crate) connections_limit: Option<usize>,
    /// Zero-copy sends (MSG_ZEROCOPY) of packets of 16 KiB and more to TCP; auto: except to addresses where the kernel
    /// copies anyway
    #[arg(long, value_name = "AUTO|ON|OFF", default_value = "auto")]
    pub(crate) zero_copy_send: ZeroCopy,
    /// Maximum time of busy-polling before a sleep when traffic is request/response, in microseconds; 0 disables
    #[arg(long, value_name = "US", default_value_t = 50, value_parser = poll_us)]
    pub(crate) poll_us: u64,
    /// Block the guest's migration
    #[arg(long)]
    pub(crate) unmigratable: bool,
    #[command(flatten)]
    pub(crate) observability: ObservabilityArgs,
    /// No statistics at the end
    #[arg(long)]
    pub(crate) quiet: bool,
    /// Print the capabilities of this vhost-user backend, as in QEMU's vhost-user.json, and exit
    #[arg(long)]
    pub(crate) print_capabilities: bool,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}
