//! The tree of QEMU's objects (QOM), and queries that a QEMU may refuse.

use serde_json::{Map, Value};
use towline_qmp::{self as qmp, Client};

/// Containers of the devices with an id, and of those without.
pub(crate) const DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// A child of an object.
pub(crate) struct QomChild {
    pub(crate) name: String,
    /// Type of the child.
    pub(crate) kind: String,
}

/// Returns the children of an object; none if it does not exist, like an empty container.
///
/// # Errors
/// Those of the monitor.
pub(crate) fn children(client: &mut Client, path: &str) -> Result<Vec<QomChild>, qmp::Error> {
    let arguments = Map::from_iter([("path".to_owned(), path.into())]);
    let listed = if_known(client.execute_raw("qom-list", Some(arguments)))?.unwrap_or_default();
    let child = |property: &Value| {
        let kind = property["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
        Some(QomChild { name: property["name"].as_str()?.to_owned(), kind: kind.to_owned() })
    };
    Ok(listed.as_array().into_iter().flatten().filter_map(child).collect())
}

/// Returns the guest's generation id; `None` without a device for it.
///
/// # Errors
/// Those of the monitor.
pub(crate) fn generation_id(client: &mut Client) -> Result<Option<String>, qmp::Error> {
    let reply = if_known(client.execute_raw("query-vm-generation-id", None))?;
    Ok(reply.and_then(|reply| reply["guid"].as_str().map(str::to_owned)))
}

/// The reply; `None` if this QEMU does not know what was queried.
///
/// # Errors
/// Those of the monitor.
pub(crate) fn if_known<T>(reply: Result<T, qmp::Error>) -> Result<Option<T>, qmp::Error> {
    match reply {
        Ok(reply) => Ok(Some(reply)),
        Err(qmp::Error::Refusal { .. } | qmp::Error::Shape { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
