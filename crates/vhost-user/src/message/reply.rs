//! Replies: what a backend answers. A descriptor that goes with one is the session's matter.

use zerocopy::IntoBytes;

use super::{
    CONFIG_BYTES_MAX, Code, FLAG_REPLY, RawConfig, RawHeader, RawTable, RegionInfo, VERSION, VringState,
};

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A number: features, counts, or what became of a request (0 is well).
    Number(u64),
    /// Where a ring was stopped.
    VringBase(VringState),
    /// A part of the configuration space.
    Config {
        /// From this byte on.
        offset: u32,
        /// As the frontend said.
        flags: u32,
        /// What; empty says that it cannot be read.
        bytes: Vec<u8>,
    },
    /// Nothing but what came along as a descriptor.
    Empty,
    /// In postcopy: where all regions are mapped here.
    Table(Vec<RegionInfo>),
    /// In postcopy: where a region is mapped here.
    Region(RegionInfo),
}

impl Reply {
    /// The whole message that answers `code`.
    ///
    /// # Panics
    /// If more configuration than [`CONFIG_BYTES_MAX`] is to be sent.
    pub fn encode(&self, code: Code) -> Vec<u8> {
        let payload = match self {
            Self::Number(number) => number.to_le_bytes().to_vec(),
            Self::Empty => Vec::new(),
            Self::Table(regions) => {
                let count = u32::try_from(regions.len()).expect("there are few");
                let head = RawTable { regions: count.into(), padding: 0.into() };
                [head.as_bytes(), regions.as_bytes()].concat()
            }
            Self::Region(region) => [&[0; 8], region.as_bytes()].concat(),
            Self::VringBase(state) => state.as_bytes().to_vec(),
            Self::Config { offset, flags, bytes } => {
                assert!(bytes.len() <= CONFIG_BYTES_MAX, "{} bytes of configuration", bytes.len());
                let size = u32::try_from(bytes.len()).expect("it is bounded above");
                let head = RawConfig { offset: (*offset).into(), size: size.into(), flags: (*flags).into() };
                // A frontend takes an answer without a payload for a refusal.
                if bytes.is_empty() { Vec::new() } else { [head.as_bytes(), bytes].concat() }
            }
        };
        let header = RawHeader::bytes(code, VERSION | FLAG_REPLY, payload.len());
        [&header[..], &payload].concat()
    }
}
