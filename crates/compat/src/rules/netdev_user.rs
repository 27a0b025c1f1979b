//! `-netdev user` has a separate state in the stream, called `slirp`.

use super::Pair;
use crate::facts::Netdev;
use crate::report::Findings;

pub(super) fn run(pair: &Pair<'_>, findings: &mut Findings<'_>) {
    let Some((source, destination)) = pair.qemus() else { return };
    let (Some(guest), Some(there)) = (&source.netdevs, &destination.netdevs) else { return };
    let count = |netdevs: &[Netdev]| netdevs.iter().filter(|netdev| netdev.kind == "user").count();
    let (guest, there) = (count(guest), count(there));
    if guest > there {
        findings.no(
            format!("the guest has {guest} `-netdev user` backends, there are {there}"),
            "their state (slirp) cannot be loaded: use the same backends at both ends",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::between;
    use super::*;

    #[test]
    fn one_less_is_a_no() {
        let netdev = |kind: &str| vec![Netdev { id: "n".into(), kind: kind.into(), ..Netdev::default() }];
        let found = |guest, there| {
            between(run, |source, destination| {
                (source.netdevs, destination.netdevs) = (Some(netdev(guest)), Some(netdev(there)));
            })
        };
        assert_eq!(found("user", "tap")[0].text, "the guest has 1 `-netdev user` backends, there are 0");
        assert_eq!(found("tap", "user"), []);
    }
}
