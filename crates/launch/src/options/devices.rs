//! Device models that an image may have, their properties, and those that two QEMUs cannot have at a time.
//!
//! Left out on purpose: models that open something of the host by a property (`vfio-*`, `usb-host`,
//! `vhost-scsi-*`, `loader`, `ivshmem-doorbell`, `virtio-9p-*`, …), and every property that names a file, a
//! descriptor, a CID or another host's address.

use super::form::{Form, Known};
use super::rewrite::{Conflict, Rewrite, Types};
use crate::names;
use Form::{Empty, Host, Id, Label, Mac, Number, One, PciAddress, Size, Switch, Uuid, Word};

/// Properties of all.
pub(super) const COMMON: &[Known] = &[(Id, "id bus"), (Number, "bootindex")];
const PCI: &[Known] = &[
    (Number, "acpi-index rombar romsize"),
    (PciAddress, "addr"),
    (Switch, "aer multifunction"),
    (Id, "failover_pair_id"),
    (Empty, "romfile"),
];
const PORT: &[Known] = &[
    (Number, "bus_nr bus-reserve chassis chassis_nr numa_node port slot"),
    (Switch, "hotplug msi power_controller_present shpc"),
    (Size, "io-reserve mem-reserve pref32-reserve pref64-reserve"),
];
const VIRTIO: &[Known] = &[
    (
        Switch,
        "any_layout ats disable-legacy disable-modern event_idx in_order indirect_desc ioeventfd \
         iommu_platform notify_on_empty packed page-per-vq queue_reset use-disabled-flag use-started",
    ),
    (Number, "vectors"),
];
const BLOCK: &[Known] = &[
    (Switch, "account-failed account-invalid backend_defaults share-rw write-cache"),
    (Number, "cyls heads secs"),
    (Size, "discard_granularity logical_block_size min_io_size opt_io_size physical_block_size"),
    (Id, "drive"),
    (One(&["auto", "report", "stop"]), "rerror"),
    (Word, "serial"),
    (One(&["auto", "report", "stop", "enospc"]), "werror"),
];
const VIRTIO_BLOCK: &[Known] = &[
    (Switch, "config-wce discard report-discard-granularity request-merging seg-max-adjust write-zeroes"),
    (Id, "iothread"),
    (Number, "max-discard-sectors max-write-zeroes-sectors num-queues queue-size"),
];
const DISK: &[Known] = &[
    (Number, "channel lun rotation_rate scsi-id scsi_version unit wwn"),
    (Word, "device_id ver"),
    (Switch, "dpofua removable"),
    (Size, "max_io_size max_unmap_size"),
    (Label, "model product vendor"),
];
const NETWORK: &[Known] = &[(Mac, "mac"), (Id, "netdev")];
const VIRTIO_NETWORK: &[Known] = &[
    (
        Switch,
        "csum ctrl_guest_offloads ctrl_mac_addr ctrl_rx ctrl_rx_extra ctrl_vlan ctrl_vq failover gso \
         guest_announce guest_csum guest_ecn guest_rsc_ext guest_tso4 guest_tso6 guest_ufo guest_uso4 \
         guest_uso6 hash host_ecn host_tso4 host_tso6 host_ufo host_uso mq mrg_rxbuf rss status",
    ),
    (One(&["half", "full"]), "duplex"),
    (Number, "host_mtu rsc_interval rx_queue_size speed tx_queue_size x-txburst x-txtimer"),
    (One(&["timer", "bh"]), "tx"),
];
const QUEUES: &[Known] = &[(Number, "num_queues virtqueue_size cmd_per_lun")];
const GRAPHICS: &[Known] = &[
    (Switch, "big-endian-framebuffer blob edid global-vmstate mmio"),
    (Size, "max_hostmem"),
    (
        Number,
        "max_outputs ram_size ram_size_mb refresh_rate vgamem_mb vram64_size_mb vram_size vram_size_mb xmax \
         xres ymax yres",
    ),
];
const USB: &[Known] = &[
    (Number, "firstport intrs p2 p3 ports slots usb_version"),
    (Id, "masterbus"),
    (Switch, "msi msix streams"),
    (Empty, "pcap"),
    (Word, "port serial"),
];
const SERIAL: &[Known] = &[(Id, "chardev"), (Number, "index iobase irq max_ports nr wakeup"), (Word, "name")];
const MEMORY: &[Known] = &[
    (Number, "addr memaddr node slot"),
    (Size, "block-size requested-size"),
    (Id, "memdev"),
    (Switch, "prealloc unplugged-inaccessible"),
];
const BALLOON: &[Known] = &[(Switch, "deflate-on-oom free-page-hint free-page-reporting"), (Id, "iothread")];
const IOMMU: &[Known] = &[
    (Number, "aw-bits"),
    (
        Switch,
        "boot-bypass caching-mode device-iotlb dma-drain eim intremap pasid pt snoop-control x-scalable-mode \
         xtsup",
    ),
];
const AUDIO: &[Known] = &[(Id, "audiodev"), (Number, "cad debug"), (Switch, "mixer")];
const PLATFORM: &[Known] =
    &[(Number, "events ioport period max-bytes"), (Uuid, "guid"), (Id, "tpmdev rng"), (Switch, "ppi")];
