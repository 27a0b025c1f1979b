//! Replies of the backend. Descriptors of replies are the session's.

use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::U32;

use super::{
    CONFIG_BYTES_MAX, FLAG_REPLY, RawConfig, RawTable, RawVringState, RegionInfo, RequestCode, VERSION,
    VringState, header_bytes,
};

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reply {
    /// A number: features, a count, or the result of a request (0 is success).
    Number(u64),
    /// Available index of a stopped ring.
    VringBase(VringState),
    /// Part of the configuration space.
    Config {
        /// Offset of the first byte.
        offset: u32,
        /// Flags of the request.
        flags: u32,
        /// Contents; empty if it cannot be read.
        bytes: Vec<u8>,
    },
    /// No payload, only a descriptor.
    Empty,
    /// In postcopy: all regions with their addresses in the backend.
    Table(Vec<RegionInfo>),
    /// In postcopy: a region with its address in the backend.
    Region(RegionInfo),
}

impl Reply {
    /// Encodes the reply to `code`, with its header.
    ///
    /// # Panics
    /// If the configuration exceeds [`CONFIG_BYTES_MAX`].
    pub fn encode(&self, code: RequestCode) -> Vec<u8> {
        let payload = match self {
            Self::Number(number) => number.to_le_bytes().to_vec(),
            Self::Empty => Vec::new(),
            Self::Table(regions) => {
                let count = u32::try_from(regions.len()).expect("at most REGIONS_MAX");
                let head: RawTable = [count, 0].map(U32::new);
                let mut table = head.as_bytes().to_vec();
                regions.iter().for_each(|region| table.extend(region.to_wire().as_bytes()));
                table
            }
            Self::Region(region) => [&[0; 8], region.to_wire().as_bytes()].concat(),
            Self::VringBase(VringState { index, number }) => {
                let state: RawVringState = [*index, *number].map(U32::new);
                state.as_bytes().to_vec()
            }
            Self::Config { offset, flags, bytes } => {
                assert!(bytes.len() <= CONFIG_BYTES_MAX, "{} bytes of configuration", bytes.len());
                let size = u32::try_from(bytes.len()).expect("at most CONFIG_BYTES_MAX");
                let head: RawConfig = [*offset, size, *flags].map(U32::new);
                // A frontend interprets a reply without a payload as a refusal.
                if bytes.is_empty() { Vec::new() } else { [head.as_bytes(), bytes].concat() }
            }
        };
        let header = header_bytes(code, VERSION | FLAG_REPLY, payload.len());
        [&header[..], &payload].concat()
    }
}
