//! `--detach-vsock`: detaches a vhost-user-vsock, which QEMU (to 10.0 at least) refuses to migrate, before a
//! move, and attaches it again at the destination.
//!
//! ```text
//!   both ends checked ─► device_del, the guest releases it ─► the move ─► the guest runs there ─► device_add
//!                             └─ failure, and the guest stays at its source: device_add there
//! ```
//! Connections end with the device; listeners in the guest stay, and accept again as soon as its kernel has
//! the new device. The device is detached while memory is transferred because QEMU checks for it at
//! `migrate`.
//!
//! Out of scope: other devices. The device must be on a port that can be unplugged (`pcie-root-port`).

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use towline_channel::Cancel;
use towline_compat::facts;
use towline_qmp as qmp;
use towline_qmp::commands::QomGet;

use super::error::{BlockedBy, Error, check_cancelled};
use crate::journal::{JournalEntry, UndoRecord};
use crate::qemu::{DEVICE_CONTAINERS, Qemu, QomChild, if_known, qom_children};

/// Prefix of its types, one of which supports legacy virtio.
pub(super) const KIND: &str = "vhost-user-vsock";
/// Properties that are restored, if they can be read.
const PROPERTIES: [&str; 5] = ["chardev", "seqpacket", "iommu_platform", "ats", "packed"];
/// Timeout for the guest to release a device: an attention button takes five seconds.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A vsock of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VsockDevice {
    driver: String,
    /// `None` if it has no id.
    id: Option<String>,
    path: String,
    bus: String,
    properties: Map<String, Value>,
}

/// The vsocks of a source, and how many were detached.
#[derive(Debug, Default)]
pub(super) struct DetachedVsocks {
    all: Vec<VsockDevice>,
    /// Number of vsocks for which the guest got an unplug request.
    unplugged: usize,
    /// Entries in the source's journal, of unplugged devices.
    entries: Vec<JournalEntry>,
}

/// Returns true if QEMU's reason not to migrate is such a device.
pub(super) fn blocked_by(reason: &str) -> BlockedBy {
    if reason.contains(KIND) { BlockedBy::Vsock(reason.into()) } else { BlockedBy::Qemu(reason.into()) }
}

fn is_vsock_blocker(reason: &str) -> bool {
    matches!(blocked_by(reason), BlockedBy::Vsock(_))
}

/// Removes the devices from the facts of a guest, as they will be detached.
pub(super) fn remove_from_facts(facts: &mut facts::QemuFacts) {
    facts.blocked_reasons.retain(|reason| !is_vsock_blocker(reason));
    if let Some(devices) = &mut facts.devices {
        devices.retain(|device| !device.kind.starts_with(KIND));
    }
}

/// Ids of the chardevs of a QEMU's vsocks, also of those that were plugged in since its start. Empty if it
/// does not reply.
pub(crate) fn chardevs(qemu: &mut Qemu) -> Vec<String> {
    let Ok(found) = DetachedVsocks::find(qemu) else { return Vec::new() };
    let chardev = |vsock: &VsockDevice| vsock.properties.get("chardev")?.as_str().map(str::to_owned);
    found.all.iter().filter_map(chardev).collect()
}

impl DetachedVsocks {
    /// Finds the vsocks of a QEMU.
    pub(super) fn find(qemu: &mut Qemu) -> Result<Self, Error> {
        let mut all = Vec::new();
        for container in DEVICE_CONTAINERS {
            for QomChild { name, kind } in qom_children(qemu.client(), container)? {
                if kind.starts_with(KIND) {
                    all.push(VsockDevice::read(qemu, container, name, kind)?);
                }
            }
        }
        Ok(Self { all, unplugged: 0, entries: Vec::new() })
    }

    /// Refuses a destination at which they could not be attached.
    pub(super) fn check(&self, waiting: &mut Qemu) -> Result<(), Error> {
        let mut reasons = Vec::new();
        let there = qom_children(waiting.client(), DEVICE_CONTAINERS[0])?;
        if let Some(QomChild { name, .. }) = there.iter().find(|child| child.kind.starts_with(KIND)) {
            reasons.push(format!(
                "{name} is there already: start it without; it is attached when the guest is there"
            ));
        }
        let chardevs = waiting.client().execute_raw("query-chardev", None)?;
        for vsock in &self.all {
            let chardev = vsock.properties.get("chardev").unwrap_or(&Value::Null);
            let labels = chardevs.as_array().into_iter().flatten().map(|one| &one["label"]);
            if !labels.into_iter().any(|label| label == chardev) {
                reasons.push(format!(
                    "it has no -chardev with the id {chardev}, to which {vsock} would be connected"
                ));
            }
            if there.iter().all(|child| child.name != vsock.bus) {
                reasons.push(format!(
                    "it has no port {:?} (pcie-root-port), to which {vsock} belongs",
                    vsock.bus
                ));
            }
        }
        if reasons.is_empty() {
            Ok(())
        } else {
            Err(Error::DoesNotFit { destination: format!("QEMU on {}", waiting.socket()), reasons })
        }
    }

