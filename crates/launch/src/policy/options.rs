//! Options that an image may have, with their types and properties.

use super::form::Form;
use super::{Known, devices};
use Form::{
    Date, Host, Id, Label, Mac, Network, Number, Off, One, PciAddress, Ranges, Size, Switch, Uuid, Word,
};

/// An image's use of an option.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rule {
    /// A flag, or a text of this form.
    Text(Form),
    /// Properties.
    Properties(&'static [Known]),
    /// Properties that depend on the value of one, its type.
    Typed { key: &'static str, types: &'static [(&'static str, &'static [Known])] },
    /// `-machine`, whose types are patterns.
    Machine,
    /// `-device`.
    Device,
    /// `-cpu`.
    Cpu,
    /// `-global`.
    Global,
    /// `-serial`: a port, whose other end comes from this host.
    Serial,
    /// Names something of the host.
    Host,
    /// Belongs to the process rather than to its guest. It is not recorded.
    Process,
}

/// Returns the rule of an option; `None` if no image may have it.
pub(super) fn rule(name: &str) -> Option<Rule> {
    RULES.iter().find(|(known, _)| *known == name).map(|(_, rule)| *rule)
}

/// Machine types: exact, or beginning with one that ends with a dash.
const MACHINES: &[&str] = &[
    "pc",
    "pc-i440fx-",
    "q35",
    "pc-q35-",
    "microvm",
    "virt",
    "virt-",
    "pseries",
    "pseries-",
    "isapc",
    "none",
];

/// Returns true if an image may have this machine type.
pub(super) fn is_machine(machine: &str) -> bool {
    Word.admits(machine)
        && MACHINES
            .iter()
            .any(|known| if known.ends_with('-') { machine.starts_with(known) } else { machine == *known })
}

/// Returns the properties of a type of an option; `None` if an image may not have that type.
pub(super) fn typed_properties(
    types: &'static [(&'static str, &'static [Known])],
    found: &str,
) -> Option<Vec<Known>> {
    let (_, properties) = types.iter().find(|(known, _)| *known == found)?;
    Some(properties.to_vec())
}

/// Returns the properties of a device model.
pub(super) fn device_properties(model: &str) -> Option<Vec<Known>> {
    Some(devices::properties(model)?.copied().collect())
}

pub(super) const MACHINE: &[Known] = &[
    ("accel", One(&["kvm", "tcg", "kvm:tcg", "tcg:kvm"])),
    ("acpi", Switch),
    ("aux-ram-share", Switch),
    ("default-bus-bypass-iommu", Switch),
    ("default_bus_bypass_iommu", Switch),
    ("dump-guest-core", Switch),
    ("fd-bootchk", Switch),
    ("gic-version", Word),
    ("graphics", Switch),
    ("hmat", Switch),
    ("hpet", Switch),
    ("i8042", Switch),
    ("kernel-irqchip", One(&["on", "off", "split"])),
    ("kernel_irqchip", One(&["on", "off", "split"])),
    ("max-fw-size", Size),
    ("max-ram-below-4g", Size),
    ("mem-merge", Switch),
    ("memory-backend", Id),
    ("nvdimm", Switch),
    ("nvdimm-persistence", One(&["cpu", "mem-ctrl"])),
    ("pcie", Switch),
    ("pflash0", Id),
    ("pflash1", Id),
    ("pic", Switch),
    ("pit", Switch),
    ("rtc", Switch),
    ("sata", Switch),
    ("smbios-entry-point-type", Word),
    ("smbus", Switch),
    ("smm", Switch),
    ("suppress-vmdesc", Switch),
    ("type", Word),
    ("usb", Switch),
    ("vmport", Switch),
    ("x-south-bridge", Word),
];

