//! Handing QEMU file descriptors.

use serde::{Deserialize, Serialize};

use super::{Empty, command};

/// `getfd`: names the descriptor that is sent with it, for `fd:NAME`; an earlier one of this name is closed.
/// Send it by [`Client::execute_with_fds`](crate::Client::execute_with_fds).
#[derive(Clone, Copy, Debug, Serialize)]
pub struct GetFd {
    /// The name, which does not begin with a digit.
    pub fdname: &'static str,
}
command!(GetFd, "getfd", Empty);

/// `add-fd`: adds the descriptor that is sent with it to a set, which QEMU opens as `/dev/fdset/ID`.
/// Send it by [`Client::execute_with_fds`](crate::Client::execute_with_fds).
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct AddFd {
    /// Number of the set, created if it does not exist; `None`: QEMU creates a set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fdset_id: Option<i64>,
    /// Text that QEMU's `query-fdsets` returns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opaque: Option<String>,
}
command!(AddFd, "add-fd", AddedFd);

/// Reply of `add-fd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AddedFd {
    /// Number of the set.
    pub fdset_id: i64,
    /// The descriptor's number within QEMU.
    pub fd: i64,
}

/// `remove-fd`: removes a descriptor, or all of them, from a set.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RemoveFd {
    /// Number of the set.
    pub fdset_id: i64,
    /// One of its descriptors; `None`: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fd: Option<i64>,
}
command!(RemoveFd, "remove-fd", Empty);
