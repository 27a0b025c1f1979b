//! Memory that is not what it seems.

use std::os::unix::fs::FileExt;

use towline_lab::{Finished, Qemu, Version, require_lab};

use crate::support::{
    Backend, MIB, Saved, copy, events, milliseconds_to_running, notices, ram_pss, report_events,
};

/// The guest runs anyway: its pages are sent into QEMU's private copies of the mapped pages.
#[test]
fn pages_are_sent_where_memory_is_not_proven_to_be_mapped() {
    if !require_lab("pages_are_sent_where_memory_is_not_proven_to_be_mapped") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let right = saved.backend();
    let moved = right.path.with_file_name("moved.img");
    let (offset, path) = (right.offset, right.path.display().to_string());
    let cases: [(Backend, &str); 3] = [
        (
            Backend { offset: offset - 4096, ..right.clone() },
            &format!("QEMU maps {path} from byte {} on, expected {offset}", offset - 4096),
        ),
        (
            Backend { properties: format!("{},prealloc=on", right.properties), ..right.clone() },
            "bytes of private copies of it",
        ),
        // The file that QEMU opened has another name by now, and another file has its name.
        (right.clone(), "the file was replaced after QEMU had opened it, or is another one"),
    ];
    for (number, (backend, expected)) in cases.iter().enumerate() {
        let destinations = [saved.waiting(backend)];
        if number == 2 {
            std::fs::rename(&right.path, &moved).unwrap();
            let made =
                std::process::Command::new("cp").arg("--sparse=always").arg(&moved).arg(&right.path).status();
            assert!(made.unwrap().success());
        }
        let finished = copy(&["--verify"], &saved, &destinations);
        assert!(finished.status.success(), "{}", finished.stderr);
        let notices = notices(&finished);
        let reason =
            notices.iter().find(|text| text.starts_with("memory of block \"pc.ram\" is sent, not mapped: "));
        assert!(reason.is_some_and(|text| text.contains(expected)), "{notices:?}");
        let completed = &events(&finished, "completed")[0];
        println!("{expected}: {}", completed["ram"]);
        saved.assert_runs_in(&destinations[0]);
        saved.assert_intact();
    }
}

/// A zero page of the guest is zero in QEMU as well, and not what the wrong mapping has there.
#[test]
fn a_wrong_mapping_is_not_visible_to_the_guest() {
    if !require_lab("a_wrong_mapping_is_not_visible_to_the_guest") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let right = saved.backend();
    let shifted = Backend { offset: right.offset - 4096, ..right.clone() };
    let behind_data = saved.zero_pages_behind_data();
    for options in [&["--paused"][..], &["--paused", "--stream"]] {
        let destinations = [saved.waiting(&shifted)];
        let finished = copy(options, &saved, &destinations);
        assert!(finished.status.success(), "{}", finished.stderr);
        assert_told(&finished);
        assert_zero(&destinations[0], &behind_data);
    }
    // As QEMU leaves it where a page became zero while it stored a running guest.
    let file = std::fs::File::options().write(true).open(&right.path).unwrap();
    for page in &behind_data {
        file.write_all_at(&[7; 4096], right.offset + page).unwrap();
    }
    for options in [&["--paused"][..], &["--paused", "--stream"]] {
        let destinations = [saved.waiting(&right)];
        let finished = copy(options, &saved, &destinations);
        assert!(finished.status.success(), "{}", finished.stderr);
        assert_told(&finished);
        assert_zero(&destinations[0], &behind_data);
    }
}

fn assert_told(finished: &Finished) {
    let notices = notices(finished);
    let expected = "memory backend \"pc.ram\" of QEMU may have old content";
    assert!(notices.iter().any(|text| text.starts_with(expected)), "{notices:?}");
}

fn assert_zero(qemu: &Qemu, pages: &[u64]) {
    for page in pages {
        let content = qemu.read_memory(*page, 4096).unwrap();
        assert!(content.iter().all(|byte| *byte == 0), "page at {page:#x}: {:?}", &content[..64]);
    }
}

/// A guest that could change its image is not restored: by its writes, or by a balloon.
#[test]
#[ignore = "nightly"]
fn an_image_that_is_open_for_writing_is_refused() {
    if !require_lab("an_image_that_is_open_for_writing_is_refused") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    for properties in ["share=on", "share=off"] {
        let backend = Backend { properties: properties.into(), ..saved.backend() };
        let destinations = [saved.waiting(&backend)];
        let finished = copy(&[], &saved, &destinations);
        assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
        let expected = "open for writing (memory backend \"pc.ram\"), so its guest's writes or its balloon would change the image";
        assert!(finished.stderr.contains(expected), "{}", finished.stderr);
        assert_eq!(destinations[0].qmp().status().unwrap(), "inmigrate");
    }
    saved.assert_intact();
}

/// `--stream` has the pages sent even if they are mapped.
#[test]
fn a_stream_has_all_pages() {
    if !require_lab("a_stream_has_all_pages") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let destinations = [saved.waiting(&saved.backend())];
    report_events(&destinations[0]);
    let finished = copy(&["--stream"], &saved, &destinations);
    assert!(finished.status.success(), "{}", finished.stderr);
    assert_told(&finished);
    let sent = events(&finished, "completed")[0]["ram"]["normal-bytes"].as_u64().unwrap();
    assert!(sent > 96 * MIB, "{sent} bytes of pages");
    let (took, pss) = (milliseconds_to_running(&destinations[0]), ram_pss(&destinations[0], &saved.path()));
    println!("streamed: {took:.1} ms from migrate-incoming to running, {} KiB of RAM", pss >> 10);
    saved.assert_runs_in(&destinations[0]);
}
