//! A guest on its way by postcopy, and one of its connections.

use std::sync::Arc;
use std::time::Duration;

use towline_protocol::PageRef;
use towline_protocol::postcopy::{PostcopyBlock, Preempt};

use super::demand::Background;
use super::faults::Faults;
use super::inbox::Inbox;
use super::sent_map::SentMap;
use super::units::Units;
use crate::outgoing::RecordSender;
use crate::{Guest, Session, Statistics};

/// Options of postcopy.
#[derive(Debug, Clone)]
pub struct Options {
    /// Maximum rate of background pages in bytes per second; `None`: unlimited.
    pub max_bandwidth: Option<u64>,
    /// Time limit of each reply that the destination must send.
    pub answer_timeout: Duration,
    /// Memory that earlier restores of this guest requested, in order: it is sent first, with its neighbours.
    pub working_set: Vec<(PageRef, u64)>,
    /// The memory that no fault waits for.
    pub background: Background,
}

/// A guest on its way, over one or more connections.
#[derive(Debug)]
pub struct Postcopy<'g> {
    pub(super) guest: GuestRef<'g>,
    pub(super) blocks: Arc<[PostcopyBlock]>,
    pub(super) options: Options,
    pub(super) statistics: Arc<Statistics>,
    pub(super) map: SentMap,
    pub(super) units: Units,
    pub(super) faults: Faults,
}

pub(super) struct GuestRef<'g>(pub(super) &'g dyn Guest);

impl std::fmt::Debug for GuestRef<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("dyn Guest")
    }
}

/// One connection's parts.
#[derive(Debug)]
pub(super) struct PostcopyConnection<'p> {
    pub(super) of: &'p Postcopy<'p>,
    pub(super) session: Arc<Session>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) preempt: Option<(RecordSender, Preempt)>,
    /// True if the guest was loaded before this connection.
    pub(super) had_loaded: bool,
}
