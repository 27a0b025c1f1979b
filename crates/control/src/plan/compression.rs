//! QEMU's migration parameters for compressed lanes.

use towline_migration::Compression;
use towline_qmp::commands::MigrationParameters;

/// Migration parameters for this compression.
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
