//! `towline vsock`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Subcommand;
use towline_vsock::{ForwardingRule, guest_cid};

use super::{GuestSpec, MORE};
use crate::observability::ObservabilityArgs;
use crate::sandbox::SandboxArgs;
use crate::sockets::SocketArgs;
use crate::units::{bytes, number, poll_us};

/// Connect a guest's vsock to sockets of this host (vhost-user)
///
/// Follows Firecracker's convention for Unix sockets: a client connects to the --uds path, sends `CONNECT
/// PORT\n`, and receives `OK PORT\n` once the guest has accepted; a guest's connection to PORT of the host
/// (CID 2) goes to the socket `UDS_PORT`. The directions of a connection close independently. Connections
/// without a rule are refused.
#[derive(Debug, clap::Args)]
#[command(after_help = MORE)]
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
  Standard input and output as a connection to the guest's port 22, as ssh's ProxyCommand:
    towline vsock connect /run/vm/v.sock 22
  Statistics of each guest and connection: kill -USR1 PID; also printed at the end.")]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true
)]
pub(crate) struct VsockArgs {
    #[command(subcommand)]
    pub(crate) command: Option<VsockCommand>,
    /// Unix socket to listen on for QEMU or another VMM [default: the service manager's, unless --fd]
    #[arg(long, value_name = "PATH", visible_alias = "socket-path", conflicts_with_all = ["fd", "guest", "config"])]
    pub(crate) socket: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) access: SocketArgs,
    /// Inherited socket, listening or connected
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = number::<i32>, conflicts_with_all = ["guest", "config"])]
    pub(crate) fd: Option<i32>,
    /// Guest CID, 3 or higher, unique on this host
    #[arg(long, value_name = "N", value_parser = guest_cid, required_unless_present_any = ["guest", "config"],
          conflicts_with_all = ["guest", "config"])]
    pub(crate) cid: Option<u64>,
    /// Unix socket for CONNECT requests, and prefix of the sockets PATH_PORT that the guest connects to
    #[arg(long, value_name = "PATH", conflicts_with_all = ["guest", "config"])]
    pub(crate) uds: Option<PathBuf>,
    /// The same for sockets that preserve message boundaries (SOCK_SEQPACKET)
    #[arg(long, hide_short_help = true, value_name = "PATH", conflicts_with_all = ["guest", "config"])]
    pub(crate) uds_seqpacket: Option<PathBuf>,
    /// Forwarding rule, such as tcp:127.0.0.1:2222=guest:22; may be repeated (all: --help)
    #[arg(long, value_name = "RULE", conflicts_with_all = ["guest", "config"])]
    pub(crate) forward: Vec<ForwardingRule>,
    /// Record of descriptors in flight, with which a restarted device completes each of them once: a file (on
    /// a tmpfs), or `fd-store`, the service manager's store (`FileDescriptorStoreMax=1`)
    #[arg(long, hide_short_help = true, value_name = "FILE|fd-store", conflicts_with_all = ["guest", "config"])]
    pub(crate) state: Option<PathBuf>,
    /// One of several guests: cid=N,socket=PATH and optionally uds=, uds-seqpacket=, forward=, group=NAME,
    /// state=, as the options; may be repeated
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) guest: Vec<GuestSpec>,
    /// TOML file of guests, in addition to those of --guest (an example: --help)
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Maximum memory of all connections of a guest in bytes, bookkeeping included (suffixes K, M, G)
    #[arg(long, hide_short_help = true, value_name = "BYTES", value_parser = bytes, default_value = "512M")]
    pub(crate) memory_limit: u64,
    /// Maximum time of busy-polling before a sleep when traffic is request/response, in microseconds; 0
    /// disables
    #[arg(long, hide_short_help = true, value_name = "US", default_value_t = 50, value_parser = poll_us)]
    pub(crate) poll_us: u64,
    #[command(flatten)]
    pub(crate) observability: ObservabilityArgs,
    /// Print the capabilities of this vhost-user backend, as in QEMU's vhost-user.json, and exit
    #[arg(long, hide_short_help = true)]
    pub(crate) print_capabilities: bool,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VsockCommand {
    Connect(ConnectArgs),
}

