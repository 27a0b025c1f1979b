//! Preflight check: gathers the facts of both ends for [`towline_compat`].
//!
//! ```text
//!   qmp:PATH    a QEMU is queried (nothing is changed)        exec:COMMAND   its output: facts, or a -dump-vmstate
//!   an image    its head and device state are read          facts:FILE     the same from a file
//!   attr:PATH   a migration_version attribute is read; as a destination, the source's string is written to it
//!   ctl:SOCKET  a towline device: the same, and its other facts
//! ```
//! Out of scope: the verdict, which the rules give.

mod sources;

use std::path::PathBuf;

use towline_compat::facts::{BlockFacts, ImageFacts, Section, Subject};
use towline_compat::{Facts, Pair, Report, attribute as judged, evaluate};
use towline_image::{Image, StoredGuest};
use towline_qmp as qmp;

use crate::qemu::Qemu;

pub use sources::{Error, RecordedError, write_facts};

/// Default number of lanes if both ends can be configured: enough to fill a fast link, few enough for a small
/// host.
pub const LANES_DEFAULT: usize = 4;
/// The same of postcopy, beside which only QEMU 10.1 and later have lanes.
pub(crate) const LANES_OF_POSTCOPY: usize = 0;

/// One end of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckEnd {
    /// A QEMU, by its QMP socket.
    Qmp(PathBuf),
    /// An image.
    Image(PathBuf),
    /// A file of facts, or of a QEMU binary's dump.
    Facts(PathBuf),
    /// A command that prints such a file.
    Command(String),
    /// A `migration_version` attribute.
    Attribute(PathBuf),
    /// A towline device, by its control socket.
    Control(PathBuf),
}

/// The planned transfer, with the default number of lanes of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlannedTransfer {
    /// The guest runs at the destination once its memory has arrived.
    #[default]
    Precopy,
    /// The guest runs before its memory has arrived.
    Postcopy,
}

impl PlannedTransfer {
    /// Postcopy if the condition is true.
    pub fn postcopy_if(is_postcopy: bool) -> Self {
        if is_postcopy { Self::Postcopy } else { Self::Precopy }
    }

    /// Number of lanes by default.
    pub fn lanes(self) -> usize {
        match self {
            Self::Precopy => LANES_DEFAULT,
            Self::Postcopy => LANES_OF_POSTCOPY,
        }
    }
}

impl CheckEnd {
    /// Gathers the facts. Nothing is changed there.
    ///
    /// # Errors
    /// [`Error`].
    pub fn facts(&self) -> Result<Facts, Error> {
        match self {
            Self::Qmp(path) => {
                let mut qemu = Qemu::inspect(path, &qmp::Options::default())?;
                Ok(Subject::Qemu(Box::new(qemu.compat_facts()?)).into())
            }
            Self::Image(path) => Ok(image(&Image::open(path)?)),
            Self::Facts(path) => {
                let from = path.display().to_string();
                sources::of_file(path).map_err(|source| Error::Recorded { from, source })
            }
            Self::Command(command) => sources::of_command(command)
                .map_err(|source| Error::Recorded { from: format!("exec:{command}"), source }),
            Self::Attribute(path) => sources::read_attribute(path)
                .map_err(|source| Error::Attribute { path: path.clone(), source }),
            Self::Control(path) => sources::of_control(path),
        }
    }

    /// Passes the source's version to a device; the error is its reply.
    fn write(&self, version: &str, device_type: &str) -> Result<(), String> {
        match self {
            Self::Attribute(path) => sources::write_attribute(path, version)
                .map_err(|errno| std::io::Error::from_raw_os_error(errno).to_string()),
            Self::Control(path) => sources::control_accepts(path, device_type, version),
            Self::Qmp(_) | Self::Image(_) | Self::Facts(_) | Self::Command(_) => Ok(()),
        }
    }

