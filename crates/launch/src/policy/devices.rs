//! Device models that an image may have, and their properties.
//!
//! Left out on purpose: what opens something of the host by its own property (`vfio-*`, `usb-host`, `vhost-scsi-*`, `loader`,
//! `ivshmem-doorbell`, `virtio-9p-*`, …), and every property that names a file, a descriptor, a CID or another host's address.

use super::Known;
use super::form::Form;
use Form::{Empty, Host, Id, Label, Mac, Number, One, PciAddress, Size, Switch, Uuid, Word};

const COMMON: &[Known] = &[("id", Id), ("bus", Id), ("bootindex", Number)];
const PCI: &[Known] = &[
    ("acpi-index", Number),
    ("addr", PciAddress),
    ("aer", Switch),
    ("failover_pair_id", Id),
    ("multifunction", Switch),
    ("rombar", Number),
    ("romfile", Empty),
    ("romsize", Number),
];
const PORT: &[Known] = &[
    ("bus_nr", Number),
    ("bus-reserve", Number),
    ("chassis", Number),
    ("chassis_nr", Number),
    ("hotplug", Switch),
    ("io-reserve", Size),
    ("mem-reserve", Size),
    ("msi", Switch),
    ("numa_node", Number),
    ("port", Number),
    ("power_controller_present", Switch),
    ("pref32-reserve", Size),
    ("pref64-reserve", Size),
    ("shpc", Switch),
    ("slot", Number),
];
const VIRTIO: &[Known] = &[
    ("any_layout", Switch),
    ("ats", Switch),
    ("disable-legacy", Switch),
    ("disable-modern", Switch),
    ("event_idx", Switch),
    ("in_order", Switch),
    ("indirect_desc", Switch),
    ("ioeventfd", Switch),
    ("iommu_platform", Switch),
    ("notify_on_empty", Switch),
    ("packed", Switch),
    ("page-per-vq", Switch),
    ("queue_reset", Switch),
    ("use-disabled-flag", Switch),
    ("use-started", Switch),
    ("vectors", Number),
];
const BLOCK: &[Known] = &[
    ("account-failed", Switch),
    ("account-invalid", Switch),
    ("backend_defaults", Switch),
    ("cyls", Number),
    ("discard_granularity", Size),
    ("drive", Id),
    ("heads", Number),
    ("logical_block_size", Size),
    ("min_io_size", Size),
    ("opt_io_size", Size),
    ("physical_block_size", Size),
    ("rerror", One(&["auto", "report", "stop"])),
    ("secs", Number),
    ("serial", Word),
    ("share-rw", Switch),
    ("werror", One(&["auto", "report", "stop", "enospc"])),
    ("write-cache", Switch),
];
const VIRTIO_BLOCK: &[Known] = &[
    ("config-wce", Switch),
    ("discard", Switch),
    ("iothread", Id),
    ("max-discard-sectors", Number),
    ("max-write-zeroes-sectors", Number),
    ("num-queues", Number),
    ("queue-size", Number),
    ("report-discard-granularity", Switch),
    ("request-merging", Switch),
    ("seg-max-adjust", Switch),
    ("write-zeroes", Switch),
];
const DISK: &[Known] = &[
    ("channel", Number),
    ("device_id", Word),
    ("dpofua", Switch),
    ("lun", Number),
    ("max_io_size", Size),
    ("max_unmap_size", Size),
    ("model", Label),
    ("product", Label),
    ("removable", Switch),
    ("rotation_rate", Number),
    ("scsi-id", Number),
    ("scsi_version", Number),
    ("unit", Number),
    ("vendor", Label),
    ("ver", Word),
    ("wwn", Number),
];
const NETWORK: &[Known] = &[("mac", Mac), ("netdev", Id)];
const VIRTIO_NETWORK: &[Known] = &[
    ("csum", Switch),
    ("ctrl_guest_offloads", Switch),
    ("ctrl_mac_addr", Switch),
    ("ctrl_rx", Switch),
    ("ctrl_rx_extra", Switch),
    ("ctrl_vlan", Switch),
    ("ctrl_vq", Switch),
    ("duplex", One(&["half", "full"])),
    ("failover", Switch),
    ("gso", Switch),
    ("guest_announce", Switch),
    ("guest_csum", Switch),
    ("guest_ecn", Switch),
    ("guest_rsc_ext", Switch),
    ("guest_tso4", Switch),
    ("guest_tso6", Switch),
    ("guest_ufo", Switch),
    ("guest_uso4", Switch),
    ("guest_uso6", Switch),
    ("hash", Switch),
    ("host_ecn", Switch),
    ("host_mtu", Number),
    ("host_tso4", Switch),
    ("host_tso6", Switch),
    ("host_ufo", Switch),
    ("host_uso", Switch),
    ("mq", Switch),
    ("mrg_rxbuf", Switch),
    ("rsc_interval", Number),
    ("rss", Switch),
    ("rx_queue_size", Number),
    ("speed", Number),
    ("status", Switch),
    ("tx", One(&["timer", "bh"])),
    ("tx_queue_size", Number),
    ("x-txburst", Number),
    ("x-txtimer", Number),
];
const QUEUES: &[Known] = &[("num_queues", Number), ("virtqueue_size", Number), ("cmd_per_lun", Number)];
const GRAPHICS: &[Known] = &[
    ("big-endian-framebuffer", Switch),
    ("blob", Switch),
    ("edid", Switch),
    ("global-vmstate", Switch),
    ("max_hostmem", Size),
    ("max_outputs", Number),
    ("mmio", Switch),
    ("ram_size", Number),
    ("ram_size_mb", Number),
    ("refresh_rate", Number),
    ("vgamem_mb", Number),
    ("vram64_size_mb", Number),
    ("vram_size", Number),
    ("vram_size_mb", Number),
    ("xmax", Number),
    ("xres", Number),
    ("ymax", Number),
    ("yres", Number),
];
const USB: &[Known] = &[
    ("firstport", Number),
    ("intrs", Number),
    ("masterbus", Id),
    ("msi", Switch),
    ("msix", Switch),
    ("p2", Number),
    ("p3", Number),
    ("pcap", Empty),
    ("port", Word),
    ("ports", Number),
    ("serial", Word),
    ("slots", Number),
    ("streams", Switch),
    ("usb_version", Number),
];
const SERIAL: &[Known] = &[
    ("chardev", Id),
    ("index", Number),
    ("iobase", Number),
    ("irq", Number),
    ("max_ports", Number),
    ("name", Word),
    ("nr", Number),
    ("wakeup", Number),
];
const MEMORY: &[Known] = &[
    ("addr", Number),
    ("block-size", Size),
    ("memaddr", Number),
    ("memdev", Id),
    ("node", Number),
    ("prealloc", Switch),
    ("requested-size", Size),
    ("slot", Number),
    ("unplugged-inaccessible", Switch),
];
const BALLOON: &[Known] = &[
    ("deflate-on-oom", Switch),
    ("free-page-hint", Switch),
    ("free-page-reporting", Switch),
    ("iothread", Id),
];
const IOMMU: &[Known] = &[
    ("aw-bits", Number),
    ("boot-bypass", Switch),
    ("caching-mode", Switch),
    ("device-iotlb", Switch),
    ("dma-drain", Switch),
    ("eim", Switch),
    ("intremap", Switch),
    ("pasid", Switch),
    ("pt", Switch),
    ("snoop-control", Switch),
    ("x-scalable-mode", Switch),
    ("xtsup", Switch),
];
const AUDIO: &[Known] = &[("audiodev", Id), ("cad", Number), ("debug", Number), ("mixer", Switch)];
const PLATFORM: &[Known] = &[
    ("events", Number),
    ("guid", Uuid),
    ("ioport", Number),
    ("tpmdev", Id),
    ("ppi", Switch),
    ("period", Number),
    ("max-bytes", Number),
    ("rng", Id),
];
const HOST_CID: &[Known] = &[("guest-cid", Host), ("chardev", Id), ("seqpacket", Switch)];
const SHARED: &[Known] = &[
    ("cache-size", Size),
    ("chardev", Id),
    ("num-queues", Number),
    ("num-request-queues", Number),
    ("queue-size", Number),
    ("tag", Word),
];

