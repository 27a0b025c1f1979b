//! A ring as the frontend has set it up.

use std::os::fd::OwnedFd;

use super::rings::Enablement;
use crate::message::VringAddress;

/// A ring as the frontend has set it up.
#[derive(Debug, Default)]
pub(super) struct Vring {
    pub(super) size: u32,
    pub(super) address: Option<VringAddress>,
    pub(super) base: u16,
    /// Eventfds of a stopped ring; those of a running one are in its thread.
    pub(super) call: Option<OwnedFd>,
    pub(super) err: Option<OwnedFd>,
    pub(super) enablement: Enablement,
    pub(super) running: bool,
}
