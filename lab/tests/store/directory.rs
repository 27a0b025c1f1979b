//! A store in a directory: every route into and out of it.

use towline_lab::wait_until;

use crate::support::{Fixture, WITHIN, last_event, uploaded};

const PAGES: u64 = 48 << 8;

#[test]
fn an_image_goes_through_a_store_and_is_sent_once() {
    let fixture = Fixture::new();
    let first = fixture.done(&["copy", "mem:48M,seed=3", &fixture.store("vm/a")]);
    assert!(uploaded(&first, "sent-chunks") > 0, "{first}");
    assert_eq!(first["destination-state"], "stored");
    // From the store to memory that knows its expected content, with lanes and without.
    for lanes in ["0", "3"] {
        let out = fixture.done(&["copy", "--multifd-channels", lanes, &fixture.store("vm/a"), "mem:"]);
        assert_eq!(out["memory"]["verified-pages"], PAGES, "{out}");
    }
    // To a file with the same content: no chunk of it needs to be sent.
    let file = fixture.name("a.img");
    fixture.done(&["copy", &fixture.store("vm/a"), &file]);
    let inspected = fixture.done(&["inspect", "--verify", &file]);
    assert_eq!(inspected["verified"], true);
    let again = fixture.done(&["copy", "--verify", &file, &fixture.store("vm/b")]);
    assert_eq!(uploaded(&again, "sent-chunks"), 0, "{again}");
    assert_eq!(
        uploaded(&again, "known-chunks"),
        uploaded(&first, "sent-chunks") + uploaded(&first, "known-chunks")
    );
    // From one store to another; the existing name stays unless overwriting is allowed.
    fixture.done(&["copy", &fixture.store("vm/b"), &fixture.store("elsewhere/c")]);
    let error = fixture.refused(&["copy", &file, &fixture.store("elsewhere/c")]);
    assert!(error.contains("it exists already"), "{error}");
    fixture.done(&["copy", "--overwrite", &file, &fixture.store("elsewhere/c")]);
    let inspected = fixture.done(&["inspect", "--verify", &fixture.store("elsewhere/c")]);
    assert_eq!((&inspected["verified"], &inspected["loadable-by-qemu"]), (&true.into(), &false.into()));
    assert!(fixture.files("vm/uploads").is_empty() && fixture.files("elsewhere/uploads").is_empty());
}

#[test]
fn a_stream_is_stored_while_it_is_written() {
    let fixture = Fixture::new();
    let socket = format!("unix:{}", fixture.name("socket"));
    for lanes in ["0", "2"] {
        let image = fixture.store(&format!("vm/lanes-{lanes}"));
        let receiver = fixture.start(&["copy", "--json", "--multifd-channels", lanes, &socket, &image]);
        wait_until("a towline that listens", WITHIN, || {
            Ok(receiver.stdout().contains("listening on").then_some(()))
        })
        .unwrap();
        // The load dirties pages that were sent already, at a rate that converges even if the host is busy.
        // With the same content as before no chunk would be sent.
        let mem = format!("mem:48M,dirty=4M,seed=9{lanes}");
        fixture.done(&["copy", "--multifd-channels", lanes, "--max-bandwidth", "60M", &mem, &socket]);
        let stored = last_event(&receiver.wait_done(WITHIN).unwrap());
        assert!(uploaded(&stored, "sent-chunks") > 0, "{stored}");
        let out = fixture.done(&["copy", &image, "mem:"]);
        assert_eq!(out["memory"]["verified-pages"], PAGES, "{out}");
        assert!(out["memory"]["pages-written-by-load"].as_u64() > Some(0), "{out}");
    }
}

#[test]
fn invalid_uses_of_a_store_are_refused_with_the_reason() {
    let fixture = Fixture::new();
    let error = fixture.refused(&["copy", "mem:8M", "http://127.0.0.1:9/x/guest"]);
    assert!(error.contains("are read-only"), "{error}");
    let error = fixture.refused(&["copy", &fixture.store("vm/none"), "mem:"]);
    assert!(error.contains("there is no such image") && error.contains("none.towline"), "{error}");
    std::fs::create_dir_all(fixture.path("vm")).unwrap();
    std::fs::write(fixture.path("vm/other.towline"), b"#!/bin/sh").unwrap();
    let error = fixture.refused(&["inspect", &fixture.store("vm/other")]);
    assert!(error.contains("not the index of an image"), "{error}");
    // Space for pages on this host.
    let mut fixture = Fixture::new();
    fixture.set("TMPDIR", "/nowhere");
    let error = fixture.refused(&["copy", "mem:8M", &fixture.store("vm/a")]);
    assert!(error.contains("/nowhere") && error.contains("TMPDIR"), "{error}");
    assert!(fixture.files("vm/uploads").is_empty());
}

/// From its files, as a complete image: a stream would lose the manifest's record of its origin.
#[test]
fn an_incremental_image_keeps_its_origin_in_a_store() {
    let fixture = Fixture::new();
    let (base, increment, image) =
        (fixture.name("base.img"), fixture.name("increment.img"), fixture.store("vm/a"));
    fixture.done(&["copy", "mem:16M,seed=7", &base]);
    fixture.done(&["copy", "--base", &base, "mem:16M,seed=8", &increment]);
    fixture.done(&["copy", &increment, &image]);
    let stored = fixture.done(&["inspect", "--verify", &image]);
    assert_eq!(stored["source"], "mem", "{stored}");
}