/// Device models, and their properties beside those in `COMMON`.
const DEVICES: &[(&str, &[&[Known]])] = &[
    ("AC97", &[PCI, AUDIO]),
    ("ES1370", &[PCI, AUDIO]),
    ("VGA", &[PCI, GRAPHICS]),
    ("ahci", &[PCI]),
    ("amd-iommu", &[PCI, IOMMU]),
    ("bochs-display", &[PCI, GRAPHICS]),
    ("cirrus-vga", &[PCI, GRAPHICS]),
    ("e1000", &[PCI, NETWORK]),
    ("e1000-82544gc", &[PCI, NETWORK]),
    ("e1000-82545em", &[PCI, NETWORK]),
    ("e1000e", &[PCI, NETWORK]),
    ("hda-duplex", &[AUDIO]),
    ("hda-micro", &[AUDIO]),
    ("hda-output", &[AUDIO]),
    ("i6300esb", &[PCI]),
    ("i82557b", &[PCI, NETWORK]),
    ("i82801b11-bridge", &[PCI, PORT]),
    ("ib700", &[]),
    ("ich9-ahci", &[PCI]),
    ("ich9-intel-hda", &[PCI, USB]),
    ("ich9-usb-ehci1", &[PCI, USB]),
    ("ich9-usb-uhci1", &[PCI, USB]),
    ("ich9-usb-uhci2", &[PCI, USB]),
    ("ich9-usb-uhci3", &[PCI, USB]),
    ("ide-cd", &[BLOCK, DISK]),
    ("ide-hd", &[BLOCK, DISK]),
    ("igb", &[PCI, NETWORK]),
    ("intel-hda", &[PCI, USB]),
    ("intel-iommu", &[IOMMU]),
    ("ioh3420", &[PCI, PORT]),
    ("isa-debugcon", &[SERIAL]),
    ("isa-serial", &[SERIAL]),
    ("lsi53c895a", &[PCI]),
    ("megasas", &[PCI]),
    ("megasas-gen2", &[PCI]),
    ("mptsas1068", &[PCI]),
    ("ne2k_pci", &[PCI, NETWORK]),
    ("nec-usb-xhci", &[PCI, USB]),
    ("nvdimm", &[MEMORY]),
    ("nvme", &[PCI, BLOCK, &[("max_ioqpairs", Number), ("mdts", Number), ("msix_qsize", Number)]]),
    ("nvme-ns", &[BLOCK, &[("nsid", Number), ("uuid", Uuid)]]),
    ("pc-dimm", &[MEMORY]),
    ("pci-bridge", &[PCI, PORT]),
    ("pci-serial", &[PCI, SERIAL]),
    ("pcie-pci-bridge", &[PCI, PORT]),
    ("pcie-root-port", &[PCI, PORT]),
    ("pcnet", &[PCI, NETWORK]),
    ("piix3-usb-uhci", &[PCI, USB]),
    ("piix4-usb-uhci", &[PCI, USB]),
    ("pvpanic", &[PLATFORM]),
    ("pvpanic-pci", &[PCI, PLATFORM]),
    ("pvscsi", &[PCI]),
    ("pxb", &[PCI, PORT]),
    ("pxb-pcie", &[PCI, PORT]),
    ("qemu-xhci", &[PCI, USB]),
    ("qxl", &[PCI, GRAPHICS]),
    ("qxl-vga", &[PCI, GRAPHICS]),
    ("ramfb", &[]),
    ("rtl8139", &[PCI, NETWORK]),
    ("scsi-cd", &[BLOCK, DISK]),
    ("scsi-hd", &[BLOCK, DISK]),
    ("secondary-vga", &[PCI, GRAPHICS]),
    ("tpm-crb", &[PLATFORM]),
    ("tpm-tis", &[PLATFORM]),
    ("usb-ehci", &[PCI, USB]),
    ("usb-hub", &[USB]),
    ("usb-kbd", &[USB]),
    ("usb-mouse", &[USB]),
    ("usb-net", &[USB, NETWORK]),
    ("usb-storage", &[USB, BLOCK, DISK]),
    ("usb-tablet", &[USB]),
    ("vhost-user-blk-pci", &[PCI, VIRTIO, VIRTIO_BLOCK, SHARED]),
    ("vhost-user-fs-pci", &[PCI, VIRTIO, SHARED]),
    ("vhost-user-vsock-pci", &[PCI, VIRTIO, HOST_CID]),
    ("vhost-vsock-pci", &[PCI, VIRTIO, HOST_CID]),
    ("virtconsole", &[SERIAL]),
    ("virtio-balloon-pci", &[PCI, VIRTIO, BALLOON]),
    ("virtio-blk-pci", &[PCI, VIRTIO, BLOCK, VIRTIO_BLOCK]),
    ("virtio-crypto-pci", &[PCI, VIRTIO, &[("cryptodev", Id)]]),
    ("virtio-gpu-pci", &[PCI, VIRTIO, GRAPHICS]),
    ("virtio-iommu-pci", &[PCI, VIRTIO, IOMMU]),
    ("virtio-keyboard-pci", &[PCI, VIRTIO]),
    ("virtio-mem-pci", &[PCI, VIRTIO, MEMORY]),
    ("virtio-mouse-pci", &[PCI, VIRTIO]),
    ("virtio-net-pci", &[PCI, VIRTIO, NETWORK, VIRTIO_NETWORK]),
    ("virtio-rng-pci", &[PCI, VIRTIO, PLATFORM]),
    ("virtio-scsi-pci", &[PCI, VIRTIO, VIRTIO_BLOCK, QUEUES]),
    ("virtio-serial-pci", &[PCI, VIRTIO, SERIAL]),
    ("virtio-tablet-pci", &[PCI, VIRTIO]),
    ("virtio-vga", &[PCI, VIRTIO, GRAPHICS]),
    ("virtserialport", &[SERIAL]),
    ("vmcoreinfo", &[]),
    ("vmgenid", &[PLATFORM]),
    ("vmware-svga", &[PCI, GRAPHICS]),
    ("vmxnet3", &[PCI, NETWORK]),
    ("x3130-upstream", &[PCI, PORT]),
    ("xio3130-downstream", &[PCI, PORT]),
];

