//! Drivers of the guest's card: they send and receive frames at the backend's full rate, or connect it to a tap. And a loop between two
//! taps in their place.

use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result};
use towline_frontend::net::{
    DriverPair, FRAME_BYTES_MAX, HEADER_BYTES, LINUX_BUFFER_BYTES, Options, feature as net,
};
use towline_frontend::wire::feature;
use towline_frontend::{Frontend, MemoryArena, wait_any};

use crate::machine::at_once;
use crate::sys::Offloads;
use crate::vhost::Signals;

/// Entries of each ring: QEMU's default.
const RING_SIZE: u16 = 256;
/// Frames per update of a ring.
const BATCH: usize = 32;
/// Flags of a frame's header.
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const ETHERNET_BYTES: usize = 14;
const IPV4: [u8; 2] = [0x08, 0x00];
/// Address of no interface: every receiver drops the frame.
const UNKNOWN: [u8; 6] = [0x02, 0, 0, 0, 0, 0x99];
const SOURCE: [u8; 6] = [0x02, 0, 0, 0, 0, 0x98];
/// "Local experimental" EtherType (IEEE 802), without a protocol.
const EXPERIMENTAL: [u8; 2] = [0x88, 0xb5];
/// Offset of the checksum in a TCP header.
const TCP_CHECKSUM_AT: u16 = 16;
/// IP's number of TCP.
const TCP: u8 = 6;
/// Maximum sleep between checks for the end.
pub(super) const SLEEP: Duration = Duration::from_millis(20);
/// Timeout of progress of the transmit ring.
const ROOM_WITHIN: Duration = Duration::from_secs(10);

/// Queues of a card. Its driver is as Linux's: it negotiates every feature, and sleeps when it has nothing to do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setup {
    pub(super) queues: usize,
    /// Longest frame from the guest.
    pub(super) transmit_bytes: usize,
    /// Offloads to negotiate, as feature bits.
    pub(super) offloads: u64,
}

impl Setup {
    /// One queue with all offloads.
    pub(super) fn of(transmit_bytes: usize) -> Self {
        Self { queues: 1, transmit_bytes, offloads: net::OFFLOADS }
    }
}

/// A card with running queues.
pub(super) struct Card {
    // Disconnected when the card is dropped.
    frontend: Frontend,
    features: u64,
    pairs: Vec<DriverPair>,
}

impl Card {
    /// Negotiates the driver's features, and starts the queue pairs. Receive buffers are those of Linux with these features.
    pub(super) fn start(mut frontend: Frontend, setup: Setup) -> Result<Self> {
        let Setup { queues, transmit_bytes, offloads } = setup;
        let wanted = feature::EVENT_IDX | feature::INDIRECT | net::MRG_RXBUF | offloads | net::MQ;
        let features = frontend.negotiate(0, wanted, 0)?.features;
        let super_frames = features & (net::GUEST_TSO4 | net::GUEST_TSO6) != 0;
        let receive_bytes = match features & net::MRG_RXBUF {
            0 if super_frames => HEADER_BYTES + FRAME_BYTES_MAX,
            _ => LINUX_BUFFER_BYTES,
        };
        let options = Options {
            size: RING_SIZE,
            receive_bytes,
            transmit_bytes: HEADER_BYTES + transmit_bytes,
            features,
        };
        let memory =
            Arc::new(MemoryArena::new(DriverPair::memory_bytes(&options) * queues as u64 + (1 << 20))?);
        frontend.set_mem_table(Some(&memory))?;
        let pairs = (0..queues)
            .map(|index| {
                DriverPair::start(&mut frontend, &memory, u32::try_from(index)?, options).map_err(Into::into)
            })
            .collect::<Result<_>>()?;
        Ok(Self { frontend, features, pairs })
    }

    /// Returns whether the guest's kernel leaves segmentation and checksums to the backend.
    pub(super) fn offloads(&self) -> Offloads {
        let both = net::HOST_TSO4 | net::CSUM;
        if self.features & both == both { Offloads::On } else { Offloads::Off }
    }

    /// Sends frames of this length from the first queue until the end.
    pub(super) fn transmit(mut self, len: usize, signals: &Signals) -> Result<()> {
        let (bytes, pair) = (frame(len), &mut self.pairs[0]);
        pair.fill_transmit_buffers(&bytes);
        while !signals.is_over() {
            let back = pair.reclaim()?;
            signals.add(back as u64);
            let sent = (0..BATCH).take_while(|_| pair.transmit_any(bytes.len())).count();
            pair.flush();
            if sent == 0 && back == 0 {
                pair.wait_room(ROOM_WITHIN)?;
            }
        }
        Ok(())
    }

    /// Receives on the first queue until the end.
    pub(super) fn receive(mut self, signals: &Signals) -> Result<()> {
        let pair = &mut self.pairs[0];
        while !signals.is_over() {
            let count = pair.receive(|_| ())?;
            signals.add(count as u64);
            if count == 0 && !pair.rx().enable_callback(1) {
                wait_any(&[pair.rx().call_fd()], SLEEP)?;
                pair.rx().drain_call();
            }
            pair.rx().disable_callback();
        }
        Ok(())
    }