const MEMORY: &[Known] = &[
    ("align", Size),
    ("dump", Switch),
    ("host-nodes", Ranges),
    ("hugetlb", Switch),
    ("hugetlbsize", Size),
    ("id", Id),
    ("merge", Switch),
    ("policy", One(&["default", "preferred", "bind", "interleave"])),
    ("prealloc", Switch),
    ("prealloc-threads", Number),
    ("qom-type", Word),
    ("reserve", Switch),
    ("seal", Switch),
    ("share", Switch),
    ("size", Size),
    ("x-use-canonical-path-for-ramblock-id", Switch),
];
const MEMORY_FILE: &[Known] = &[
    ("align", Size),
    ("discard-data", Host),
    ("dump", Switch),
    ("host-nodes", Ranges),
    ("id", Id),
    ("mem-path", Host),
    ("merge", Switch),
    ("offset", Host),
    ("pmem", Switch),
    ("policy", One(&["default", "preferred", "bind", "interleave"])),
    ("prealloc", Switch),
    ("prealloc-threads", Number),
    ("qom-type", Word),
    ("readonly", Switch),
    ("reserve", Switch),
    ("rom", Switch),
    ("share", Switch),
    ("size", Size),
    ("x-use-canonical-path-for-ramblock-id", Switch),
];
const IO_THREAD: &[Known] = &[
    ("aio-max-batch", Number),
    ("id", Id),
    ("poll-grow", Number),
    ("poll-max-ns", Number),
    ("poll-shrink", Number),
    ("qom-type", Word),
    ("thread-pool-max", Number),
    ("thread-pool-min", Number),
];
const OBJECTS: &[(&str, &[Known])] = &[
    ("cryptodev-backend-builtin", &[("id", Id), ("qom-type", Word), ("queues", Number)]),
    ("iothread", IO_THREAD),
    ("memory-backend-file", MEMORY_FILE),
    ("memory-backend-memfd", MEMORY),
    ("memory-backend-ram", MEMORY),
    ("rng-builtin", &[("id", Id), ("qom-type", Word)]),
    ("rng-random", &[("filename", Host), ("id", Id), ("qom-type", Word)]),
];

/// QEMU's own network, which reaches nothing unless this host sets `restrict=off`; ports of the host, programs and files are the host's.
const USER: &[Known] = &[
    ("bootfile", Host),
    ("dhcpstart", Network),
    ("dns", Network),
    ("domainname", Word),
    ("guestfwd", Host),
    ("host", Network),
    ("hostfwd", Host),
    ("hostname", Word),
    ("id", Id),
    ("ipv4", Switch),
    ("ipv6", Switch),
    ("ipv6-dns", Network),
    ("ipv6-host", Network),
    ("ipv6-net", Network),
    ("net", Network),
    ("restrict", Switch),
    ("smb", Host),
    ("smbserver", Host),
    ("tftp", Host),
    ("tftp-server-name", Host),
    ("type", Word),
];
const TAP: &[Known] = &[
    ("br", Host),
    ("downscript", One(&["no", ""])),
    ("fd", Host),
    ("fds", Host),
    ("helper", Host),
    ("id", Id),
    ("ifname", Host),
    ("poll-us", Number),
    ("queues", Number),
    ("script", One(&["no", ""])),
    ("sndbuf", Size),
    ("type", Word),
    ("vhost", Off),
    ("vhostfd", Host),
    ("vhostfds", Host),
    ("vhostforce", Off),
    ("vnet_hdr", Switch),
];
const VHOST_USER: &[Known] =
    &[("chardev", Id), ("id", Id), ("queues", Number), ("type", Word), ("vhostforce", Switch)];
const NETDEVS: &[(&str, &[Known])] = &[
    ("hubport", &[("hubid", Number), ("id", Id), ("netdev", Id), ("type", Word)]),
    ("tap", TAP),
    ("user", USER),
    ("vhost-user", VHOST_USER),
];
const NIC: &[Known] = &[
    ("addr", PciAddress),
    ("macaddr", Mac),
    ("mac", Mac),
    ("model", Word),
    ("netdev", Id),
    ("type", Word),
    ("vectors", Number),
];
const NETS: &[(&str, &[Known])] = &[("nic", NIC), ("none", &[("type", Word)]), ("user", USER)];
const NICS: &[(&str, &[Known])] = &[("none", &[("type", Word)]), ("user", NIC)];

const CHARDEVS: &[(&str, &[Known])] = &[
    ("null", &[("backend", Word), ("id", Id)]),
    ("ringbuf", &[("backend", Word), ("id", Id), ("size", Size)]),
];

/// Without the file and its format: a guest that wrote the header of another format into its disk could otherwise have this host open
/// any file as that one's base. Nor may an image have writes lost or errors ignored on this host's disks.
const DRIVE: &[Known] = &[
    ("aio", One(&["threads", "native", "io_uring"])),
    ("bus", Number),
    ("cache", One(&["none", "writeback", "directsync", "writethrough"])),
    ("cache.direct", Switch),
    ("cache.no-flush", Off),
    ("cache.writeback", Switch),
    ("copy-on-read", Switch),
    ("detect-zeroes", One(&["on", "off", "unmap"])),
    ("discard", One(&["ignore", "off", "unmap", "on"])),
    ("driver", Host),
    ("file", Host),
    ("file.filename", Host),
    ("format", Host),
    ("id", Id),
    ("if", One(&["none", "virtio", "ide", "scsi", "floppy", "pflash", "sd"])),
    ("index", Number),
    ("media", One(&["disk", "cdrom"])),
    ("read-only", Switch),
    ("readonly", Switch),
    ("rerror", One(&["auto", "report", "stop"])),
    ("throttling.bps-read", Number),
    ("throttling.bps-total", Number),
    ("throttling.bps-write", Number),
    ("throttling.iops-read", Number),
    ("throttling.iops-total", Number),
    ("throttling.iops-write", Number),
    ("unit", Number),
    ("werror", One(&["auto", "report", "stop", "enospc"])),
];
const BLOCKDEV: &[Known] = &[
    ("auto-read-only", Switch),
    ("backing", Host),
    ("cache.direct", Switch),
    ("cache.no-flush", Off),
    ("detect-zeroes", One(&["on", "off", "unmap"])),
    ("discard", One(&["ignore", "unmap"])),
    ("driver", Host),
    ("file", Id),
    ("filename", Host),
    ("node-name", Id),
    ("read-only", Switch),
];

