//! Credentials in a build without TLS: the types are there, and no value of them can be made.

use crate::{Error, Result};
use std::path::Path;

const WITHOUT_TLS: &str = "TLS; build towline-channel with its feature `tls`";

/// Credentials of a TLS server. This build has no TLS, so there are none.
#[derive(Debug, Clone)]
pub enum TlsServer {}

/// Credentials of a TLS client. This build has no TLS, so there are none.
#[derive(Debug, Clone)]
pub enum TlsClient {}

impl TlsServer {
    /// Fails: this build has no TLS.
    ///
    /// # Errors
    /// [`Error::Unsupported`], always.
    pub fn load(directory: &Path) -> Result<Self> {
        Err(Error::unsupported(&directory.display().to_string(), WITHOUT_TLS))
    }
}

impl TlsClient {
    /// Fails: this build has no TLS.
    ///
    /// # Errors
    /// [`Error::Unsupported`], always.
    pub fn load(directory: &Path, hostname: Option<&str>) -> Result<Self> {
        let _ = hostname;
        Err(Error::unsupported(&directory.display().to_string(), WITHOUT_TLS))
    }

    pub(crate) fn hostname(&self) -> Option<&str> {
        match *self {}
    }
}
