//! Sending a lane's packets: in one vectored call, or the header in a call of its own and the pages without a copy.
//!
//! ```text
//!   plain      send(header, run, run, …)                       the kernel copies
//!   zero-copy  send(header, MORE) · send(run, run, …, ZERO_COPY)   the kernel reads the pages, until flush
//! ```
//!
//! The header's memory is used again at once, so it never goes without a copy. Completions are read by the channel at each
//! zero-copy send, and by [`PacketSender::flush`], which every barrier calls.

mod policy;

use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use towline_channel::{
    Capabilities, Channel, ChannelExt, Error as ChannelError, Flushed, IoBuf, IoCursor, SendFlags, Splice,
    ZeroCopySend, total_len,
};

use crate::statistics::{LaneSends, SendMethod, SendReason, Statistics};
use crate::{Compression, Error, Result};
use policy::SendPolicy;

/// Refuses zero-copy sends that are required and unavailable.
pub(crate) fn check(
    setting: ZeroCopySend,
    compression: Compression,
    lanes: &[Arc<dyn Channel>],
) -> Result<()> {
    if setting != ZeroCopySend::On {
        return Ok(());
    }
    let cannot = |lane: &&Arc<dyn Channel>| !lane.capabilities().contains(Capabilities::ZERO_COPY);
    let why = match (lanes, lanes.iter().find(cannot)) {
        ([], _) => "there are no lanes, and the main channel has none".to_owned(),
        _ if compression != Compression::None => {
            "compressed pages lie in a buffer that is used again at once".to_owned()
        }
        (_, Some(lane)) => format!("the connection to {} has none", lane.peer()),
        _ => return Ok(()),
    };
    Err(Error::NoZeroCopy { why })
}

/// The sending side of one lane's channel.
#[derive(Debug)]
pub(crate) struct PacketSender {
    channel: Arc<dyn Channel>,
    policy: SendPolicy,
    setting: ZeroCopySend,
    /// Made when it is first needed.
    splice: Option<Splice>,
    statistics: Arc<Statistics>,
    /// The lane's published statistics.
    published: Arc<Mutex<LaneSends>>,
}

impl PacketSender {
    pub(crate) fn new(
        channel: Arc<dyn Channel>,
        statistics: Arc<Statistics>,
        setting: ZeroCopySend,
        compression: Compression,
    ) -> Self {
        let can = match channel.capabilities().contains(Capabilities::ZERO_COPY) {
            _ if compression != Compression::None => Err(SendReason::Compressed),
            true => Ok(()),
            false => Err(SendReason::Unsupported),
        };
        let policy = SendPolicy::new(setting, can);
        let (method, reason) = policy.state();
        let published = statistics.add_lane(LaneSends { method, reason, ..LaneSends::default() });
        Self { channel, policy, setting, splice: None, statistics, published }
    }

    /// Sends bytes other than a packet with pages.
    pub(crate) fn send_plain(&self, bytes: &[u8]) -> Result<()> {
        Ok(self.channel.send_all(&[IoBuf::from(bytes)], SendFlags::empty())?)
    }

