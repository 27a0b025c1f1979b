//! Certificates in a directory, with the names that QEMU's `tls-creds-x509` has for them.
//!
//! | file | needed |
//! |---|---|
//! | `ca-cert.pem` | always: the CA that signs the other end's certificate |
//! | `ca-crl.pem` | certificates that this CA has revoked; optional |
//! | `server-cert.pem`, `server-key.pem` | to listen |
//! | `client-cert.pem`, `client-key.pem` | to connect to a server that requires them, as QEMU does unless `verify-peer=off` |
//!
//! A server accepts only clients with a certificate of this CA.

use crate::{Error, Result};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) const CA_CERT: &str = "ca-cert.pem";
pub(super) const CA_CRL: &str = "ca-crl.pem";
pub(super) const SERVER_CERT: &str = "server-cert.pem";
pub(super) const CLIENT_CERT: &str = "client-cert.pem";
const SERVER_KEY: &str = "server-key.pem";
const CLIENT_KEY: &str = "client-key.pem";

/// Credentials of a TLS server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TlsServer {
    config: Arc<ServerConfig>,
    directory: PathBuf,
}

/// Credentials of a TLS client. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    directory: PathBuf,
    hostname: Option<String>,
    has_certificate: bool,
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
        let mut config = config
            .with_single_cert(chain, key)
            .map_err(|error| at.mismatched(SERVER_CERT, SERVER_KEY, &error))?;
        config.ignore_client_order = true;
        // Tickets that a lane never reads would turn its end into a reset.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.enable_secret_extraction = true;
        Ok(Self { config: Arc::new(config), directory: directory.to_owned() })
    }

    pub(super) fn config(&self) -> &Arc<ServerConfig> {
        &self.config
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
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
        let mut config = if has_certificate {
            let (chain, key) = at.pair(CLIENT_CERT, CLIENT_KEY)?;
            let config = config.with_client_auth_cert(chain, key);
            config.map_err(|error| at.mismatched(CLIENT_CERT, CLIENT_KEY, &error))?
        } else {
            config.with_no_client_auth()
        };
        config.resumption = Resumption::disabled();
        config.enable_secret_extraction = true;
        let hostname = hostname.map(str::to_owned);
        Ok(Self { config: Arc::new(config), directory: directory.to_owned(), hostname, has_certificate })
    }

    /// The name that was given to [`Self::load`].
    pub fn hostname(&self) -> Option<&str> {
        self.hostname.as_deref()
    }

    pub(super) fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn has_certificate(&self) -> bool {
        self.has_certificate
    }
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