    /// Connects each pair to a queue of a tap.
    pub(super) fn pump(self, taps: Vec<File>, signals: &Signals) -> Result<()> {
        let _frontend = self.frontend;
        at_once(self.pairs.into_iter().zip(taps).map(|(pair, tap)| move || pump(pair, &tap, signals)))
    }
}

fn pump(mut pair: DriverPair, mut tap: &File, signals: &Signals) -> Result<()> {
    while !signals.power_off.load(Ordering::Relaxed) {
        let (mut moved, mut full) = (0, false);
        for _ in 0..BATCH {
            match pair.transmit_from(|bytes| tap.read(bytes)) {
                Ok(Some(_)) => moved += 1,
                Ok(None) => full = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).context("the guest's tap"),
            }
            if full {
                break;
            }
        }
        pair.flush();
        // A full tap drops frames, as a card's ring does.
        moved += pair.receive(|frame| drop(frame.write(|parts| pass_on(tap, parts))))?;
        moved += pair.reclaim()?;
        if moved == 0 {
            let share = pair.tx().in_flight() / 4 * 3;
            let ready = pair.rx().enable_callback(1) || (full && pair.tx().enable_callback(share.max(1)));
            if !ready {
                let (rx, tx) = pair.rings();
                let fds = [rx.call_fd(), tx.call_fd(), tap.as_fd()];
                wait_any(if full { &fds[..2] } else { &fds }, SLEEP)?;
                rx.drain_call();
                tx.drain_call();
            }
            pair.rx().disable_callback();
            pair.tx().disable_callback();
        }
    }
    Ok(())
}

/// Forwards frames between two taps until the end, with a thread for each direction, without rings and without a backend: what the
/// taps themselves allow for TCP.
pub(super) fn relay([outside, inside]: [File; 2], signals: &Signals) -> Result<()> {
    let ways = [(&outside, &inside), (&inside, &outside)];
    at_once(ways.map(|(from, to)| move || forward(from, to, signals)))
}

fn forward(mut from: &File, mut to: &File, signals: &Signals) -> Result<()> {
    let mut frame = vec![0; HEADER_BYTES + FRAME_BYTES_MAX];
    while !signals.power_off.load(Ordering::Relaxed) {
        match from.read(&mut frame) {
            // A full tap drops frames, as a card's ring does.
            Ok(length) => drop(to.write(&frame[..length])),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                wait_any(&[from.as_fd()], SLEEP)?;
            }
            Err(error) => return Err(error).context("a tap"),
        }
    }
    Ok(())
}

/// Writes a frame with its header to the tap. A frame whose checksum the backend vouches for (`VIRTIO_NET_HDR_F_DATA_VALID`), and may
/// have left out, is marked as one whose checksum is partial: Linux's driver trusts both, a tap only the latter.
fn pass_on(mut tap: &File, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    let [first, rest @ ..] = parts else { return Ok(0) };
    if first.first().is_none_or(|flags| flags & DATA_VALID == 0) {
        return tap.write_vectored(parts);
    }
    let Some((header, frame)) = first.split_first_chunk::<HEADER_BYTES>() else {
        return tap.write_vectored(parts);
    };
    let mut header = *header;
    if let Some(start) = tcp_at(frame) {
        header[0] = NEEDS_CSUM;
        header[6..8].copy_from_slice(&start.to_le_bytes());
        header[8..10].copy_from_slice(&TCP_CHECKSUM_AT.to_le_bytes());
    }
    let mut all = vec![IoSlice::new(&header), IoSlice::new(frame)];
    all.extend(rest.iter().map(|part| IoSlice::new(part)));
    tap.write_vectored(&all)
}

/// Returns a frame of this length after a header of 12 bytes.
pub(super) fn frame(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES + len];
    let start = [UNKNOWN, SOURCE].concat().into_iter().chain(EXPERIMENTAL);
    bytes.iter_mut().skip(HEADER_BYTES).zip(start).for_each(|(to, from)| *to = from);
    bytes
}

/// Returns the offset of the TCP header of an IPv4 frame.
fn tcp_at(frame: &[u8]) -> Option<u16> {
    let (kind, packet) = (frame.get(12..14)?, frame.get(ETHERNET_BYTES..)?);
    let is_tcp = kind == IPV4 && packet.get(9) == Some(&TCP);
    is_tcp.then(|| u16::from(packet[0] & 0xf) * 4 + ETHERNET_BYTES as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tcp_header_follows_the_options_of_ip() {
        let mut tcp = frame(64).split_off(HEADER_BYTES);
        assert_eq!(tcp_at(&tcp), None);
        tcp[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
        tcp[23] = TCP;
        assert_eq!(tcp_at(&tcp), Some(34));
        tcp[14] = 0x46;
        assert_eq!(tcp_at(&tcp), Some(38));
        assert_eq!(tcp_at(&tcp[..20]), None);
    }
}
