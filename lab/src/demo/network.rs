//! The network of the demonstration: a bridge in a separate namespace, a card for each QEMU, and one
//! connection to the guest.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};

use super::shown::{self, heading};
use crate::linux::LinuxGuest;
use crate::network::Network;
use crate::towline::Towline;
use crate::wait::wait_until;

const BRIDGE: &str = "br0";
const HOST: &str = "10.7.0.1";
const GUEST: &str = "10.7.0.2";
const ECHO: u16 = 7;
/// An exchange that takes longer is a broken connection.
const ECHO_WITHIN: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);
const LISTENS_WITHIN: Duration = Duration::from_secs(30);

/// The bridge.
pub(super) struct Hub {
    network: Network,
    cards: usize,
}

impl Hub {
    /// Creates the bridge; needs root.
    pub(super) fn new() -> Result<Self> {
        let network = Network::new()?;
        heading("A bridge for the guest's network cards, in a network namespace that is removed at the end");
        let hub = Self { network, cards: 0 };
        hub.show(&["ip", "link", "add", BRIDGE, "type", "bridge"])?;
        hub.show(&["ip", "address", "add", &format!("{HOST}/24"), "dev", BRIDGE])?;
        hub.show(&["ip", "link", "set", BRIDGE, "up"])?;
        Ok(hub)
    }

    /// Prints and runs a command of the host.
    fn show(&self, line: &[&str]) -> Result<()> {
        shown::command(line);
        self.network.run(line)
    }

    /// Creates a tap on the bridge, starts a card on it, and waits until it listens.
    pub(super) fn start_card(&mut self, towline: &Path, socket: &Path) -> Result<Towline> {
        let tap = format!("tap{}", self.cards);
        self.cards += 1;
        self.show(&["ip", "tuntap", "add", "dev", &tap, "mode", "tap", "vnet_hdr"])?;
        self.show(&["ip", "link", "set", &tap, "master", BRIDGE, "up"])?;
        let socket_text = socket.display().to_string();
        let words = ["net", "--socket", &socket_text, "--tap", &tap];
        shown::command(["towline"].into_iter().chain(words).chain(["&"]));
        let mut card = Towline::start_within(&self.network.prefix(), towline, words)?;
        wait_until("the card's socket", LISTENS_WITHIN, || {
            card.check()?;
            Ok(socket.exists().then_some(()))
        })?;
        Ok(card)
    }

    /// Gives the guest its address and starts its echo.
    pub(super) fn set_up(guest: &mut LinuxGuest, within: Duration) -> Result<()> {
        guest.shell(&format!("ip addr add {GUEST}/24 dev eth0 && ip link set eth0 up"), within)?;
        guest.echo(ECHO)
    }

    /// Connects to the guest's echo, and exchanges until the end.
    pub(super) fn talk(&self) -> Result<Talk> {
        let address: SocketAddr = format!("{GUEST}:{ECHO}").parse()?;
        let mut stream = self.network.enter(|| TcpStream::connect_timeout(&address, ECHO_WITHIN))??;
        stream.set_read_timeout(Some(ECHO_WITHIN))?;
        stream.set_nodelay(true)?;
        let end = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&end);
        let thread = std::thread::spawn(move || {
            let mut talked = Talked::default();
            while !ends.load(Relaxed) {
                let (sent, started) = (talked.exchanges.to_be_bytes(), Instant::now());
                stream.write_all(&sent)?;
                let mut echo = [0; 8];
                stream.read_exact(&mut echo)?;
                ensure!(echo == sent, "the guest echoed {echo:?}, expected {sent:?}");
                talked.exchanges += 1;
                talked.longest = talked.longest.max(started.elapsed());
                std::thread::sleep(PAUSE);
            }
            Ok(talked)
        });
        Ok(Talk { end, thread })
    }
}

/// A connection that is in use.
pub(super) struct Talk {
    end: Arc<AtomicBool>,
    thread: JoinHandle<Result<Talked>>,
}

/// Exchanges on it.
#[derive(Debug, Default)]
pub(super) struct Talked {
    pub(super) exchanges: u64,
    /// The longest exchange.
    pub(super) longest: Duration,
}

impl Talk {
    /// Ends it. Fails if the connection did not last.
    pub(super) fn end(self) -> Result<Talked> {
        self.end.store(true, Relaxed);
        self.thread
            .join()
            .map_err(|_| anyhow!("the client panicked"))?
            .context("the connection to the guest broke")
    }
}