const HOST_CID: &[Known] = &[(Host, "guest-cid"), (Id, "chardev"), (Switch, "seqpacket")];
const SHARED: &[Known] = &[
    (Size, "cache-size"),
    (Id, "chardev"),
    (Number, "num-queues num-request-queues queue-size"),
    (Word, "tag"),
];

/// Device models.
pub(super) const DEVICES: Types = Types {
    image: &[
        (&[PCI, AUDIO], "AC97 ES1370"),
        (&[PCI, GRAPHICS], "VGA bochs-display cirrus-vga qxl qxl-vga secondary-vga vmware-svga"),
        (&[PCI], "ahci ahci-ich9 i6300esb ich9-ahci lsi53c895a megasas megasas-gen2 mptsas1068 pvscsi"),
        (&[PCI, IOMMU], "amd-iommu"),
        (
            &[PCI, NETWORK],
            "e1000 e1000-82544gc e1000-82545em e1000e i82557b igb ne2k_pci pcnet rtl8139 vmxnet3",
        ),
        (&[AUDIO], "hda-duplex hda-micro hda-output"),
        (
            &[PCI, PORT],
            "i82801b11-bridge ioh3420 pci-bridge pcie-pci-bridge pcie-root-port pxb pxb-pcie x3130-upstream \
             xio3130-downstream",
        ),
        (&[], "ib700 ramfb vmcoreinfo"),
        (
            &[PCI, USB],
            "ich9-intel-hda ich9-usb-ehci1 ich9-usb-uhci1 ich9-usb-uhci2 ich9-usb-uhci3 intel-hda nec-usb-xhci \
             piix3-usb-uhci piix4-usb-uhci qemu-xhci usb-ehci",
        ),
        (&[BLOCK, DISK], "ide-cd ide-hd scsi-cd scsi-hd"),
        (&[IOMMU], "intel-iommu"),
        (&[SERIAL], "isa-debugcon isa-serial virtconsole virtserialport"),
        (&[MEMORY], "nvdimm pc-dimm"),
        (&[PCI, BLOCK, &[(Number, "max_ioqpairs mdts msix_qsize")]], "nvme"),
        (&[BLOCK, &[(Number, "nsid"), (Uuid, "uuid")]], "nvme-ns"),
        (&[PCI, SERIAL], "pci-serial"),
        (&[PLATFORM], "pvpanic tpm-crb tpm-tis vmgenid"),
        (&[PCI, PLATFORM], "pvpanic-pci"),
        (&[USB], "usb-hub usb-kbd usb-mouse usb-tablet"),
        (&[USB, NETWORK], "usb-net"),
        (&[USB, BLOCK, DISK], "usb-storage"),
        (&[PCI, VIRTIO, VIRTIO_BLOCK, SHARED], "vhost-user-blk-pci"),
        (&[PCI, VIRTIO, SHARED], "vhost-user-fs-pci"),
        (&[PCI, VIRTIO, HOST_CID], "vhost-user-vsock-pci vhost-vsock-pci"),
        (&[PCI, VIRTIO, BALLOON], "virtio-balloon virtio-balloon-pci"),
        (&[PCI, VIRTIO, BLOCK, VIRTIO_BLOCK], "virtio-blk virtio-blk-pci"),
        (&[PCI, VIRTIO, &[(Id, "cryptodev")]], "virtio-crypto-pci"),
        (&[PCI, VIRTIO, GRAPHICS], "virtio-gpu virtio-gpu-pci virtio-vga"),
        (&[PCI, VIRTIO, IOMMU], "virtio-iommu-pci"),
        (
            &[PCI, VIRTIO],
            "virtio-keyboard virtio-keyboard-pci virtio-mouse virtio-mouse-pci virtio-tablet virtio-tablet-pci",
        ),
        (&[PCI, VIRTIO, MEMORY], "virtio-mem-pci"),
        (&[PCI, VIRTIO, NETWORK, VIRTIO_NETWORK], "virtio-net virtio-net-pci"),
        (&[PCI, VIRTIO, PLATFORM], "virtio-rng virtio-rng-pci"),
        (&[PCI, VIRTIO, VIRTIO_BLOCK, QUEUES], "virtio-scsi virtio-scsi-pci"),
        (&[PCI, VIRTIO, SERIAL], "virtio-serial virtio-serial-pci"),
    ],
    rewrite: &[
        (Rewrite::GenerationId, "vmgenid"),
        (Rewrite::Vsock, "vhost-user-vsock*"),
        (
            Rewrite::Refuse(Conflict::HostDevice),
            "ivshmem* nvdimm* usb-host* vfio-* vhost-* virtio-9p* virtio-mem* virtio-pmem*",
        ),
    ],
};

