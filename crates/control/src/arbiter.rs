//! The host that may go on alone with a guest that two hosts protect.
//!
//! The guest has a generation, a number above 0. When one of two hosts loses the other, each claims the next one, and one of them gets it: the
//! standby runs the guest then, or its host lets its output go. The one that loses ends its guest, or its copy. A claim may be made again, with the
//! same result, since a reply can be lost.
//!
//! Nothing here depends on a clock, or on whether the other host lives: held output of a host that has lost was never sent.

mod program;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::durable::create_once;
use crate::procfs::of_kernel;

pub use program::{Answer, NoAnswer, ask};

const PREFIX: &str = "generation.";
const VERSION: u32 = 1;

/// Arbiter of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arbiter {
    /// Files in a directory on storage of both hosts: the one that makes a file has its generation.
    Directory(PathBuf),
    /// A program, run by a shell.
    Program(String),
}

/// One of those who claim a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Claimant {
    version: u32,
    /// Name of its host.
    pub host: String,
    id: String,
}

/// Result of a claim.
#[derive(Debug)]
pub enum Verdict {
    /// The claimant has the generation.
    Won,
    /// Another one has it.
    Lost,
    /// It is not known who has it, or will have it.
    Unknown(ArbiterError),
}

/// Reason for which an arbiter has not decided.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArbiterError {
    /// The directory or a file in it.
    #[error("{}: {source}; check the shared storage", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file of another version.
    #[error("{} is not one of version {VERSION}; use the same towline on both hosts", path.display())]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// The program has not answered.
    #[error("the arbiter's program: {0}")]
    Program(#[from] NoAnswer),
    /// The program prints something else.
    #[error("the arbiter's program printed {found:?} for TOWLINE_ACTION=newest, expected a number")]
    NotANumber {
        /// Its output.
        found: String,
    },
}

impl FromStr for Arbiter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("exec:") {
            Some(command) if !command.trim().is_empty() => Ok(Self::Program(command.to_owned())),
            None if text.starts_with('/') => Ok(Self::Directory(text.into())),
            _ => Err(format!(
                "{text:?}: expected exec:COMMAND, or the absolute path of a directory on storage of both hosts"
            )),
        }
    }
}

impl Claimant {
    /// A new one on this host.
    pub fn new() -> Self {
        let id = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        Self { version: VERSION, host: of_kernel("hostname"), id }
    }
}

impl Default for Claimant {
    fn default() -> Self {
        Self::new()
    }
}

impl Arbiter {
    /// The highest generation that was claimed; 0 for none.
    ///
    /// # Errors
    /// It is not known.
    pub fn newest(&self) -> Result<u64, ArbiterError> {
        match self {
            Self::Directory(directory) => newest(directory),
            Self::Program(command) => {
                let found = ask(command, &[("TOWLINE_ACTION", "newest".into())])?.output;
                found.parse().map_err(|_| ArbiterError::NotANumber { found })
            }
        }
    }

    /// Claims a generation.
    pub fn claim(&self, generation: u64, claimant: &Claimant) -> Verdict {
        match self {
            Self::Directory(directory) => {
                let path = directory.join(format!("{PREFIX}{generation}"));
                make(&path, claimant).unwrap_or_else(Verdict::Unknown)
            }
            Self::Program(command) => {
                let variables = [
                    ("TOWLINE_ACTION", "claim".into()),
                    ("TOWLINE_GENERATION", generation.to_string()),
                    ("TOWLINE_CLAIMANT", claimant.id.clone()),
                    ("TOWLINE_HOST", claimant.host.clone()),
                ];
                match ask(command, &variables) {
                    Ok(answer) if answer.is_yes => Verdict::Won,
                    Ok(_) => Verdict::Lost,
                    Err(error) => Verdict::Unknown(error.into()),
                }
            }
        }
    }
}

fn newest(directory: &Path) -> Result<u64, ArbiterError> {
    let failed = |source| ArbiterError::Io { path: directory.to_owned(), source };
    let mut newest = 0;
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse().ok());
        newest = newest.max(number.unwrap_or_default());
    }
    Ok(newest)
}

fn make(path: &Path, claimant: &Claimant) -> Result<Verdict, ArbiterError> {
    let failed = |source| ArbiterError::Io { path: path.to_owned(), source };
    let json = serde_json::to_vec(claimant).map_err(|error| failed(error.into()))?;
    match create_once(path, &json) {
        Ok(()) => return Ok(Verdict::Won),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    let found = serde_json::from_slice(&fs::read(path).map_err(failed)?).ok();
    let found = found.filter(|found: &Claimant| found.version == VERSION);
    let found = found.ok_or_else(|| ArbiterError::Format { path: path.to_owned() })?;
    Ok(if found.id == claimant.id { Verdict::Won } else { Verdict::Lost })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_of_many_wins(arbiter: &Arbiter) {
        assert_eq!(arbiter.newest().unwrap(), 0);
        let claimants: Vec<_> = (0..6).map(|_| Claimant::new()).collect();
        let won = |claimant| matches!(arbiter.claim(3, claimant), Verdict::Won);
        let first: Vec<_> = std::thread::scope(|scope| {
            let won = &won;
            let threads: Vec<_> =
                claimants.iter().map(|claimant| scope.spawn(move || won(claimant))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(first.iter().filter(|won| **won).count(), 1, "{first:?}");
        // A claim is answered alike when it is made again.
        assert_eq!(claimants.iter().map(won).collect::<Vec<_>>(), first);
        assert_eq!(arbiter.newest().unwrap(), 3);
    }

    #[test]
    fn one_of_many_has_a_generation() {
        let place = tempfile::tempdir().unwrap();
        one_of_many_wins(&Arbiter::Directory(place.path().to_owned()));
        let place = tempfile::tempdir().unwrap();
        let path = place.path().display();
        let program = format!(
            "exec:case $TOWLINE_ACTION in
             newest) ls {path} | sort -n | tail -n 1 | grep . || echo 0;;
             claim) ln -s $TOWLINE_CLAIMANT {path}/$TOWLINE_GENERATION 2>/dev/null
                    test \"$(readlink {path}/$TOWLINE_GENERATION)\" = $TOWLINE_CLAIMANT;; esac"
        );
        one_of_many_wins(&program.parse().unwrap());
    }

    #[test]
    fn an_arbiter_that_does_not_decide_says_why() {
        let place = tempfile::tempdir().unwrap();
        let text = |arbiter: &Arbiter| match arbiter.claim(1, &Claimant::new()) {
            Verdict::Unknown(error) => error.to_string(),
            verdict => panic!("{verdict:?}"),
        };
        let missing = Arbiter::Directory(place.path().join("missing"));
        assert!(text(&missing).ends_with("check the shared storage"), "{}", text(&missing));
        assert!(missing.newest().is_err());
        fs::write(place.path().join("generation.1"), "{}").unwrap();
        assert!(text(&Arbiter::Directory(place.path().to_owned())).contains("version 1"));
        let program = "exec:echo no quorum >&2; exit 7".parse().unwrap();
        assert_eq!(text(&program), "the arbiter's program: exit status 7: no quorum");
        let newest = "exec:echo many".parse::<Arbiter>().unwrap().newest();
        assert!(newest.unwrap_err().to_string().contains("\"many\""));
        assert!("relative".parse::<Arbiter>().is_err() && "exec: ".parse::<Arbiter>().is_err());
    }
}