/// Other names of models.
const ALIASES: &[(&str, &str)] = &[
    ("ahci-ich9", "ich9-ahci"),
    ("virtio-balloon", "virtio-balloon-pci"),
    ("virtio-blk", "virtio-blk-pci"),
    ("virtio-gpu", "virtio-gpu-pci"),
    ("virtio-keyboard", "virtio-keyboard-pci"),
    ("virtio-mouse", "virtio-mouse-pci"),
    ("virtio-net", "virtio-net-pci"),
    ("virtio-rng", "virtio-rng-pci"),
    ("virtio-scsi", "virtio-scsi-pci"),
    ("virtio-serial", "virtio-serial-pci"),
    ("virtio-tablet", "virtio-tablet-pci"),
];

/// Drivers that are not added by `-device`, with the properties that `-global` may set.
const BUILT_IN: &[(&str, &[Known])] = &[
    (
        "ICH9-LPC",
        &[
            ("acpi-pci-hotplug-with-bridge-support", Switch),
            ("disable_s3", Number),
            ("disable_s4", Number),
            ("noreboot", Switch),
        ],
    ),
    (
        "PIIX4_PM",
        &[
            ("acpi-pci-hotplug-with-bridge-support", Switch),
            ("acpi-root-pci-hotplug", Switch),
            ("disable_s3", Number),
            ("disable_s4", Number),
        ],
    ),
    ("cfi.pflash01", &[("secure", Switch)]),
    ("fw_cfg_io", &[("dma_enabled", Switch)]),
    ("hpet", &[("msi", Switch), ("timers", Number)]),
    ("i440FX-pcihost", &[("pci-hole64-size", Size), ("x-pci-hole64-fix", Switch)]),
    ("kvm-pit", &[("lost_tick_policy", One(&["discard", "delay"]))]),
    ("mc146818rtc", &[("lost_tick_policy", One(&["discard", "slew"]))]),
    ("mch", &[("extended-tseg-mbytes", Number), ("smbase-smram", Switch)]),
    ("q35-pcihost", &[("pci-hole64-size", Size), ("x-pci-hole64-fix", Switch)]),
];

