//! A cancellation after everything is sent, before the destination has loaded it.

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::{Action, Finished, Flow, Proxy, Qemu, Towline, Trigger, Version, require_lab, wait_until};

use crate::support::{
    LAST_SECTION, PONG_LOADED, Scratch, Suspended, WITHIN, assert_ended, assert_runs_only_in, counting, end,
    is_live, listening, listens_at, migrate, qmp, signal, small, start, wait_fired, wait_over, wait_quiet,
    waiting,
};

const VERSIONS: [Version; 2] = [Version::V10_0, Version::V7_2];

/// Cancels a copy, and waits until it exits.
fn cancelled(towline: Towline) -> Finished {
    signal(towline.pid(), Signal::INT);
    end(towline)
}

/// Holds the link where the device state ends.
fn hold_at_the_end(proxy: &Proxy) {
    let action = Action::Hold(Flow::ToDestination);
    let bytes = LAST_SECTION.to_vec();
    proxy.set_trigger(Trigger { flow: Flow::ToDestination, bytes, forwards: true, action });
}

/// Suspends the destination's QEMU when it lacks only the last bytes, cancels when everything is sent, and
/// resumes it.
fn cancel_while_it_loads<T>(proxy: &Proxy, destination: &Qemu, cancel: impl FnOnce() -> T) -> T {
    wait_fired(proxy);
    let suspended = Suspended::new(destination);
    proxy.release();
    wait_quiet(proxy);
    let cancelled = cancel();
    drop(suspended);
    cancelled
}

#[test]
fn a_cancellation_while_a_stock_destination_loads_leaves_one_guest() {
    if !require_lab("a_cancellation_while_a_stock_destination_loads_leaves_one_guest") {
        return;
    }
    for version in VERSIONS {
        let (source, (destination, address)) = (counting(&small(version)), listening(&small(version)));
        let proxy = Proxy::start(address).unwrap();
        hold_at_the_end(&proxy);
        let towline = start(&format!("copy {} tcp:{}", qmp(&source), proxy.address()));
        let finished = cancel_while_it_loads(&proxy, &destination, || cancelled(towline));
        assert_ended(&finished, 1, &["cancelled", "the guest: safe at its source"]);
        assert_runs_only_in(&source, &destination);
    }
}

#[test]
fn a_cancelled_restore_to_a_stock_destination_does_not_run() {
    if !require_lab("a_cancelled_restore_to_a_stock_destination_does_not_run") {
        return;
    }
    let (scratch, version) = (Scratch::new(), Version::V10_0);
    let image = scratch.text("guest.img");
    let source = counting(&small(version));
    assert_ended(&end(start(&format!("copy {} {image}", qmp(&source)))), 0, &[]);
    let (destination, address) = listening(&small(version));
    let proxy = Proxy::start(address).unwrap();
    hold_at_the_end(&proxy);
    let towline = start(&format!("copy {image} tcp:{}", proxy.address()));
    let finished = cancel_while_it_loads(&proxy, &destination, || cancelled(towline));
    assert_ended(&finished, 1, &["cancelled", "the guest: in its image, which is as it was"]);
    wait_over(&destination);
    assert!(!is_live(&destination), "it runs, and its image is reported to hold it");
}

/// After the destination's confirmation the guest may run there: it is too late to cancel, and the copy
/// continues.
#[test]
fn a_cancellation_after_the_confirmation_comes_too_late() {
    if !require_lab("a_cancellation_after_the_confirmation_comes_too_late") {
        return;
    }
    let (source, (destination, address)) =
        (counting(&small(Version::V10_0)), listening(&small(Version::V10_0)));
    let proxy = Proxy::start(address).unwrap();
    proxy.set_trigger(confirmed());
    let mut towline = start(&format!("copy {} tcp:{}", qmp(&source), proxy.address()));
    wait_fired(&proxy);
    wait_quiet(&proxy);
    signal(towline.pid(), Signal::INT);
    wait_until("a notice of the cancellation", WITHIN, || {
        assert!(towline.runs()?, "it ended: {}", towline.stderr());
        Ok(towline.stderr().contains("cancelling").then_some(()))
    })
    .unwrap();
    proxy.release();
    let finished = end(towline);
    assert_ended(&finished, 0, &[]);
    assert!(finished.stdout.contains("too late to cancel"), "{}", finished.stdout);
    assert_runs_only_in(&destination, &source);
}

