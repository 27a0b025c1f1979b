//! Who may be connected with whom, beyond the convention of `PATH_PORT` and `CONNECT`.
//!
//! ```text
//!   guest:PORT=tcp:ADDRESS    guest:PORT=unix:PATH      the guest connects to the host's PORT and gets that
//!   guest:PORT=vsock:CID:PORT                           the same, by the host's own AF_VSOCK
//!   tcp:ADDRESS=guest:PORT    unix:PATH=guest:PORT      we listen there; who connects gets the guest's PORT
//!   vsock:PORT=guest:PORT                               the same, with the host's own AF_VSOCK
//!   cid:N=uds:PATH                                      the guest connects to guest N, whose device's socket is PATH
//! ```
//! What has no rule is refused, but for the convention's own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// A place on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostAddress {
    /// An address, numeric: nothing is resolved on the way.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
    /// A socket of the host's own AF_VSOCK.
    Vsock {
        /// Whose; none: anybody's, to listen.
        cid: Option<u32>,
        /// The port.
        port: u32,
    },
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rule {
    /// The guest reaches a place by this port of the host.
    Connect {
        /// The port.
        port: u32,
        /// The place.
        to: HostAddress,
    },
    /// A place leads to this port of the guest.
    Listen {
        /// The place.
        from: HostAddress,
        /// The port.
        port: u32,
    },
    /// The guest reaches another guest by the socket of its device.
    PeerGuest {
        /// The other's context.
        cid: u64,
        /// The socket that takes `CONNECT`.
        uds: PathBuf,
    },
}

/// A rule that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// Not of the form.
    #[error(
        "`{found}` is not a rule; expected guest:PORT=tcp:ADDRESS:PORT, guest:PORT=unix:PATH, guest:PORT=vsock:CID:PORT, \
         tcp:ADDRESS:PORT=guest:PORT, unix:PATH=guest:PORT, vsock:PORT=guest:PORT or cid:N=uds:PATH"
    )]
    Form {
        /// What was given.
        found: String,
    },
    /// A port that is none.
    #[error("`{found}` is not a port; expected a number below 2^32 - 1")]
    Port {
        /// What was given.
        found: String,
    },
    /// A context that no other guest has.
    #[error("`{found}` is not a guest CID; expected a number from 3 to 2^32 - 2")]
    Cid {
        /// What was given.
        found: String,
    },
    /// An address that is none.
    #[error("`{found}` is not an address; expected a numeric one, such as 127.0.0.1:80 or [::1]:80")]
    Address {
        /// What was given.
        found: String,
    },
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let form = || RuleError::Form { found: text.to_owned() };
        let (from, to) = text.split_once('=').ok_or_else(form)?;
        if let (Some(cid), Some(path)) = (from.strip_prefix("cid:"), to.strip_prefix("uds:")) {
            return Ok(Self::PeerGuest { cid: guest_cid(cid)?, uds: path.into() });
        }
        // A path may have a `=` in it; then the guest is behind the last one.
        if let Some(number) = from.strip_prefix("guest:") {
            let to = place(to).ok_or_else(form)??;
            // Nobody connects to anybody.
            let somewhere = !matches!(to, HostAddress::Vsock { cid: None, .. });
            return if somewhere { Ok(Self::Connect { port: port(number)?, to }) } else { Err(form()) };
        }
        let (from, to) = text.rsplit_once('=').ok_or_else(form)?;
        let number = to.strip_prefix("guest:").ok_or_else(form)?;
        Ok(Self::Listen { from: place(from).ok_or_else(form)??, port: port(number)? })
    }
}

/// A context that a guest can have.
///
/// # Errors
/// [`RuleError::Cid`].
pub fn guest_cid(text: &str) -> Result<u64, RuleError> {
    let cid = text.parse().ok().filter(|cid| (3..u64::from(u32::MAX)).contains(cid));
    cid.ok_or_else(|| RuleError::Cid { found: text.to_owned() })
}

fn port(text: &str) -> Result<u32, RuleError> {
    let port = text.parse().ok().filter(|port| *port < u32::MAX);
    port.ok_or_else(|| RuleError::Port { found: text.to_owned() })
}

fn place(text: &str) -> Option<Result<HostAddress, RuleError>> {
    if let Some(path) = text.strip_prefix("unix:") {
        return (!path.is_empty()).then(|| Ok(HostAddress::Unix(path.into())));
    }
    if let Some(address) = text.strip_prefix("vsock:") {
        let (cid, number) = match address.split_once(':') {
            Some((cid, number)) => (Some(cid.parse().ok()?), number),
            None => (None, address),
        };
        return Some(port(number).map(|port| HostAddress::Vsock { cid, port }));
    }
    let address = text.strip_prefix("tcp:")?;
    Some(address.parse().map(HostAddress::Tcp).map_err(|_| RuleError::Address { found: address.to_owned() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_what_they_look_like() {
        let rule = |text: &str| text.parse::<Rule>().unwrap();
        let tcp = HostAddress::Tcp("127.0.0.1:80".parse().unwrap());
        assert_eq!(rule("guest:5=tcp:127.0.0.1:80"), Rule::Connect { port: 5, to: tcp.clone() });
        assert_eq!(rule("tcp:127.0.0.1:80=guest:5"), Rule::Listen { from: tcp, port: 5 });
        let odd = HostAddress::Unix("/a=b".into());
        assert_eq!(rule("guest:5=unix:/a=b"), Rule::Connect { port: 5, to: odd.clone() });
        assert_eq!(rule("unix:/a=b=guest:5"), Rule::Listen { from: odd, port: 5 });
        let (cid, port) = (Some(1), 9001);
        assert_eq!(
            rule("guest:5=vsock:1:9001"),
            Rule::Connect { port: 5, to: HostAddress::Vsock { cid, port } }
        );
        assert_eq!(
            rule("vsock:9001=guest:5"),
            Rule::Listen { from: HostAddress::Vsock { cid: None, port }, port: 5 }
        );
        assert_eq!(rule("cid:7=uds:/run/seven"), Rule::PeerGuest { cid: 7, uds: "/run/seven".into() });
    }

    #[test]
    fn what_is_no_rule_is_named() {
        let error = |text: &str| text.parse::<Rule>().unwrap_err().to_string();
        assert!(error("5").starts_with("`5` is not a rule; expected guest:PORT=tcp:"));
        assert!(error("guest:5=").starts_with("`guest:5=` is not a rule"));
        assert!(error("guest:5=vsock:9001").starts_with("`guest:5=vsock:9001` is not a rule"));
        assert!(error("vsock:x:1=guest:5").starts_with("`vsock:x:1=guest:5` is not a rule"));
        assert_eq!(error("guest:x=unix:/a"), "`x` is not a port; expected a number below 2^32 - 1");
        assert!(error("guest:4294967295=unix:/a").contains("is not a port"));
        assert!(error("tcp:localhost:80=guest:5").starts_with("`localhost:80` is not an address"));
        assert!(error("cid:2=uds:/a").starts_with("`2` is not a guest CID"));
    }
}
