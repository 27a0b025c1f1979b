//! Storage of a device's record of descriptors in flight: a file, or the service manager's store
//! (`sd_notify(3)`).

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};
use towline_vhost_user::{InFlightRecord, RECORD_FD_NAME};

use crate::notify;
use crate::sockets::send_with;

/// Value of `--state` for the service manager's store.
pub(crate) const STORE: &str = "fd-store";

/// Opens the record of a device with this number of queues.
pub(crate) fn open_in_flight_record(location: Option<&Path>, queues: usize) -> Result<InFlightRecord> {
    match location {
        None => Ok(InFlightRecord::new(queues)?),
        Some(location) if location == Path::new(STORE) => stored(queues),
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
        "--state fd-store: NOTIFY_SOCKET is not set, so there is no service manager: name a file instead",
    )?;
    if let Some(record) = InFlightRecord::from_service_manager(queues)? {
        return Ok(record);
    }
    let record = InFlightRecord::new(queues)?;
    store(&manager, &record).with_context(|| {
        format!("--state fd-store: no notification of the service manager at {}", manager.display())
    })?;
    Ok(record.into_durable())
}

/// Sends the record to the manager's store. With a unit without `FileDescriptorStoreMax=` it is dropped
/// silently.
fn store(manager: &OsStr, record: &InFlightRecord) -> std::io::Result<()> {
    let text = format!("FDSTORE=1\nFDNAME={RECORD_FD_NAME}\nFDPOLL=0");
    Ok(send_with(notify::connected(manager)?, text.as_bytes(), record.as_fd())?)
}
