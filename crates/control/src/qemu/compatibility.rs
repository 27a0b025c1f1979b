//! Facts about a QEMU for [`towline_compat`]: beyond its [`QemuState`](super::facts::QemuState), its
//! processors, devices with their negotiated features, backends and drives.
//!
//! Facts that a QEMU cannot report are left out; the rules then report them as unknown. Those of a QEMU
//! that this process has started are queried while it creates its machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::{Map, Value, json};
use towline_compat::facts::{self, BlockFacts, Cpu, FeatureWord, Netdev, QemuDevice, Virtio};
use towline_qmp::commands::{CpuFast, HumanMonitorCommand, QomGet, QueryCpusFast};
use towline_qmp::{self as qmp, Client, CommandRequest, Options, Submitted};

use super::connection::Qemu;
use super::device_tree::if_known;
use super::error::Error;
use super::facts::{IMAGE_REQUESTS, VHOST_USER, image_facts, image_requests, mark_disconnected, requests};
use super::ram_block::RamBlockInfo;
use super::virtio;
use crate::lock::lock;

/// Properties of the machine that a guest sees.
const MACHINE_PROPERTIES: [&str; 13] = [
    "smp",
    "memory",
    "smm",
    "acpi",
    "pit",
    "pic",
    "hpet",
    "vmport",
    "i8042",
    "sata",
    "smbus",
    "nvdimm",
    "max-ram-below-4g",
];
/// Maximum number of processors whose APIC ids are queried.
const APIC_IDS_MAX: usize = 1024;
/// Maximum number of buses between a device and its host bridge.
const BUSES_MAX: usize = 16;
/// Suffix of a processor's QOM type, after its model and architecture.
const CPU_SUFFIX: &str = "-cpu";
/// Name of a virtio device below its PCI function.
const VIRTIO_CHILD: &str = "/virtio-backend";

/// The first QEMU that may abort in a query for the status of a virtio device.
const VIRTIO_STATUS_ABORTS_SINCE: (u32, u32) = (10, 1);

impl Qemu {
    /// Facts that need no further query, for rules about machine and memory.
    pub fn basic_facts(&self) -> facts::QemuFacts {
        let facts = self.facts();
        facts::QemuFacts {
            version: facts.version.qemu.to_string(),
            machine: facts.machine.clone(),
            status: facts.status.status.as_str().to_owned(),
            incoming: facts.incoming,
            uuid: Some(facts.uuid.clone()),
            blocks: facts.migrated_blocks().map(block).collect(),
            capabilities: facts.capabilities.iter().map(|(name, on)| (name.to_string(), *on)).collect(),
            parameters: facts.parameters.to_map().into_iter().collect(),
            blocked_reasons: facts.blocked_reasons().to_vec(),
            ..facts::QemuFacts::default()
        }
    }

    /// Queries everything that the compatibility rules need.
    ///
    /// # Errors
    /// [`Error::Qmp`]: the monitor is disconnected or does not reply. A query that this QEMU does not know is
    /// not an error.
    pub fn compat_facts(&mut self) -> Result<facts::QemuFacts, Error> {
        self.refresh()?;
        let cpus = if_known(self.client.execute(&QueryCpusFast))?;
        let facts::QemuFacts { mut devices, mut netdevs, memory_backends, drives, .. } =
            image_facts(self.client.execute_all(&image_requests()?)?, self.process().pid())?;
        self.mark_disconnected(netdevs.as_deref_mut().unwrap_or_default())?;
        if let Some(devices) = &mut devices {
            self.virtio(devices, netdevs.as_deref().unwrap_or_default())?;
        }
        let cpu_features = match cpus.iter().flatten().next() {
            Some(cpu) => self.property(&cpu.qom_path, "feature-words")?.map(|words| feature_words(&words)),
            None => None,
        };
        let mut known = facts::QemuFacts {
            devices,
            netdevs,
            memory_backends,
            drives,
            cpu_features,
            ..self.basic_facts()
        };
        known.cpus = cpus.map(|cpus| self.cpus(&cpus)).transpose()?;
        known.kvm = self.query_raw("query-kvm", None)?.and_then(|reply| reply["enabled"].as_bool());
        known.machine_properties = Some(self.machine_properties()?);
        Ok(known)
    }

    fn mark_disconnected(&mut self, netdevs: &mut [Netdev]) -> Result<(), Error> {
        if netdevs.iter().any(|netdev| netdev.kind == VHOST_USER)
            && let Some(network) = self.human_command("info network")?
            && let Some(chardevs) = self.query_raw("query-chardev", None)?
        {
            mark_disconnected(netdevs, &network, &chardevs);
        }
        Ok(())
    }