/// Returns the properties of a device model that an image may have; `None` if it may not have the model.
pub(super) fn properties(model: &str) -> Option<impl Iterator<Item = &'static Known> + use<>> {
    let model = ALIASES.iter().find(|(alias, _)| *alias == model).map_or(model, |(_, model)| model);
    let (_, groups) = DEVICES.iter().find(|(known, _)| *known == model)?;
    Some(COMMON.iter().chain(groups.iter().copied().flatten()))
}

/// Returns true if the device model is known to open nothing of the host by itself.
#[must_use]
pub fn is_known_model(model: &str) -> bool {
    properties(model).is_some()
}

/// Returns the form of a driver's property that `-global` sets; `None` if an image may not set it.
pub(super) fn global(driver: &str, property: &str) -> Option<Form> {
    if let Some((_, known)) = BUILT_IN.iter().find(|(known, _)| *known == driver) {
        return known.iter().find(|(key, _)| *key == property).map(|(_, form)| *form);
    }
    properties(driver)?.find(|(key, _)| *key == property).map(|(_, form)| *form)
}

/// Models whose chardev is a console's: what the guest writes to it is text for people.
pub(super) fn is_console(model: &str) -> bool {
    ["isa-debugcon", "isa-serial", "pci-serial", "virtconsole"].contains(&model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_form_of_a_key_is_the_one_that_counts() {
        for (model, _) in DEVICES {
            let mut keys: Vec<_> = properties(model).unwrap().collect();
            keys.sort_by_key(|(key, _)| *key);
            for pair in keys.windows(2) {
                // `addr` of a memory device is an address of memory, and none of these is a PCI device with memory's `addr`.
                let is_same = pair[0].0 != pair[1].0 || pair[0].1 == pair[1].1;
                assert!(is_same || *model == "virtio-mem-pci", "{model}: {} has two forms", pair[0].0);
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
