//! Certificates made for a test, in directories laid out for QEMU's `tls-creds-x509`.

use std::path::Path;

use anyhow::Result;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    DnType, ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SerialNumber, date_time_ymd,
};

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate to be issued.
#[derive(Debug, Clone, Copy)]
pub struct Holder<'a> {
    /// Role, and beginning of its file names: `server` or `client`.
    pub role: &'a str,
    /// Host names and addresses for which it is valid.
    pub names: &'a [&'a str],
    /// Serial number.
    pub serial: u64,
    /// Last year of its validity.
    pub until: i32,
}

impl Holder<'static> {
    /// A server on this machine.
    pub const SERVER: Self =
        Self { role: "server", names: &["localhost", "127.0.0.1"], serial: 2, until: 2999 };
    /// A client.
    pub const CLIENT: Self = Self { role: "client", names: &["client.lab"], serial: 3, until: 2999 };
}

impl Authority {
    /// Creates an authority with a new key.
    pub fn new(name: &str) -> Result<Self> {
        let mut params = params(&[], name, 2999)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// Writes `ca-cert.pem`.
    pub fn write(&self, directory: &Path) -> Result<()> {
        Ok(std::fs::write(directory.join("ca-cert.pem"), self.0.pem())?)
    }

    /// Issues a certificate and writes `ROLE-cert.pem` and `ROLE-key.pem`.
    pub fn issue(&self, directory: &Path, holder: Holder<'_>) -> Result<()> {
        let mut params = params(holder.names, holder.role, holder.until)?;
        params.serial_number = Some(holder.serial.into());
        // QEMU requires the key usage `keyEncipherment` too, for any type of key.
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![match holder.role {
            "server" => ExtendedKeyUsagePurpose::ServerAuth,
            _ => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        let key = KeyPair::generate()?;
        let certificate: Certificate = params.signed_by(&key, &self.0)?;
        std::fs::write(directory.join(format!("{}-cert.pem", holder.role)), certificate.pem())?;
        std::fs::write(directory.join(format!("{}-key.pem", holder.role)), key.serialize_pem())?;
        Ok(())
    }

    /// Writes `ca-crl.pem`, which revokes the certificate with this serial number.
    pub fn revoke(&self, directory: &Path, serial: u64) -> Result<()> {
        let revoked = RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(2999, 1, 1),
            crl_number: SerialNumber::from(1_u64),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        Ok(std::fs::write(directory.join("ca-crl.pem"), list.signed_by(&self.0)?.pem()?)?)
    }

    /// Writes a complete set: the authority's, a server's and a client's certificate.
    pub fn furnish(&self, directory: &Path) -> Result<()> {
        self.write(directory)?;
        self.issue(directory, Holder::SERVER)?;
        self.issue(directory, Holder::CLIENT)
    }
}

fn params(names: &[&str], common_name: &str, until: i32) -> Result<CertificateParams> {
    let mut params = CertificateParams::new(names.iter().copied().map(str::to_owned).collect::<Vec<_>>())?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = date_time_ymd(2010, 1, 1);
    params.not_after = date_time_ymd(until, 1, 1);
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}