    /// As [`Qemu::compat_facts`], for a newly connected QEMU: only facts that rules compare with an image,
    /// which has no others.
    ///
    /// # Errors
    /// As [`Qemu::compat_facts`].
    pub(crate) fn facts_for_image(&mut self) -> Result<facts::QemuFacts, Error> {
        let found = match self.image_facts.take() {
            Some(found) => found,
            None => image_facts(self.client.execute_all(&image_requests()?)?, self.process().pid())?,
        };
        let cpu = |cpu: &CpuFast| Cpu { index: cpu.cpu_index, ..Cpu::default() };
        Ok(facts::QemuFacts {
            cpus: self.cpus.as_ref().map(|cpus| cpus.iter().map(cpu).collect()),
            devices: found.devices,
            netdevs: found.netdevs,
            memory_backends: found.memory_backends,
            drives: found.drives,
            ..self.basic_facts()
        })
    }

    /// Returns true if KVM runs the guest's processors; false if QEMU does not report it.
    pub(crate) fn is_kvm(&mut self) -> Result<bool, Error> {
        Ok(self.query_raw("query-kvm", None)?.is_some_and(|reply| reply["enabled"] == true))
    }

    /// Returns `None` if QEMU refuses the query.
    pub(crate) fn query_raw(
        &mut self,
        command: &str,
        arguments: Option<Map<String, Value>>,
    ) -> Result<Option<Value>, Error> {
        Ok(if_known(self.client.execute_raw(command, arguments))?)
    }

    fn human_command(&mut self, line: &str) -> Result<Option<String>, Error> {
        let command = HumanMonitorCommand { command_line: line.into() };
        Ok(if_known(self.client.execute(&command))?)
    }

    fn property(&mut self, path: &str, property: &str) -> Result<Option<Value>, Error> {
        let get = QomGet { path: path.into(), property: property.into() };
        Ok(if_known(self.client.execute(&get))?)
    }

    fn machine_properties(&mut self) -> Result<BTreeMap<String, Value>, Error> {
        let mut known = BTreeMap::new();
        for name in MACHINE_PROPERTIES {
            if let Some(value) = self.property("/machine", name)? {
                known.insert(name.to_owned(), value);
            }
        }
        Ok(known)
    }

    fn cpus(&mut self, cpus: &[CpuFast]) -> Result<Vec<Cpu>, Error> {
        let mut known = Vec::with_capacity(cpus.len());
        for (index, cpu) in cpus.iter().enumerate() {
            // All processors have the same model.
            let model = match known.first().map(|first: &Cpu| first.model.clone()) {
                Some(model) => model,
                None => self.cpu_model(cpu)?,
            };
            let apic_id = if index < APIC_IDS_MAX { self.property(&cpu.qom_path, "apic-id")? } else { None };
            let apic_id = apic_id.and_then(|id| id.as_u64());
            let props = cpu.other.get("props").and_then(Value::as_object);
            let topology =
                props.into_iter().flatten().filter_map(|(name, id)| Some((name.clone(), id.as_u64()?)));
            known.push(Cpu { index: cpu.cpu_index, model, apic_id, topology: topology.collect() });
        }
        Ok(known)
    }

    fn cpu_model(&mut self, cpu: &CpuFast) -> Result<String, Error> {
        let kind = self.property(&cpu.qom_path, "type")?.unwrap_or_default();
        let kind = kind.as_str().unwrap_or_default();
        let suffix = format!("-{}{CPU_SUFFIX}", cpu.target);
        Ok(kind.strip_suffix(suffix.as_str()).unwrap_or(kind).to_owned())
    }

    /// Adds QEMU's facts about virtio devices: their virtqueues, and the features that they and their drivers
    /// negotiated.
    fn virtio(&mut self, devices: &mut [QemuDevice], netdevs: &[Netdev]) -> Result<(), Error> {
        let Some(Value::Array(listed)) = self.query_raw("x-query-virtio", None)? else { return Ok(()) };
        for path in listed.iter().filter_map(|entry| entry["path"].as_str()) {
            let Some(place) = self.virtio_place(path)? else { continue };
            let Some(device) = devices.iter_mut().find(|device| device.place == place) else { continue };
            if !virtio::may_be_queried(&device.kind) {
                continue;
            }
            device.virtio = self.virtio_features(path)?;
            device.virtqueues = self.virtqueues(path, device, netdevs)?;
        }
        Ok(())
    }

    /// Features of a virtio device, if QEMU can be queried for them: 11.1.3 aborts, and its guest with it, in
    /// this query for any virtio device without vhost; 10.0.13 replies. Versions between are not queried
    /// either.
    fn virtio_features(&mut self, path: &str) -> Result<Option<Virtio>, Error> {
        let version = &self.facts.version.qemu;
        if (version.major, version.minor) >= VIRTIO_STATUS_ABORTS_SINCE {
            return Ok(None);
        }
        let Value::Object(arguments) = json!({ "path": path }) else { return Ok(None) };
        let status = self.query_raw("x-query-virtio-status", Some(arguments))?;
        Ok(status.map(|status| Virtio {
            offered: virtio::names(&status["host-features"]),
            negotiated: virtio::names(&status["guest-features"]),
        }))
    }

