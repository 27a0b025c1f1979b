//! One running or waiting QEMU: its state, and its settings for a migration.
//!
//! [`Qemu`] is a connected [`Client`](towline_qmp::Client) with the [`QemuState`] queried at the beginning;
//! [`AppliedSettings`] changes capabilities and parameters and restores them. Out of scope: when to change
//! them, and in which order.

mod activation;
mod compatibility;
mod connection;
mod device_tree;
mod drives;
mod error;
mod facts;
mod image_facts;
mod inventory;
mod open_files;
pub(crate) mod qom;
mod ram_block;
mod repair;
mod repaired;
mod settings;
mod started;
mod virtio;
mod virtqueues;

pub use crate::process::{Process, ProcessState};
pub use connection::Qemu;
pub use error::{Error, Fault};
pub use facts::{IncomingState, QemuState};
pub(crate) use image_facts::is_disconnected;
pub(crate) use inventory::Inventory;
pub(crate) use open_files::OpenFiles;
pub use ram_block::{RamBlockError, RamBlockInfo};
pub use repaired::RepairReport;
pub use settings::{AppliedSettings, ApplyError, MigrationSettings, RestoreError};
pub use started::StartedQemu;
