//! Errors of other hosts.

use std::process::ExitStatus;
use std::time::Duration;

use towline_launch::RuntimeError;

/// Exit status of ssh for its own errors.
pub(super) const SSH_FAILED: i32 = 255;

/// Error of another host, or on the way to it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{program} cannot be started: {source}; install OpenSSH's client")]
    Start { program: String, source: std::io::Error },
    #[error("no connection to {host}: ssh exited with status {SSH_FAILED}; its own message says why")]
    Unreachable { host: String },
    #[error("{host} has no towline: install it there, in the PATH of non-interactive shells")]
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
        "ssh to {host} wrote \"{found}\" instead of the agent's greeting: a shell that ssh starts there must write nothing before it (.bashrc)"
    )]
    Chatty { host: String, found: String },
    #[error("{host}: {text}")]
    Refused { host: String, text: String },
    #[error("{host} sent {found}, expected {expected}: install the same version on both hosts")]
    Unexpected { host: String, found: String, expected: &'static str },
    #[error("{host} has not replied for {:.1} s", waited.as_secs_f64())]
    Silent { host: String, waited: Duration },
    #[error(
        "name {name} is taken by process {pid}, a QEMU whose monitor does not answer and whose towline has ended. It may run a guest: look at \
         it first. If a move has left it, and its guest runs at its source, end it (kill -9 {pid} on this host)"
    )]
    Hanging { name: String, pid: u32 },
    #[error("{0}")]
    Runtime(#[from] RuntimeError),
    #[error("the session with {host} was lost")]
    Lost { host: String },
    #[error(
        "disk {drive} has {what}, which a copy of its content would lose: remove that, or have the disk on storage of both hosts"
    )]
    DiskExtras { drive: String, what: &'static str },
    #[error(
        "disk {drive} is not a file that the guest's command line names (it was plugged in since, or has a filter or `snapshot=on`), so a QEMU that is started with that would be without it: start one there that waits, with this disk"
    )]
    DiskOfNoOption { drive: String },
    #[error(
        "{host} was asked to receive disks, and has no port for them: install the same version on both hosts"
    )]
    NoDiskPort { host: String },
    #[error(
        "{host} was asked to connect its QEMU to the one here, and did not take that up: install the same version on both hosts"
    )]
    NotDirect { host: String },
    #[error(
        "{what} is in another network namespace than towline, and connects by itself in the clear: let its stream be encrypted, or start towline in that namespace"
    )]
    OtherNetwork { what: &'static str },
    #[error("the guest's command line: {source}")]
    CommandLine { source: towline_launch::ParseError },
    #[error("cancelled")]
    Cancelled,
    #[error("{0}")]
    Channel(#[from] towline_channel::Error),
}
