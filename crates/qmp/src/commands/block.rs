//! Commands that copy disks: nodes, jobs, and exports by NBD.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Empty, MigrationStatus, command};

/// `blockdev-add` of a node whose content an NBD server has.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "driver", rename = "nbd", rename_all = "kebab-case")]
pub struct AddNbdNode {
    /// Name of the node, at most 31 characters.
    pub node_name: String,
    /// The server.
    pub server: NbdAddress,
    /// Name of its export.
    pub export: String,
}
command!(AddNbdNode, "blockdev-add", Empty);

/// Address of an NBD server, as a node has it.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum NbdAddress {
    /// A Unix socket.
    Unix {
        /// Its path.
        path: PathBuf,
    },
}

/// `blockdev-del`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DeleteNode {
    /// The node.
    pub node_name: String,
}
command!(DeleteNode, "blockdev-del", Empty);

/// `blockdev-mirror`: copies a node to another one, and every later write.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockdevMirror {
    /// Id of the job.
    pub job_id: String,
    /// The node to copy.
    pub device: String,
    /// The node to copy to.
    pub target: String,
    /// `full`: with the content of its backing files.
    pub sync: &'static str,
    /// `write-blocking`: a write of the guest is complete once the target has it.
    pub copy_mode: &'static str,
    /// Bytes per second; 0 for unlimited.
    pub speed: u64,
    /// Reaction to an error of the target: `report` fails the job, `stop` pauses it.
    pub on_target_error: &'static str,
    /// The same of the node.
    pub on_source_error: &'static str,
    /// False: a job that has ended stays until [`DismissJob`].
    pub auto_dismiss: bool,
    /// True: the target is all zeros, which are left as they are; since 10.1.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub target_is_zero: bool,
}
command!(BlockdevMirror, "blockdev-mirror", Empty);

/// `block-stream`: copies what is in a node's backing files, down to `base`, into the node, which then has `base` as its backing file. A job
/// that has ended is dismissed.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockStream {
    /// Id of the job.
    pub job_id: String,
    /// The node.
    pub device: String,
    /// File name of the backing file that stays.
    pub base: String,
}
command!(BlockStream, "block-stream", Empty);

/// `block-job-set-speed`.
#[derive(Clone, Debug, Serialize)]
pub struct SetJobSpeed {
    /// The job.
    pub device: String,
    /// Bytes per second; 0 for unlimited.
    pub speed: u64,
}
command!(SetJobSpeed, "block-job-set-speed", Empty);

/// `block-job-cancel`. A mirror that is ready ends successfully, without its guest's disk being replaced, unless it is forced.
#[derive(Clone, Debug, Serialize)]
pub struct CancelJob {
    /// The job.
    pub device: String,
    /// Ends it with what it has copied so far.
    pub force: bool,
}
command!(CancelJob, "block-job-cancel", Empty);

/// `job-dismiss`, of a job that has ended.
#[derive(Clone, Debug, Serialize)]
pub struct DismissJob {
    /// The job.
    pub id: String,
}
command!(DismissJob, "job-dismiss", Empty);

/// `query-block-jobs`.
#[derive(Clone, Debug, Serialize)]
pub struct QueryJobs;
command!(QueryJobs, "query-block-jobs", Vec<Job>);

/// A job of the block layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Job {
    /// Its id.
    #[serde(rename = "device")]
    pub id: String,
    /// `running`, `ready`, `concluded` and others.
    pub status: String,
    /// Work that is done, in bytes of a mirror.
    pub offset: u64,
    /// All of the work, in bytes, which grows while the guest writes.
    pub len: u64,
    /// `ok`; `failed` or `nospace` of a job that an error has paused.
    pub io_status: String,
    /// True of a mirror whose target has each write before the guest's write is done; `None` before 8.2.
    #[serde(default)]
    pub actively_synced: Option<bool>,
    /// The reason for which it failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// `migrate-continue`: a migration that waits in this state goes on.
#[derive(Clone, Debug, Serialize)]
pub struct MigrateContinue {
    /// The state.
    pub state: MigrationStatus,
}
command!(MigrateContinue, "migrate-continue", Empty);

/// `nbd-server-start`.
#[derive(Clone, Debug, Serialize)]
pub struct StartNbdServer {
    /// Where it listens.
    pub addr: NbdListenAddress,
}
command!(StartNbdServer, "nbd-server-start", Empty);

/// Address of QEMU's own NBD server, which is written in another form than [`NbdAddress`].
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", content = "data", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum NbdListenAddress {
    /// A Unix socket.
    Unix {
        /// Its path.
        path: PathBuf,
    },
}

/// `nbd-server-stop`: ends its exports and connections, too.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StopNbdServer;
command!(StopNbdServer, "nbd-server-stop", Empty);

/// `block-export-add` to the NBD server.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename = "nbd", rename_all = "kebab-case")]
pub struct ExportNode {
    /// Id of the export.
    pub id: String,
    /// The node.
    pub node_name: String,
    /// Name for clients.
    pub name: String,
    /// True if clients may write.
    pub writable: bool,
    /// Bitmaps of the node that clients may read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<String>,
}
command!(ExportNode, "block-export-add", Empty);

/// `block-dirty-bitmap-remove`.
#[derive(Clone, Debug, Serialize)]
pub struct RemoveBitmap {
    /// The node.
    pub node: String,
    /// The bitmap.
    pub name: String,
}
command!(RemoveBitmap, "block-dirty-bitmap-remove", Empty);

/// `query-named-block-nodes`, without the nodes below each one.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryNodes {
    /// True.
    pub flat: bool,
}
command!(QueryNodes, "query-named-block-nodes", Vec<BlockNode>);

/// A node with its bitmaps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockNode {
    /// Its name.
    #[serde(default)]
    pub node_name: String,
    /// Its bitmaps.
    #[serde(default)]
    pub dirty_bitmaps: Vec<Bitmap>,
}

/// A bitmap of what is written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bitmap {
    /// Its name; empty if it is QEMU's own.
    #[serde(default)]
    pub name: String,
    /// Bytes that were written, in whole parts of the bitmap.
    pub count: u64,
}

/// `query-block-exports`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryExports;
command!(QueryExports, "query-block-exports", Vec<Export>);

/// An export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    /// Its id.
    pub id: String,
}
