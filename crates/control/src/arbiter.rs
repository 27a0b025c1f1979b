//! The host that may go on alone with a guest that two hosts protect.
//!
//! The guest has a generation, a number above 0. When one of two hosts loses the other, each claims the next one, and one of them gets it: the
//! standby runs the guest then, or its host lets its output go. The one that loses ends its guest, or its copy. A claim may be made again, with
//! the same result, since a reply can be lost.
//!
//! Nothing here depends on a clock, or on whether the other host lives: held output of a host that has lost was never sent.

mod answer;
mod claim;
mod program;
#[cfg(feature = "store")]
mod store;

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use towline_channel::Cancel;
use towline_image::Location;

use crate::durable::{create_once, highest};
pub use answer::{NoAnswer, ask};
pub use claim::{ArbiterError, Claim, Claimant, Stake};
use claim::{generation, name};

/// Interval of claims while the arbiter does not decide.
const CLAIM_INTERVAL: Duration = Duration::from_millis(200);

/// Name of the arbiter that is the cluster of both hosts, and the program that asks it.
const PACEMAKER: &str = "pacemaker";
const PACEMAKER_PROGRAM: &str = "towline ocf arbitrate protected";

/// Arbiter of guests, each of which has its generations there by its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arbiter {
    /// Files in a directory on storage of both hosts: the one that makes a file has its generation.
    Directory(PathBuf),
    /// Objects in a store that has conditional writes: the one that makes an object has its generation.
    Store(String),
    /// A program, run by a shell.
    Program(String),
}

impl FromStr for Arbiter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("exec:") {
            Some(command) if !command.trim().is_empty() => Ok(Self::Program(command.to_owned())),
            None if text == PACEMAKER => Ok(Self::Program(PACEMAKER_PROGRAM.into())),
            None if text.starts_with('/') => Ok(Self::Directory(text.into())),
            None if text.contains("://") || text.starts_with("store:") => text
                .parse::<Location>()
                .map(|_| Self::Store(text.to_owned()))
                .map_err(|error| error.to_string()),
            _ => Err(format!(
                "{text:?}: expected the absolute path of a directory on storage of both hosts, a prefix of an object store, {PACEMAKER}, or \
                 exec:COMMAND"
            )),
        }
    }
}

impl Arbiter {
    /// The highest generation of this guest that was claimed; 0 for none.
    ///
    /// # Errors
    /// It is not known.
    pub fn newest(&self, guest: &str) -> Result<u64, ArbiterError> {
        match self {
            Self::Directory(directory) => newest_file(directory, guest),
            #[cfg(feature = "store")]
            Self::Store(place) => store::newest(place, guest),
            #[cfg(not(feature = "store"))]
            Self::Store(place) => Err(without_stores(place)),
            Self::Program(command) => program::newest(command, guest),
        }
    }

    /// Claims a generation of a guest. Returns true if the claimant has it, and false if another one has it.
    ///
    /// # Errors
    /// It is not known who has it, or will have it.
    pub fn claim(&self, claim: &Claim<'_>, claimant: &Claimant) -> Result<bool, ArbiterError> {
        let name = name(claim.guest, claim.generation);
        match self {
            Self::Directory(directory) => claim_file(&directory.join(name), claimant),
            #[cfg(feature = "store")]
            Self::Store(place) => store::claim(place, &name, claimant),
            #[cfg(not(feature = "store"))]
            Self::Store(place) => Err(without_stores(place)),
            Self::Program(command) => program::claim(command, claim, claimant),
        }
    }

    /// Claims a generation until that is answered. Each new reason for which it is not is given to `notice`.
    ///
    /// # Errors
    /// As [`Self::claim`], after `cancel`.
    pub fn decide(
        &self,
        claim: &Claim<'_>,
        claimant: &Claimant,
        cancel: &Cancel,
        notice: &dyn Fn(&str),
    ) -> Result<bool, ArbiterError> {
        let mut said = None;
        loop {
            match self.claim(claim, claimant) {
                Err(error) if !cancel.is_cancelled() => {
                    let text = error.to_string();
                    if said.as_ref() != Some(&text) {
                        notice(&format!(
                            "not decided which host goes on with the guest, whose output is held: {text}; it is tried again"
                        ));
                        said = Some(text);
                    }
                    thread::sleep(CLAIM_INTERVAL);
                }
                claimed => return claimed,
            }
        }
    }
}

#[cfg(not(feature = "store"))]
fn without_stores(place: &str) -> ArbiterError {
    let reason = "this towline was built without object stores; use one with them".into();
    ArbiterError::Store { place: place.to_owned(), reason }
}

/// Generations as files in a directory of both hosts.
fn newest_file(directory: &Path, guest: &str) -> Result<u64, ArbiterError> {
    let newest = highest(directory, |name| generation(name, guest));
    let newest = newest.map_err(|source| ArbiterError::Io { path: directory.to_owned(), source })?;
    Ok(newest.unwrap_or_default())
}

