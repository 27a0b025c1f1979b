//! towline's devices, queried over their control sockets.

use std::path::Path;

use serde_json::{Map, Value};
use towline_compat::Facts;
use towline_qmp::{self as qmp, Client};

use super::error::Error;

/// Facts of the device, with its version.
pub(super) fn facts(path: &Path) -> Result<Facts, Error> {
    let fault = |source: qmp::Error| Error::Control { path: path.to_owned(), source: source.into() };
    let mut client = Client::connect(path, &qmp::Options::default()).map_err(fault)?;
    let facts = client.execute_raw("query-device-facts", None).map_err(fault)?;
    let from = format!("ctl:{}", path.display());
    Facts::parse(facts.to_string().as_bytes())
        .map_err(|source| Error::Recorded { from, source: source.into() })
}

/// Passes the source's version to the device; the error is its reply.
pub(super) fn accepts(path: &Path, device_type: &str, version: &str) -> Result<(), String> {
    let arguments = [("type", device_type), ("version", version)];
    let arguments: Map<String, Value> =
        arguments.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
    let answer = Client::connect(path, &qmp::Options::default())
        .and_then(|mut client| client.execute_raw("check-migration-version", Some(arguments)));
    match answer {
        Ok(_) => Ok(()),
        Err(qmp::Error::Refusal { desc, .. }) => Err(desc),
        Err(error) => Err(error.to_string()),
    }
}
