//! Page size of the memory that backs a block.

use super::Pair;
use crate::report::{ConfiguredBy, Findings, Severity};

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    for guest in source.blocks.iter().filter(|block| block.page_bytes > 0) {
        let there = destination.blocks.iter().find(|block| block.name == guest.name);
        let Some(there) = there.filter(|there| ![0, guest.page_bytes].contains(&there.page_bytes)) else {
            continue;
        };
        let is_set = source.capabilities.get("postcopy-ram") == Some(&true);
        let text = format!(
            "RAM block {:?} lies in pages of {} bytes in the guest, there in pages of {}",
            guest.name, guest.page_bytes, there.page_bytes
        );
        if is_set {
            let remedy = "back both with the same pages, or switch postcopy-ram off";
            findings.add(Severity::No, Some(ConfiguredBy::ByHand), text.clone(), remedy.into());
        }
        if pair.is_postcopy {
            let remedy = "back both with the same pages, or leave --postcopy out";
            findings.add(Severity::No, Some(ConfiguredBy::Towline), text, remedy.into());
            continue;
        }
        findings.note(text, "only postcopy needs them alike");
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{between, of_postcopy};
    use super::*;
    use crate::facts::{BlockFacts, QemuFacts, Subject};

    #[test]
    fn only_postcopy_minds() {
        let block =
            |page_bytes| BlockFacts { name: "pc.ram".into(), page_bytes, used_bytes: 1, max_bytes: 1 };
        let huge = |postcopy| {
            between(run, |source, destination| {
                source.capabilities.insert("postcopy-ram".into(), postcopy);
                (source.blocks, destination.blocks) = (vec![block(4096)], vec![block(2 << 20)]);
            })
        };
        assert_eq!(huge(false)[0].severity, Severity::Note);
        assert_eq!(
            (huge(true)[0].severity, huge(true)[0].configured_by),
            (Severity::No, Some(ConfiguredBy::ByHand))
        );
    }

    #[test]
    fn a_move_by_postcopy_is_refused_whatever_is_set() {
        let qemu = |page_bytes| {
            let block = BlockFacts { name: "pc.ram".into(), page_bytes, used_bytes: 1, max_bytes: 1 };
            Subject::Qemu(Box::new(QemuFacts { blocks: vec![block], ..QemuFacts::default() }))
        };
        let found = of_postcopy(run, qemu(4096), qemu(2 << 20));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].severity, found[0].configured_by), (Severity::No, Some(ConfiguredBy::Towline)));
        assert_eq!(
            found[0].text,
            "RAM block \"pc.ram\" lies in pages of 4096 bytes in the guest, there in pages of 2097152"
        );
        assert_eq!(found[0].remedy, "back both with the same pages, or leave --postcopy out");
        assert!(of_postcopy(run, qemu(4096), qemu(4096)).is_empty());
    }
}
