//! Errors of other hosts.

use std::process::ExitStatus;

use towline_qmp as qmp;

/// Exit status of ssh for its own errors.
pub(super) const SSH_FAILED: i32 = 255;

/// Error of another host, or on the way to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each variant's text says what it is")]
pub enum Error {
    #[error("{program} cannot be started: {source}; install OpenSSH's client")]
    Start { program: String, source: std::io::Error },
    #[error("no connection to {host}: ssh exited with status {SSH_FAILED}; its own message says why")]
    Unreachable { host: String },
    #[error("{host} has no towline: install it there, in the PATH of a shell that ssh starts")]
    NoTowline { host: String },
    #[error(
        "towline on {host} is older than this one, and has no session with other hosts: install this version there"
    )]
    Older { host: String },
    #[error(
        "towline on {host} has session {found}, expected {expected}: install the same version on both hosts"
    )]
    Session { host: String, found: u64, expected: u64 },
    #[error("`towline agent` on {host} ended ({status}); its own message says why")]
    AgentEnded { host: String, status: ExitStatus },
    #[error(
        "a shell that ssh starts on {host} writes \"{found}\" before the agent's greeting: it must write nothing there (.bashrc)"
    )]
    Chatty { host: String, found: String },
    #[error("{host}: {text}")]
    Refused { host: String, text: String },
    #[error("{host} sent {found}, expected {expected}: install the same version on both hosts")]
    Unexpected { host: String, found: String, expected: &'static str },
    #[error("{source}")]
    Connection { source: Box<qmp::Error> },
    #[error("{0}")]
    Channel(#[from] towline_channel::Error),
}
