//! Zero-copy options of lanes.

use towline_migration::outgoing::LaneOptions;
use towline_migration::{Compression, ZeroCopySend};

use super::request::CopyRequest;

/// Returns true if lanes should be connected for zero-copy sends.
pub(super) fn is_wanted(options: &CopyRequest) -> bool {
    let copied = options.compression != Compression::None || options.tls.is_some();
    options.zero_copy_send != ZeroCopySend::Off && !copied
}

/// Send options of lanes.
pub(super) fn lane_options(options: &CopyRequest) -> LaneOptions {
    LaneOptions { compression: options.compression, zero_copy_send: options.zero_copy_send }
}
