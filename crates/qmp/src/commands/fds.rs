//! Handing QEMU file descriptors.

use serde::{Deserialize, Serialize};

use super::{Empty, command};

/// `add-fd`: adds the descriptor that is sent with it to a set, which QEMU opens as `/dev/fdset/ID`.
/// Send it by [`Client::execute_with_fds`](crate::Client::execute_with_fds).
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct AddFd {
    /// Number of the set, created if it does not exist; `None`: QEMU creates a set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fdset_id: Option<i64>,
    /// Text that `query-fdsets` returns.
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

/// `query-fdsets`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryFdsets;
command!(QueryFdsets, "query-fdsets", Vec<FdSet>);

/// A set of descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct FdSet {
    /// Number of the set.
    pub fdset_id: i64,
    /// Its descriptors.
    pub fds: Vec<FdSetFd>,
}

/// A descriptor in a set.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct FdSetFd {
    /// Its number within QEMU.
    pub fd: i64,
    /// Text passed to `add-fd`.
    #[serde(default)]
    pub opaque: Option<String>,
}

/// `getfd`: names the descriptor that is sent with it, for `fd:NAME`.
/// Send it by [`Client::execute_with_fds`](crate::Client::execute_with_fds).
#[derive(Clone, Debug, Serialize)]
pub struct GetFd {
    /// The name; it may not begin with a digit.
    pub fdname: String,
}
command!(GetFd, "getfd", Empty);

/// `closefd`: closes a descriptor of `getfd` that is not in use.
#[derive(Clone, Debug, Serialize)]
pub struct CloseFd {
    /// Name of the descriptor.
    pub fdname: String,
}
command!(CloseFd, "closefd", Empty);