    /// Returns true if the facts are current, not recorded earlier.
    pub fn is_live(&self) -> bool {
        matches!(self, Self::Qmp(_) | Self::Attribute(_) | Self::Control(_))
    }
}

/// Checks a pair of ends. An attribute or a device as the destination gets the source's version.
///
/// # Errors
/// [`Error`] of either end.
pub fn check(source: &CheckEnd, destination: &CheckEnd, planned: PlannedTransfer) -> Result<Report, Error> {
    let (guest, there) = (source.facts()?, destination.facts()?);
    let is_live = destination.is_live();
    let is_one_host = is_live && (source.is_live() || matches!(source, CheckEnd::Image(_)));
    let mut report = evaluate(&Pair {
        source: &guest,
        destination: &there,
        lanes: Some(planned.lanes()),
        is_postcopy: planned == PlannedTransfer::Postcopy,
        is_live,
        is_one_host,
        copies_disks: false,
    });
    if let CheckEnd::Attribute(_) | CheckEnd::Control(_) = destination {
        let device_type = match &guest.subject {
            Subject::Device(device) => device.device_type.as_str(),
            Subject::Attribute(attribute) => attribute.device_type.as_str(),
            _ => "",
        };
        judged::evaluate(&mut report, &guest, &there, |version| destination.write(version, device_type));
    }
    Ok(report)
}

/// Facts of an open image.
pub(crate) fn image(image: &dyn StoredGuest) -> Facts {
    let section = |device: &towline_protocol::device_state::DeviceSection| Section {
        name: device.name.clone(),
        instance: device.instance,
        version: device.version,
    };
    let facts = ImageFacts {
        machine: image.configuration().machine_type.clone(),
        blocks: blocks(image.blocks()),
        sections: image.devices().devices().iter().map(section).collect(),
        qemu: image
            .image()
            .filter(|image| !image.is_incremental())
            .and_then(Image::manifest)
            .and_then(|manifest| manifest.origin.qemu.clone()),
    };
    Subject::Image(facts).into()
}

/// Facts of a stored guest whose devices are not known.
pub(crate) fn stored(machine_type: &str, ram_blocks: &[towline_protocol::RamBlock]) -> Facts {
    let blocks = blocks(ram_blocks);
    Subject::Image(ImageFacts { machine: machine_type.into(), blocks, ..ImageFacts::default() }).into()
}

fn blocks(ram_blocks: &[towline_protocol::RamBlock]) -> Vec<BlockFacts> {
    let block = |block: &towline_protocol::RamBlock| BlockFacts {
        name: block.name.clone(),
        page_bytes: 0,
        used_bytes: block.length,
        max_bytes: block.length,
    };
    ram_blocks.iter().map(block).collect()
}

#[cfg(test)]
mod tests {
    use towline_compat::facts::QemuFacts;
    use towline_compat::{ConfiguredBy, Verdict};

    use super::*;

    /// Only lanes between two QEMUs carry the uuid, and postcopy has none by default.
    #[test]
    fn postcopy_is_checked_without_lanes() {
        let directory = tempfile::tempdir().unwrap();
        let [source, destination] = ["a", "b"].map(|uuid| {
            let path = directory.path().join(uuid);
            let facts = QemuFacts { uuid: Some(uuid.into()), ..QemuFacts::default() };
            write_facts(&path, &Subject::Qemu(Box::new(facts)).into()).unwrap();
            CheckEnd::Facts(path)
        });
        for planned in [PlannedTransfer::Precopy, PlannedTransfer::Postcopy] {
            let report = check(&source, &destination, planned).unwrap();
            let uuid = report.of(ConfiguredBy::Towline).find(|finding| finding.rule == "uuid").unwrap();
            assert_eq!(uuid.severity, towline_compat::Severity::Note, "{planned:?}: {uuid:?}");
            assert_ne!(report.verdict(ConfiguredBy::Towline), Verdict::No, "{planned:?}: {report:?}");
        }
    }
}
