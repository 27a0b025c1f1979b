//! Sending a lane's packets: in one vectored call, or the header in a separate call and the pages without a
//! copy.
//!
//! ```text
//!   plain      send(header, run, run, …)                       the kernel copies
//!   zero-copy  send(header, MORE) · send(run, run, …, ZERO_COPY)   the kernel reads the pages, until flush
//! ```
//!
//! The header's memory is reused at once, so it is always copied. Completions are read by the channel at each
//! zero-copy send, and by [`PacketSender::flush`], which every barrier calls.

mod policy;

use std::io::ErrorKind;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use towline_channel::{
    Capabilities, Channel, ChannelExt, Error as ChannelError, Flushed, IoBuf, IoCursor, SendFlags, Splice,
    ZeroCopySend, total_len,
};

use crate::lock::lock;
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
    /// [`Self::begin`] was called for the next packet.
    is_begun: bool,
    /// CPU time at its beginning, if it is measured.
    begun: Option<Duration>,
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
        Self { channel, policy, setting, splice: None, is_begun: false, begun: None, statistics, published }
    }

    /// Sends bytes other than a packet with pages.
    pub(crate) fn send_plain(&self, bytes: &[u8]) -> Result<()> {
        Ok(self.channel.send_all(&[IoBuf::from(bytes)], SendFlags::empty())?)
    }

    /// Sends a packet. The contents' memory may be read until [`Self::flush`], or until the channel's ticket
    /// is done.
    pub(crate) fn send(&mut self, header: &[u8], contents: &[IoBuf<'_>]) -> Result<()> {
        if contents.is_empty() {
            return self.send_plain(header);
        }
        let bytes = total_len(contents);
        if !self.is_begun {
            self.begin(bytes)?;
        }
        // Contents that lie in memory cannot be spliced.
        let method = match self.policy.method(bytes) {
            SendMethod::ZeroCopy => {
                self.channel.send_all(&[IoBuf::from(header)], SendFlags::MORE)?;
                self.send_zero_copy(contents)?;
                SendMethod::ZeroCopy
            }
            SendMethod::Plain | SendMethod::Splice => {
                let mut buffers = Vec::with_capacity(1 + contents.len());
                buffers.push(IoBuf::from(header));
                buffers.extend_from_slice(contents);
                self.channel.send_all(&buffers, SendFlags::empty())?;
                SendMethod::Plain
            }
        };
        self.end(bytes, method);
        Ok(())
    }

    /// Returns true if the next packet's contents, `bytes` bytes that come on `from`, should be spliced.
    /// Otherwise they are received and sent, which is measured as one operation.
    pub(crate) fn splices_from(&mut self, from: &dyn Channel, bytes: usize) -> Result<bool> {
        if self.setting == ZeroCopySend::On || !Splice::joins(from, self.channel.as_ref()) {
            return Ok(false);
        }
        if self.splice.is_none() {
            self.splice = Splice::new().inspect_err(|error| tracing::debug!(%error, "no splicing")).ok();
            if self.splice.is_none() {
                return Ok(false);
            }
            self.policy.allow_splices();
        }
        self.begin(bytes)?;
        Ok(!self.policy.is_auto() || self.policy.method(bytes) == SendMethod::Splice)
    }

    /// Sends a header, and then `bytes` bytes spliced from `from`; returns the number of calls of
    /// `splice(2)`.
    pub(crate) fn splice(&mut self, header: &[u8], from: &dyn Channel, bytes: usize) -> Result<u64> {
        let splice = self.splice.as_ref().expect("checked by `splices_from`");
        self.channel.send_all(&[IoBuf::from(header)], SendFlags::MORE)?;
        let calls = splice.move_exact(from, self.channel.as_ref(), bytes)?;
        self.end(bytes, SendMethod::Splice);
        Ok(calls)
    }

    /// A packet with these bytes of pages is next.
    fn begin(&mut self, bytes: usize) -> Result<()> {
        if self.policy.needs_statistics() {
            // Also reads the completions that have arrived.
            self.channel.zero_copy_ticket().is_done()?;
            self.policy.evaluate(self.channel.zero_copy_statistics().unwrap_or_default());
        }
        (self.is_begun, self.begun) = (true, self.policy.measures(bytes).then(cpu_time));
        Ok(())
    }

    /// Accounts for a packet that was sent.
    fn end(&mut self, bytes: usize, method: SendMethod) {
        self.is_begun = false;
        let cost = self.begun.take().map(|begun| cpu_time().saturating_sub(begun));
        self.policy.sent(bytes, method, cost);
        self.publish_sends(bytes, method, cost);
    }

    /// Waits until the kernel reads none of the memory that was sent.
    pub(crate) fn flush(&self) -> Result<()> {
        let flushed = self.channel.flush()?;
        if flushed == Flushed::AllCopied && self.setting == ZeroCopySend::On {
            Statistics::add(&self.statistics.dirty_sync_missed_zero_copy, 1);
        }
        if let Some(now) = self.channel.zero_copy_statistics() {
            let mut published = lock(&self.published);
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
        let mut published = lock(&self.published);
        let state = self.policy.state();
        published.switches += u64::from(published.method != state.0);
        (published.method, published.reason) = state;
        let totals = match method {
            SendMethod::Plain => &mut published.plain,
            SendMethod::ZeroCopy => &mut published.zero_copy,
            SendMethod::Splice => &mut published.spliced,
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
