//! Certificates in a directory, with the names that QEMU's `tls-creds-x509` has for them.
//!
//! | file | needed |
//! |---|---|
//! | `ca-cert.pem` | always: the CA that signs the other end's certificate |
//! | `ca-crl.pem` | certificates that this CA has revoked; optional |
//! | `server-cert.pem`, `server-key.pem` | to listen |
//! | `client-cert.pem`, `client-key.pem` | to connect to a server that requires them, as QEMU does unless `verify-peer=off` |
//!
//! A server accepts only clients with a certificate of this CA. Two ends that have another channel between them, which is authenticated,
//! need no files: each makes a [`OneTimeKey`], and accepts the certificate of the other one alone.

use crate::{Error, Result};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) const CA_CERT: &str = "ca-cert.pem";
pub(super) const CA_CRL: &str = "ca-crl.pem";
pub(super) const SERVER_CERT: &str = "server-cert.pem";
pub(super) const CLIENT_CERT: &str = "client-cert.pem";
const SERVER_KEY: &str = "server-key.pem";
const CLIENT_KEY: &str = "client-key.pem";
/// Name that every one-time certificate is for.
const ONE_TIME_NAME: &str = "towline";

/// A key that one end makes for one connection, with a certificate that it signs itself. Its `Debug` form is without the key.
pub struct OneTimeKey {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

/// Credentials of one end for one connection: its own key, and the certificate of the other end, which alone is accepted. Cheap to clone.
#[derive(Debug, Clone)]
pub struct OneTimeCredentials {
    own: Arc<OneTimeKey>,
    peer: CertificateDer<'static>,
}

impl OneTimeKey {
    /// Makes one.
    ///
    /// # Errors
    /// [`Error::TlsOneTime`]: the system has no randomness.
    pub fn generate() -> Result<Self> {
        let key = rcgen::KeyPair::generate().map_err(one_time_error)?;
        let certificate =
            rcgen::CertificateParams::new([ONE_TIME_NAME.to_owned()]).map_err(one_time_error)?;
        let certificate = certificate.self_signed(&key).map_err(one_time_error)?;
        Self::from_der(certificate.der().to_vec(), key.serialize_der())
    }

    /// Its certificate, in DER, for the other end.
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// One that was made before, in DER (PKCS #8).
    ///
    /// # Errors
    /// [`Error::TlsOneTime`]: it is not a key.
    pub fn from_der(certificate: Vec<u8>, key: Vec<u8>) -> Result<Self> {
        let key = PrivateKeyDer::try_from(key).map_err(one_time_error)?;
        Ok(Self { certificate: certificate.into(), key })
    }

    /// Its secret key, in DER (PKCS #8).
    pub fn secret(&self) -> &[u8] {
        self.key.secret_der()
    }

    /// Credentials for a connection with the end that has this certificate, in DER.
    pub fn with_peer(self, certificate: Vec<u8>) -> OneTimeCredentials {
        OneTimeCredentials { own: Arc::new(self), peer: certificate.into() }
    }
}

impl OneTimeCredentials {
    /// The key of this end.
    pub fn own(&self) -> &OneTimeKey {
        &self.own
    }

    /// The certificate of the other end, in DER.
    pub fn peer(&self) -> &[u8] {
        &self.peer
    }
}

impl fmt::Debug for OneTimeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OneTimeKey").finish_non_exhaustive()
    }
}

/// Origin of credentials, for messages.
#[derive(Debug, Clone)]
pub(super) enum CredentialsOrigin {
    Directory(PathBuf),
    OneTime,
}

impl CredentialsOrigin {
    /// Names the file of this name.
    pub(super) fn file(&self, name: &str) -> String {
        match self {
            Self::Directory(directory) => directory.join(name).display().to_string(),
            Self::OneTime => "the one-time certificate of this connection".into(),
        }
    }

    pub(super) fn is_one_time(&self) -> bool {
        matches!(self, Self::OneTime)
    }

