//! Properties that differ between a device and its counterpart.

use super::Pair;
use crate::facts::{QemuDevice, QemuFacts};
use crate::report::Findings;

/// Effect of a differing property.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// Nothing: it is the host's, or another rule checks it.
    None,
    /// QEMU accepts it and the guest runs on.
    Compatible(&'static str),
    /// QEMU refuses the device's state.
    Refused(&'static str),
    /// Unknown: it is in no table.
    Unknown,
}

const PCI_CONFIG: &str = "it is in PCI configuration space, which QEMU compares";
const STREAM: &str = "it changes the device's state in the stream";

/// Properties that are the host's, or that other rules check: memory by its block, features by what was
/// negotiated. `busnr` is the number that the guest's firmware gave its bus; it comes with the state of the
/// port before it.
const NO_EFFECT: &str = "\
    netdev chardev drive audiodev iothread ioeventfd vhostfd vhost tx x-txtimer x-txburst bootindex romfile \
    romsize rombar rerror werror share-rw account-invalid account-failed stats-intervals backend_defaults \
    page-sampling failover_pair_id request-merging iothread-vq-mapping x-max-bounce-buffer-size memdev \
    hostmem vgamem_mb ram_size ram_size_mb vram_size_mb display head below-4g-mem-size busnr MCFG \
    above-4g-mem-size rng filename ebpf-rss-fds disable-legacy-check x-disable-legacy-check \
    use-disabled-flag use-started evdev cryptodev guest-stats-polling-interval";

/// virtio's own rule compares these where they are in use.
const FEATURES: &str = "\
    csum guest_csum gso guest_tso4 guest_tso6 guest_ecn guest_ufo guest_announce host_tso4 host_tso6 \
    host_ecn host_ufo mrg_rxbuf status ctrl_vq ctrl_rx ctrl_vlan ctrl_rx_extra ctrl_mac_addr \
    ctrl_guest_offloads mq rss hash guest_rsc_ext guest_uso4 guest_uso6 host_uso standby indirect_desc \
    event_idx notify_on_empty any_layout iommu_platform packed queue_reset in_order config-wce discard \
    write-zeroes seg-max-adjust report-discard-granularity deflate-on-oom free-page-hint page-poison \
    free-page-reporting hotplug param_change speed duplex scsi";

/// Effect, and the properties that have it.
const COMPATIBLE_DIFFERENCES: &[(&str, &str)] = &[
    ("the guest keeps its own address, which comes with its state", "mac"),
    ("the guest keeps the MTU that it knows", "host_mtu"),
    (
        "the guest keeps its ring; give it the same for the next boot",
        "rx_queue_size tx_queue_size queue-size",
    ),
    ("the guest sees another serial number when it probes again", "serial"),
    ("the guest sees another name when it probes again", "model wwn"),
    ("the guest sees another version when it probes again", "ver"),
    ("the guest keeps its setting", "write-cache"),
    ("the disk has other blocks than the guest knows", "logical_block_size"),
    (
        "",
        "physical_block_size min_io_size opt_io_size discard_granularity max-bytes max_sectors period edid \
         xres yres xmax ymax",
    ),
    ("a port of the guest beyond them cannot be loaded", "max_ports"),
    ("the guest keeps the queues that it knows", "num-queues"),
    ("the guest sees another number when it probes again", "chassis"),
    ("the guest may rename the device at its next boot", "acpi-index"),
];

/// Reason, and the properties for which QEMU refuses.
const REFUSED: &[(&str, &str)] = &[
    ("the length of the MSI-X table follows from the queues: use the same queues and vectors=", "vectors"),
    (
        PCI_CONFIG,
        "multifunction disable-legacy disable-modern modern-pio-notify page-per-vq class msi msix \
         disable-acs",
    ),
    (STREAM, "timers p2 p3"),
];

/// Properties of a PCI Express capability: without effect on the root bus, where devices have none.
const EXPRESS: &str = "\
    ats aer x-pcie-lnksta-dllla x-pcie-extcap-init x-pcie-deverr-init x-pcie-lnkctl-init x-pcie-pm-init \
    x-pcie-flr-init";
/// Of ports.
const PORT: &str = "slot port hotplug x-speed x-width power_controller_present";

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    for guest in source.devices.iter().flatten() {
        if let Some(there) = destination.device_at(&guest.place).filter(|there| there.kind == guest.kind) {
            compare([source, destination], guest, there, findings);
        }
    }
}

