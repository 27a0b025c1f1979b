//! Guests that a card accepts, by the text of the source.

use super::*;

#[test]
fn the_migration_version_decides_which_guests_are_accepted() {
    let name = "the_migration_version_decides_which_guests_are_accepted";
    let Some(bench) = Bench::new(name, 1536, 64, feature::MRG_RXBUF) else { return };
    let version = bench.network.enter(|| bench.net.migration_version()).unwrap().unwrap();
    let accepts = |source: &str| bench.network.enter(|| bench.net.accepts(source)).unwrap();
    assert!(
        version.starts_with("towline-net-1 features=0x") && version.ends_with(" pairs=1 mtu=65521 state=1"),
        "{version}"
    );
    accepts(&version).unwrap();
    // A text without the number, and one of fewer pairs, and words that are not known here.
    for other in ["", " pairs=0", " pairs=1 rings=7"] {
        accepts(&version.replace(" pairs=1", other)).unwrap();
    }
    let reason = accepts(&version.replace("pairs=1", "pairs=4")).unwrap_err().to_string();
    let wanted = "the source has 4 queue pairs and this card only 1; start it with --queues 4; the source is `towline-net-1 ";
    assert!(reason.starts_with(wanted), "{reason}");
    let reason = accepts(&version.replace("mtu=65521", "mtu=65522")).unwrap_err().to_string();
    assert!(reason.starts_with("the MTU is 65522 on the source and only 65521 on this host"), "{reason}");
    let reason = accepts(&version.replace("features=0x", "features=0x8")).unwrap_err().to_string();
    assert!(reason.starts_with("the tap of this host lacks features 0x8"), "{reason}");
    let reason = accepts("towline-vsock-1").unwrap_err().to_string();
    assert!(reason.starts_with("the source is not a towline-net-1"), "{reason}");
}