    /// Possible faults of a certificate, for messages.
    pub(super) fn doubts(&self) -> &'static str {
        if self.is_one_time() { "" } else { " (its CA, date or names)" }
    }
}

/// Credentials of a TLS server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TlsServer {
    pub(super) config: Arc<ServerConfig>,
    pub(super) origin: CredentialsOrigin,
}

/// Credentials of a TLS client. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TlsClient {
    pub(super) config: Arc<ClientConfig>,
    pub(super) origin: CredentialsOrigin,
    hostname: Option<String>,
    pub(super) has_certificate: bool,
}

impl TlsServer {
    /// Reads `ca-cert.pem`, `server-cert.pem`, `server-key.pem` and, if it exists, `ca-crl.pem`.
    ///
    /// # Errors
    /// [`Error::TlsCredentials`] and [`Error::TlsFile`] name the file and its fault.
    pub fn load(directory: &Path) -> Result<Self> {
        let at = Files { directory };
        let provider = provider();
        let (chain, key) = at.pair(SERVER_CERT, SERVER_KEY)?;
        let roots = Arc::new(at.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .with_crls(at.revoked()?)
            .allow_unknown_revocation_status()
            .build()
            .map_err(|error| at.bad(CA_CRL, error))?;
        let config = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let config = config.expect("the provider has the version").with_client_cert_verifier(verifier);
        let config = config
            .with_single_cert(chain, key)
            .map_err(|error| at.mismatched(SERVER_CERT, SERVER_KEY, &error))?;
        Ok(Self::new(config, CredentialsOrigin::Directory(directory.to_owned())))
    }

    /// Credentials of the end that listens.
    ///
    /// # Errors
    /// [`Error::TlsOneTime`]: the other end's certificate is not one.
    pub fn one_time(credentials: &OneTimeCredentials) -> Result<Self> {
        let (provider, roots) = (provider(), credentials.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let verifier = verifier.map_err(one_time_error)?;
        let config = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let config = config.expect("the provider has the version").with_client_cert_verifier(verifier);
        let (chain, key) = credentials.pair();
        let config = config.with_single_cert(chain, key).map_err(one_time_error)?;
        Ok(Self::new(config, CredentialsOrigin::OneTime))
    }

    fn new(mut config: ServerConfig, origin: CredentialsOrigin) -> Self {
        config.ignore_client_order = true;
        // Tickets that a lane never reads would turn its end into a reset.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.enable_secret_extraction = true;
        Self { config: Arc::new(config), origin }
    }
}

impl TlsClient {
    /// Reads `ca-cert.pem` and, if they exist, `client-cert.pem` with `client-key.pem`, and `ca-crl.pem`.
    /// `hostname` is the name that the server's certificate must be for; `None`: that of the address that is
    /// connected to.
    ///
    /// # Errors
    /// [`Error::TlsCredentials`] and [`Error::TlsFile`] name the file and its fault.
    pub fn load(directory: &Path, hostname: Option<&str>) -> Result<Self> {
        let at = Files { directory };
        let provider = provider();
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(at.roots()?), Arc::clone(&provider))
                .with_crls(at.revoked()?)
                .allow_unknown_revocation_status()
                .build()
                .map_err(|error| at.bad(CA_CRL, error))?;
        let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let config = config.expect("the provider has the version").with_webpki_verifier(verifier);
        let has_certificate = at.has(CLIENT_CERT) || at.has(CLIENT_KEY);
        let config = if has_certificate {
            let (chain, key) = at.pair(CLIENT_CERT, CLIENT_KEY)?;
            let config = config.with_client_auth_cert(chain, key);
            config.map_err(|error| at.mismatched(CLIENT_CERT, CLIENT_KEY, &error))?
        } else {
            config.with_no_client_auth()
        };
        let origin = CredentialsOrigin::Directory(directory.to_owned());
        Ok(Self { has_certificate, ..Self::new(config, origin, hostname) })
    }

    /// Credentials of the end that connects.
    ///
    /// # Errors
    /// [`Error::TlsOneTime`]: the other end's certificate is not one.
    pub fn one_time(credentials: &OneTimeCredentials) -> Result<Self> {
        let config = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
        let config =
            config.expect("the provider has the version").with_root_certificates(credentials.roots()?);
        let (chain, key) = credentials.pair();
        let config = config.with_client_auth_cert(chain, key).map_err(one_time_error)?;
        Ok(Self::new(config, CredentialsOrigin::OneTime, Some(ONE_TIME_NAME)))
    }

    fn new(mut config: ClientConfig, origin: CredentialsOrigin, hostname: Option<&str>) -> Self {
        config.resumption = Resumption::disabled();
        config.enable_secret_extraction = true;
        let hostname = hostname.map(str::to_owned);
        Self { config: Arc::new(config), origin, hostname, has_certificate: true }
    }

    /// Name that the server's certificate must be for; `None`: that of the address that is connected to.
    pub fn hostname(&self) -> Option<&str> {
        self.hostname.as_deref()
    }
}

impl OneTimeCredentials {
    fn roots(&self) -> Result<Arc<RootCertStore>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.peer.clone()).map_err(one_time_error)?;
        Ok(Arc::new(roots))
    }

    fn pair(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        (vec![self.own.certificate.clone()], self.own.key.clone_key())
    }
}