fn compare(qemus: [&QemuFacts; 2], guest: &QemuDevice, there: &QemuDevice, findings: &mut Findings<'_>) {
    for (name, mine) in &guest.properties {
        // A property that only one of two versions has is set by the machine type.
        let Some(theirs) = there.properties.get(name).filter(|theirs| *theirs != mine) else { continue };
        let text = format!("{name} of {} is {mine} in the guest and {theirs} there", guest.shown());
        let remedy = format!("start it with {name}={mine}");
        match effect(guest, there, name) {
            Effect::None => {}
            Effect::Compatible("") => findings.note(text, ""),
            Effect::Compatible(what) => findings.note(text, what),
            Effect::Refused(why) => findings.no(format!("{text}: {why}"), remedy),
            // The same machine type means the same device; other differences are internal to a version.
            Effect::Unknown if qemus[0].version != qemus[1].version => findings.note(text, ""),
            Effect::Unknown => findings.unknown(text, remedy),
        }
    }
}

fn effect(guest: &QemuDevice, there: &QemuDevice, name: &str) -> Effect {
    let is_in = |names: &str| names.split_ascii_whitespace().any(|known| known == name);
    let of =
        |table: &[(&'static str, &str)]| table.iter().find(|(_, names)| is_in(names)).map(|(text, _)| *text);
    let is_virtio = guest.virtio.is_some() && there.virtio.is_some();
    let is_root = guest.place.split('/').count() <= 2;
    if is_in(NO_EFFECT) || (is_virtio && is_in(FEATURES)) || (is_root && is_in(EXPRESS)) {
        Effect::None
    } else if is_in(EXPRESS) || (guest.kind.ends_with("-port") && is_in(PORT)) {
        Effect::Refused(PCI_CONFIG)
    } else if let Some(what) = of(COMPATIBLE_DIFFERENCES) {
        Effect::Compatible(what)
    } else if let Some(why) = of(REFUSED) {
        Effect::Refused(why)
    } else {
        Effect::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, device};
    use super::*;
    use crate::facts::Virtio;
    use crate::report::Severity;

    fn found(property: &str, there: &str, is_virtio: bool) -> Vec<crate::Finding> {
        between(run, |source, destination| {
            for (qemu, value) in [(source, "1"), (destination, there)] {
                let virtio = is_virtio.then(Virtio::default);
                let device = QemuDevice { virtio, ..device("nic", "pci/02.0", &[(property, value)]) };
                qemu.devices = Some(vec![device]);
            }
        })
    }

    #[test]
    fn each_property_has_its_effect() {
        let severity = |property, virtio| found(property, "2", virtio).first().map(|found| found.severity);
        assert_eq!(severity("netdev", false), None);
        assert_eq!(severity("busnr", false), None);
        assert_eq!(severity("mac", false), Some(Severity::Note));
        assert_eq!(severity("vectors", false), Some(Severity::No));
        assert_eq!(severity("gso", true), None);
        assert_eq!(severity("gso", false), Some(Severity::Unknown));
        assert_eq!(severity("brand-new", false), Some(Severity::Unknown));
        assert_eq!(found("vectors", "1", false), []);
    }

    #[test]
    fn both_values_and_the_remedy_are_reported() {
        assert_eq!(
            found("vectors", "2", false)[0].to_string(),
            "vectors of nic at pci/02.0 is 1 in the guest and 2 there: the length of the MSI-X table follows from \
             the queues: use the same queues and vectors= (start it with vectors=1)"
        );
    }

    #[test]
    fn some_matter_only_where_there_is_pci_express() {
        let severity = |kind, place, property| {
            let found = between(run, |source, destination| {
                source.devices = Some(vec![device(kind, place, &[(property, "1")])]);
                destination.devices = Some(vec![device(kind, place, &[(property, "2")])]);
            });
            found.first().map(|found| found.severity)
        };
        assert_eq!(severity("nic", "pci/02.0", "aer"), None);
        assert_eq!(severity("nic", "pci/02.0/00.0", "aer"), Some(Severity::No));
        assert_eq!(severity("pcie-root-port", "pci/02.0", "slot"), Some(Severity::No));
        assert_eq!(severity("pcie-root-port", "pci/02.0", "chassis"), Some(Severity::Note));
        assert_eq!(severity("nic", "pci/02.0", "slot"), Some(Severity::Unknown));
    }

    #[test]
    fn no_property_is_in_two_tables() {
        let tables = COMPATIBLE_DIFFERENCES.iter().chain(REFUSED).map(|(_, names)| *names);
        let lists = [NO_EFFECT, FEATURES].into_iter().chain(tables);
        let mut names: Vec<_> = lists.flat_map(str::split_ascii_whitespace).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
