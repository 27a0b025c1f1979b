//! Claims of a guest's generations, and their results.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::answer::NoAnswer;
use crate::procfs::of_kernel;

pub(super) const VERSION: u32 = 1;

/// One of those who claim a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Claimant {
    version: u32,
    /// Name of its host.
    pub host: String,
    /// Its unique id.
    pub(crate) id: String,
}

/// A claim of a guest's generation.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The guest's name.
    pub guest: &'a str,
    /// The generation.
    pub generation: u64,
    /// That of the claimant.
    pub stake: Stake,
}

/// Part of a guest that its claimant has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stake {
    /// The guest, which runs.
    Guest,
    /// A copy of it, which can run.
    Copy,
    /// Frames that it has sent before it was shut down.
    LastOutput,
}

/// Reason for which an arbiter has not decided: it is not known who has a generation, or will have it.
#[derive(Debug, thiserror::Error)]
pub enum ArbiterError {
    /// The directory or a file in it.
    #[error("{}: {source}; check the shared storage", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A file of another version.
    #[error("{} is not one of version {VERSION}; use the same towline on both hosts", path.display())]
    Format { path: PathBuf },
    /// The store.
    #[error("{place}: {reason}")]
    Store { place: String, reason: String },
    /// The program has not answered.
    #[error("the arbiter's program: {0}; see what it prints on this host")]
    Program(#[from] NoAnswer),
    /// The program prints something else.
    #[error(
        "the arbiter's program printed {found:?} for TOWLINE_ACTION={action}, expected {expected}; correct it"
    )]
    Output { action: &'static str, found: String, expected: &'static str },
}

impl Claimant {
    /// A new one on this host.
    pub(crate) fn new() -> Self {
        let id = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        Self { version: VERSION, host: of_kernel("hostname"), id }
    }

    /// Returns true if it is this holder; `None` if that cannot be read.
    pub(super) fn is(&self, holder: &[u8]) -> Option<bool> {
        let holder = serde_json::from_slice(holder).ok().filter(|holder: &Self| holder.version == VERSION)?;
        Some(holder.id == self.id)
    }
}

/// Name of a guest's generation.
pub(super) fn name(guest: &str, generation: u64) -> String {
    format!("{guest}.generation.{generation}")
}

/// The generation of a guest that has this name.
pub(super) fn generation(name: &str, guest: &str) -> Option<u64> {
    name.strip_prefix(guest)?.strip_prefix(".generation.")?.parse().ok()
}
