//! Compressed lanes: QEMU's `multifd-compression`, zlib and zstd.
//!
//! ```text
//!   lane     header (bits of the method, bytes that follow) · compressed pages │ header · compressed pages │ …
//!            └────────────── one stream for the lane's whole life, flushed at each packet's end ──────────┘
//! ```
//!
//! The pages of a packet can be restored from its bytes and those before it. Zero pages are sent as such,
//! uncompressed.
//!
//! **The one copy.** A running guest may write a page while it is compressed. If the compressor reads a byte
//! twice and finds it changed, its output may be undecodable. So pages of live memory are copied first, as in
//! QEMU (`multifd-zlib.c`); those of an image and of a relay are read in place. Nothing is sent zero-copy:
//! the compressed bytes are in a buffer that the next packet replaces, without waiting.
//!
//! On receipt pages are decompressed into the lane's own buffer and never straight into a guest's memory: a
//! decompressor reads its output again, so a concurrent writer would determine the content of later pages.
//!
//! Limits: a packet decompresses to exactly its pages; its compressed form has at most
//! [`limits::PACKET_COMPRESSED_BYTES_MAX`](towline_protocol::limits::PACKET_COMPRESSED_BYTES_MAX), and a
//! lane's window is at most [`limits::ZSTD_WINDOW_LOG_MAX`](towline_protocol::limits::ZSTD_WINDOW_LOG_MAX).
//! QPL, UADK and QATzip need hardware and are refused by name.

mod compressor;
mod decompressor;
#[cfg(test)]
mod tests;

use towline_protocol::multifd::Method;

pub(crate) use compressor::Compressor;
pub(crate) use decompressor::Decompressor;

/// Compression of the pages on lanes. Both ends use the same method; the level is up to the sending end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// No compression.
    #[default]
    None,
    /// A zlib stream for each lane.
    Zlib {
        /// 0 (none) to [`Compression::ZLIB_LEVEL_MAX`] (best); higher values count as the maximum.
        level: u8,
    },
    /// A zstd stream for each lane.
    Zstd {
        /// 1 (fastest) to [`Compression::ZSTD_LEVEL_MAX`] (best), 0 is zstd's default; higher values count
        /// as the maximum.
        level: u8,
    },
}

impl Compression {
    /// Maximum of QEMU's `multifd-zlib-level`.
    pub const ZLIB_LEVEL_MAX: u8 = 9;
    /// Maximum of QEMU's `multifd-zstd-level`.
    pub const ZSTD_LEVEL_MAX: u8 = 20;
    /// QEMU's default of both.
    pub const LEVEL_DEFAULT: u8 = 1;

    /// The method in packets, and its name in QEMU's `multifd-compression`.
    pub fn method(self) -> Method {
        match self {
            Self::None => Method::None,
            Self::Zlib { .. } => Method::Zlib,
            Self::Zstd { .. } => Method::Zstd,
        }
    }
}