const ACCELERATOR: &[Known] = &[
    ("accel", One(&["kvm", "tcg"])),
    ("dirty-ring-size", Number),
    ("kernel-irqchip", One(&["on", "off", "split"])),
    ("notify-vmexit", One(&["run", "internal-error", "disable"])),
    ("notify-window", Number),
    ("one-insn-per-tb", Switch),
    ("split-wx", Switch),
    ("tb-size", Number),
    ("thread", One(&["single", "multi"])),
];
const NUMA: &[(&str, &[Known])] = &[
    (
        "cpu",
        &[
            ("core-id", Number),
            ("die-id", Number),
            ("node-id", Number),
            ("socket-id", Number),
            ("thread-id", Number),
            ("type", Word),
        ],
    ),
    ("dist", &[("dst", Number), ("src", Number), ("type", Word), ("val", Number)]),
    (
        "hmat-cache",
        &[
            ("associativity", Word),
            ("level", Number),
            ("line", Number),
            ("node-id", Number),
            ("policy", Word),
            ("size", Size),
            ("type", Word),
        ],
    ),
    (
        "hmat-lb",
        &[
            ("bandwidth", Size),
            ("data-type", Word),
            ("hierarchy", Word),
            ("initiator", Number),
            ("latency", Number),
            ("target", Number),
            ("type", Word),
        ],
    ),
    (
        "node",
        &[
            ("cpus", Ranges),
            ("initiator", Number),
            ("mem", Size),
            ("memdev", Id),
            ("nodeid", Number),
            ("type", Word),
        ],
    ),
];
const SMP: &[Known] = &[
    ("books", Number),
    ("clusters", Number),
    ("cores", Number),
    ("cpus", Number),
    ("dies", Number),
    ("drawers", Number),
    ("maxcpus", Number),
    ("modules", Number),
    ("sockets", Number),
    ("threads", Number),
];
const SMBIOS: &[Known] = &[
    ("asset", Label),
    ("bank", Label),
    ("date", Label),
    ("family", Label),
    ("file", Host),
    ("loc_pfx", Label),
    ("location", Label),
    ("manufacturer", Label),
    ("part", Label),
    ("path", Host),
    ("product", Label),
    ("release", Label),
    ("serial", Label),
    ("sku", Label),
    ("sock_pfx", Label),
    ("speed", Number),
    ("type", Number),
    ("uefi", Switch),
    ("uuid", Uuid),
    ("value", Host),
    ("vendor", Label),
    ("version", Label),
];
const BOOT: &[Known] = &[
    ("menu", Switch),
    ("once", Word),
    ("order", Word),
    ("reboot-timeout", Number),
    ("splash", Host),
    ("splash-time", Number),
    ("strict", Switch),
];
const FLAG: Rule = Rule::Text(Form::Empty);