    /// Address of a virtio device in the format of [`device_tree`]; `None` if it is not on PCI.
    fn virtio_place(&mut self, path: &str) -> Result<Option<String>, Error> {
        let Some(mut device) = path.strip_suffix(VIRTIO_CHILD).map(str::to_owned) else { return Ok(None) };
        let mut addresses = Vec::new();
        for _ in 0..BUSES_MAX {
            let Some(address) = self.property(&device, "addr")?.as_ref().and_then(pci_address) else { break };
            addresses.push(address);
            let bus = self.property(&device, "parent_bus")?.unwrap_or_default();
            let Some((parent, _)) = bus.as_str().and_then(|bus| bus.rsplit_once('/')) else { break };
            device = parent.to_owned();
        }
        addresses.reverse();
        Ok((!addresses.is_empty()).then(|| format!("pci/{}/virtio", addresses.join("/"))))
    }
}

/// A slot and a function, from a number or text.
fn pci_address(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => {
            let number = number.as_u64().filter(|number| *number < 256)?;
            Some(format!("{:02x}.{:x}", number >> 3, number & 7))
        }
        _ => None,
    }
}

fn block(block: &RamBlockInfo) -> BlockFacts {
    BlockFacts {
        name: block.name.clone(),
        page_bytes: block.page_bytes,
        used_bytes: block.used_bytes,
        max_bytes: block.max_bytes,
    }
}

fn feature_words(words: &Value) -> Vec<FeatureWord> {
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    let word = |word: &Value| {
        Some(FeatureWord {
            leaf: number(&word["cpuid-input-eax"])?,
            subleaf: number(&word["cpuid-input-ecx"]),
            register: word["cpuid-register"].as_str()?.to_owned(),
            bits: number(&word["features"])?,
        })
    };
    words.as_array().into_iter().flatten().filter_map(word).collect()
}

// A QEMU that this process has started: queried while it creates its machine.
//
// ```text
//   fork ─► connect, send all queries ─► QEMU reads them while it starts ─► greeting, replies ─► Qemu
// ```
// A QEMU reads its monitor on a separate thread, one byte at a time, which takes most of the time of short
// queries. Queries of a QEMU that is not ready yet cost nothing.

/// The monitor of a QEMU that this process has started, for the copy of an image to it.
#[derive(Debug)]
pub struct StartedQemu {
    pid: u32,
    socket: PathBuf,
    // Taken by the copy, which is its only user.
    monitor: Mutex<Option<(Client, Submitted)>>,
}

impl StartedQemu {
    /// Connects to the monitor at `socket` of process `pid`, a child of this one, as soon as it exists.
    /// Returns when it has answered.
    ///
    /// # Errors
    /// Those of [`Client::connect`].
    pub fn connect(socket: &Path, pid: u32, options: &Options) -> Result<Self, qmp::Error> {
        let mut queries = Vec::from(image_requests()?);
        queries.push(CommandRequest::new(&QueryCpusFast)?);
        queries.extend(requests()?);
        let (mut client, submitted) = Client::connect_ahead(socket, options, &queries)?;
        client.set_deadline(qmp::DEADLINE);
        Ok(Self { pid, socket: socket.to_owned(), monitor: Mutex::new(Some((client, submitted))) })
    }

    /// The QEMU with its journal; `None` if this was called before.
    pub(crate) fn take(&self) -> Option<Result<Qemu, Error>> {
        let monitor = lock(&self.monitor).take();
        monitor.map(|(client, submitted)| self.qemu(client, submitted))
    }

    fn qemu(&self, mut client: Client, submitted: Submitted) -> Result<Qemu, Error> {
        let mut replies = client.replies(submitted)?.into_iter();
        let facts = replies.by_ref().take(IMAGE_REQUESTS);
        let image_facts = image_facts(facts, Some(self.pid.cast_signed()))?;
        // QEMU listens on a socket of this process, so the kernel names no peer.
        let mut qemu = Qemu::of_replies(client, replies, self.pid.cast_signed())?;
        qemu.image_facts = Some(image_facts);
        qemu.has_current_settings = true;
        qemu.with_journal(&self.socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_numbers_or_text() {
        assert_eq!(pci_address(&json!(250)), Some("1f.2".into()));
        assert_eq!(pci_address(&json!("02.0")), Some("02.0".into()));
        assert_eq!(pci_address(&json!(-1)), None);
    }

    #[test]
    fn invalid_feature_words_are_skipped() {
        let words =
            json!([{ "cpuid-register": "ECX", "cpuid-input-eax": 1, "features": 5 }, { "features": 1 }]);
        let found = feature_words(&words);
        assert_eq!((found.len(), found[0].leaf, found[0].bits), (1, 1, 5));
    }
}
