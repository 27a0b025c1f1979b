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
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::net::sockopt::{Timeout, set_socket_linger, set_socket_timeout, set_tcp_nodelay};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use towline_lab::Network;

use crate::applications::{Applications, Dial, Kind, Traffic, WITHIN};

/// Tap of the backend.
pub(super) const TAP: &str = "tap0";
/// Tap of the driver.
pub(super) const GUEST_TAP: &str = "tap1";
pub(super) const OUTSIDE: &str = "10.99.0.1";
pub(super) const INSIDE: &str = "10.99.0.2";
pub(super) const PORT: u16 = 5000;
/// Interval of attempts to connect.
const CONNECT_INTERVAL: Duration = Duration::from_millis(20);

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
