//! One running or waiting QEMU: its state, and its settings for a migration.
//!
//! [`Qemu`] is a connected [`Client`](towline_qmp::Client) with the [`QemuState`] queried at the beginning;
//! [`AppliedSettings`] changes capabilities and parameters and restores them. Out of scope: when to change
//! them, and in which order.

mod checkpoints;
mod comparison;
mod compatibility;
mod connection;
mod device_tree;
mod drives;
mod error;
mod facts;
mod inventory;
mod migration;
mod mirror;
mod open_files;
mod ram_block;
mod repair;
mod settings;
mod virtio;

pub use crate::process::{Process, ProcessState};
pub(crate) use comparison::ComparedDrive;
pub use compatibility::StartedQemu;
pub use connection::Qemu;
pub(crate) use device_tree::{DEVICE_CONTAINERS, QomChild, generation_id, if_known, qom_children};
pub(crate) use drives::Drive;
pub use error::{Error, RepairReport, lacks_userfaultfd};
pub use facts::QemuState;
pub(crate) use facts::{is_disconnected, is_live};
pub(crate) use inventory::Inventory;
pub(crate) use migration::MIGRATION_CLEANUP_TIMEOUT;
pub(crate) use mirror::{Mirror, MirrorFailure, MirrorProgress, is_complete};
pub(crate) use open_files::OpenFiles;
pub use ram_block::{RamBlockError, RamBlockInfo};
pub use settings::{AppliedSettings, ApplyError, MigrationSettings, RestoreError};
