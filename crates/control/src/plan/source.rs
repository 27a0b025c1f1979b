//! A running QEMU as source, driven by its monitor: checked, migrated to this process, watched, restored.

mod configuration;
mod migration;
mod postcopy;
mod qmp_source;
mod refusals;
mod restore;
mod stream;

pub(super) use qmp_source::{QmpSource, Required};
pub(super) use restore::{CopyEnd, GuestAction};
pub(super) use stream::LANES_TIMEOUT;
