//! Generations as files in a directory of both hosts.

use std::fs;
use std::io;
use std::path::Path;

use super::claim::{ArbiterError, Claimant, Verdict, highest};
use crate::durable::create_once;

pub(super) fn newest(directory: &Path, guest: &str) -> Result<u64, ArbiterError> {
    let failed = |source| ArbiterError::Io { path: directory.to_owned(), source };
    let names = fs::read_dir(directory)
        .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>());
    let names = names.map_err(failed)?;
    Ok(highest(names.iter().filter_map(|name| name.to_str()), guest))
}

pub(super) fn claim(path: &Path, claimant: &Claimant) -> Result<Verdict, ArbiterError> {
    let failed = |source| ArbiterError::Io { path: path.to_owned(), source };
    let json = serde_json::to_vec(claimant).map_err(|error| failed(error.into()))?;
    match create_once(path, &json) {
        Ok(()) => return Ok(Verdict::Won),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    let verdict = claimant.compare(&fs::read(path).map_err(failed)?);
    verdict.ok_or_else(|| ArbiterError::Format { path: path.to_owned() })
}