    /// Sends a packet. The contents' memory may be read until [`Self::flush`], or until the channel's lease is done.
    pub(crate) fn send(&mut self, header: &[u8], contents: &[IoBuf<'_>]) -> Result<()> {
        if contents.is_empty() {
            return self.send_plain(header);
        }
        if self.policy.needs_statistics() {
            // Also reads the completions that have arrived.
            self.channel.lease().is_done()?;
            self.policy.evaluate(self.channel.zero_copy_statistics().unwrap_or_default());
        }
        let bytes = total_len(contents);
        let method = self.policy.method(bytes);
        let begun = self.policy.measures(bytes).then(cpu_time);
        match method {
            SendMethod::Plain => {
                let mut buffers = Vec::with_capacity(1 + contents.len());
                buffers.push(IoBuf::from(header));
                buffers.extend_from_slice(contents);
                self.channel.send_all(&buffers, SendFlags::empty())?;
            }
            SendMethod::ZeroCopy => {
                self.channel.send_all(&[IoBuf::from(header)], SendFlags::MORE)?;
                self.send_zero_copy(contents)?;
            }
        }
        let cost = begun.map(|begun| cpu_time().saturating_sub(begun));
        self.policy.sent(bytes, method, cost);
        self.publish_sends(bytes, method, cost);
        Ok(())
    }

    /// Returns true if contents received on `from` can be spliced. Zero-copy sends, where possible and configured, go first.
    pub(crate) fn splices_from(&mut self, from: &dyn Channel) -> bool {
        let has_zero_copy = self.channel.capabilities().contains(Capabilities::ZERO_COPY);
        let wants_zero_copy =
            self.setting == ZeroCopySend::On || (self.setting == ZeroCopySend::Auto && has_zero_copy);
        if wants_zero_copy || !Splice::joins(from, self.channel.as_ref()) {
            return false;
        }
        if self.splice.is_none() {
            self.splice = Splice::new().inspect_err(|error| tracing::debug!(%error, "no splicing")).ok();
        }
        self.splice.is_some()
    }

    /// Sends a header, and then `length` bytes spliced from `from`; returns the number of calls of `splice(2)`.
    pub(crate) fn splice(&mut self, header: &[u8], from: &dyn Channel, bytes: u64) -> Result<u64> {
        let splice = self.splice.as_ref().expect("checked by `splices_from`");
        self.channel.send_all(&[IoBuf::from(header)], SendFlags::MORE)?;
        Ok(splice.move_exact(from, self.channel.as_ref(), bytes as usize)?.system_calls)
    }

    /// Waits until the kernel reads none of the memory that was sent.
    pub(crate) fn flush(&self) -> Result<()> {
        let flushed = self.channel.flush()?;
        if flushed == Flushed::AllCopied && self.setting == ZeroCopySend::On {
            Statistics::add(&self.statistics.dirty_sync_missed_zero_copy, 1);
        }
        if let Some(now) = self.channel.zero_copy_statistics() {
            let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
            (published.copied, published.zero_copied) = (now.copied, now.zero_copied);
        }
        Ok(())
    }

    fn send_zero_copy(&mut self, contents: &[IoBuf<'_>]) -> Result<()> {
        let mut cursor = IoCursor::new(contents);
        let mut flag = SendFlags::ZERO_COPY;
        while !cursor.is_empty() {
            let (chunk, is_last) = cursor.chunk_and_last();
            let more = if is_last { SendFlags::empty() } else { SendFlags::MORE };
            match self.channel.send(chunk, flag | more) {
                Ok(0) => {
                    let (peer, source) = (self.channel.peer().to_owned(), ErrorKind::WriteZero.into());
                    return Err(ChannelError::Io { op: "send", peer, source }.into());
                }
                Ok(sent) => cursor.advance(sent),
                Err(error @ ChannelError::ZeroCopyMemory { .. }) if self.policy.is_auto() => {
                    tracing::debug!(%error, "the lane continues with plain sends");
                    self.policy.starve();
                    flag = SendFlags::empty();
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn publish_sends(&self, bytes: usize, method: SendMethod, cost: Option<Duration>) {
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.policy.state();
        published.switches += u64::from(published.method != state.0);
        (published.method, published.reason) = state;
        let totals = match method {
            SendMethod::Plain => &mut published.plain,
            SendMethod::ZeroCopy => &mut published.zero_copy,
        };
        totals.packets += 1;
        totals.bytes += bytes as u64;
        if let Some(cost) = cost {
            totals.measured_packets += 1;
            totals.measured_bytes += bytes as u64;
            totals.measured_cpu_ns += u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX);
        }
    }
}

/// The CPU time that this thread has used.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests;
