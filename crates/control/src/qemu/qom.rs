//! The tree of QEMU's objects (QOM).

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
    let listed = match client.execute_raw("qom-list", Some(arguments)) {
        Ok(listed) => listed,
        Err(qmp::Error::Refusal { .. }) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let child = |property: &Value| {
        let kind = property["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
        Some(QomChild { name: property["name"].as_str()?.to_owned(), kind: kind.to_owned() })
    };
    Ok(listed.as_array().into_iter().flatten().filter_map(child).collect())
}
