//! The other end of the guest's card: a connection of QEMU's `-netdev stream`, or a tap of several queues.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, eth, recv, socket_with};
use towline_lab::{Network, wait_until};

use super::driver;
use crate::support::WITHIN;

/// Receive buffer of a tap's wire: more than all frames of a driver.
const BUFFER_BYTES: usize = 64 << 20;
/// Interval at which the reader of a tap checks if it has to end.
const END_INTERVAL: Duration = Duration::from_millis(200);
const FRAME_BYTES_MAX: usize = 1 << 16;

/// See the module.
pub(super) struct Wire {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
    stream: Option<UnixStream>,
}

/// State of a wire and its reader.
#[derive(Default)]
struct Shared {
    received: Mutex<Received>,
    resumed: Condvar,
}

#[derive(Default)]
struct Received {
    paused: bool,
    ended: bool,
    /// Number of times that each of the driver's frames came.
    frames: BTreeMap<u32, u32>,
    /// The first frame with other bytes than the driver wrote.
    damaged: Option<u32>,
}

impl Wire {
    /// The connection of a QEMU that has been made: the last, as one that did not boot is replaced.
    pub(super) fn accept(listener: &UnixListener) -> Self {
        listener.set_nonblocking(true).unwrap();
        let stream = std::iter::from_fn(|| listener.accept().ok()).last().unwrap().0;
        let mut incoming = stream.try_clone().unwrap();
        Self::new(Some(stream), move || {
            // Each frame comes after its length.
            let mut length = [0; 4];
            incoming.read_exact(&mut length).ok()?;
            let mut frame = vec![0; u32::from_be_bytes(length) as usize];
            incoming.read_exact(&mut frame).ok()?;
            Some(frame)
        })
    }

    /// Capture of all that a QEMU writes to the taps of this network.
    pub(super) fn capture(network: &Network) -> Self {
        let open = || -> rustix::io::Result<OwnedFd> {
            let flags = SocketFlags::CLOEXEC;
            let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, Some(eth::ALL))?;
            set_socket_recv_buffer_size_force(&socket, BUFFER_BYTES)?;
            set_socket_timeout(&socket, Timeout::Recv, Some(END_INTERVAL))?;
            Ok(socket)
        };
        let socket = network.enter(open).unwrap().unwrap();
        Self::new(None, move || {
            let mut frame = vec![0; FRAME_BYTES_MAX];
            // Nothing arrived in the interval.
            let length = recv(&socket, &mut frame[..], RecvFlags::empty()).map_or(0, |(length, _)| length);
            frame.truncate(length);
            Some(frame)
        })
    }

    fn new(stream: Option<UnixStream>, next: impl FnMut() -> Option<Vec<u8>> + Send + 'static) -> Self {
        let shared: Arc<Shared> = Arc::default();
        let of_reader = Arc::clone(&shared);
        let reader = std::thread::spawn(move || read(next, &of_reader));
        Self { shared, reader: Some(reader), stream }
    }

    /// Stops or resumes reading.
    pub(super) fn set_paused(&self, paused: bool) {
        self.shared.received.lock().unwrap().paused = paused;
        self.shared.resumed.notify_all();
    }

    /// Number of times that a frame came. Panics if one was damaged.
    pub(super) fn count(&self, sequence: u32) -> u32 {
        let received = self.shared.received.lock().unwrap();
        assert_eq!(received.damaged, None, "a frame has other bytes than the driver wrote");
        received.frames.get(&sequence).copied().unwrap_or(0)
    }

    /// Waits until each of these frames has come.
    pub(super) fn wait_for(&self, sequences: std::ops::Range<u32>) {
        for sequence in sequences.clone() {
            wait_until(&format!("frame {sequence}"), WITHIN, || Ok((self.count(sequence) > 0).then_some(())))
                .unwrap_or_else(|error| {
                    let missing = sequences.clone().filter(|sequence| self.count(*sequence) == 0).count();
                    panic!("{missing} of the frames {sequences:?} have not come: {error:#}")
                });
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if let Ok(mut received) = self.shared.received.lock() {
            received.ended = true;
        }
        self.set_paused(false);
        // It may be closed already.
        let _ = self.stream.as_ref().map(|stream| stream.shutdown(Shutdown::Both));
        let ended = self.reader.take().map(JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || std::thread::panicking());
    }
}

/// Reads frames until the wire ends.
fn read(mut next: impl FnMut() -> Option<Vec<u8>>, shared: &Shared) {
    loop {
        let waiting = shared.received.lock().unwrap();
        let received = shared.resumed.wait_while(waiting, |received| received.paused).unwrap();
        let ended = received.ended;
        drop(received);
        let Some(frame) = next().filter(|_| !ended) else { return };
        let mut received = shared.received.lock().unwrap();
        match driver::sequence(&frame) {
            Some(sequence) if driver::frame(sequence) == frame => {
                *received.frames.entry(sequence).or_default() += 1;
            }
            Some(sequence) => drop(received.damaged.get_or_insert(sequence)),
            // Overwritten from its beginning on.
            None if frame.starts_with(&[0xee; 14]) => drop(received.damaged.get_or_insert(u32::MAX)),
            // The guest's kernel sends by the same card.
            None => {}
        }
    }
}
