//! The QMP commands that we use, typed. Names, keys and units are QEMU's (`qapi/*.json` of QEMU 7.2 to 11.1).
//!
//! Arguments that are `None` are not sent. Replies keep unknown keys in `other`, where losing them could
//! matter; elsewhere they are ignored, because each QEMU adds some. Other commands go through
//! [`Client::execute_raw`](crate::Client::execute_raw).

mod block;
mod fds;
mod migrate;
mod migration_info;
mod migration_settings;
mod open_enum;
mod state;

use serde::{Deserialize, Serialize};

pub use block::{
    AddNbdNode, Bitmap, BlockNode, BlockStream, BlockdevMirror, CancelJob, DeleteNode, DismissJob, Export,
    ExportNode, Job, MigrateContinue, NbdAddress, NbdListenAddress, QueryExports, QueryJobs, QueryNodes,
    RemoveBitmap, SetJobSpeed, StartNbdServer, StopNbdServer,
};
pub use fds::{AddFd, AddedFd, GetFd, RemoveFd};
pub use migrate::{
    Migrate, MigrateCancel, MigrateIncoming, MigratePause, MigrateRecover, MigrateStartPostcopy, Yank,
    YankInstance,
};
pub use migration_info::{MigrationInfo, MigrationStatus, QueryMigrate, RamStats};
pub use migration_settings::{
    Capability, CapabilityState, MigrateSetCapabilities, MigrateSetParameters, MigrationParameters,
    QueryMigrateCapabilities, QueryMigrateParameters,
};
pub use state::{
    BlockDevice, BlockImage, BlockInserted, Cont, CpuFast, HumanMonitorCommand, Memdev, QomGet, QueryBlock,
    QueryCpusFast, QueryMemdev, QueryStatus, QueryUuid, QueryVersion, Quit, RunState, SetLink, Status, Stop,
    Transaction, TransactionAction, Uuid, Version, VersionTriple, XenSaveDevicesState,
};

/// Reply of commands that return no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Empty {}

/// Implements [`Command`](crate::Command) for the arguments of a command.
macro_rules! command {
    ($name:ty, $text:literal, $answer:ty) => {
        impl $crate::Command for $name {
            const NAME: &'static str = $text;
            type Return = $answer;
        }
    };
}
use command;
