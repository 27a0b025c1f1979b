//! The guest that goes to another host, and whether it would run there.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use towline_channel::Address;
use towline_compat::facts::{QemuDevice, QemuFacts, Subject};
use towline_compat::{Facts, Pair, Report, evaluate};
use towline_launch::{HostMap, Overlay, Recorded, Setting};
use towline_qmp as qmp;
use towline_qmp::commands::Capability;

use super::disks::{DiskPolicy, WrittenDisk};
use super::frames::{Card, FramePassing};
use super::{Error, NewGuest, Place};
use crate::check::PlannedTransfer;
use crate::generations::ManagedGuest;
use crate::plan::{self, CopyRequest, Destination, Direct, Observer, SHARED_CAPABILITIES, Tls};
use crate::qemu::Qemu;
use crate::upgrade::base_name;

/// Devices whose state a stream has in parts that only QEMU can read.
const DIRECT_DEVICES: [&str; 2] = ["vfio-", "virtio-mem"];

/// A guest before it goes to another host, as its QEMU describes it.
#[derive(Debug)]
pub struct DepartingGuest {
    pub(super) facts: Facts,
    pub(super) disks: Vec<WrittenDisk>,
    pub(super) disk_policy: DiskPolicy,
    pub(super) place: Place,
    cards: Vec<Card>,
    /// Its QEMU is in another network namespace than this process.
    has_own_network: bool,
    planned: PlannedTransfer,
}

/// Opinion of the other host on a place for a guest.
#[derive(Debug)]
pub struct Fit {
    /// Facts about the QEMU there; none of an image.
    pub facts: Option<Facts>,
    /// Reasons of that host against.
    pub refusals: Vec<String>,
    /// Chardev ids of the cards there that take frames.
    pub(super) cards: Vec<String>,
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
        Self::of_qemu(&mut Qemu::inspect(socket, &options)?, place, disk_policy, map)
    }

    /// As [`Self::of`], of a QEMU whose monitor is connected.
    pub(crate) fn of_qemu(
        qemu: &mut Qemu,
        place: Place,
        disk_policy: DiskPolicy,
        map: Option<&HostMap>,
    ) -> Result<Self, plan::Error> {
        let facts = Subject::Qemu(Box::new(qemu.compat_facts()?)).into();
        let place = match place {
            Place::Guest(guest) => Place::Guest(with_own_values(guest, map, qemu)?),
            place => place,
        };
        let mut disks = WrittenDisk::of(qemu)?;
        if disk_policy == DiskPolicy::Copied {
            disks.iter().try_for_each(WrittenDisk::check_copy)?;
            if let Place::Guest(guest) = &place {
                let of_line = disks_of(guest)?;
                disks.iter_mut().try_for_each(|disk| disk.find_setting(&of_line))?;
            }
        }
        let cards = Card::of(qemu);
        let has_own_network = qemu.process().has_own_network();
        let planned = PlannedTransfer::default();
        Ok(Self { facts, disks, disk_policy, place, cards, has_own_network, planned })
    }

    /// The same, to be sent like this.
    pub fn planned(self, planned: PlannedTransfer) -> Self {
        Self { planned, ..self }
    }

    /// Returns true if it has disks that are copied.
    pub(super) fn copies_disks(&self) -> bool {
        self.disk_policy == DiskPolicy::Copied && !self.disks.is_empty()
    }

    /// Returns true if it continues in a QEMU there.
    pub fn is_run_there(&self) -> bool {
        matches!(self.place, Place::Qmp(_) | Place::Guest(_))
    }

    /// The reason for which only its QEMU can send it to the other one, if there is one.
    pub fn needs_direct(&self) -> Option<String> {
        if let Some(capability) = self.shared_capabilities().first() {
            return Some(format!("capability {capability}"));
        }
        let devices = self.qemu()?.devices.as_ref()?;
        let of_qemu = |device: &&QemuDevice| DIRECT_DEVICES.iter().any(|kind| device.kind.starts_with(kind));
        devices.iter().find(of_qemu).map(|device| format!("device {}", device.kind))
    }

    /// Options for its QEMU to send it to the other one, encrypted or in the clear.
    ///
    /// # Errors
    /// [`Error::OtherNetwork`]: in the clear its QEMU connects by itself.
    pub fn direct(&self, is_encrypted: bool, request: &CopyRequest) -> Result<Direct, Error> {
        if self.has_own_network && !is_encrypted {
            return Err(Error::OtherNetwork { what: "the guest's QEMU" });
        }
        let mut capabilities = self.shared_capabilities();
        capabilities.extend(request.is_postcopy().then_some(Capability::POSTCOPY_RAM));
        Ok(Direct { is_encrypted, capabilities })
    }

    /// The QEMU that is started for it, with its own command line.
    pub(crate) fn new_guest(&self) -> Option<&NewGuest> {
        match &self.place {
            Place::Guest(guest) => Some(guest),
            _ => None,
        }
    }

    /// Control sockets of its cards.
    pub(crate) fn card_controls(&self) -> Vec<PathBuf> {
        self.cards.iter().map(|card| card.control.clone()).collect()
    }

    /// Facts about its QEMU.
    pub(crate) fn qemu(&self) -> Option<&QemuFacts> {
        self.facts.qemu()
    }

    /// Capabilities that are set, and that the other QEMU needs as well.
    fn shared_capabilities(&self) -> Vec<Capability> {
        let is_on = |name: &Capability| {
            self.qemu().is_some_and(|qemu| qemu.capabilities.get(name.as_str()) == Some(&true))
        };
        SHARED_CAPABILITIES.into_iter().filter(is_on).collect()
    }

    /// Notices about its disks, once a copy of them has gone on elsewhere.
    pub fn disks_left(&self) -> Vec<String> {
        if self.copies_disks() {
            self.disks.iter().filter_map(WrittenDisk::left).collect()
        } else {
            Vec::new()
        }
    }

    /// Its cards whose frames go with it.
    pub fn into_frame_passing(self, there: &Fit) -> FramePassing {
        let is_there = |card: &Card| there.cards.contains(&card.chardev);
        FramePassing::of(self.cards.into_iter().filter(is_there))
    }

    pub(super) fn facts_json(&self) -> Value {
        serde_json::from_slice(&self.facts.to_json()).expect("written as JSON")
    }

    /// The findings of both hosts on this guest and its place.
    pub fn compare(&self, there: &Fit, lanes: usize) -> Report {
        let compare = |there| {
            evaluate(&Pair {
                is_postcopy: self.planned == PlannedTransfer::Postcopy,
                copies_disks: self.copies_disks(),
                ..of_two_hosts(&self.facts, there, lanes)
            })
        };
        there.facts.as_ref().map(compare).unwrap_or_default().with_refusals(&there.refusals)
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
    let managed = ManagedGuest::of_qemu(qemu)?;
    let generations = managed.map(|guest| guest.next()).transpose()?;
    let binary = Some(binary);
    Ok(NewGuest { name, command_line, binary, working_directory, settings, generations, ..given })
}

