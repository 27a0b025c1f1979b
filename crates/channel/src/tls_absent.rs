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

/// A key for one connection. This build has no TLS, so there are none.
#[derive(Debug)]
pub enum OneTimeKey {}

/// Credentials for one connection. This build has no TLS, so there are none.
#[derive(Debug, Clone)]
pub enum OneTimeCredentials {}

impl OneTimeKey {
    /// Fails: this build has no TLS.
    ///
    /// # Errors
    /// [`Error::Unsupported`], always.
    pub fn generate() -> Result<Self> {
        Err(Error::unsupported("a connection", WITHOUT_TLS))
    }

    /// Cannot be called.
    pub fn certificate(&self) -> &[u8] {
        match *self {}
    }

    /// Cannot be called.
    pub fn with_peer(self, _certificate: Vec<u8>) -> OneTimeCredentials {
        match self {}
    }
}

impl TlsServer {
    /// Cannot be called.
    ///
    /// # Errors
    /// None.
    pub fn one_time(credentials: &OneTimeCredentials) -> Result<Self> {
        match *credentials {}
    }

    /// Fails: this build has no TLS.
    ///
    /// # Errors
    /// [`Error::Unsupported`], always.
    pub fn load(directory: &Path) -> Result<Self> {
        Err(Error::unsupported(&directory.display().to_string(), WITHOUT_TLS))
    }
}

impl TlsClient {
    /// Cannot be called.
    ///
    /// # Errors
    /// None.
    pub fn one_time(credentials: &OneTimeCredentials) -> Result<Self> {
        match *credentials {}
    }

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