const RULES: &[(&str, Rule)] = &[
    ("(disk file)", Rule::Host),
    ("D", Rule::Process),
    ("L", Rule::Process),
    ("S", Rule::Process),
    ("accel", Rule::Properties(ACCELERATOR)),
    ("acpitable", Rule::Host),
    (
        "action",
        Rule::Properties(&[("panic", Word), ("reboot", Word), ("shutdown", Word), ("watchdog", Word)]),
    ),
    ("add-fd", Rule::Process),
    ("append", Rule::Host),
    ("async-teardown", Rule::Process),
    ("audiodev", Rule::Typed { key: "driver", types: &[("none", &[("driver", Word), ("id", Id)])] }),
    ("bios", Rule::Host),
    ("blockdev", Rule::Properties(BLOCKDEV)),
    ("boot", Rule::Properties(BOOT)),
    ("cdrom", Rule::Host),
    ("chardev", Rule::Typed { key: "backend", types: CHARDEVS }),
    ("chroot", Rule::Process),
    ("cpu", Rule::Cpu),
    ("d", Rule::Process),
    ("daemonize", Rule::Process),
    ("debugcon", Rule::Host),
    ("device", Rule::Device),
    ("dfilter", Rule::Process),
    ("display", Rule::Process),
    ("drive", Rule::Properties(DRIVE)),
    ("dtb", Rule::Host),
    ("enable-kvm", FLAG),
    ("fda", Rule::Host),
    ("fdb", Rule::Host),
    ("full-screen", Rule::Process),
    ("fw_cfg", Rule::Host),
    ("g", Rule::Text(Word)),
    ("gdb", Rule::Process),
    ("global", Rule::Global),
    ("hda", Rule::Host),
    ("hdb", Rule::Host),
    ("hdc", Rule::Host),
    ("hdd", Rule::Host),
    ("icount", Rule::Properties(&[("align", Switch), ("shift", Word), ("sleep", Switch)])),
    ("incoming", Rule::Process),
    ("initrd", Rule::Host),
    ("jitdump", Rule::Process),
    ("k", Rule::Process),
    ("kernel", Rule::Host),
    ("m", Rule::Properties(&[("maxmem", Size), ("size", Size), ("slots", Number)])),
    ("machine", Rule::Machine),
    ("mem-path", Rule::Host),
    ("mem-prealloc", FLAG),
    ("mon", Rule::Process),
    ("monitor", Rule::Process),
    ("msg", Rule::Process),
    ("mtdblock", Rule::Host),
    ("name", Rule::Properties(&[("debug-threads", Switch), ("guest", Word), ("process", Host)])),
    ("net", Rule::Typed { key: "type", types: NETS }),
    ("netdev", Rule::Typed { key: "type", types: NETDEVS }),
    ("nic", Rule::Typed { key: "type", types: NICS }),
    ("no-acpi", FLAG),
    ("no-fd-bootchk", FLAG),
    ("no-hpet", FLAG),
    ("no-reboot", FLAG),
    ("no-shutdown", FLAG),
    ("no-user-config", FLAG),
    ("nodefaults", FLAG),
    // The serial port would write to the log without a limit.
    ("nographic", Rule::Host),
    ("numa", Rule::Typed { key: "type", types: NUMA }),
    ("object", Rule::Typed { key: "qom-type", types: OBJECTS }),
    ("only-migratable", FLAG),
    ("option-rom", Rule::Host),
    ("overcommit", Rule::Process),
    ("parallel", Rule::Text(One(&["none", "null"]))),
    ("perfmap", Rule::Process),
    ("pflash", Rule::Host),
    ("pidfile", Rule::Process),
    ("preconfig", Rule::Process),
    ("qmp", Rule::Process),
    ("qmp-pretty", Rule::Process),
    ("qtest", Rule::Process),
    ("qtest-log", Rule::Process),
    ("rtc", Rule::Properties(&[("base", Date), ("clock", One(&["host", "rt", "vm"])), ("driftfix", Word)])),
    ("run-with", Rule::Process),
    ("runas", Rule::Process),
    ("s", Rule::Process),
    ("sandbox", Rule::Process),
    ("sd", Rule::Host),
    ("seed", Rule::Text(Number)),
    ("serial", Rule::Serial),
    ("singlestep", FLAG),
    ("smbios", Rule::Properties(SMBIOS)),
    ("smp", Rule::Properties(SMP)),
    // What the guest writes to this host's disks would be lost.
    ("snapshot", Rule::Host),
    ("spice", Rule::Process),
    (
        "tpmdev",
        Rule::Typed { key: "type", types: &[("emulator", &[("chardev", Id), ("id", Id), ("type", Word)])] },
    ),
    ("trace", Rule::Process),
    ("usb", FLAG),
    ("usbdevice", Rule::Text(One(&["tablet", "mouse", "keyboard"]))),
    ("uuid", Rule::Text(Uuid)),
    ("vga", Rule::Text(One(&["none", "std", "cirrus", "vmware", "qxl", "virtio"]))),
    ("vnc", Rule::Process),
    ("watchdog-action", Rule::Text(Word)),
    ("win2k-hack", FLAG),
];

/// Returns true if an option belongs to the process rather than to its guest.
pub(crate) fn is_of_process(name: &str) -> bool {
    matches!(rule(name), Some(Rule::Process))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::OptionName;

    #[test]
    fn every_rule_is_for_an_option_of_qemu() {
        for (index, (name, _)) in RULES.iter().enumerate() {
            assert_eq!(OptionName::find(name).map(OptionName::as_str), Some(*name));
            assert!(RULES[..index].iter().all(|(other, _)| other != name), "{name} has two rules");
        }
    }

    #[test]
    fn machine_types_are_matched_whole_or_by_series() {
        for machine in ["q35", "pc-q35-11.1", "pc-i440fx-7.2", "virt", "none"] {
            assert!(is_machine(machine), "{machine}");
        }
        for machine in ["", "q35x", "x-remote", "nitro-enclave", "xenfv", "pc-q35-/etc", "pc-"] {
            assert!(!is_machine(machine), "{machine}");
        }
    }
}