/// A guest and a QEMU on another host.
pub(super) fn of_two_hosts<'a>(source: &'a Facts, destination: &'a Facts, lanes: usize) -> Pair<'a> {
    Pair {
        source,
        destination,
        lanes: Some(lanes),
        is_postcopy: false,
        is_live: true,
        is_one_host: false,
        copies_disks: false,
    }
}

/// An image that another host sends.
#[derive(Debug)]
pub struct Departure {
    /// Where it listens.
    pub address: Address,
    /// Keys of both ends.
    pub tls: Tls,
    /// Facts about the guest; none of an image in a store.
    pub(super) facts: Option<Facts>,
}

impl Departure {
    /// Refuses a guest that would not run in the QEMU of this destination, and passes other findings on as notices.
    ///
    /// # Errors
    /// [`plan::Error::DoesNotFit`]; the QEMU does not reply.
    pub fn check(
        &self,
        destination: &Destination,
        lanes: usize,
        observer: &dyn Observer,
    ) -> Result<(), plan::Error> {
        let (Some(guest), Destination::Qmp(socket)) = (&self.facts, destination) else { return Ok(()) };
        let mut qemu = Qemu::inspect(socket, &qmp::Options::default())?;
        let here = Subject::Qemu(Box::new(qemu.compat_facts()?)).into();
        let name = || format!("QEMU on {}", socket.display());
        plan::report_findings(&evaluate(&of_two_hosts(guest, &here, lanes)), name, observer)
    }
}
