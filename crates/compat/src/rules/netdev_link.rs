//! The link of a network card whose process has ended is down, which its state has. QEMU raises it when the
//! process is connected again, and only then: at a destination that is already connected it stays down.

use super::Pair;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, _)) = pair.qemus() else { return };
    let mut ids: Vec<&str> = source
        .netdevs
        .iter()
        .flatten()
        .filter(|netdev| netdev.is_disconnected)
        .map(|netdev| netdev.id.as_str())
        .collect();
    // One entry for each queue.
    ids.dedup();
    for id in ids {
        findings.note(
            format!(
                "QEMU at the source is not connected to the process of network backend {id}: the guest has no link, also at the destination"
            ),
            format!("start that process before, or raise the link at the destination (`set_link {id} on`)"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;
    use crate::facts::Netdev;

    #[test]
    fn a_lost_process_at_the_source_is_noted_once() {
        let netdev = |is_disconnected| Netdev { id: "n0".into(), kind: "vhost-user".into(), is_disconnected };
        let found = |guest: bool, there: bool| {
            between(run, |source, destination| {
                source.netdevs = Some(vec![netdev(guest), netdev(guest)]);
                destination.netdevs = Some(vec![netdev(there)]);
            })
        };
        let noted = found(true, false);
        assert_eq!(noted.len(), 1);
        assert!(noted[0].text.contains("network backend n0"), "{}", noted[0].text);
        assert_eq!(found(false, true), []);
    }
}
