//! Options and headings that several commands share.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ValueEnum, ValueHint};
use towline_control::plan::Tls;
use towline_migration::ZeroCopySend;

/// Headings of options.
pub(crate) const LANES: &str = "Lanes";
pub(crate) const TLS: &str = "TLS";
pub(crate) const LIMITS: &str = "Limits";
pub(crate) const POSTCOPY: &str = "Postcopy";
pub(crate) const IMAGES: &str = "Images";
pub(crate) const GUEST: &str = "Guest";
pub(crate) const HOSTS: &str = "Other host";
pub(crate) const PROCESS: &str = "Process";
pub(crate) const OUTPUT: &str = "Output";

/// Last line of `-h`.
pub(super) const MORE: &str = "More options, exit status and examples: --help, or the manual page";

/// TLS of streams.
#[derive(Debug, clap::Args)]
pub(crate) struct TlsArgs {
    /// Directory of certificates with QEMU's file names (tls-creds-x509); encrypts tcp:, unix: and wss://
    /// streams
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = TLS)]
    pub(crate) tls_creds: Option<PathBuf>,
    /// Host name in the certificate of DEST [default: the host of its address]
    #[arg(long, value_name = "NAME", requires = "tls_creds", hide_short_help = true, help_heading = TLS)]
    pub(crate) tls_hostname: Option<String>,
}

impl TlsArgs {
    pub(crate) fn tls(&self) -> Option<Tls> {
        let credentials = self.tls_creds.clone()?;
        Some(Tls::Files { credentials, hostname: self.tls_hostname.clone() })
    }
}

/// Form of the output.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Output {
    /// One JSON object per event on standard output (docs/json.md)
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
    /// Errors only; of a list, the names only
    #[arg(short, long, conflicts_with = "json", help_heading = OUTPUT)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    On,
    Off,
}

/// Parser of `--zero-copy-send`.
pub(super) fn zero_copy_send() -> impl TypedValueParser<Value = ZeroCopySend> {
    PossibleValuesParser::new(["auto", "on", "off"]).map(|value| match value.as_str() {
        "on" => ZeroCopySend::On,
        "off" => ZeroCopySend::Off,
        _ => ZeroCopySend::Auto,
    })
}

/// The way of a guest to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Via {
    /// Through both towlines, unless the guest or an option needs the other way.
    Auto,
    /// From QEMU to QEMU.
    Direct,
    /// Through both towlines.
    Relay,
}

/// Treatment of a guest that does not converge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IfNotConverging {
    /// It runs at DEST at once, and the rest of its memory follows.
    Postcopy,
    /// Its vCPUs are throttled from then on (QEMU's auto-converge).
    Throttle,
    /// It stays at SOURCE.
    GiveUp,
}

/// Splits at the first `=`, unless a half is empty.
pub(super) fn key_and_value(text: &str) -> Option<(&str, &str)> {
    text.split_once('=').filter(|(key, value)| !key.is_empty() && !value.is_empty())
}