fn one_time_error(why: impl fmt::Display) -> Error {
    Error::TlsOneTime { why: why.to_string() }
}

/// The ciphers of TLS 1.3 in the order of their speed here.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites.retain(|suite| suite.tls13().is_some());
    let has_aes = has_aes();
    provider.cipher_suites.sort_by_key(|suite| match suite.suite() {
        CipherSuite::TLS13_CHACHA20_POLY1305_SHA256 if !has_aes => 0,
        CipherSuite::TLS13_AES_128_GCM_SHA256 => 1,
        CipherSuite::TLS13_AES_256_GCM_SHA384 => 2,
        _ => 3,
    });
    Arc::new(provider)
}

/// Returns true if the processor has instructions for AES, without which ChaCha20 is several times as fast.
fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

struct Files<'a> {
    directory: &'a Path,
}

impl Files<'_> {
    fn bad(&self, name: &str, why: impl std::fmt::Display) -> Error {
        Error::TlsCredentials { path: self.directory.join(name), why: why.to_string() }
    }

    fn mismatched(&self, certificate: &str, key: &str, error: &rustls::Error) -> Error {
        match error {
            rustls::Error::InconsistentKeys(_) => {
                self.bad(certificate, format!("{key} is not the key of it"))
            }
            error => self.bad(certificate, error),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.directory.join(name).exists()
    }

    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.directory.join(name);
        std::fs::read(&path).map_err(|source| Error::TlsFile { path, source })
    }

    fn all<T: PemObject>(&self, name: &str) -> Result<Vec<T>> {
        let bytes = self.read(name)?;
        let all: Result<Vec<T>, _> = T::pem_slice_iter(&bytes).collect();
        all.map_err(|error| self.bad(name, format!("it is not a valid PEM file: {error}")))
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        for certificate in self.all::<CertificateDer<'static>>(CA_CERT)? {
            roots.add(certificate).map_err(|error| self.bad(CA_CERT, error))?;
        }
        if roots.is_empty() { Err(self.bad(CA_CERT, "there is no certificate in it")) } else { Ok(roots) }
    }

    fn revoked(&self) -> Result<Vec<CertificateRevocationListDer<'static>>> {
        if self.has(CA_CRL) { self.all(CA_CRL) } else { Ok(Vec::new()) }
    }

    /// A certificate with those that lead to the CA, and its key.
    fn pair(
        &self,
        certificate: &str,
        key: &str,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
        let chain = self.all(certificate)?;
        if chain.is_empty() {
            return Err(self.bad(certificate, "there is no certificate in it"));
        }
        let bytes = self.read(key)?;
        let key = PrivateKeyDer::from_pem_slice(&bytes)
            .map_err(|error| self.bad(key, format!("there is no private key in it: {error}")))?;
        Ok((chain, key))
    }
}
