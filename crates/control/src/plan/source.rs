//! A running QEMU as source, driven by its monitor: checked, migrated to this process, watched, restored.

mod direct;
mod migration;
mod postcopy;
mod qmp_source;
mod stream;

pub(super) use migration::{CopyEnd, GuestAction};
pub(super) use qmp_source::{QmpSource, Required};
