//! Devices of a QEMU, parsed from `info qtree`.
//!
//! QMP reports one property per query, and an ordinary guest has a thousand; this text has them all. It is a
//! tree by indentation:
//!
//! ```text
//! bus: main-system-bus
//!   type System
//!   dev: q35-pcihost, id ""
//!     MCFG = -1 (0xffffffffffffffff)
//!     bus: pcie.0
//!       type PCIE
//!       dev: virtio-net-pci, id "net0"
//!         addr = 02.0
//!         class Ethernet controller, addr 00:02.0, pci id 1af4:1000 (sub 1af4:0001)
//!         bus: virtio-bus
//!           type virtio-pci-bus
//!           dev: virtio-net-device, id ""
//!             mac = "52:54:00:12:34:56"
//! ```
//! The stream identifies devices by their position, so each gets an address: `pci/02.0`, `pci/02.0/virtio`,
//! `pci/1c.0/00.0` below a port, `pci/1f.2/bus1/unit0` for a disk on a controller's second bus. A device
//! without an address is named by its type, and numbered in the order of creation, the reverse of the order
//! in the text.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use towline_compat::facts::QemuDevice;
use towline_qmp::{self as qmp, Client};

/// Types of buses whose devices have an `addr` of slot and function.
const PCI_BUSES: [&str; 4] = ["PCI", "PCIE", "pxb-bus", "pxb-pcie-bus"];
/// Properties that distinguish devices on other buses, by the bus's type.
const ADDRESSES: [(&str, &[&str]); 4] = [
    ("IDE", &["unit"]),
    ("SCSI", &["channel", "scsi-id", "lun"]),
    ("i2c-bus", &["address"]),
    ("virtio-serial-bus", &["nr"]),
];

struct Bus {
    kind: String,
    /// The device that has this bus.
    device: Option<usize>,
}

struct QomEntry {
    bus: Option<usize>,
    device: QemuDevice,
    /// Port on a USB bus.
    port: Option<String>,
}

/// A bus or a device in whose part of the text a line is, by its index.
#[derive(Clone, Copy)]
enum Open {
    Bus(usize),
    Device(usize),
}

struct OpenPart {
    indent: usize,
    open: Open,
}

/// Parses the text. Unknown lines are skipped.
pub(super) fn parse(text: &str) -> Vec<QemuDevice> {
    let (mut buses, mut entries): (Vec<Bus>, Vec<QomEntry>) = (Vec::new(), Vec::new());
    let mut parts: Vec<OpenPart> = Vec::new();
    for line in text.lines() {
        let content = line.trim_start_matches(' ');
        let indent = line.len() - content.len();
        let (is_bus, device) = (content.starts_with("bus: "), content.strip_prefix("dev: "));
        if is_bus || device.is_some() {
            while parts.pop_if(|last| last.indent >= indent).is_some() {}
        }
        let parent = parts.last().map(|part| part.open);
        if is_bus {
            let device = if let Some(Open::Device(device)) = parent { Some(device) } else { None };
            parts.push(OpenPart { indent, open: Open::Bus(buses.len()) });
            buses.push(Bus { kind: String::new(), device });
        } else if let Some(described) = device {
            let bus = if let Some(Open::Bus(bus)) = parent { Some(bus) } else { None };
            parts.push(OpenPart { indent, open: Open::Device(entries.len()) });
            entries.push(QomEntry { bus, device: self::device(described), port: None });
        } else if let (Some(Open::Bus(bus)), Some(kind)) = (parent, content.strip_prefix("type ")) {
            kind.clone_into(&mut buses[bus].kind);
        } else if let Some(Open::Device(device)) = parent {
            entries[device].detail(content);
        }
    }
    places(&buses, &mut entries);
    entries.into_iter().map(|entry| entry.device).collect()
}

/// `virtio-net-pci, id "net0"`.
fn device(described: &str) -> QemuDevice {
    let (kind, id) = described.split_once(", id ").unwrap_or((described, ""));
    QemuDevice { kind: kind.into(), id: unquoted(id).into(), ..QemuDevice::default() }
}

