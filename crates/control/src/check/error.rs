//! Errors of gathering facts.

use std::path::PathBuf;

use towline_qmp as qmp;

use super::recorded::Error as RecordedError;
use crate::qemu;

/// Error of gathering an end's facts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A QEMU could not be queried.
    #[error("{0}")]
    Qemu(#[from] qemu::Error),
    /// A control socket could not be queried, or is not that of a device.
    #[error("ctl:{}: {source}", path.display())]
    Control {
        /// The socket.
        path: PathBuf,
        /// The reason.
        source: Box<qmp::Error>,
    },
    /// An image cannot be read.
    #[error("{0}")]
    Image(#[from] towline_image::Error),
    /// Recorded facts cannot be read.
    #[error("{from}: {source}")]
    Recorded {
        /// Where they were read from.
        from: String,
        /// The reason.
        source: RecordedError,
    },
    /// The type of an attribute cannot be determined.
    #[error("{}: {source}", path.display())]
    Attribute {
        /// The attribute.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
}
