//! Both ends are of kinds that can be compared.

use super::Pair;
use crate::facts::Subject;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    use Subject::{Attribute, Binary, Device, Image, Qemu};
    let (source, destination) = (&pair.source.subject, &pair.destination.subject);
    match (source, destination) {
        (Qemu(_) | Image(_), Qemu(_)) | (Image(_) | Binary(_), Binary(_)) => {}
        // The destination device decides when its attribute is written; see `attribute`.
        (Device(_) | Attribute(_), Device(_) | Attribute(_)) => {}
        (Qemu(_), Binary(_)) => findings.unknown(
            "which versions the guest's devices have is not to be learned from a running QEMU",
            "compare its binary's -dump-vmstate, or an image of the guest",
        ),
        _ => findings.unknown(
            format!("{} cannot be compared with {}", source.noun(), destination.noun()),
            "compare a guest (QEMU, image) with a QEMU, a binary with a binary, a device with one of its type",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::of;
    use super::*;
    use crate::facts;

    #[test]
    fn an_image_and_a_device_are_not_comparable() {
        let found = of(
            run,
            Subject::Image(facts::ImageFacts::default()),
            Subject::Device(facts::DeviceFacts::default()),
        );
        assert_eq!(found[0].text, "an image cannot be compared with a device");
        let found = of(run, Subject::Image(facts::ImageFacts::default()), Subject::Qemu(Box::default()));
        assert_eq!(found, []);
    }
}
