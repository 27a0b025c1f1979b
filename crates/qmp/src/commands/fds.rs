//! Handing QEMU file descriptors.

use serde::{Deserialize, Serialize};

use super::{Empty, command};

/// `add-fd`: puts the descriptor that goes with it into a set, which is then opened as `/dev/fdset/ID`.
/// Send it by [`Client::execute_with_fds`](crate::Client::execute_with_fds).
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct AddFd {
    /// An existing set or a new number; `None`: QEMU makes a new set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fdset_id: Option<i64>,
    /// A note for `query-fdsets`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opaque: Option<String>,
}
command!(AddFd, "add-fd", AddedFd);

/// `add-fd`'s answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AddedFd {
    /// The set.
    pub fdset_id: i64,
    /// The descriptor's number within QEMU.
    pub fd: i64,
}

/// `remove-fd`: takes a descriptor, or all, out of a set.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RemoveFd {
    /// The set.
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
    /// Its number.
    pub fdset_id: i64,
    /// Its descriptors.
    pub fds: Vec<FdSetFd>,
}

/// A descriptor in a set.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct FdSetFd {
    /// Its number within QEMU.
    pub fd: i64,
    /// The note given with it.
    #[serde(default)]
    pub opaque: Option<String>,
}

/// `getfd`: gives the descriptor that goes with it a name, for `fd:NAME`.
/// Send it by [`Client::execute_with_fds`](crate::Client::execute_with_fds).
#[derive(Clone, Debug, Serialize)]
pub struct GetFd {
    /// The name; it may not begin with a digit.
    pub fdname: String,
}
command!(GetFd, "getfd", Empty);

/// `closefd`: closes a descriptor that was given by `getfd` and not used since.
#[derive(Clone, Debug, Serialize)]
pub struct CloseFd {
    /// Its name.
    pub fdname: String,
}
command!(CloseFd, "closefd", Empty);
