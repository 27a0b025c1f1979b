//! Options that an image may have, with their types and properties.

use super::form::{Form, Known};
use crate::command_line::DISK_FILE;
use crate::names::{self, NameGroup};
use Form::{
    Date, Host, Id, Label, Mac, Network, Number, Off, One, PciAddress, Ranges, Size, Switch, Uuid, Word,
};

/// An image's use of an option.
#[derive(Debug, Clone, Copy)]
pub(super) enum OptionRule {
    /// A flag, or a text of this form.
    Text(Form),
    /// Properties.
    Properties(&'static [Known]),
    /// Properties that depend on the type, which is the value of one of them.
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
pub(super) fn rule(name: &str) -> Option<OptionRule> {
    if name == DISK_FILE.as_str() {
        Some(OptionRule::Host)
    } else {
        names::find(RULES, name).map(|(rule, _)| rule)
    }
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

pub(super) const MACHINE: &[Known] = &[
    (One(&["kvm", "tcg", "kvm:tcg", "tcg:kvm"]), "accel"),
    (
        Switch,
        "acpi aux-ram-share default-bus-bypass-iommu default_bus_bypass_iommu dump-guest-core fd-bootchk \
         graphics hmat hpet i8042 mem-merge nvdimm pcie pic pit rtc sata smbus smm suppress-vmdesc usb \
         vmport",
    ),
    (Word, "gic-version smbios-entry-point-type type x-south-bridge"),
    (One(&["on", "off", "split"]), "kernel-irqchip kernel_irqchip"),
    (Size, "max-fw-size max-ram-below-4g"),
    (Id, "memory-backend pflash0 pflash1"),
    (One(&["cpu", "mem-ctrl"]), "nvdimm-persistence"),
];

const MEMORY: &[Known] = &[
    (Size, "align hugetlbsize size"),
    (Switch, "dump hugetlb merge prealloc reserve seal share x-use-canonical-path-for-ramblock-id"),
    (Ranges, "host-nodes"),
    (Id, "id"),
    (One(&["default", "preferred", "bind", "interleave"]), "policy"),
    (Number, "prealloc-threads"),
    (Word, "qom-type"),
];
const MEMORY_FILE: &[Known] = &[
    (Size, "align size"),
    (Host, "discard-data mem-path offset"),
    (Switch, "dump merge pmem prealloc readonly reserve rom share x-use-canonical-path-for-ramblock-id"),
    (Ranges, "host-nodes"),
    (Id, "id"),
    (One(&["default", "preferred", "bind", "interleave"]), "policy"),
    (Number, "prealloc-threads"),
    (Word, "qom-type"),
];
const IO_THREAD: &[Known] = &[
    (Number, "aio-max-batch poll-grow poll-max-ns poll-shrink thread-pool-max thread-pool-min"),
    (Id, "id"),
    (Word, "qom-type"),
];
const OBJECTS: &[(&str, &[Known])] = &[
    ("cryptodev-backend-builtin", &[(Id, "id"), (Word, "qom-type"), (Number, "queues")]),
    ("iothread", IO_THREAD),
    ("memory-backend-file", MEMORY_FILE),
    ("memory-backend-memfd", MEMORY),
    ("memory-backend-ram", MEMORY),
    ("rng-builtin", &[(Id, "id"), (Word, "qom-type")]),
    ("rng-random", &[(Host, "filename"), (Id, "id"), (Word, "qom-type")]),
];

/// QEMU's own network, which reaches nothing unless this host sets `restrict=off`; ports of the host,
/// programs and files are the host's.
const USER: &[Known] = &[
    (Host, "bootfile guestfwd hostfwd smb smbserver tftp tftp-server-name"),
    (Network, "dhcpstart dns host ipv6-dns ipv6-host ipv6-net net"),
    (Word, "domainname hostname type"),
    (Id, "id"),
    (Switch, "ipv4 ipv6 restrict"),
];
const TAP: &[Known] = &[
    (Host, "br fd fds helper ifname vhostfd vhostfds"),
    (One(&["no", ""]), "downscript script"),
    (Id, "id"),
    (Number, "poll-us queues"),
    (Size, "sndbuf"),
    (Word, "type"),
    (Off, "vhost vhostforce"),
    (Switch, "vnet_hdr"),
];
const VHOST_USER: &[Known] =
    &[(Id, "chardev id"), (Number, "queues"), (Word, "type"), (Switch, "vhostforce")];
const NETDEVS: &[(&str, &[Known])] = &[
    ("hubport", &[(Number, "hubid"), (Id, "id netdev"), (Word, "type")]),
    ("tap", TAP),
    ("user", USER),
    ("vhost-user", VHOST_USER),
];
const NIC: &[Known] =
    &[(PciAddress, "addr"), (Mac, "macaddr mac"), (Word, "model type"), (Id, "netdev"), (Number, "vectors")];
const NETS: &[(&str, &[Known])] = &[("nic", NIC), ("none", &[(Word, "type")]), ("user", USER)];
const NICS: &[(&str, &[Known])] = &[("none", &[(Word, "type")]), ("user", NIC)];

const CHARDEVS: &[(&str, &[Known])] = &[
    ("null", &[(Word, "backend"), (Id, "id")]),
    ("ringbuf", &[(Word, "backend"), (Id, "id"), (Size, "size")]),
];

/// Without the file and its format: a guest that wrote the header of another format into its disk could
/// otherwise have this host open any file as that one's base. Nor may an image lose writes or ignore errors
/// on this host's disks.
const DRIVE: &[Known] = &[
    (One(&["threads", "native", "io_uring"]), "aio"),
    (
        Number,
        "bus index throttling.bps-read throttling.bps-total throttling.bps-write throttling.iops-read \
         throttling.iops-total throttling.iops-write unit",
    ),
    (One(&["none", "writeback", "directsync", "writethrough"]), "cache"),
    (Switch, "cache.direct cache.writeback copy-on-read read-only readonly"),
    (Off, "cache.no-flush"),
    (One(&["on", "off", "unmap"]), "detect-zeroes"),
    (One(&["ignore", "off", "unmap", "on"]), "discard"),
    (Host, "driver file file.filename format"),
    (Id, "id"),
    (One(&["none", "virtio", "ide", "scsi", "floppy", "pflash", "sd"]), "if"),
    (One(&["disk", "cdrom"]), "media"),
    (One(&["auto", "report", "stop"]), "rerror"),
    (One(&["auto", "report", "stop", "enospc"]), "werror"),
];
const BLOCKDEV: &[Known] = &[
    (Switch, "auto-read-only cache.direct read-only"),
    (Host, "backing driver filename"),
    (Off, "cache.no-flush"),
    (One(&["on", "off", "unmap"]), "detect-zeroes"),
    (One(&["ignore", "unmap"]), "discard"),
    (Id, "file node-name"),
];

const ACCELERATOR: &[Known] = &[
    (One(&["kvm", "tcg"]), "accel"),
    (Number, "dirty-ring-size notify-window tb-size"),
    (One(&["on", "off", "split"]), "kernel-irqchip"),
    (One(&["run", "internal-error", "disable"]), "notify-vmexit"),
    (Switch, "one-insn-per-tb split-wx"),
    (One(&["single", "multi"]), "thread"),
];
const NUMA: &[(&str, &[Known])] = &[
    ("cpu", &[(Number, "core-id die-id node-id socket-id thread-id"), (Word, "type")]),
    ("dist", &[(Number, "dst src val"), (Word, "type")]),
    ("hmat-cache", &[(Word, "associativity policy type"), (Number, "level line node-id"), (Size, "size")]),
    (
        "hmat-lb",
        &[(Size, "bandwidth"), (Word, "data-type hierarchy type"), (Number, "initiator latency target")],
    ),
    (
        "node",
        &[(Ranges, "cpus"), (Number, "initiator nodeid"), (Size, "mem"), (Id, "memdev"), (Word, "type")],
    ),
];
const SMP: &[Known] = &[(Number, "books clusters cores cpus dies drawers maxcpus modules sockets threads")];
const SMBIOS: &[Known] = &[
    (
        Label,
        "asset bank date family loc_pfx location manufacturer part product release serial sku sock_pfx \
         vendor version",
    ),
    (Host, "file path value"),
    (Number, "speed type"),
    (Switch, "uefi"),
    (Uuid, "uuid"),
];
const BOOT: &[Known] = &[
    (Switch, "menu strict"),
    (Word, "once order"),
    (Number, "reboot-timeout splash-time"),
    (Host, "splash"),
];
const FLAG: OptionRule = OptionRule::Text(Form::Empty);

// Not from an image: `nographic`, whose serial port would write to the log without a limit, and `snapshot`,
// with which the guest's writes to this host's disks would be lost.
const RULES: &[NameGroup<OptionRule>] = &[
    (
        OptionRule::Host,
        "acpitable bios cdrom debugcon dtb fda fdb fw_cfg hda hdb hdc hdd initrd kernel \
         mem-path mtdblock nographic option-rom pflash sd snapshot",
    ),
    (
        OptionRule::Process,
        "D L S add-fd async-teardown chroot d daemonize dfilter display full-screen gdb incoming jitdump k \
         mon monitor msg overcommit perfmap pidfile preconfig qmp qmp-pretty qtest qtest-log run-with runas \
         s sandbox spice trace vnc",
    ),
    (
        FLAG,
        "enable-kvm mem-prealloc no-acpi no-fd-bootchk no-hpet no-reboot no-shutdown no-user-config \
         nodefaults only-migratable singlestep usb win2k-hack",
    ),
    (OptionRule::Text(Form::KernelArguments), "append"),
    (OptionRule::Text(Word), "g watchdog-action"),
    (OptionRule::Properties(ACCELERATOR), "accel"),
    (OptionRule::Properties(&[(Word, "panic reboot shutdown watchdog")]), "action"),
    (OptionRule::Typed { key: "driver", types: &[("none", &[(Word, "driver"), (Id, "id")])] }, "audiodev"),
    (OptionRule::Properties(BLOCKDEV), "blockdev"),
    (OptionRule::Properties(BOOT), "boot"),
    (OptionRule::Typed { key: "backend", types: CHARDEVS }, "chardev"),
    (OptionRule::Cpu, "cpu"),
    (OptionRule::Device, "device"),
    (OptionRule::Properties(DRIVE), "drive"),
    (OptionRule::Global, "global"),
    (OptionRule::Properties(&[(Switch, "align sleep"), (Word, "shift")]), "icount"),
    (OptionRule::Properties(&[(Size, "maxmem size"), (Number, "slots")]), "m"),
    (OptionRule::Machine, "machine"),
    (OptionRule::Properties(&[(Switch, "debug-threads"), (Word, "guest"), (Host, "process")]), "name"),
    (OptionRule::Typed { key: "type", types: NETS }, "net"),
    (OptionRule::Typed { key: "type", types: NETDEVS }, "netdev"),
    (OptionRule::Typed { key: "type", types: NICS }, "nic"),
    (OptionRule::Typed { key: "type", types: NUMA }, "numa"),
    (OptionRule::Typed { key: "qom-type", types: OBJECTS }, "object"),
    (OptionRule::Text(One(&["none", "null"])), "parallel"),
    (
        OptionRule::Properties(&[(Date, "base"), (One(&["host", "rt", "vm"]), "clock"), (Word, "driftfix")]),
        "rtc",
    ),
    (OptionRule::Text(Number), "seed"),
    (OptionRule::Serial, "serial"),
    (OptionRule::Properties(SMBIOS), "smbios"),
    (OptionRule::Properties(SMP), "smp"),
    (
        OptionRule::Typed { key: "type", types: &[("emulator", &[(Id, "chardev id"), (Word, "type")])] },
        "tpmdev",
    ),
    (OptionRule::Text(One(&["tablet", "mouse", "keyboard"])), "usbdevice"),
    (OptionRule::Text(Uuid), "uuid"),
    (OptionRule::Text(One(&["none", "std", "cirrus", "vmware", "qxl", "virtio"])), "vga"),
];

/// Returns true if an option belongs to the process rather than to its guest.
pub(crate) fn is_of_process(name: &str) -> bool {
    matches!(rule(name), Some(OptionRule::Process))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::OptionName;

    #[test]
    fn every_rule_is_for_an_option_of_qemu() {
        let names: Vec<_> = names::all(RULES).collect();
        for (index, name) in names.iter().enumerate() {
            assert_eq!(OptionName::find(name).map(OptionName::as_str), Some(*name));
            assert!(!names[..index].contains(name), "{name} has two rules");
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
