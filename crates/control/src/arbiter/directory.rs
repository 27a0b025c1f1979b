//! Generations as files in a directory of both hosts.

use std::fs;
use std::path::Path;

use super::claim::{ArbiterError, Claimant, generation};
use crate::durable::{create_once, highest};

pub(super) fn newest(directory: &Path, guest: &str) -> Result<u64, ArbiterError> {
    let newest = highest(directory, |name| generation(name, guest));
    let newest = newest.map_err(|source| ArbiterError::Io { path: directory.to_owned(), source })?;
    Ok(newest.unwrap_or_default())
}

pub(super) fn claim(path: &Path, claimant: &Claimant) -> Result<bool, ArbiterError> {
    let failed = |source| ArbiterError::Io { path: path.to_owned(), source };
    if create_once(path, claimant).map_err(failed)? {
        return Ok(true);
    }
    let is_won = claimant.is(&fs::read(path).map_err(failed)?);
    is_won.ok_or_else(|| ArbiterError::Format { path: path.to_owned() })
}
