//! Types of options, and the properties of options and types that an image may have.

use super::form::{Form, Known};
use super::rewrite::{Conflict, Rewrite, Types};
use crate::names::NameGroup;
use Form::{
    Date, Host, Id, Label, Mac, Network, Number, Off, One, PciAddress, Ranges, Size, Switch, Uuid, Word,
};
use Rewrite::{Keep, Refuse};

pub(super) const MACHINE: &[Known] = &[
    (One(&["kvm", "tcg", "kvm:tcg", "tcg:kvm"]), "accel"),
    (
        Switch,
        "acpi aux-ram-share default-bus-bypass-iommu default_bus_bypass_iommu dump-guest-core fd-bootchk \
         graphics hmat hpet i8042 mem-merge nvdimm pcie pic pit rtc sata smbus smm suppress-vmdesc usb \
         vmport",
    ),
    (Word, "gic-version smbios-entry-point-type x-south-bridge"),
    (One(&["on", "off", "split"]), "kernel-irqchip kernel_irqchip"),
    (Size, "max-fw-size max-ram-below-4g"),
    (Id, "memory-backend pflash0 pflash1"),
    (One(&["cpu", "mem-ctrl"]), "nvdimm-persistence"),
];

/// Machine types, of which most have a version.
pub(super) const MACHINES: Types = Types {
    image: &[(&[], "isapc microvm none pc pc-i440fx-* pc-q35-* pseries pseries-* q35 virt virt-*")],
    rewrite: &[(Keep, "*")],
};

const MEMORY: &[Known] = &[
    (Size, "align hugetlbsize size"),
    (Switch, "dump hugetlb merge prealloc reserve seal share x-use-canonical-path-for-ramblock-id"),
    (Ranges, "host-nodes"),
    (One(&["default", "preferred", "bind", "interleave"]), "policy"),
    (Number, "prealloc-threads"),
];
const MEMORY_FILE: &[Known] = &[
    (Size, "align size"),
    (Host, "discard-data mem-path offset"),
    (Switch, "dump merge pmem prealloc readonly reserve rom share x-use-canonical-path-for-ramblock-id"),
    (Ranges, "host-nodes"),
    (One(&["default", "preferred", "bind", "interleave"]), "policy"),
    (Number, "prealloc-threads"),
];
const IO_THREAD: &[Known] =
    &[(Number, "aio-max-batch poll-grow poll-max-ns poll-shrink thread-pool-max thread-pool-min")];
pub(super) const OBJECTS: Types = Types {
    image: &[
        (&[&[(Number, "queues")]], "cryptodev-backend-builtin"),
        (&[IO_THREAD], "iothread"),
        (&[MEMORY_FILE], "memory-backend-file"),
        (&[MEMORY], "memory-backend-memfd memory-backend-ram"),
        (&[], "rng-builtin"),
        (&[&[(Host, "filename")]], "rng-random"),
    ],
    // They open nothing that the old QEMU has for itself.
    rewrite: &[(Keep, "authz-* main-loop memory-backend-* secret thread-context throttle-group tls-creds-*")],
};

/// QEMU's own network, which reaches nothing unless this host sets `restrict=off`; ports of the host,
/// programs and files are the host's.
const USER: &[Known] = &[
    (Host, "bootfile guestfwd hostfwd smb smbserver tftp tftp-server-name"),
    (Network, "dhcpstart dns host ipv6-dns ipv6-host ipv6-net net"),
    (Word, "domainname hostname"),
    (Id, "id"),
    (Switch, "ipv4 ipv6 restrict"),
];
const TAP: &[Known] = &[
    (Host, "br fd fds helper ifname vhostfd vhostfds"),
    (One(&["no", ""]), "downscript script"),
    (Number, "poll-us queues"),
    (Size, "sndbuf"),
    (Off, "vhost vhostforce"),
    (Switch, "vnet_hdr"),
];
const VHOST_USER: &[Known] = &[(Id, "chardev"), (Number, "queues"), (Switch, "vhostforce")];
const NIC: &[Known] =
    &[(PciAddress, "addr"), (Mac, "macaddr mac"), (Word, "model"), (Id, "netdev"), (Number, "vectors")];
