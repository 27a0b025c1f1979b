//! A QEMU that this process has started: queried while it creates its machine.
//!
//! ```text
//!   fork ─► connect, send all queries ─► QEMU reads them while it starts ─► greeting, replies ─► Qemu
//! ```
//! A QEMU reads its monitor on a separate thread, one byte at a time, which takes most of the time of short
//! queries. Queries of a QEMU that is not ready yet cost nothing.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use towline_qmp::commands::QueryCpusFast;
use towline_qmp::{self as qmp, Client, CommandRequest, Options, Submitted};

use super::connection::Qemu;
use super::error::Error;
use super::{facts, image_facts};
use crate::lock::lock;

/// The monitor of a QEMU that this process has started, for the copy of an image to it.
#[derive(Debug)]
pub struct StartedQemu {
    pid: u32,
    socket: PathBuf,
    // Taken by the copy, which is its only user.
    monitor: Mutex<Option<(Client, Submitted)>>,
}

impl StartedQemu {
    /// Connects to the monitor at `socket` of process `pid`, a child of this one, as soon as it exists.
    /// Returns when it has answered.
    ///
    /// # Errors
    /// Those of [`Client::connect`].
    pub fn connect(socket: &Path, pid: u32, options: &Options) -> Result<Self, qmp::Error> {
        let mut requests = Vec::from(image_facts::image_requests()?);
        requests.push(CommandRequest::new(&QueryCpusFast)?);
        requests.extend(facts::requests()?);
        let (mut client, submitted) = Client::connect_ahead(socket, options, &requests)?;
        client.set_deadline(qmp::DEADLINE);
        Ok(Self { pid, socket: socket.to_owned(), monitor: Mutex::new(Some((client, submitted))) })
    }

    /// The QEMU with its journal; `None` if this was called before.
    pub(crate) fn take(&self) -> Option<Result<Qemu, Error>> {
        let monitor = lock(&self.monitor).take();
        monitor.map(|(client, submitted)| self.qemu(client, submitted))
    }

    fn qemu(&self, mut client: Client, submitted: Submitted) -> Result<Qemu, Error> {
        let mut replies = client.replies(submitted)?.into_iter();
        let facts = replies.by_ref().take(image_facts::IMAGE_REQUESTS);
        let image_facts = image_facts::image_facts(facts, Some(self.pid.cast_signed()))?;
        // QEMU listens on a socket of this process, so the kernel names no peer.
        let mut qemu = Qemu::of_replies(client, replies, self.pid.cast_signed())?;
        qemu.image_facts = Some(image_facts);
        qemu.has_current_settings = true;
        qemu.with_journal(&self.socket)
    }
}
