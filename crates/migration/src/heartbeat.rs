//! A thread that tells the peer every second that this process is at work.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::Result;

/// Interval between two heartbeats.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Longest silence of a peer that sends heartbeats: this timeout, but at least three intervals.
pub fn silence_max(timeout: Duration) -> Duration {
    timeout.max(3 * HEARTBEAT_INTERVAL)
}

/// Sends heartbeats until it is dropped, or until one cannot be sent.
#[derive(Debug)]
pub struct Heartbeat {
    /// `None` once dropped, which ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Calls `send` every [`HEARTBEAT_INTERVAL`]. No other thread may send on that connection until this is
    /// dropped, unless `send` takes turns with it.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(mut send: impl FnMut() -> Result<()> + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let beat = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(HEARTBEAT_INTERVAL) {
                if let Err(error) = send() {
                    tracing::debug!(%error, "heartbeats end");
                    return;
                }
            }
        };
        Ok(Self { stop: Some(stop), thread: Some(Builder::new().spawn(beat)?) })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of `send` has been reported by its thread.
            let _ = thread.join();
        }
    }
}
