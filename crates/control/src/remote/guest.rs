//! The guest that goes to another host, and whether it would run there.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use towline_compat::facts::Subject;
use towline_compat::{Facts, Pair, Report, evaluate};
use towline_launch::{HostMap, Overlay, Recorded, Setting};
use towline_qmp as qmp;

use super::disks::{DiskPolicy, WrittenDisk};
use super::{Error, NewGuest, Place};
use crate::plan::{self, Observer};
use crate::qemu::Qemu;
use crate::upgrade::base_name;

/// A guest before it goes to another host, as its QEMU describes it.
#[derive(Debug)]
pub struct DepartingGuest {
    pub(super) facts: Facts,
    pub(super) disks: Vec<WrittenDisk>,
    pub(super) disk_policy: DiskPolicy,
    pub(super) place: Place,
}

/// Opinion of the other host on a place for a guest.
#[derive(Debug)]
#[non_exhaustive]
pub struct Fit {
    /// Facts about the QEMU there; none of an image.
    pub facts: Option<Facts>,
    /// Reasons of that host against.
    pub refusals: Vec<String>,
}

impl DepartingGuest {
    /// Queries the QEMU with this monitor for a guest that goes to `place`, and changes nothing there. A QEMU that is started for it gets
    /// its command line, and its name and program unless they are given. `interrupt` ends the wait for the monitor.
    ///
    /// # Errors
    /// It cannot be queried, its command line is not known, or a disk cannot be copied.
    pub fn of(
        socket: &Path,
        place: Place,
        disk_policy: DiskPolicy,
        map: Option<&HostMap>,
        interrupt: Option<Arc<OwnedFd>>,
    ) -> Result<Self, plan::Error> {
        let options = qmp::Options { interrupt, ..qmp::Options::default() };
        let mut qemu = Qemu::inspect(socket, &options)?;
        let facts = Subject::Qemu(Box::new(qemu.compat_facts()?)).into();
        let place = match place {
            Place::Guest(guest) => Place::Guest(with_own_values(guest, map, &mut qemu)?),
            place => place,
        };
        let mut disks = WrittenDisk::of(&mut qemu)?;
        if disk_policy == DiskPolicy::Copied {
            disks.iter().try_for_each(WrittenDisk::check_copy)?;
            if let Place::Guest(guest) = &place {
                let of_line = disks_of(guest)?;
                disks.iter_mut().try_for_each(|disk| disk.find_setting(&of_line))?;
            }
        }
        Ok(Self { facts, disks, disk_policy, place })
    }

    /// Returns true if it has disks that are copied.
    pub(super) fn copies_disks(&self) -> bool {
        self.disk_policy == DiskPolicy::Copied && !self.disks.is_empty()
    }

    /// Notices about its disks, once a copy of them has gone on elsewhere.
    pub fn disks_left(&self) -> Vec<String> {
        if self.copies_disks() {
            self.disks.iter().filter_map(WrittenDisk::left).collect()
        } else {
            Vec::new()
        }
    }

    pub(super) fn facts_json(&self) -> Value {
        serde_json::from_slice(&self.facts.to_json()).expect("written as JSON")
    }

    /// The findings of both hosts on this guest and its place.
    pub fn compare(&self, there: &Fit, lanes: usize) -> Report {
        let report = there.facts.as_ref().map(|there| compare(&self.facts, there, lanes)).unwrap_or_default();
        report.with_refusals(&there.refusals)
    }

    /// Refuses a guest that would not run there, and passes other findings on as notices.
    ///
    /// # Errors
    /// [`plan::Error::DoesNotFit`].
    pub fn check(
        &self,
        there: &Fit,
        lanes: usize,
        host: &str,
        observer: &dyn Observer,
    ) -> Result<(), plan::Error> {
        plan::report_findings(&self.compare(there, lanes), || host.to_owned(), observer)
    }
}

/// The disks in the command line of a guest that gets a QEMU elsewhere.
fn disks_of(guest: &NewGuest) -> Result<Vec<Overlay>, Error> {
    let recorded = recorded(&guest.command_line)?;
    let directory = guest.working_directory.as_deref().unwrap_or(Path::new("/"));
    Ok(recorded.command_line().written_disks(directory, None))
}

fn recorded(command_line: &str) -> Result<Recorded, Error> {
    Recorded::from_json(command_line.as_bytes()).map_err(|source| Error::CommandLine { source })
}

/// A QEMU for this one's guest, with the given name and program, or its own, and with the names that the other host has.
fn with_own_values(given: NewGuest, map: Option<&HostMap>, qemu: &mut Qemu) -> Result<NewGuest, plan::Error> {
    let command_line = plan::record_command_line(qemu)?.command_line;
    let mut settings = Vec::new();
    if let Some(map) = map {
        let translated = map.settings(recorded(&command_line)?.command_line());
        settings.extend(translated.into_iter().map(|Setting { key, value }| format!("{key}={value}")));
    }
    // The last one counts.
    settings.extend_from_slice(&given.settings);
    let name = match given.name.as_str() {
        "" => {
            let reply = qemu.query_raw("query-name", None)?;
            let own = reply.as_ref().and_then(|reply| reply["name"].as_str());
            base_name(own, qemu.socket().as_ref())
        }
        name => name.to_owned(),
    };
    let (binary, working_directory) =
        (given.binary.unwrap_or_else(|| qemu.program()), qemu.working_directory());
    Ok(NewGuest { name, command_line, binary: Some(binary), working_directory, settings, ..given })
}

/// Compares a guest with a QEMU on another host.
pub(super) fn compare(source: &Facts, destination: &Facts, lanes: usize) -> Report {
    evaluate(&Pair {
        source,
        destination,
        lanes: Some(lanes),
        is_postcopy: false,
        is_live: true,
        is_one_host: false,
    })
}