/// Returns the properties of a device model that an image may have; `None` if it may not have the model.
fn properties(model: &str) -> Option<impl Iterator<Item = Known>> {
    let (groups, _) = names::find(DEVICES.image, model)?;
    Some(COMMON.iter().chain(groups.iter().copied().flatten()).copied())
}

/// Drivers that are not added by `-device`, with the properties that `-global` may set.
const BUILT_IN: &[(&str, &[Known])] = &[
    (
        "ICH9-LPC",
        &[(Switch, "acpi-pci-hotplug-with-bridge-support noreboot"), (Number, "disable_s3 disable_s4")],
    ),
    (
        "PIIX4_PM",
        &[
            (Switch, "acpi-pci-hotplug-with-bridge-support acpi-root-pci-hotplug"),
            (Number, "disable_s3 disable_s4"),
        ],
    ),
    ("cfi.pflash01", &[(Switch, "secure")]),
    ("fw_cfg_io", &[(Switch, "dma_enabled")]),
    ("hpet", &[(Switch, "msi"), (Number, "timers")]),
    ("i440FX-pcihost", &[(Size, "pci-hole64-size"), (Switch, "x-pci-hole64-fix")]),
    ("kvm-pit", &[(One(&["discard", "delay"]), "lost_tick_policy")]),
    ("mc146818rtc", &[(One(&["discard", "slew"]), "lost_tick_policy")]),
    ("mch", &[(Number, "extended-tseg-mbytes"), (Switch, "smbase-smram")]),
    ("q35-pcihost", &[(Size, "pci-hole64-size"), (Switch, "x-pci-hole64-fix")]),
];

/// Returns the form of a driver's property that `-global` sets; `None` if an image may not set it.
pub(crate) fn global(driver: &str, property: &str) -> Option<Form> {
    let built_in = BUILT_IN.iter().find(|(known, _)| *known == driver).map(|(_, known)| known.to_vec());
    let known = built_in.or_else(|| Some(properties(driver)?.collect()))?;
    names::find(&known, property).map(|(form, _)| form)
}

/// Models whose chardev is a console's: what the guest writes to it is text for people.
pub(crate) fn is_console(model: &str) -> bool {
    ["isa-debugcon", "isa-serial", "pci-serial", "virtconsole"].contains(&model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_form_of_a_key_is_the_one_that_counts() {
        for model in names::all(DEVICES.image) {
            let known: Vec<_> = properties(model).unwrap().collect();
            let keys = |known: &Known| known.1.split(' ').map(|key| (key, known.0)).collect::<Vec<_>>();
            for (key, form) in known.iter().flat_map(keys) {
                // `addr` of a memory device is an address of memory, and none of these is a PCI device with
                // memory's `addr`.
                let is_same = names::find(&known, key) == Some((form, key));
                assert!(is_same || model == "virtio-mem-pci", "{model}: {key} has two forms");
            }
        }
    }

    #[test]
    fn devices_of_the_host_are_not_listed() {
        for model in [
            "vfio-pci",
            "usb-host",
            "loader",
            "virtio-9p-pci",
            "vhost-scsi-pci",
            "ivshmem-doorbell",
            "usb-mtp",
        ] {
            assert!(properties(model).is_none(), "{model}");
        }
        assert_eq!(global("virtio-net-pci", "romfile"), Some(Empty));
        assert_eq!(global("vfio-pci", "host"), None);
        assert_eq!(global("ICH9-LPC", "disable_s3"), Some(Number));
    }
}