fn claim_file(path: &Path, claimant: &Claimant) -> Result<bool, ArbiterError> {
    let failed = |source| ArbiterError::Io { path: path.to_owned(), source };
    if create_once(path, claimant).map_err(failed)? {
        return Ok(true);
    }
    let is_won = claimant.is(&fs::read(path).map_err(failed)?);
    is_won.ok_or_else(|| ArbiterError::Format { path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(guest: &str, generation: u64) -> Claim<'_> {
        Claim { guest, generation, stake: Stake::Guest }
    }

    fn one_of_many_wins(arbiter: &Arbiter) {
        assert_eq!(arbiter.newest("web").unwrap(), 0);
        let claimants: Vec<_> = (0..6).map(|_| Claimant::new()).collect();
        let won = |claimant| arbiter.claim(&claim("web", 3), claimant).unwrap();
        let first: Vec<_> = std::thread::scope(|scope| {
            let won = &won;
            let threads: Vec<_> =
                claimants.iter().map(|claimant| scope.spawn(move || won(claimant))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(first.iter().filter(|won| **won).count(), 1, "{first:?}");
        // A claim is answered alike when it is made again.
        assert_eq!(claimants.iter().map(won).collect::<Vec<_>>(), first);
        assert_eq!(arbiter.newest("web").unwrap(), 3);
        // Of another guest.
        assert_eq!(arbiter.newest("we").unwrap(), 0);
        assert!(arbiter.claim(&claim("we", 3), &claimants[0]).unwrap());
    }

    /// A program that makes links in this directory.
    fn linking(directory: &std::path::Path) -> Arbiter {
        let links = format!("{}/$TOWLINE_GUEST", directory.display());
        let program = format!(
            "exec:case $TOWLINE_ACTION in
             newest) mkdir -p {links} && ls {links} | sort -n | tail -n 1 | grep . || echo 0;;
             claim) mkdir -p {links}; ln -s $TOWLINE_CLAIMANT {links}/$TOWLINE_GENERATION 2>/dev/null
                    readlink {links}/$TOWLINE_GENERATION;; esac"
        );
        program.parse().unwrap()
    }

    #[test]
    fn one_of_many_has_a_generation() {
        let place = || tempfile::tempdir().unwrap();
        let (directory, program) = (place(), place());
        one_of_many_wins(&Arbiter::Directory(directory.path().to_owned()));
        one_of_many_wins(&linking(program.path()));
        #[cfg(feature = "store")]
        {
            let store = place();
            one_of_many_wins(&format!("store:{}", store.path().display()).parse().unwrap());
        }
    }

    #[test]
    fn an_arbiter_that_does_not_decide_says_why() {
        let place = tempfile::tempdir().unwrap();
        let text =
            |arbiter: &Arbiter| arbiter.claim(&claim("web", 1), &Claimant::new()).unwrap_err().to_string();
        let missing = Arbiter::Directory(place.path().join("missing"));
        assert!(text(&missing).ends_with("check the shared storage"), "{}", text(&missing));
        assert!(missing.newest("web").is_err());
        std::fs::write(place.path().join("web.generation.1"), "{}").unwrap();
        assert!(text(&Arbiter::Directory(place.path().to_owned())).contains("version 1"));
        let program = |text: &str| text.parse::<Arbiter>().unwrap();
        let refused = text(&program("exec:echo no quorum >&2; exit 7"));
        assert!(refused.starts_with("the arbiter's program: exit status 7: no quorum"), "{refused}");
        // A failure of the shell is no word about another claimant, and neither is silence.
        assert!(text(&program("exec:false")).contains("exit status 1"));
        assert!(text(&program("exec:true")).contains("expected the claimant"));
        assert!(program("exec:echo many").newest("web").unwrap_err().to_string().contains("\"many\""));
        assert!(program("exec:echo 3; false").newest("web").is_err());
        assert!("relative".parse::<Arbiter>().is_err() && "exec: ".parse::<Arbiter>().is_err());
    }

    #[test]
    fn claims_are_made_until_they_are_answered() {
        let place = tempfile::tempdir().unwrap();
        let (path, claimant, cancel) = (place.path().join("late"), Claimant::new(), Cancel::new().unwrap());
        let arbiter = Arbiter::Directory(path.clone());
        let appears = |_: &str| std::fs::create_dir(&path).unwrap();
        let decided = arbiter.decide(&claim("web", 1), &claimant, &cancel, &appears);
        assert!(decided.unwrap());
        cancel.cancel();
        let missing = Arbiter::Directory(place.path().join("missing"));
        assert!(missing.decide(&claim("web", 2), &claimant, &cancel, &|_| {}).is_err());
    }
}
