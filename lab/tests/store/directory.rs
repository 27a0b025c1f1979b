//! A store in a directory: every route into and out of it.

use towline_lab::wait_until;

use crate::support::{Place, WITHIN, last_event, uploaded};

const PAGES: u64 = 48 << 8;

#[test]
fn an_image_goes_through_a_store_and_is_sent_once() {
    let place = Place::new();
    let first = place.done(&["copy", "mem:48M,seed=3", &place.store("vm/a")]);
    assert!(uploaded(&first, "sent-chunks") > 0, "{first}");
    assert_eq!(first["destination-state"], "stored, synced");
    // From the store to memory that knows its expected content, with lanes and without.
    for lanes in ["0", "3"] {
        let out = place.done(&["copy", "--multifd-channels", lanes, &place.store("vm/a"), "mem:"]);
        assert_eq!(out["memory"]["verified-pages"], PAGES, "{out}");
    }
    // To a file with the same content: no chunk of it needs to be sent.
    let file = place.name("a.img");
    place.done(&["copy", &place.store("vm/a"), &file]);
    let inspected = place.done(&["inspect", "--verify", &file]);
    assert_eq!(inspected["verified"], true);
    let again = place.done(&["copy", "--verify", &file, &place.store("vm/b")]);
    assert_eq!(uploaded(&again, "sent-chunks"), 0, "{again}");
    assert_eq!(
        uploaded(&again, "known-chunks"),
        uploaded(&first, "sent-chunks") + uploaded(&first, "known-chunks")
    );
    // From one store to another; the existing name stays unless overwriting is allowed.
    place.done(&["copy", &place.store("vm/b"), &place.store("elsewhere/c")]);
    let error = place.refused(&["copy", &file, &place.store("elsewhere/c")]);
    assert!(error.contains("it exists already"), "{error}");
    place.done(&["copy", "--overwrite", &file, &place.store("elsewhere/c")]);
    let inspected = place.done(&["inspect", "--verify", &place.store("elsewhere/c")]);
    assert_eq!((&inspected["verified"], &inspected["loadable-by-qemu"]), (&true.into(), &false.into()));
    assert!(place.files("vm/uploads").is_empty() && place.files("elsewhere/uploads").is_empty());
}

#[test]
fn a_stream_is_stored_while_it_is_written() {
    let place = Place::new();
    let socket = format!("unix:{}", place.name("socket"));
    for lanes in ["0", "2"] {
        let image = place.store(&format!("vm/lanes-{lanes}"));
        let receiver = place.start(&["copy", "--json", "--multifd-channels", lanes, &socket, &image]);
        wait_until("a towline that listens", WITHIN, || {
            Ok(receiver.stdout().contains("listening on").then_some(()))
        })
        .unwrap();
        // The load dirties pages that were sent already.
        let mem = "mem:48M,dirty=30M,seed=9";
        place.done(&["copy", "--multifd-channels", lanes, "--max-bandwidth", "60M", mem, &socket]);
        let stored = last_event(&receiver.wait_done(WITHIN).unwrap());
        assert!(uploaded(&stored, "sent-chunks") > 0, "{stored}");
        let out = place.done(&["copy", &image, "mem:"]);
        assert_eq!(out["memory"]["verified-pages"], PAGES, "{out}");
        assert!(out["memory"]["pages-written-by-load"].as_u64() > Some(0), "{out}");
    }
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let place = Place::new();
    let error = place.refused(&["copy", "mem:8M", "http://127.0.0.1:9/x/guest"]);
    assert!(error.contains("are only read"), "{error}");
    let error = place.refused(&["copy", &place.store("vm/none"), "mem:"]);
    assert!(error.contains("there is no such image") && error.contains("none.towline"), "{error}");
    std::fs::create_dir_all(place.path("vm")).unwrap();
    std::fs::write(place.path("vm/other.towline"), b"#!/bin/sh").unwrap();
    let error = place.refused(&["inspect", &place.store("vm/other")]);
    assert!(error.contains("no index of an image"), "{error}");
    // Space for pages on this host.
    let mut place = Place::new();
    place.set("TMPDIR", "/nowhere");
    let error = place.refused(&["copy", "mem:8M", &place.store("vm/a")]);
    assert!(error.contains("/nowhere") && error.contains("TMPDIR"), "{error}");
    assert!(place.files("vm/uploads").is_empty());
}

/// From its files, as a complete image: a stream would lose the manifest's record of its origin.
#[test]
fn an_incremental_image_keeps_its_origin_in_a_store() {
    let place = Place::new();
    let (base, increment, image) = (place.name("base.img"), place.name("increment.img"), place.store("vm/a"));
    place.done(&["copy", "mem:16M,seed=7", &base]);
    place.done(&["copy", "--base", &base, "mem:16M,seed=8", &increment]);
    place.done(&["copy", &increment, &image]);
    let stored = place.done(&["inspect", "--verify", &image]);
    assert_eq!(stored["source"], "mem", "{stored}");
}
