//! Forwarding rules: permitted connections beside Firecracker's convention of `PATH_PORT` and `CONNECT`.
//!
//! ```text
//!   guest:PORT=tcp:ADDRESS    guest:PORT=unix:PATH      connections of the guest to the host's PORT lead there
//!   guest:PORT=vsock:CID:PORT                           the same, to AF_VSOCK of the host
//!   tcp:ADDRESS=guest:PORT    unix:PATH=guest:PORT      the device listens there; clients reach PORT of the guest
//!   vsock:PORT=guest:PORT                               the same, on AF_VSOCK of the host
//!   cid:N=uds:PATH                                      the guest reaches guest N, whose device listens on PATH
//! ```
//! Connections without a rule or the convention are refused.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// Address of a socket on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostAddress {
    /// A numeric address; names are not resolved.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
    /// AF_VSOCK of the host.
    Vsock {
        /// CID; `None` for any, to listen.
        cid: Option<u32>,
        /// Port.
        port: u32,
    },
}

/// A forwarding rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ForwardingRule {
    /// Connections of the guest to a port of the host lead to an address.
    Connect {
        /// Port of the host.
        port: u32,
        /// Destination.
        to: HostAddress,
    },
    /// Connections to an address lead to a port of the guest.
    Listen {
        /// Address to listen on.
        from: HostAddress,
        /// Port of the guest.
        port: u32,
    },
    /// The guest reaches another guest through the socket of its device.
    PeerGuest {
        /// CID of the other guest.
        cid: u64,
        /// Path of the socket that accepts `CONNECT`.
        uds: PathBuf,
    },
}

/// Error in the text of a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// The text is not a rule.
    #[error(
        "`{found}` is not a rule; expected guest:PORT=tcp:ADDRESS:PORT, guest:PORT=unix:PATH, guest:PORT=vsock:CID:PORT, \
         tcp:ADDRESS:PORT=guest:PORT, unix:PATH=guest:PORT, vsock:PORT=guest:PORT or cid:N=uds:PATH"
    )]
    Form { found: String },
    /// Invalid port.
    #[error("`{found}` is not a port; expected a number below 2^32 - 1")]
    Port { found: String },
    /// Invalid CID of a guest.
    #[error("`{found}` is not a guest CID; expected a number from 3 to 2^32 - 2")]
    Cid { found: String },
    /// Invalid address.
    #[error("`{found}` is not an address; expected a numeric one, such as 127.0.0.1:80 or [::1]:80")]
    Address { found: String },
}

impl FromStr for ForwardingRule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let form = || RuleError::Form { found: text.to_owned() };
        let (from, to) = text.split_once('=').ok_or_else(form)?;
        if let (Some(cid), Some(path)) = (from.strip_prefix("cid:"), to.strip_prefix("uds:")) {
            return Ok(Self::PeerGuest { cid: guest_cid(cid)?, uds: path.into() });
        }
        // A path may contain `=`, so the guest follows the last one.
        if let Some(number) = from.strip_prefix("guest:") {
            let to = address(to).ok_or_else(form)??;
            if matches!(to, HostAddress::Vsock { cid: None, .. }) {
                return Err(form());
            }
            return Ok(Self::Connect { port: port(number)?, to });
        }
        let (from, to) = text.rsplit_once('=').ok_or_else(form)?;
        let number = to.strip_prefix("guest:").ok_or_else(form)?;
        Ok(Self::Listen { from: address(from).ok_or_else(form)??, port: port(number)? })
    }
}

/// Parses the CID of a guest.
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

fn address(text: &str) -> Option<Result<HostAddress, RuleError>> {
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
    fn every_form_of_a_rule_is_parsed() {
        let rule = |text: &str| text.parse::<ForwardingRule>().unwrap();
        let tcp = HostAddress::Tcp("127.0.0.1:80".parse().unwrap());
        assert_eq!(rule("guest:5=tcp:127.0.0.1:80"), ForwardingRule::Connect { port: 5, to: tcp.clone() });
        assert_eq!(rule("tcp:127.0.0.1:80=guest:5"), ForwardingRule::Listen { from: tcp, port: 5 });
        let odd = HostAddress::Unix("/a=b".into());
        assert_eq!(rule("guest:5=unix:/a=b"), ForwardingRule::Connect { port: 5, to: odd.clone() });
        assert_eq!(rule("unix:/a=b=guest:5"), ForwardingRule::Listen { from: odd, port: 5 });
        let (cid, port) = (Some(1), 9001);
        assert_eq!(
            rule("guest:5=vsock:1:9001"),
            ForwardingRule::Connect { port: 5, to: HostAddress::Vsock { cid, port } }
        );
        assert_eq!(
            rule("vsock:9001=guest:5"),
            ForwardingRule::Listen { from: HostAddress::Vsock { cid: None, port }, port: 5 }
        );
        assert_eq!(
            rule("cid:7=uds:/run/seven"),
            ForwardingRule::PeerGuest { cid: 7, uds: "/run/seven".into() }
        );
    }

    #[test]
    fn the_invalid_part_of_a_rule_is_named() {
        let error = |text: &str| text.parse::<ForwardingRule>().unwrap_err().to_string();
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
