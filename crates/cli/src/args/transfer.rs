//! Options that `copy` and `move` share.

use clap::builder::{PossibleValue, TypedValueParser};
use towline_migration::{Compression, ZeroCopySend};

use super::{GUEST, IMAGES, LANES, LIMITS, OnOff, POSTCOPY, TlsArgs, zero_copy_send};
use crate::observability::ObservabilityArgs;
use crate::report::ReportArgs;
use crate::sandbox::SandboxArgs;
use crate::units::{Unit, bytes, milliseconds, number, seconds, whole};

/// Options of a transfer.
#[derive(Debug, clap::Args)]
pub(crate) struct TransferArgs {
    /// Number of lanes (multifd channels), the same at both ends; 0 disables them [default: 4 where QMP can
    /// set them, else 0]
    #[arg(long, value_name = "N", value_parser = number::<usize>, help_heading = LANES)]
    pub(crate) multifd_channels: Option<usize>,
    /// Compression of the lanes, the method the same at both ends of a stream (QEMU's multifd-compression).
    /// LEVEL is 1, or for zlib 0 (none) to 9 (best), for zstd 1 (fastest) to 20 (best), 0 for its own default
    #[arg(long, value_name = "METHOD[:LEVEL]", value_parser = CompressionParser, default_value = "none", help_heading = LANES)]
    pub(crate) compression: Compression,
    /// Zero-copy sends (MSG_ZEROCOPY) on TCP lanes: auto, where they save CPU time; on, or fail; off
    #[arg(long, value_name = "AUTO|ON|OFF", value_parser = zero_copy_send(), default_value = "auto", hide_short_help = true, help_heading = LANES)]
    pub(crate) zero_copy_send: ZeroCopySend,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Maximum bandwidth in bytes per second (suffixes K, M, G) [default: unlimited]
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = LIMITS)]
    pub(crate) max_bandwidth: Option<u64>,
    /// Maximum downtime in milliseconds
    #[arg(long, value_name = "MS", value_parser = milliseconds, default_value_t = 300, help_heading = LIMITS)]
    pub(crate) downtime_limit: u64,
    /// Throttle the vCPUs of a qmp: SOURCE that dirties memory faster than it is sent (QEMU's auto-converge)
    #[arg(long, help_heading = LIMITS)]
    pub(crate) throttle: bool,
    /// Run the guest at a qmp: DEST even if it was paused
    #[arg(long, conflicts_with = "paused", help_heading = GUEST)]
    pub(crate) run: bool,
    /// Leave the guest at a qmp: DEST paused even if it ran
    #[arg(long, help_heading = GUEST)]
    pub(crate) paused: bool,
    /// Return path of streams; off for one-way transports such as files and pipes
    #[arg(long, value_name = "ON|OFF", default_value = "on", hide_short_help = true, help_heading = LANES)]
    pub(crate) return_path: OnOff,
    /// Replace an existing image
    #[arg(long, help_heading = IMAGES)]
    pub(crate) overwrite: bool,
    #[command(flatten)]
    pub(crate) postcopy: PostcopyArgs,
    #[command(flatten)]
    pub(crate) observability: ObservabilityArgs,
    /// Timeout in seconds for connecting to the other end, and for its first reply
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds, hide_short_help = true, help_heading = LIMITS)]
    pub(crate) connect_timeout: std::time::Duration,
    /// Timeout in seconds for a SOURCE to connect where towline listens
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds, hide_short_help = true, help_heading = LIMITS)]
    pub(crate) accept_timeout: std::time::Duration,
    /// Silence in seconds after which the other end of a tcp: stream is taken for lost
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds, hide_short_help = true, help_heading = LIMITS)]
    pub(crate) peer_timeout: std::time::Duration,
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
}

/// Options of postcopy.
#[derive(Debug, clap::Args)]
pub(crate) struct PostcopyArgs {
    /// Run the guest at DEST at once, and load its memory on demand (docs/instant-restore.md)
    #[arg(long, help_heading = POSTCOPY)]
    pub(crate) postcopy: bool,
    /// Time in seconds for which a guest that runs at DEST without all of its memory, and whose connection was lost, is connected again
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds, hide_short_help = true, help_heading = POSTCOPY)]
    pub(crate) recover_timeout: std::time::Duration,
    /// Send requested pages on a separate channel; the other QEMU needs the same postcopy-preempt
    #[arg(long, requires = "postcopy", hide_short_help = true, help_heading = POSTCOPY)]
    pub(crate) postcopy_preempt: bool,
}

/// Parser of `METHOD[:LEVEL]`, of which the methods are completed.
#[derive(Debug, Clone, Copy)]
struct CompressionParser;

impl TypedValueParser for CompressionParser {
    type Value = Compression;

    fn parse_ref(
        &self,
        command: &clap::Command,
        option: Option<&clap::Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<Compression, clap::Error> {
        compression.parse_ref(command, option, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(["none", "zlib", "zstd"].map(PossibleValue::new).into_iter()))
    }
}

/// Parses QEMU's `multifd-compression` without its hardware methods, with `multifd-zlib-level` or
/// `multifd-zstd-level`.
fn compression(text: &str) -> Result<Compression, String> {
    let (method, level) = text.split_once(':').map_or((text, None), |(method, level)| (method, Some(level)));
    let level = |max: u8| {
        level.map_or(Ok(Compression::LEVEL_DEFAULT), |level| whole(level, Unit::None, 0..=u64::from(max)))
    };
    match text {
        "none" => Ok(Compression::None),
        _ if method == "zlib" => Ok(Compression::Zlib { level: level(Compression::ZLIB_LEVEL_MAX)? }),
        _ if method == "zstd" => Ok(Compression::Zstd { level: level(Compression::ZSTD_LEVEL_MAX)? }),
        _ => Err("expected none, zlib, zstd, zlib:LEVEL or zstd:LEVEL".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_has_the_levels_of_qemu() {
        for (text, expected) in [
            ("none", Compression::None),
            ("zlib", Compression::Zlib { level: 1 }),
            ("zlib:0", Compression::Zlib { level: 0 }),
            ("zlib:9", Compression::Zlib { level: 9 }),
            ("zstd", Compression::Zstd { level: 1 }),
            ("zstd:20", Compression::Zstd { level: 20 }),
        ] {
            assert_eq!(compression(text), Ok(expected), "{text}");
        }
        for (text, expected) in [
            ("zlib:10", "a whole number from 0 to 9"),
            ("zstd:21", "a whole number from 0 to 20"),
            ("zstd:", "a whole number"),
            ("none:1", "expected none, zlib, zstd"),
            ("qpl", "expected none, zlib, zstd"),
        ] {
            let error = compression(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