/// Connect standard input and output to a port of a guest, for example as the ProxyCommand of ssh
///
/// The guest's device is found by its --uds socket, as of `towline vsock`, Firecracker or Cloud Hypervisor.
/// The directions end independently: the end of standard input ends the direction to the guest, and the
/// guest's data is written until its own end.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Targets:
  PATH, uds:PATH          the socket of a device that accepts `CONNECT PORT` (--uds)
  vsock-mux/PATH          the same, as systemd-ssh-proxy names it; also vsock-mux%PATH, and
                          without the slash that an absolute path begins with
  unix:PATH, unix/PATH    a listener of a rule, --forward unix:PATH=guest:PORT
  tcp:ADDRESS:PORT        a listener of a rule, --forward tcp:ADDRESS:PORT=guest:PORT

Examples:
  A port of a guest:
    towline vsock connect /run/vm/v.sock 52
  ssh, once:
    ssh -o ProxyCommand='towline vsock connect /run/vm/%h.v %p' root@a
  ssh vsock-mux/run/vm/v.sock, in ~/.ssh/config; ssh gets the connection itself:
    Host vsock-mux/* vsock-mux%*
      ProxyCommand towline vsock connect --pass-fd %h %p
      ProxyUseFdpass yes

Exit status: 0 both directions have ended; 1 refused, or failed; 2 usage.
")]
pub(crate) struct ConnectArgs {
    /// Socket of the guest's device, or of a rule; see below
    #[arg(value_name = "TARGET")]
    pub(crate) target: ConnectTarget,
    /// Port of the guest; without effect on a listener of a rule, which has its own
    #[arg(value_name = "PORT", value_parser = number::<u32>)]
    pub(crate) port: Option<u32>,
    /// Send the connected socket over standard output, a Unix socket, and exit (ssh's ProxyUseFdpass)
    #[arg(long)]
    pub(crate) pass_fd: bool,
}

/// Destination of `towline vsock connect`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ConnectTarget {
    /// Socket of a device, which expects `CONNECT`.
    Device(PathBuf),
    /// Unix socket of a rule.
    Unix(PathBuf),
    /// TCP address of a rule.
    Tcp(SocketAddr),
}

impl FromStr for ConnectTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // As host names of ssh have them: separated by `/`, `%` or `,` from an absolute path, whose slash may
        // be missing.
        let of_host = |prefix: &str| {
            let path = text.strip_prefix(prefix)?.strip_prefix(['/', '%', ','])?;
            Some(PathBuf::from("/").join(path))
        };
        let non_empty = |path: &str| {
            if path.is_empty() { Err(format!("`{text}` has no path")) } else { Ok(PathBuf::from(path)) }
        };
        if let Some(path) = of_host("vsock-mux") {
            return Ok(Self::Device(path));
        }
        if let Some(path) = of_host("unix") {
            return Ok(Self::Unix(path));
        }
        if let Some(path) = text.strip_prefix("unix:") {
            return non_empty(path).map(Self::Unix);
        }
        if let Some(address) = text.strip_prefix("tcp:") {
            let address = address.parse();
            return address.map(Self::Tcp).map_err(|_| {
                format!("`{text}`: expected a numeric address and a port, such as tcp:127.0.0.1:2222")
            });
        }
        non_empty(text.strip_prefix("uds:").unwrap_or(text)).map(Self::Device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_parsed_as_ssh_names_them() {
        let target = |text: &str| text.parse::<ConnectTarget>().unwrap();
        let device = ConnectTarget::Device("/run/vm/v.sock".into());
        for text in [
            "/run/vm/v.sock",
            "uds:/run/vm/v.sock",
            "vsock-mux/run/vm/v.sock",
            "vsock-mux//run/vm/v.sock",
            "vsock-mux%/run/vm/v.sock",
            "vsock-mux,/run/vm/v.sock",
        ] {
            assert_eq!(target(text), device, "{text}");
        }
        assert_eq!(target("v.sock"), ConnectTarget::Device("v.sock".into()));
        assert_eq!(target("unix:ssh.sock"), ConnectTarget::Unix("ssh.sock".into()));
        assert_eq!(target("unix/run/ssh.sock"), ConnectTarget::Unix("/run/ssh.sock".into()));
        assert_eq!(target("tcp:[::1]:22"), ConnectTarget::Tcp("[::1]:22".parse().unwrap()));
        for (text, expected) in [
            ("", "`` has no path"),
            ("uds:", "`uds:` has no path"),
            ("unix:", "`unix:` has no path"),
            (
                "tcp:host:22",
                "`tcp:host:22`: expected a numeric address and a port, such as tcp:127.0.0.1:2222",
            ),
        ] {
            assert_eq!(text.parse::<ConnectTarget>(), Err(expected.to_owned()));
        }
    }
}
