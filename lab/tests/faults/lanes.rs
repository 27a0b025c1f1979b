//! Ends with different numbers of lanes (multifd channels) fail quickly, and name both numbers.

use std::time::{Duration, Instant};

use serde_json::json;
use towline_lab::require_lab;

use crate::support::{
    Fixture, WITHIN, assert_runs, assert_runs_nothing, assert_safe, counting, guest, listens_at, migrate,
    save, set, waiting,
};

/// Time limit of the failure, though QEMU would wait forever. The timeout is towline's `--connect-timeout`, and
/// appears in its messages.
const QUICK: Duration = Duration::from_secs(30);

/// Migrates from a source with `theirs` lanes (0: no multifd) to a towline that listens for `ours`. Each time
/// another source: the time that QEMU needs to clean up lanes that were not accepted is unknown.
fn disagree(fixture: &Fixture, theirs: u64, ours: u64, texts: &[&str]) {
    let source = &counting(guest());
    let multifd = if theirs > 0 { "+multifd" } else { "-multifd" };
    set(source, &["+return-path", multifd], json!({ "multifd-channels": theirs.max(1) }));
    let socket = format!("unix:{}", fixture.name("lanes.sock"));
    let image = fixture.name("guest.img");
    let line = format!("copy --connect-timeout 3 --multifd-channels {ours} {socket} {image}");
    let mut towline = fixture.towline(&line);
    listens_at(&mut towline);
    let since = Instant::now();
    migrate(source, &socket);
    let finished = towline.wait(WITHIN).unwrap();
    println!("{theirs} to {ours} after {:?}: {}", since.elapsed(), finished.stderr);
    assert!(since.elapsed() < QUICK, "{:?}", since.elapsed());
    assert_safe(&finished, texts);
    source.qmp().wait_migration("failed", WITHIN).unwrap();
    assert_runs(source);
    fixture.assert_holds(&[]);
}

#[test]
fn a_source_with_another_number_of_lanes_is_refused() {
    if !require_lab("a_source_with_another_number_of_lanes_is_refused") {
        return;
    }
    let fixture = Fixture::new();
    disagree(&fixture, 2, 4, &["2 of 4 lanes connected within 3.0 s", "multifd-channels 4 as here"]);
    disagree(&fixture, 0, 4, &["0 of 4 lanes connected within 3.0 s", "must have multifd on"]);
    let same = "the same multifd-channels";
    disagree(&fixture, 8, 2, &["the source has a lane ", ", but the number of lanes here is 2", same]);
    disagree(&fixture, 3, 0, &["the source has a lane ", ", but the number of lanes here is 0", same]);
}

/// Our side opens the lanes, and the listening QEMU is configured for another number: it waits forever,
/// silently.
#[test]
fn a_destination_with_another_number_of_lanes_is_refused() {
    if !require_lab("a_destination_with_another_number_of_lanes_is_refused") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, guest(), "guest.img");
    for (theirs, ours) in [(4, 2), (0, 2), (2, 0), (2, 4)] {
        let destination = waiting(&guest().paused());
        let multifd = if theirs > 0 { "+multifd" } else { "-multifd" };
        set(&destination, &[multifd], json!({ "multifd-channels": theirs.max(1) }));
        let uri = format!("unix:{}", destination.directory().join("lanes.sock").display());
        let arguments = json!({ "uri": uri, "exit-on-error": false });
        destination.qmp().execute("migrate-incoming", arguments).unwrap();
        let since = Instant::now();
        let image = fixture.name("guest.img");
        let line = format!("copy --connect-timeout 3 --multifd-channels {ours} {image} {uri}");
        let finished = fixture.run(&line);
        println!("{ours} to {theirs} after {:?}: {}", since.elapsed(), finished.stderr);
        assert!(since.elapsed() < QUICK, "{:?}", since.elapsed());
        assert_safe(&finished, &[&uri, "multifd-channels"]);
        assert_runs_nothing(&destination);
    }
    fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
}
