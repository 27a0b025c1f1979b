//! Zero-copy sends: what `on` cannot have, said before anything is touched.

use towline_migration::outgoing::LaneOptions;
use towline_migration::{Compression, ZeroCopySend};

use super::request::Request;

/// Whether lanes are to be connected so that they can.
pub(super) fn is_wanted(options: &Request) -> bool {
    let copied = options.compression != Compression::None || options.tls.is_some();
    options.zero_copy_send != ZeroCopySend::Off && !copied
}

/// How lanes send.
pub(super) fn lane_options(options: &Request) -> LaneOptions {
    LaneOptions { compression: options.compression, zero_copy_send: options.zero_copy_send }
}
