//! Error of a page or a chart.

/// Failure to draw a chart or to format a page.
#[derive(Debug, thiserror::Error)]
#[error("a page or its chart cannot be made: {0}")]
pub struct Error(String);

impl Error {
    pub(crate) fn of(error: impl std::fmt::Display) -> Self {
        Self(error.to_string())
    }
}
