//! Content that the two ends of a connection send.

use towline_vsock::packet::SocketType;

/// Content of a connection: its bytes are derived from a seed, its messages are lengths.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) kind: SocketType,
    pub(crate) seed: u32,
    pub(crate) guest: Vec<u32>,
    pub(crate) host: Vec<u32>,
    /// True if one of the ends aborts.
    pub(crate) aborts: bool,
}

/// Returns a byte of a stream: from the guest by its seed, to the guest by the complement of the seed.
pub(crate) fn byte(seed: u32, at: u32) -> u8 {
    let mixed = (at ^ seed).wrapping_mul(0x9e37_79b1);
    (mixed >> 24) as u8
}

impl Plan {
    /// Creates a random plan. `longest` is the maximum message to the guest, and limits streams to it too.
    pub(crate) fn new(rng: &mut fastrand::Rng, longest: u32) -> Self {
        let kind = if rng.u32(..4) == 0 { SocketType::Seqpacket } else { SocketType::Stream };
        let mut lens = |longest: u32| {
            let count = rng.usize(..6);
            let scale = [10, 1000, 20_000][rng.usize(..3)].min(longest);
            (0..count).map(|_| rng.u32(1..=scale)).collect()
        };
        let (guest, host) =
            (lens(20_000), lens(if kind == SocketType::Seqpacket { longest } else { 100 * longest }));
        Self { kind, seed: rng.u32(..), guest, host, aborts: rng.u32(..8) == 0 }
    }

    pub(crate) fn guest_bytes(&self) -> u32 {
        self.guest.iter().sum()
    }

    pub(crate) fn to_guest(&self) -> u32 {
        self.host.iter().sum()
    }

    /// Returns the rest of the message at `sent`, and true if the connection keeps message boundaries.
    pub(crate) fn guest_message_at(&self, sent: u32) -> (u32, bool) {
        let mut end = 0;
        for len in &self.guest {
            end += len;
            if sent < end {
                return (end - sent, self.kind == SocketType::Seqpacket);
            }
        }
        (0, false)
    }
}
