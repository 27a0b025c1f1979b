//! Errors that may pass by themselves.

use crate::Error;

impl Error {
    /// Returns true if the same read may succeed later: a store is unreachable, overloaded, or refuses
    /// credentials that expired.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            #[cfg(feature = "store")]
            Self::Store(error) => {
                matches!(error.downcast_ref(), Some(crate::store::Error::Store { .. }))
            }
            _ => false,
        }
    }
}

#[cfg(feature = "store")]
impl From<crate::store::Error> for Error {
    fn from(error: crate::store::Error) -> Self {
        Self::Store(Box::new(error))
    }
}
