//! Where a device's record of descriptors in flight is: in a file, or in the service manager's store (`sd_notify(3)`).

use std::ffi::OsStr;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use towline_vhost_user::{InFlightRecord, RECORD_FD_NAME};

use crate::notify;

/// The word that stands for the service manager's store.
pub(crate) const STORE: &str = "fd-store";

/// The record of a device with so many queues.
pub(crate) fn record(place: Option<&Path>, queues: usize) -> Result<InFlightRecord> {
    match place {
        None => Ok(InFlightRecord::new(queues)?),
        Some(place) if place == Path::new(STORE) => stored(queues),
        Some(file) => {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fd = rustix::fs::open(file, flags, Mode::RUSR | Mode::WUSR)
                .with_context(|| format!("--state {}", file.display()))?;
            Ok(InFlightRecord::open(fd, queues, &file.display().to_string())?)
        }
    }
}

fn stored(queues: usize) -> Result<InFlightRecord> {
    let manager = std::env::var_os("NOTIFY_SOCKET").context(
        "--state fd-store: no service manager is there to keep it (NOTIFY_SOCKET is not set); name a file instead",
    )?;
    if let Some(record) = InFlightRecord::from_service_manager(queues)? {
        return Ok(record);
    }
    let record = InFlightRecord::new(queues)?;
    keep(&manager, &record).with_context(|| {
        format!("--state fd-store: the service manager at {} cannot be told", manager.display())
    })?;
    Ok(record.into_durable())
}

/// Gives it to the manager's store. A unit without `FileDescriptorStoreMax=` drops it, and nobody is told.
fn keep(manager: &OsStr, record: &InFlightRecord) -> std::io::Result<()> {
    let socket = notify::connected(manager)?;
    let fds = [record.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fits = ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    assert!(fits, "the space is for one descriptor");
    let text = format!("FDSTORE=1\nFDNAME={RECORD_FD_NAME}\nFDPOLL=0");
    sendmsg(&socket, &[IoSlice::new(text.as_bytes())], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
