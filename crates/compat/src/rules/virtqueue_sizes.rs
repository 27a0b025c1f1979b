//! Virtqueues that are larger than those of the device there, which QEMU refuses since 11.1.
//!
//! QEMU 10.0.13 (with a fix for CVE-2026-50626) offers 1024 entries in every virtqueue, while 10.0.12 and
//! older, and 11.1 and newer, offer what the device declares: 8 for virtio-rng, 64 for the control queue of
//! virtio-net. The stream carries the size that the guest's driver has set, and without a driver the size
//! that is offered. Before 11.1 it is loaded without a check.

use super::Pair;
use crate::facts::{ImageFacts, QemuDevice, QemuFacts, Subject, version_numbers};
use crate::report::Findings;

/// The first QEMU that compares the sizes.
const COMPARED_SINCE: [u32; 2] = [11, 1];
/// The QEMUs that offer [`ENLARGED`] entries in every queue: from the first of these to the end of its
/// series.
const ENLARGED_SINCE: [u32; 3] = [10, 0, 13];
/// virtio's limit in QEMU (`VIRTQUEUE_MAX_SIZE`).
const ENLARGED: u32 = 1024;
/// State of a virtio device: `virtio-net`, `vhost-user-fs`.
const STATES: [&str; 2] = ["virtio-", "vhost-"];
const REMEDY: &str = "move it to a QEMU before 11.1, unplug these devices for the move (device_del), or shut the guest down and \
     start it there; where a device has it, queue-size=1024 (virtqueue_size= of virtio-scsi) there is enough";

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some(destination) = pair.destination_qemu() else { return };
    if version_numbers(&destination.version)[..] < COMPARED_SINCE[..] {
        return;
    }
    match &pair.source.subject {
        Subject::Qemu(source) => of_qemu(source, destination, findings),
        Subject::Image(image) => of_image(image, destination, findings),
        Subject::Binary(_) | Subject::Device(_) | Subject::Attribute(_) => {}
    }
}

fn of_qemu(source: &QemuFacts, destination: &QemuFacts, findings: &mut Findings<'_>) {
    let refused: Vec<_> = source
        .devices
        .iter()
        .flatten()
        .filter_map(|guest| {
            let there = destination.device_at(&guest.place).filter(|there| there.kind == guest.kind)?;
            refused_queue(guest, there)
        })
        .collect();
    if !refused.is_empty() {
        findings.no(
            format!(
                "QEMU {} loads no virtqueue that is larger than its own: {}",
                destination.version,
                refused.join("; ")
            ),
            REMEDY,
        );
    }
}

/// Describes the first queue of a device that is too large.
fn refused_queue(guest: &QemuDevice, there: &QemuDevice) -> Option<String> {
    let queues = guest.virtqueues.iter().zip(&there.virtqueues);
    queues.enumerate().find_map(|(index, (mine, theirs))| {
        let size_max = theirs.size_max.filter(|size_max| mine.size > *size_max)?;
        Some(format!(
            "queue {index} of {} has {} entries, there at most {size_max}",
            guest.shown(),
            mine.size
        ))
    })
}

/// An image does not have the sizes; the version of the QEMU that stored it shows if they may be too large.
fn of_image(image: &ImageFacts, destination: &QemuFacts, findings: &mut Findings<'_>) {
    let Some(qemu) = &image.qemu else { return };
    let version = version_numbers(qemu);
    let is_enlarged = version[..] >= ENLARGED_SINCE[..] && version.starts_with(&ENLARGED_SINCE[..2]);
    let has_virtio =
        image.sections.iter().any(|section| STATES.iter().any(|prefix| section.state().starts_with(prefix)));
    if is_enlarged && has_virtio {
        findings.unknown(
            format!(
                "the guest was stored by QEMU {qemu}, whose virtqueues have up to {ENLARGED} entries, and QEMU {} loads none that \
                 is larger than its own",
                destination.version
            ),
            "restore it into a QEMU before 11.1",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, device, of};
    use super::*;
    use crate::facts::{IncomingState, Section, Virtqueue};
    use crate::report::{Finding, Severity};

    fn rng(sizes: &[u32], size_max: Option<u32>) -> QemuDevice {
        let virtqueues = sizes.iter().map(|size| Virtqueue { size: *size, size_max }).collect();
        QemuDevice { virtqueues, ..device("virtio-rng-device", "pci/02.0/virtio", &[]) }
    }

    fn found(guest: QemuDevice, there: QemuDevice, version: &str) -> Vec<Finding> {
        between(run, |source, destination| {
            destination.version = version.into();
            (source.devices, destination.devices) = (Some(vec![guest]), Some(vec![there]));
        })
    }

    #[test]
    fn larger_queues_are_refused_since_11_1() {
        let to = |version: &str| found(rng(&[8, 1024], Some(1024)), rng(&[8, 8], Some(8)), version);
        let refused = to("11.1.3");
        assert_eq!((refused.len(), refused[0].severity), (1, Severity::No));
        let wanted = "queue 1 of virtio-rng-device at pci/02.0/virtio has 1024 entries, there at most 8";
        assert!(refused[0].text.contains(wanted), "{refused:?}");
        assert_eq!(to("10.0.2"), []);
        assert_eq!(to("12.0.0").len(), 1);
    }

    #[test]
    fn the_size_that_the_driver_has_set_is_compared() {
        assert_eq!(found(rng(&[8], Some(1024)), rng(&[8], Some(8)), "11.1.3"), []);
        let vhost_user = found(rng(&[512], None), rng(&[256], Some(256)), "11.1.3");
        assert_eq!(vhost_user[0].severity, Severity::No);
        // QEMU did not report the queues of one side.
        assert_eq!(found(rng(&[], None), rng(&[8], Some(8)), "11.1.3"), []);
        assert_eq!(found(rng(&[1024], None), rng(&[8], None), "11.1.3"), []);
    }

    #[test]
    fn an_image_of_an_enlarging_qemu_is_unknown() {
        let restored = |by: Option<&str>, state: &str, version: &str| {
            let sections = vec![Section { name: format!("0000:00:02.0/{state}"), ..Section::default() }];
            let image = ImageFacts { qemu: by.map(str::to_owned), sections, ..ImageFacts::default() };
            let waiting = QemuFacts {
                version: version.into(),
                incoming: IncomingState::Deferred,
                ..QemuFacts::default()
            };
            let found = of(run, Subject::Image(image), Subject::Qemu(Box::new(waiting)));
            found.into_iter().map(|found| found.severity).collect::<Vec<_>>()
        };
        assert_eq!(restored(Some("10.0.13"), "virtio-net", "11.1.3"), [Severity::Unknown]);
        assert_eq!(restored(Some("10.0.13"), "e1000", "11.1.3"), []);
        assert_eq!(restored(Some("10.0.13"), "virtio-net", "10.0.13"), []);
        assert_eq!(restored(Some("10.0.2"), "virtio-net", "11.1.3"), []);
        assert_eq!(restored(Some("11.1.3"), "virtio-net", "11.1.3"), []);
        assert_eq!(restored(None, "virtio-net", "11.1.3"), []);
    }
}