/// The link is cut there: the arrival of the last bytes is unknown, so the source is stopped for good.
#[test]
fn a_link_cut_after_the_confirmation_leaves_the_source_paused() {
    if !require_lab("a_link_cut_after_the_confirmation_leaves_the_source_paused") {
        return;
    }
    for version in VERSIONS {
        let (source, (destination, address)) = (counting(&small(version)), listening(&small(version)));
        let proxy = Proxy::start(address).unwrap();
        proxy.set_trigger(confirmed());
        let towline = start(&format!("move {} tcp:{}", qmp(&source), proxy.address()));
        wait_fired(&proxy);
        wait_quiet(&proxy);
        proxy.cut();
        assert_ended(&end(towline), 3, &["its destination was sent everything, and may run it"]);
        wait_over(&destination);
        source.qmp().wait_status("postmigrate", WITHIN).unwrap();
        assert!(!is_live(&destination), "the last bytes did not arrive");
        source.qmp().execute("cont", Value::Null).unwrap();
        assert_runs_only_in(&source, &destination);
    }
}

/// Holds the stream after the destination's confirmation that it has loaded all but the last bytes.
fn confirmed() -> Trigger {
    let action = Action::Hold(Flow::ToDestination);
    Trigger { flow: Flow::ToSource, bytes: PONG_LOADED.to_vec(), forwards: true, action }
}

#[test]
fn a_move_between_two_towlines_that_is_cancelled_leaves_one_guest() {
    if !require_lab("a_move_between_two_towlines_that_is_cancelled_leaves_one_guest") {
        return;
    }
    for version in VERSIONS {
        let (source, destination) = (counting(&small(version)), waiting(&small(version)));
        let mut there = start(&format!("copy tcp:127.0.0.1:0 {}", qmp(&destination)));
        let proxy = Proxy::start(listens_at(&mut there)).unwrap();
        hold_at_the_end(&proxy);
        let here = start(&format!("move {} tcp:{}", qmp(&source), proxy.address()));
        let finished = cancel_while_it_loads(&proxy, &destination, || cancelled(here));
        assert_ended(&finished, 1, &["cancelled", "the guest: safe at its source"]);
        assert_ended(&end(there), 1, &["the guest: safe at its source"]);
        assert_runs_only_in(&source, &destination);
    }
}

#[test]
fn a_cancellation_at_a_stock_source_while_the_destination_loads_leaves_one_guest() {
    if !require_lab("a_cancellation_at_a_stock_source_while_the_destination_loads_leaves_one_guest") {
        return;
    }
    for version in VERSIONS {
        let (source, destination) = (counting(&small(version)), waiting(&small(version)));
        let mut towline = start(&format!("copy tcp:127.0.0.1:0 {}", qmp(&destination)));
        let proxy = Proxy::start(listens_at(&mut towline)).unwrap();
        hold_at_the_end(&proxy);
        migrate(&source, proxy.address());
        cancel_while_it_loads(&proxy, &destination, || {
            source.qmp().execute("migrate_cancel", Value::Null).unwrap();
            // QEMU reports `failed` if it sees the broken connection first.
            wait_until("the end of a migration", WITHIN, || {
                let migration = source.qmp().execute("query-migrate", Value::Null)?;
                let is_over =
                    ["cancelled", "failed"].contains(&migration["status"].as_str().unwrap_or_default());
                Ok(is_over.then_some(()))
            })
            .unwrap();
        });
        assert_ended(&end(towline), 1, &["the guest: safe at its source"]);
        assert_runs_only_in(&source, &destination);
    }
}
