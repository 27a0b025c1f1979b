//! Why an end cannot be asked.

use std::path::PathBuf;

use towline_qmp as qmp;

use super::recorded::Error as RecordedError;
use crate::qemu;

/// Why an end's facts are not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A QEMU did not answer.
    #[error(transparent)]
    Qemu(#[from] qemu::Error),
    /// A control socket did not answer, or not as one of a device.
    #[error("ctl:{}: {source}", path.display())]
    Control {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: Box<qmp::Error>,
    },
    /// An image cannot be read.
    #[error(transparent)]
    Image(#[from] towline_image::Error),
    /// Recorded facts cannot be read.
    #[error("{from}: {source}")]
    Recorded {
        /// Where they should have come from.
        from: String,
        /// Why.
        source: RecordedError,
    },
    /// An attribute's type cannot be told.
    #[error("{}: {source}", path.display())]
    Attribute {
        /// The attribute.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}
