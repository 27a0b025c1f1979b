//! Explains TLS failures; messages name the file and the remedy.

use super::credentials::{
    CA_CERT, CA_CRL, CLIENT_CERT, CredentialsOrigin, SERVER_CERT, TlsClient, TlsServer,
};
use crate::Error;
use crate::guess::describe_plain;
use rustls::{AlertDescription, CertificateError, Error as TlsError, PeerIncompatible};

/// Number of leading bytes from which the peer's protocol is recognized.
pub(super) const MAGIC_BYTES: usize = 4;

/// A peer whose first bytes are not TLS.
pub(super) fn plain(peer: &str, what: &str) -> Error {
    let text = format!(
        "it sent {what}: turn TLS on there (tls-creds at the source's QEMU), or off here (--tls-creds)"
    );
    Error::tls(peer, text)
}

pub(super) fn at_client(peer: &str, tls: &TlsClient, error: &TlsError) -> Error {
    let text = match error {
        error if tls.origin.is_one_time() && is_about_certificates(error) => NOT_THE_PEER.into(),
        TlsError::InvalidCertificate(error) => certificate(&tls.origin, "server", error),
        TlsError::AlertReceived(alert) => refused(*alert, &own_client(tls)),
        TlsError::InvalidMessage(_) => {
            "it does not answer with TLS: turn TLS on there (tls-creds at the destination's QEMU), or off here (--tls-creds)".into()
        }
        error => other(error),
    };
    Error::tls(peer, text)
}

pub(super) fn at_server(peer: &str, tls: &TlsServer, error: &TlsError) -> Error {
    let own = tls.origin.file(SERVER_CERT);
    let text = match error {
        error if tls.origin.is_one_time() && is_about_certificates(error) => NOT_THE_PEER.into(),
        TlsError::InvalidCertificate(error) => certificate(&tls.origin, "client", error),
        TlsError::NoCertificatesPresented => format!(
            "it sent no client certificate, and every client needs one: put {CLIENT_CERT} and its key into its directory, signed by the CA of {}",
            tls.origin.file(CA_CERT)
        ),
        TlsError::AlertReceived(alert) => refused(*alert, &own),
        error => other(error),
    };
    Error::tls(peer, text)
}

/// The peer closed the connection where its answer was expected.
pub(super) fn ended_at_client(peer: &str, tls: &TlsClient) -> Error {
    let own = own_client(tls);
    let text = format!(
        "it ended the connection in the handshake: either it does not speak TLS (tls-creds at the destination's QEMU), or it does not accept {own}; its own log says which"
    );
    Error::tls(peer, text)
}

pub(super) fn ended_at_server(peer: &str, tls: &TlsServer, first: &[u8]) -> Error {
    let own = tls.origin.file(SERVER_CERT);
    let text = match (describe_plain(first), first) {
        (Some("TLS"), _) => format!(
            "it ended the connection in the handshake: it may not accept {own}{}; its own log says why",
            tls.origin.doubts()
        ),
        (Some(what), _) => return plain(peer, what),
        (None, []) => "it closed the connection without sending anything".into(),
        (None, _) => "it sent something else than TLS and ended the connection".into(),
    };
    Error::tls(peer, text)
}

/// Hint for a connection that the server closes before it has sent anything.
pub(super) fn doubt_at_client(tls: &TlsClient) -> String {
    let text = "it ended the connection right after the handshake:";
    if tls.has_certificate {
        format!("{text} it may not accept {}; its own log says why", own_client(tls))
    } else {
        format!("{text} it may want a client certificate, and there is {}", own_client(tls))
    }
}

/// The same of a client.
pub(super) fn doubt_at_server(tls: &TlsServer) -> String {
    format!(
        "it ended the connection right after the handshake: it may not accept {}{}; its own log says why",
        tls.origin.file(SERVER_CERT),
        tls.origin.doubts()
    )
}

/// An alert that ends a connection after its handshake.
pub(super) fn alert(peer: &str, alert: AlertDescription) -> Error {
    Error::tls(peer, refused(alert, "this side's certificate"))
}

/// Error of one-time certificates, of which the user can change none.
const NOT_THE_PEER: &str =
    "it is not the other end of this copy: another program uses the port, or is between the hosts";

fn is_about_certificates(error: &TlsError) -> bool {
    match error {
        TlsError::InvalidCertificate(_) | TlsError::NoCertificatesPresented => true,
        TlsError::AlertReceived(alert) => matches!(
            alert,
            AlertDescription::UnknownCA
                | AlertDescription::BadCertificate
                | AlertDescription::CertificateUnknown
                | AlertDescription::CertificateRequired
                | AlertDescription::DecryptError
        ),
        _ => false,
    }
}

fn own_client(tls: &TlsClient) -> String {
    let path = tls.origin.file(CLIENT_CERT);
    if tls.has_certificate { path } else { format!("no {path}") }
}

fn certificate(origin: &CredentialsOrigin, of: &str, error: &CertificateError) -> String {
    let in_directory = |name| origin.file(name);
    match error {
        CertificateError::UnknownIssuer => {
            format!("its {of} certificate is not signed by the CA of {}", in_directory(CA_CERT))
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("its {of} certificate has expired: make it a new one")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("its {of} certificate is not valid yet: is the clock right, here and where it was made?")
        }
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "its certificate is for {}, not for \"{}\": name the host that it is for (--tls-hostname), or give it a certificate with this name",
            names(presented),
            expected.to_str()
        ),
        CertificateError::Revoked => format!("its {of} certificate is revoked by {}", in_directory(CA_CRL)),
        CertificateError::InvalidPurposeContext { .. } | CertificateError::InvalidPurpose => {
            format!("its certificate is not one for a {of} (extended key usage)")
        }
        error => format!("its {of} certificate is not good: {error}"),
    }
}

/// Names of a certificate, which rustls has as `DnsName("vm")` and `IpAddress(127.0.0.1)`.
fn names(presented: &[String]) -> String {
    let name = |text: &String| {
        let inner = text.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
        inner.unwrap_or(text).trim_matches('"').to_owned()
    };
    match presented {
        [] => "no name (subjectAltName)".into(),
        presented => presented.iter().map(name).collect::<Vec<_>>().join(", "),
    }
}

fn refused(alert: AlertDescription, own: &str) -> String {
    match alert {
        AlertDescription::UnknownCA => {
            format!("it does not know the CA that signed {own}: both ends need the same {CA_CERT}")
        }
        AlertDescription::CertificateExpired => format!("it says that {own} has expired"),
        AlertDescription::CertificateRevoked => format!("it says that {own} is revoked"),
        AlertDescription::CertificateRequired => format!("it wants a client certificate, and there is {own}"),
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied => format!("it does not accept {own} (alert {alert:?})"),
        AlertDescription::ProtocolVersion => "it does not speak TLS 1.3, which is needed here".into(),
        alert => format!("it ended TLS with the alert {alert:?}; its own log may say why"),
    }
}

fn other(error: &TlsError) -> String {
    match error {
        TlsError::PeerIncompatible(
            PeerIncompatible::SupportedVersionsExtensionRequired
            | PeerIncompatible::Tls13RequiredForQuic
            | PeerIncompatible::Tls12NotOfferedOrEnabled
            | PeerIncompatible::ServerDoesNotSupportTls12Or13,
        ) => "it does not speak TLS 1.3, which is needed here".into(),
        error => error.to_string(),
    }
}
