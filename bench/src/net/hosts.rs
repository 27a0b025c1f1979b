//! Two hosts as network namespaces: one on the backend's tap, and the "guest" on the driver's.
//!
//! ```text
//!   namespace outside                          this process                        namespace inside
//!   applications ── kernel ── tap0 ── backend ── rings ── Pump (driver) ── tap1 ── kernel ── applications
//! ```

use std::fs::File;
use std::io::ErrorKind;
use std::net::{SocketAddrV4, TcpListener};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use rustix::net::sockopt::{Timeout, set_socket_linger, set_socket_timeout, set_tcp_nodelay};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use towline_lab::{Network, Towline as Process};

use super::rows::{Carrier, PASST, Run, TESTPMD, VHOST_USER_NET};
use crate::applications::{Applications, Dial, Kind, Traffic, WITHIN};
use crate::options::Bench;

/// Tap of the backend.
pub(super) const TAP: &str = "tap0";
/// Tap of the driver.
pub(super) const GUEST_TAP: &str = "tap1";
pub(super) const OUTSIDE: &str = "10.99.0.1";
pub(super) const INSIDE: &str = "10.99.0.2";
pub(super) const PORT: u16 = 5000;
/// Interval of attempts to connect.
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// Name of the frontend's socket.
pub(super) const SOCKET: &str = "net.sock";

/// One run of a row.
pub(super) struct Hosts<'a> {
    pub(super) bench: &'a Bench,
    pub(super) run: Run,
    pub(super) outside: Network,
}

impl Hosts<'_> {
    /// Starts the backend in the outer namespace, with its socket in this directory.
    pub(super) fn backend(&self, directory: &Path) -> Result<Process> {
        let (socket, queues) = (directory.join(SOCKET).display().to_string(), self.run.row.queues);
        let own = |options: &str| {
            let line = format!("net --socket {socket} --tap {TAP} --queues {queues} {options}");
            anyhow::Ok((self.bench.options.towline.clone(), line))
        };
        let (program, line) = match self.run.contender.kind {
            Carrier::Towline => own(""),
            Carrier::Sleeping => own("--poll-us 0"),
            Carrier::VhostUserNet => Ok((
                self.bench.peer(VHOST_USER_NET)?,
                format!(
                    "--net-backend ip={OUTSIDE},mask=255.255.255.0,socket={socket},client=off,num_queues={},queue_size=256,tap={TAP}",
                    2 * queues
                ),
            )),
            // Without huge pages, between its vhost and its tap driver.
            Carrier::Testpmd => Ok((
                self.bench.peer(TESTPMD)?,
                format!(
                    "-l 0,1 --no-huge -m 1024 --no-pci --no-shconf --no-telemetry --log-level error \
                 --vdev net_vhost0,iface={socket},queues={queues},client=0 --vdev net_tap0,iface={TAP} -- \
                 --forward-mode io --auto-start --stats-period 3600 --rxq {queues} --txq {queues}"
                ),
            )),
            // For a guest at `INSIDE`, which reaches `OUTSIDE` as it is.
            Carrier::Passt => Ok((
                self.bench.peer(PASST)?,
                format!(
                    "--vhost-user --socket {socket} --foreground --quiet --ipv4-only --interface {TAP} --address {INSIDE} \
                 --netmask 24 --gateway {OUTSIDE} --map-host-loopback none --no-dhcp --udp-ports none \
                 --tcp-ports {INSIDE}/{PORT}"
                ),
            )),
            Carrier::Loop | Carrier::Tap | Carrier::Veth => bail!("the limit has no backend"),
        }?;
        Process::start_within(&self.outside.prefix(), &program, line.split_whitespace())
    }
}

/// Creates a namespace whose kernel sends no frames by itself.
pub(super) fn host() -> Result<Network> {
    let host = Network::new()?;
    host.run(&["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"])?;
    Ok(host)
}

/// Serves the clients of this traffic at [`PORT`] of a host.
pub(super) fn serve(
    host: &Network,
    address: &str,
    traffic: Traffic,
    applications: &mut Applications,
) -> Result<()> {
    let listener = host.enter(|| TcpListener::bind((address, PORT)))??;
    listener.set_nonblocking(true)?;
    applications.serve(listener, traffic.service(), traffic.sessions);
    Ok(())
}

/// Connects to [`PORT`] from this thread's namespace, with retries while the link drops frames after it came up.
pub(super) fn dial(address: &str, traffic: Traffic) -> Result<Dial> {
    let address = SocketAddrV4::new(address.parse()?, PORT);
    Ok(Arc::new(move || {
        let until = Instant::now() + WITHIN;
        loop {
            match connected(address, traffic) {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    ensure!(Instant::now() < until, "cannot connect: {error}");
                    // The port was used just before, and the peer replied to the old connection: at once.
                    if !matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused) {
                        std::thread::sleep(CONNECT_INTERVAL);
                    }
                }
            }
        }
    }))
}

fn connected(address: SocketAddrV4, traffic: Traffic) -> std::io::Result<File> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(socket.as_fd(), Timeout::Send, Some(WITHIN))?;
    set_socket_timeout(socket.as_fd(), Timeout::Recv, Some(WITHIN))?;
    if !traffic.is_stream() {
        // As in netperf and iperf3, TCP may coalesce the messages of a stream.
        set_tcp_nodelay(socket.as_fd(), true)?;
        if traffic.kind == Kind::Connection {
            // A reset at close frees the client's port at once: thousands of connections per second would exhaust them.
            set_socket_linger(socket.as_fd(), Some(Duration::ZERO))?;
        }
    }
    connect(socket.as_fd(), &address)?;
    Ok(socket.into())
}
