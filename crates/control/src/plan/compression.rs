//! Compressed lanes: what is refused beforehand, and QEMU's parameters for the rest.

use towline_migration::Compression;
use towline_qmp::commands::MigrationParameters;

use super::{Destination, Error, Options, Source};

/// Refuses compression where it would do nothing.
pub(super) fn check(
    source: &Source,
    destination: &Destination,
    options: &Options,
    lanes: usize,
) -> Result<(), Error> {
    if options.compression == Compression::None {
        return Ok(());
    }
    let name = options.compression.method().name();
    if source.is_image() && destination.is_image() {
        return Err(Error::Usage(format!(
            "--compression {name} between two images, neither of which is a stream: leave the option out"
        )));
    }
    match lanes {
        0 => Err(Error::Usage(format!(
            "--compression {name} with 0 lanes: only lanes are compressed, the main channel never is; give both ends the same --multifd-channels, at least 1"
        ))),
        _ => Ok(()),
    }
}

/// What a QEMU is told of it.
pub(super) fn parameters(compression: Compression, lanes: usize) -> MigrationParameters {
    let (zlib, zstd) = match compression {
        Compression::None => (None, None),
        Compression::Zlib { level } => (Some(level), None),
        Compression::Zstd { level } => (None, Some(level)),
    };
    MigrationParameters {
        multifd_compression: (lanes > 0).then(|| compression.method().name().into()),
        multifd_zlib_level: zlib,
        multifd_zstd_level: zstd,
        ..MigrationParameters::default()
    }
}