impl QomEntry {
    fn detail(&mut self, content: &str) {
        if let Some((name, value)) = content.split_once(" = ") {
            self.device.properties.insert(name.into(), plain(value).into());
        } else if let Some(port) = content.split_once(", port ").filter(|(head, _)| head.starts_with("addr "))
        {
            self.port = port.1.split(',').next().map(str::to_owned);
        }
    }
}

/// A number in one notation, text without its quotes.
fn plain(value: &str) -> &str {
    let is_number = value.starts_with(|c: char| c.is_ascii_digit() || c == '-');
    match value.split_once(" (") {
        Some((number, _)) if is_number => number,
        _ => unquoted(value),
    }
}

fn unquoted(text: &str) -> &str {
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text)
}

/// Sets the address of each device. Parents come before their children.
fn places(buses: &[Bus], entries: &mut [QomEntry]) {
    // From the end, so a device that is created later does not change the numbers of the others.
    let mut bus_numbers = vec![0; buses.len()];
    let mut counts: BTreeMap<Option<usize>, usize> = BTreeMap::new();
    for (index, bus) in buses.iter().enumerate().rev() {
        let count = counts.entry(bus.device).or_default();
        bus_numbers[index] = *count;
        *count += 1;
    }
    let mut numbers = vec![0; entries.len()];
    let mut counts: BTreeMap<(Option<usize>, &str), usize> = BTreeMap::new();
    for (index, entry) in entries.iter().enumerate().rev() {
        let count = counts.entry((entry.bus, entry.device.kind.as_str())).or_default();
        numbers[index] = *count;
        *count += 1;
    }
    for index in 0..entries.len() {
        let bus = entries[index].bus.map(|bus| &buses[bus]);
        let parent = bus.and_then(|bus| bus.device).map(|device| &entries[device]);
        let is_pci = |kind: &str| PCI_BUSES.contains(&kind);
        let kind = bus.map_or("", |bus| bus.kind.as_str());
        let is_root = parent.is_none_or(|parent| !parent.device.place.starts_with("pci/"));
        let prefix = match (parent, entries[index].bus.map_or(0, |bus| bus_numbers[bus])) {
            _ if ["PCI", "PCIE"].contains(&kind) && is_root => "pci".to_owned(),
            (None, _) => "system".to_owned(),
            (Some(parent), 0) => parent.device.place.clone(),
            (Some(parent), number) => format!("{}/bus{number}", parent.device.place),
        };
        let entry = &entries[index];
        let name = match numbers[index] {
            0 => entry.device.kind.clone(),
            number => format!("{}#{number}", entry.device.kind),
        };
        let local = match kind {
            _ if is_pci(kind) => entry.device.properties.get("addr").cloned().unwrap_or(name),
            _ if kind.starts_with("virtio-") && !kind.starts_with("virtio-serial") => "virtio".to_owned(),
            "usb-bus" => entry.port.as_ref().map_or(name, |port| format!("port{port}")),
            _ => address(entry, kind).unwrap_or(name),
        };
        entries[index].device.place = format!("{prefix}/{local}");
    }
}

fn address(entry: &QomEntry, bus: &str) -> Option<String> {
    let (_, names) = ADDRESSES.iter().find(|(kind, _)| *kind == bus)?;
    let parts: Option<Vec<_>> =
        names.iter().map(|name| Some(format!("{name}{}", entry.device.properties.get(*name)?))).collect();
    parts.map(|parts| parts.join("-"))
}

// The tree of QEMU's objects (QOM), and queries that a QEMU may refuse.

/// Containers of the devices with an id, and of those without.
pub(crate) const DEVICE_CONTAINERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// A child of an object.
pub(crate) struct QomChild {
    pub(crate) name: String,
    /// Type of the child.
    pub(crate) kind: String,
}

