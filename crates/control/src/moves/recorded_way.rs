//! The way to another host in a record, by which a later towline connects to it again.

use std::fmt;

use serde::{Deserialize, Serialize};
use towline_channel::{Address, OneTimeCredentials, OneTimeKey};

use crate::hex::{from_hex, to_hex};

/// See the module's text. Its `Debug` form is without the key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RecordedWay {
    address: String,
    /// Certificates and this end's key, in hexadecimal digits of DER.
    certificate: String,
    key: String,
    peer: String,
}

impl RecordedWay {
    pub(crate) fn new(address: &Address, credentials: &OneTimeCredentials) -> Self {
        let own = credentials.own();
        Self {
            address: address.to_string(),
            certificate: to_hex(own.certificate()),
            key: to_hex(own.secret()),
            peer: to_hex(credentials.peer()),
        }
    }

    /// Where the other towline listens.
    pub(crate) fn address(&self) -> Option<Address> {
        self.address.parse().ok()
    }

    /// The keys of the move.
    pub(crate) fn credentials(&self) -> Option<OneTimeCredentials> {
        let key = OneTimeKey::from_der(from_hex(&self.certificate)?, from_hex(&self.key)?).ok()?;
        Some(key.with_peer(from_hex(&self.peer)?))
    }
}

impl fmt::Debug for RecordedWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedWay").field("address", &self.address).finish_non_exhaustive()
    }
}