/// Networks that two QEMUs cannot share: of QEMU's own one, ports of the host, and directories and programs
/// that serve the guest.
const NETWORKS: &[NameGroup<Rewrite>] = &[
    (Keep, "hubport none"),
    (Refuse(Conflict::Tap), "tap"),
    (Rewrite::KeepUnless(Conflict::Port, "hostfwd guestfwd smb"), "user"),
    (Rewrite::Card, "vhost-user"),
];
pub(super) const NETDEVS: Types = Types {
    image: &[
        (&[&[(Number, "hubid"), (Id, "netdev")]], "hubport"),
        (&[TAP], "tap"),
        (&[USER], "user"),
        (&[VHOST_USER], "vhost-user"),
    ],
    rewrite: NETWORKS,
};
pub(super) const NETS: Types =
    Types { image: &[(&[NIC], "nic"), (&[], "none"), (&[USER], "user")], rewrite: NETWORKS };
pub(super) const NICS: Types = Types { image: &[(&[], "none"), (&[NIC], "user")], rewrite: NETWORKS };

pub(super) const CHARDEVS: Types = Types {
    image: &[(&[], "null"), (&[&[(Size, "size")]], "ringbuf")],
    rewrite: &[
        (Keep, "memory vc"),
        (Rewrite::Append, "file"),
        (Rewrite::Socket, "socket"),
        (Refuse(Conflict::Terminal), "pty stdio"),
    ],
};
pub(super) const TPMS: Types = Types { image: &[(&[&[(Id, "chardev")]], "emulator")], rewrite: &[] };

const SHOWN: &[NameGroup<Rewrite>] = &[(Keep, "none"), (Refuse(Conflict::Display), "*")];
pub(super) const AUDIO: Types = Types { image: &[(&[], "none")], rewrite: SHOWN };
pub(super) const DISPLAYS: Types = Types { image: &[], rewrite: SHOWN };

/// Without the file and its format: a guest that wrote the header of another format into its disk could
/// otherwise have this host open any file as that one's base. Nor may an image lose writes or ignore errors
/// on this host's disks.
pub(super) const DRIVE: &[Known] = &[
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
pub(super) const BLOCKDEV: &[Known] = &[
    (Switch, "auto-read-only cache.direct read-only"),
    (Host, "backing driver filename"),
    (Off, "cache.no-flush"),
    (One(&["on", "off", "unmap"]), "detect-zeroes"),
    (One(&["ignore", "unmap"]), "discard"),
    (Id, "file node-name"),
];

pub(super) const ACCELERATOR: &[Known] = &[
    (One(&["kvm", "tcg"]), "accel"),
    (Number, "dirty-ring-size notify-window tb-size"),
    (One(&["on", "off", "split"]), "kernel-irqchip"),
    (One(&["run", "internal-error", "disable"]), "notify-vmexit"),
    (Switch, "one-insn-per-tb split-wx"),
    (One(&["single", "multi"]), "thread"),
];
pub(super) const NUMA: Types = Types {
    image: &[
        (&[&[(Number, "core-id die-id node-id socket-id thread-id")]], "cpu"),
        (&[&[(Number, "dst src val")]], "dist"),
        (&[&[(Word, "associativity policy"), (Number, "level line node-id"), (Size, "size")]], "hmat-cache"),
        (
            &[&[(Size, "bandwidth"), (Word, "data-type hierarchy"), (Number, "initiator latency target")]],
            "hmat-lb",
        ),
        (&[&[(Ranges, "cpus"), (Number, "initiator nodeid"), (Size, "mem"), (Id, "memdev")]], "node"),
    ],
    rewrite: &[(Keep, "*")],
};
pub(super) const ACTION: &[Known] = &[(Word, "panic reboot shutdown watchdog")];
pub(super) const CLOCK: &[Known] =
    &[(Date, "base"), (One(&["host", "rt", "vm"]), "clock"), (Word, "driftfix")];
pub(super) const ICOUNT: &[Known] = &[(Switch, "align sleep"), (Word, "shift")];
pub(super) const NAME: &[Known] = &[(Switch, "debug-threads"), (Word, "guest"), (Host, "process")];
pub(super) const RAM: &[Known] = &[(Size, "maxmem size"), (Number, "slots")];
pub(super) const SMP: &[Known] =
    &[(Number, "books clusters cores cpus dies drawers maxcpus modules sockets threads")];
pub(super) const SMBIOS: &[Known] = &[
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
pub(super) const BOOT: &[Known] = &[
    (Switch, "menu strict"),
    (Word, "once order"),
    (Number, "reboot-timeout splash-time"),
    (Host, "splash"),
];
