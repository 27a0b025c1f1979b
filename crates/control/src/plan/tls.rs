//! Encrypted streams: what is refused beforehand, and the credentials for the rest.

use std::path::PathBuf;

use towline_channel::{Address, ConnectOptions, ListenOptions, TlsClient, TlsServer};

use super::{Destination, Error, Options, Source, zero_copy};

/// How streams are encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// A directory with the file names of QEMU's `tls-creds-x509`.
    pub credentials: PathBuf,
    /// What the certificate of a server must be for; `None`: the host of its address.
    pub hostname: Option<String>,
}

/// Refuses TLS where it would do nothing, and credentials that are no good, before anything is touched.
pub(super) fn check(source: &Source, destination: &Destination, options: &Options) -> Result<(), Error> {
    let from = match source {
        Source::Stream(address) => Some(address),
        _ => None,
    };
    let to = match destination {
        Destination::Stream(address) => Some(address),
        _ => None,
    };
    let streams = || [from, to].into_iter().flatten();
    let Some(tls) = &options.tls else {
        return match streams().find(|address| matches!(address, Address::WebSocket { secure: true, .. })) {
            Some(address) => {
                Err(Error::Usage(format!("{address} needs --tls-creds DIR; ws:// is the one without TLS")))
            }
            None => Ok(()),
        };
    };
    if from.is_none() && to.is_none() {
        return Err(Error::Usage(
            "--tls-creds is for a stream (tcp:, unix:), and neither end is one: between a qmp: QEMU and towline there is a private Unix socket, which needs none; leave the option out".into(),
        ));
    }
    let carries = |address: &&Address| {
        matches!(address, Address::Tcp { .. } | Address::Unix(_) | Address::WebSocket { secure: true, .. })
    };
    if let Some(address) = streams().find(|address| !carries(address)) {
        return Err(Error::Usage(format!(
            "--tls-creds with {address}: only tcp:, unix: and wss:// speak TLS; leave the option out"
        )));
    }
    match (to, &tls.hostname) {
        (None, Some(_)) => {
            return Err(Error::Usage(
                "--tls-hostname is the name of a destination that is connected to (tcp:, unix:), and here nobody is: leave the option out".into(),
            ));
        }
        (Some(address @ Address::Unix(_)), None) => {
            return Err(Error::Usage(format!(
                "--tls-creds with {address}, which names no host: say with --tls-hostname which its certificate is for"
            )));
        }
        _ => {}
    }
    if from.is_some() {
        listening(options)?;
    }
    if to.is_some() {
        connecting(options)?;
    }
    Ok(())
}

/// How to listen for a stream.
pub(super) fn listening(options: &Options) -> Result<ListenOptions, Error> {
    let tls = options.tls.as_ref().map(|tls| TlsServer::load(&tls.credentials)).transpose()?;
    Ok(ListenOptions { tls, ..ListenOptions::default() })
}

/// How to connect to one.
pub(super) fn connecting(options: &Options) -> Result<ConnectOptions, Error> {
    let load = |tls: &Tls| TlsClient::load(&tls.credentials, tls.hostname.as_deref());
    let tls = options.tls.as_ref().map(load).transpose()?;
    let zero_copy = zero_copy::is_wanted(options);
    Ok(ConnectOptions { zero_copy, tls, ..ConnectOptions::default() })
}
