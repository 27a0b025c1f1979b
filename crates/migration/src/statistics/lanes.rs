//! Send method and totals of each lane.

use std::fmt;

/// Send method of a packet's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SendMethod {
    /// Copied by the kernel, in one vectored call with the header.
    #[default]
    Plain,
    /// Read by the kernel in place, if the path to the peer allows it.
    ZeroCopy,
    /// Moved by the kernel from the socket on which a relay receives them.
    Splice,
}

/// Reason for a lane's send method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SendReason {
    /// Requested.
    #[default]
    Asked,
    /// Too few packets with many pages to decide.
    Undecided,
    /// The channel has no zero-copy sends.
    Unsupported,
    /// Compressed pages lie in a buffer that is used again at once.
    Compressed,
    /// The kernel copied what was sent without a copy.
    Copied,
    /// Without a copy it takes more CPU time than with one.
    CostsMore,
    /// Without a copy it takes less CPU time.
    CostsLess,
    /// Splicing takes less CPU time than to receive and to send.
    SpliceCostsLess,
    /// The kernel lacks the memory that zero-copy sends are charged to.
    NoMemory,
}

impl fmt::Display for SendMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::ZeroCopy => "zero-copy",
            Self::Splice => "splice",
        })
    }
}

impl fmt::Display for SendReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asked => "as requested",
            Self::Undecided => "too little was sent to decide",
            Self::Unsupported => "this channel has no zero-copy",
            Self::Compressed => "the lane is compressed",
            Self::Copied => "the kernel copies anyway (loopback, bridge, or a card without scatter-gather)",
            Self::CostsMore => "zero-copy takes more CPU time here",
            Self::CostsLess => "zero-copy takes less CPU time",
            Self::SpliceCostsLess => "splicing takes less CPU time",
            Self::NoMemory => "the kernel lacks memory for zero-copy (net.core.optmem_max, RLIMIT_MEMLOCK)",
        })
    }
}

/// The packets with pages of one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LaneSends {
    /// Current method.
    pub method: SendMethod,
    /// Reason for the current method.
    pub reason: SendReason,
    /// Number of changes of the method.
    pub switches: u64,
    /// Packets sent plainly.
    pub plain: SendTotals,
    /// Packets of zero-copy sends, even if the kernel copied them.
    pub zero_copy: SendTotals,
    /// Packets spliced.
    pub spliced: SendTotals,
    /// Calls of zero-copy sends that the kernel has copied. As of the last barrier.
    pub copied: u64,
    /// Calls of zero-copy sends that it has not copied.
    pub zero_copied: u64,
}

/// Packets of one method. Some of those of 64 KiB and more are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SendTotals {
    /// All of them.
    pub packets: u64,
    /// Bytes of pages in these.
    pub bytes: u64,
    /// Number of packets measured.
    pub measured_packets: u64,
    /// Bytes of pages in the measured ones.
    pub measured_bytes: u64,
    /// CPU time of the lane's thread for sending these, in nanoseconds.
    pub measured_cpu_ns: u64,
}

impl SendTotals {
    /// CPU time of a packet's calls in nanoseconds, on average; `None` if none was measured.
    pub fn cpu_ns_per_packet(&self) -> Option<u64> {
        self.measured_cpu_ns.checked_div(self.measured_packets)
    }

    /// CPU time for a gigabyte (10⁹ bytes) of pages in milliseconds; `None` if none was measured.
    pub fn cpu_ms_per_gb(&self) -> Option<f64> {
        (self.measured_bytes > 0).then(|| self.measured_cpu_ns as f64 * 1e3 / self.measured_bytes as f64)
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            packets: self.packets + other.packets,
            bytes: self.bytes + other.bytes,
            measured_packets: self.measured_packets + other.measured_packets,
            measured_bytes: self.measured_bytes + other.measured_bytes,
            measured_cpu_ns: self.measured_cpu_ns + other.measured_cpu_ns,
        }
    }
}