/// Returns the children of an object; none if it does not exist, like an empty container.
///
/// # Errors
/// Those of the monitor.
pub(crate) fn qom_children(client: &mut Client, path: &str) -> Result<Vec<QomChild>, qmp::Error> {
    let arguments = Map::from_iter([("path".to_owned(), path.into())]);
    let listed = if_known(client.execute_raw("qom-list", Some(arguments)))?.unwrap_or_default();
    let child = |property: &Value| {
        let kind = property["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
        Some(QomChild { name: property["name"].as_str()?.to_owned(), kind: kind.to_owned() })
    };
    Ok(listed.as_array().into_iter().flatten().filter_map(child).collect())
}

/// Returns the guest's generation id; `None` without a device for it.
///
/// # Errors
/// Those of the monitor.
pub(crate) fn generation_id(client: &mut Client) -> Result<Option<String>, qmp::Error> {
    let reply = if_known(client.execute_raw("query-vm-generation-id", None))?;
    Ok(reply.and_then(|reply| reply["guid"].as_str().map(str::to_owned)))
}

/// The reply; `None` if this QEMU does not know what was queried.
///
/// # Errors
/// Those of the monitor.
pub(crate) fn if_known<T>(reply: Result<T, qmp::Error>) -> Result<Option<T>, qmp::Error> {
    match reply {
        Ok(reply) => Ok(Some(reply)),
        Err(qmp::Error::Refusal { .. } | qmp::Error::Shape { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"bus: main-system-bus
  type System
  dev: hpet, id ""
    gpio-in "" 2
    timers = 3 (0x3)
    mmio 00000000fed00000/0000000000000400
  dev: q35-pcihost, id ""
    MCFG = -1 (0xffffffffffffffff)
    bus: pcie.0
      type PCIE
      dev: qemu-xhci, id ""
        addr = 05.0
        bus: usb-bus.0
          type usb-bus
          dev: usb-tablet, id ""
            port = ""
            addr 0.0, port 1, speed 480, name QEMU USB Tablet, attached
      dev: pcie-root-port, id "rp1"
        addr = 04.0
        class PCI bridge, addr 00:04.0, pci id 1b36:000c (sub 0000:0000)
        bus: rp1
          type PCIE
          dev: virtio-net-pci, id "net0"
            addr = 00.0
            bus: virtio-bus
              type virtio-pci-bus
              dev: virtio-net-device, id ""
                mac = "52:54:00:12:34:56"
                csum = true
      dev: ich9-ahci, id ""
        addr = 1f.2
        bus: ide.1
          type IDE
          dev: ide-cd, id ""
            unit = 0 (0x0)
        bus: ide.0
          type IDE
      dev: ICH9-LPC, id ""
        addr = 1f.0
        bus: isa.0
          type ISA
          dev: isa-i8259, id ""
          dev: isa-i8259, id ""
"#;

    #[test]
    fn every_device_has_a_place() {
        let devices = parse(TEXT);
        let found: Vec<_> =
            devices.iter().map(|device| (device.kind.as_str(), device.place.as_str())).collect();
        assert_eq!(
            found,
            [
                ("hpet", "system/hpet"),
                ("q35-pcihost", "system/q35-pcihost"),
                ("qemu-xhci", "pci/05.0"),
                ("usb-tablet", "pci/05.0/port1"),
                ("pcie-root-port", "pci/04.0"),
                ("virtio-net-pci", "pci/04.0/00.0"),
                ("virtio-net-device", "pci/04.0/00.0/virtio"),
                ("ich9-ahci", "pci/1f.2"),
                ("ide-cd", "pci/1f.2/bus1/unit0"),
                ("ICH9-LPC", "pci/1f.0"),
                ("isa-i8259", "pci/1f.0/isa-i8259#1"),
                ("isa-i8259", "pci/1f.0/isa-i8259"),
            ]
        );
        assert_eq!(devices[5].id, "net0");
    }

    #[test]
    fn values_have_one_notation() {
        let devices = parse(TEXT);
        let value = |index: usize, name: &str| devices[index].properties.get(name).map(String::as_str);
        assert_eq!(value(0, "timers"), Some("3"));
        assert_eq!(value(1, "MCFG"), Some("-1"));
        assert_eq!(value(6, "mac"), Some("52:54:00:12:34:56"));
        assert_eq!(value(6, "csum"), Some("true"));
        assert_eq!(value(4, "class"), None);
    }

    proptest::proptest! {
        #[test]
        fn parser_never_panics(text in "( {0,6}(bus: a|type PCI|type IDE|dev: d, id \"x\"|addr = 1|unit = é|, port 1)\n){0,40}") {
            let _ = parse(&text);
        }
    }
}