    /// Unplugs them from the guest.
    pub(super) fn detach(&mut self, qemu: &mut Qemu, cancel: &Cancel) -> Result<(), Error> {
        if !self.all.is_empty() {
            qemu.wait_for_replies();
        }
        while let Some(vsock) = self.all.get(self.unplugged) {
            let refused = |text: String, qemu: &Qemu| Error::NotDetached {
                socket: qemu.socket().to_owned(),
                device: vsock.to_string(),
                text,
            };
            if !qemu.status()?.running {
                let text = "it is paused, and only a running guest can release a device: `cont` it first";
                return Err(refused(text.into(), qemu));
            }
            let entry = qemu.record(&vsock.record());
            let device = Map::from_iter([("id".to_owned(), vsock.path.clone().into())]);
            match qemu.client().execute_raw("device_del", Some(device)) {
                Ok(_) => self.entries.extend(entry),
                Err(qmp::Error::Refusal { desc, .. }) => {
                    entry.iter().for_each(JournalEntry::done);
                    let text = format!("{desc} (it must be behind a pcie-root-port)");
                    return Err(refused(text, qemu));
                }
                Err(error) => return Err(error.into()),
            }
            self.unplugged += 1;
            let deadline = Instant::now() + UNPLUG_TIMEOUT;
            while vsock.is_there(qemu)? {
                check_cancelled(cancel)?;
                if Instant::now() >= deadline {
                    let text = format!(
                        "its kernel has not released it within {} s, and may still do so",
                        UNPLUG_TIMEOUT.as_secs()
                    );
                    return Err(refused(text, qemu));
                }
                thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(())
    }

    /// Records of the detached devices.
    pub(super) fn records(&self) -> Vec<UndoRecord> {
        self.all[..self.unplugged].iter().map(VsockDevice::record).collect()
    }

    /// Attaches the detached devices, at either end.
    pub(super) fn attach(&self, qemu: &mut Qemu) -> Result<(), Error> {
        for vsock in &self.all[..self.unplugged] {
            if vsock.is_there(qemu)? {
                return Err(Error::NotAttached {
                    socket: qemu.socket().into(),
                    device: vsock.to_string(),
                    text: "the guest got an unplug request and has not released it yet: when it does, attach it manually (`device_add`)".into(),
                });
            }
            vsock.add(qemu)?;
        }
        // At the destination too: the guest has them again, and its source must not.
        self.entries.iter().for_each(JournalEntry::done);
        Ok(())
    }
}

impl VsockDevice {
    fn read(qemu: &mut Qemu, container: &str, name: String, driver: String) -> Result<Self, Error> {
        let path = format!("{container}/{name}");
        let bus = get(qemu, &path, "parent_bus")?;
        // The last part of the bus's path is its name.
        let bus = bus.as_str().and_then(|bus| bus.rsplit('/').next()).unwrap_or_default().to_owned();
        let mut properties = Map::new();
        for property in PROPERTIES {
            // Not all versions have all of them.
            if let Some(value) = if_known(get(qemu, &path, property))? {
                properties.insert(property.into(), value);
            }
        }
        let id = (container == DEVICE_CONTAINERS[0]).then_some(name);
        Ok(Self { driver, id, path, bus, properties })
    }

    fn is_there(&self, qemu: &mut Qemu) -> Result<bool, Error> {
        let Some((container, name)) = self.path.rsplit_once('/') else { return Ok(false) };
        let is_listed = |child: &QomChild| child.name == name && child.kind == self.driver;
        let listed = qom_children(qemu.client(), container)?.iter().any(is_listed);
        Ok(listed || qemu.migration()?.blocked_reasons.iter().any(|reason| is_vsock_blocker(reason)))
    }

    /// The undo record of its removal.
    fn record(&self) -> UndoRecord {
        UndoRecord::Device { path: self.path.clone(), add: self.arguments() }
    }

    /// Arguments of `device_add`.
    fn arguments(&self) -> Map<String, Value> {
        let mut arguments = self.properties.clone();
        arguments.insert("driver".into(), self.driver.clone().into());
        arguments.insert("bus".into(), self.bus.clone().into());
        if let Some(id) = &self.id {
            arguments.insert("id".into(), id.clone().into());
        }
        arguments
    }

    fn add(&self, qemu: &mut Qemu) -> Result<(), Error> {
        match qemu.plug(&self.arguments()) {
            Ok(()) => Ok(()),
            Err(qmp::Error::Refusal { desc, .. }) => {
                Err(Error::NotAttached { socket: qemu.socket().into(), device: self.to_string(), text: desc })
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl std::fmt::Display for VsockDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.id.as_deref().unwrap_or(&self.driver), self.bus)
    }
}

fn get(qemu: &mut Qemu, path: &str, property: &str) -> Result<Value, qmp::Error> {
    qemu.client().execute(&QomGet { path: path.into(), property: property.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_facts_about_vsocks_are_removed() {
        let device = |kind: &str| facts::QemuDevice { kind: kind.into(), ..facts::QemuDevice::default() };
        let mut facts = facts::QemuFacts {
            blocked_reasons: ["0000:01:00.0/vhost-user-vsock", "0000:00:02.0/nvme"]
                .map(|name| format!("non-migratable device: {name}"))
                .into(),
            devices: Some(["vhost-user-vsock-pci", "vhost-user-vsock-device", "nvme"].map(device).into()),
            ..facts::QemuFacts::default()
        };
        remove_from_facts(&mut facts);
        assert_eq!(facts.blocked_reasons, ["non-migratable device: 0000:00:02.0/nvme"]);
        assert_eq!(facts.devices.unwrap(), [device("nvme")]);
    }
}
