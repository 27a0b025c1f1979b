//! Pages of the memory behind a block.

use super::{Pair, Rule};
use crate::report::{ConfiguredBy, Findings, Severity};

pub(super) const RULE: Rule =
    Rule { id: "page-size", about: "postcopy needs the same page size behind each RAM block", run };

fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    for guest in source.blocks.iter().filter(|block| block.page_bytes > 0) {
        let there = destination.blocks.iter().find(|block| block.name == guest.name);
        let Some(there) = there.filter(|there| ![0, guest.page_bytes].contains(&there.page_bytes)) else {
            continue;
        };
        let is_postcopy = source.capabilities.get("postcopy-ram") == Some(&true);
        let text = format!(
            "RAM block {:?} lies in pages of {} bytes in the guest, there in pages of {}",
            guest.name, guest.page_bytes, there.page_bytes
        );
        if is_postcopy {
            let remedy = "back both with the same pages, or switch postcopy-ram off";
            findings.add(Severity::No, Some(ConfiguredBy::ByHand), text.clone(), remedy.into());
        }
        findings.note(text, "only postcopy needs them alike");
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;
    use crate::facts::Block;

    #[test]
    fn only_postcopy_minds() {
        let block = |page_bytes| Block { name: "pc.ram".into(), page_bytes, used_bytes: 1, max_bytes: 1 };
        let huge = |postcopy| {
            between(&RULE, |source, destination| {
                source.capabilities.insert("postcopy-ram".into(), postcopy);
                (source.blocks, destination.blocks) = (vec![block(4096)], vec![block(2 << 20)]);
            })
        };
        assert_eq!(huge(false)[0].severity, Severity::Note);
        assert_eq!((huge(true)[0].severity, huge(true)[0].way), (Severity::No, Some(ConfiguredBy::ByHand)));
    }
}
