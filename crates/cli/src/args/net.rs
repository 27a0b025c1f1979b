//! `towline net`.

use std::path::PathBuf;

use towline_migration::ZeroCopySend;

use super::{MORE, OnOff, zero_copy_send};
use crate::observability::ObservabilityArgs;
use crate::sandbox::SandboxArgs;
use crate::sockets::SocketArgs;
use crate::units::{Unit, number, poll_us, whole};

/// Run a network card for a guest on a tap of this host (vhost-user): multiqueue, all offloads, live
/// migration
///
/// A missing tap is created, brought up, and removed at the end; create one that must stay, for instance on a
/// bridge, first. SIGTERM and Ctrl-C end the card and print the statistics of its queues; SIGUSR1 prints them
/// at any time. A card that is started again after a crash continues to serve its guest if QEMU's chardev has
/// `reconnect=` (`reconnect-ms=` from QEMU 9.2 on, which 11.1 requires).
#[derive(Debug, clap::Args)]
#[command(after_help = MORE)]
#[command(after_long_help = "\
Examples:
  A tap with four queues on a bridge, and its QEMU, with shared memory:
    ip tuntap add dev vm0 mode tap multi_queue vnet_hdr
    ip link set vm0 master br0 up
    towline net --socket /run/vm/net0.sock --tap vm0 --queues 4
    qemu-system-x86_64 … -object memory-backend-memfd,id=mem,size=4G,share=on \\
      -machine q35,memory-backend=mem \\
      -chardev socket,id=net0,path=/run/vm/net0.sock,reconnect=1 \\
      -netdev vhost-user,id=n0,chardev=net0,queues=4 -device virtio-net-pci,netdev=n0,mq=on
  QEMU 11.1 refuses reconnect=1: from 9.2 on it is reconnect-ms=1000.
  The same as the XML of a libvirt domain:
    <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
    <interface type='vhostuser'>
      <source type='unix' path='/run/vm/net0.sock' mode='client'>
        <reconnect enabled='yes' timeout='1'/>
      </source>
      <model type='virtio'/><driver queues='4'/>
    </interface>
  Taps opened by a manager (descriptors 5 and 6), with worker threads on processors 2 and 3:
    towline net --fd 4 --tap-fds 5:6 --cpus 2,3
  Transmit by AF_XDP from pinned guest memory, through queue 0 of an SR-IOV function; receive by a
  macvtap of the same function (docs/af-xdp.md lists drivers and requirements):
    ip link add link ens1f0 name vm0 address 52:54:00:00:00:01 type macvtap mode bridge
    ip link set vm0 up
    towline net --socket /run/vm/net0.sock --tap vm0 --af-xdp ens1f0

Exit status: 0 ended on request; 1 failed or refused; 2 usage.
")]
pub(crate) struct NetArgs {
    /// Unix socket to listen on for QEMU; a stale one is replaced [default: the service manager's, unless
    /// --fd]
    #[arg(long, value_name = "PATH", visible_alias = "socket-path", conflicts_with = "fd")]
    pub(crate) socket: Option<PathBuf>,
    /// Inherited socket, listening or connected
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = number::<i32>)]
    pub(crate) fd: Option<i32>,
    #[command(flatten)]
    pub(crate) access: SocketArgs,
    /// Tap or macvtap; created if it does not exist
    #[arg(long, value_name = "NAME", value_parser = interface, required_unless_present = "tap_fds", conflicts_with = "tap_fds")]
    pub(crate) tap: Option<String>,
    /// Inherited queues of one tap, opened with IFF_VNET_HDR
    #[arg(long, hide_short_help = true, value_name = "A:B:..", value_parser = number::<i32>, value_delimiter = ':')]
    pub(crate) tap_fds: Vec<i32>,
    /// Number of queue pairs, 1 to 128, each with a thread; QEMU's `queues=` may be lower [default: 1]
    #[arg(long, value_name = "N", value_parser = |text: &str| whole::<usize>(text, Unit::None, 1..=128), conflicts_with = "tap_fds")]
    pub(crate) queues: Option<usize>,
    /// Interface that transmits from guest memory by AF_XDP where that is not slower than the tap, which
    /// receives
    #[arg(long, value_name = "IF", value_parser = interface)]
    pub(crate) af_xdp: Option<String>,
    /// AF_XDP's copy mode, for tests and comparisons; without it, frames of an interface without zero-copy go
    /// by the tap, which is faster
    #[arg(long, hide_short_help = true, requires = "af_xdp")]
    pub(crate) af_xdp_copy: bool,
    /// Frames that leave by AF_XDP, those of more than 256 bytes by reference: auto, of drivers without
    /// offloads; on, all; off, all, and none by reference
    #[arg(
        long,
        hide_short_help = true,
        value_name = "AUTO|ON|OFF",
        value_parser = zero_copy_send(),
        default_value = "auto",
        requires = "af_xdp"
    )]
    pub(crate) zero_copy_send: ZeroCopySend,
    /// Inherited AF_XDP sockets, not bound, one for each queue pair
    #[arg(long, hide_short_help = true, value_name = "A:B:..", value_parser = number::<i32>, value_delimiter = ':', requires = "af_xdp")]
    pub(crate) xsk_fds: Vec<i32>,
    /// First queue of the AF_XDP interface; the queue pairs use consecutive ones
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = number::<u32>, default_value_t = 0, requires = "af_xdp")]
    pub(crate) xsk_queue: u32,
    /// Processors of the worker threads, in the order of the queues
    #[arg(long, hide_short_help = true, value_name = "N,N,..", value_parser = number::<usize>, value_delimiter = ',')]
    pub(crate) cpus: Vec<usize>,
    /// Maximum time of busy-polling before a sleep when traffic is request/response, in microseconds; 0
    /// disables
    #[arg(long, hide_short_help = true, value_name = "US", default_value_t = 50, value_parser = poll_us)]
    pub(crate) poll_us: u64,
    /// Record of descriptors in flight, with which a restarted card loses no buffers: a file (on a tmpfs), or
    /// `fd-store`, the service manager's store (`FileDescriptorStoreMax=1`)
    #[arg(long, hide_short_help = true, value_name = "FILE|fd-store")]
    pub(crate) state: Option<PathBuf>,
    /// Hold the guest's frames from the start on, until the control socket releases them (output commit,
    /// docs/net.md)
    #[arg(long, hide_short_help = true, requires = "qmp")]
    pub(crate) hold: bool,
    /// Block the guest's migration; disables the dirty log
    #[arg(long, hide_short_help = true)]
    pub(crate) unmigratable: bool,
    /// Migration of the link state and counters (vhost-user's DEVICE_STATE, which stock QEMU does not use for
    /// network cards); the same at both hosts
    #[arg(long, hide_short_help = true, value_name = "ON|OFF", default_value = "off")]
    pub(crate) device_state: OnOff,
    #[command(flatten)]
    pub(crate) observability: ObservabilityArgs,
    /// Statistics as JSON objects on standard output (docs/json.md)
    #[arg(long, hide_short_help = true)]
    pub(crate) json: bool,
    /// Print the capabilities of this vhost-user backend, as in QEMU's vhost-user.json, and exit
    #[arg(long, hide_short_help = true)]
    pub(crate) print_capabilities: bool,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
}

/// Parses the name of an interface, as the kernel limits it (`IFNAMSIZ`).
fn interface(text: &str) -> Result<String, String> {
    let is_valid = (1..=15).contains(&text.len()) && !text.contains(['/', ':', ' ']);
    is_valid
        .then(|| text.to_owned())
        .ok_or_else(|| "expected the name of an interface, of at most 15 bytes".into())
}
