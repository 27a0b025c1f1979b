//! Drives of a guest that has arrived and does not run.
//!
//! A QEMU that receives a guest has its drives inactive, without locks on their files, until `cont`. Before
//! 10.0 it aborts if such a guest is migrated again (`bdrv_inactivate_recurse`), or if it is suspended, which
//! `cont` does not change, and wakes up.

use serde_json::{Map, Value, json};
use towline_qmp as qmp;

use super::connection::Qemu;
use super::error::Error;

/// The first QEMU that needs no activation, and has a command for it.
const TRACKS_ACTIVATION_SINCE: (u32, u32) = (10, 0);
/// Id of a temporary export.
const EXPORT: &str = "towline-activates";

impl Qemu {
    /// Activates the drives of a guest that stays here and does not run. A drive that another process has
    /// locked stays inactive: `cont` reports that.
    ///
    /// # Errors
    /// The connection's.
    pub(crate) fn activate_drives(&mut self) -> Result<(), Error> {
        let version = &self.facts.version.qemu;
        if (version.major, version.minor) >= TRACKS_ACTIVATION_SINCE || self.status()?.running {
            return Ok(());
        }
        let flat = Map::from_iter([("flat".to_owned(), true.into())]);
        let nodes = self.client.execute_raw("query-named-block-nodes", Some(flat))?;
        for node in nodes.as_array().into_iter().flatten() {
            self.activate_node(&node["node-name"])?;
        }
        Ok(())
    }

    /// QEMUs before 10.0 have no command that only activates: the first step of an export does so, even
    /// without a server.
    fn activate_node(&mut self, node: &Value) -> Result<(), Error> {
        let Value::Object(export) = json!({ "type": "nbd", "id": EXPORT, "node-name": node }) else {
            unreachable!("an object")
        };
        match self.client.execute_raw("block-export-add", Some(export)) {
            Ok(_) => {
                let id = Map::from_iter([("id".to_owned(), EXPORT.into())]);
                self.client.execute_raw("block-export-del", Some(id))?;
            }
            Err(qmp::Error::Refusal { desc, .. }) => {
                tracing::debug!(%node, desc, "activated without an export");
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}
