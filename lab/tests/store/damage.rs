//! Damage to a store's objects is reported by name, and no damaged byte reaches a guest.

use std::path::PathBuf;

use crate::support::Fixture;

/// A store with an image, and its chunks, largest first: the largest is memory.
fn stored() -> (Fixture, String, Vec<PathBuf>) {
    let fixture = Fixture::new();
    let image = fixture.store("vm/a");
    fixture.done(&["copy", "mem:24M,seed=4", &image]);
    let mut chunks = fixture.files("vm/chunks");
    chunks.sort_by_key(|path| std::cmp::Reverse(std::fs::metadata(path).unwrap().len()));
    (fixture, image, chunks)
}

/// Asserts that every way to read the image reports the same damage.
#[track_caller]
fn assert_every_reader_reports(fixture: &Fixture, image: &str, parts: &[&str]) {
    let file = fixture.name("out.img");
    for arguments in [
        &["inspect", "--verify", image][..],
        &["copy", image, "mem:"],
        &["copy", "--multifd-channels", "2", image, "mem:"],
        &["copy", image, &file],
    ] {
        let error = fixture.refused(arguments);
        parts.iter().for_each(|part| assert!(error.contains(part), "{arguments:?}: no {part:?} in {error}"));
        assert!(!fixture.path("out.img").exists());
    }
}

#[test]
fn a_flipped_bit_in_a_chunk_is_named() {
    let (fixture, image, chunks) = stored();
    let victim = &chunks[chunks.len() / 2];
    let whole = std::fs::read(victim).unwrap();
    let name = victim.file_name().unwrap().to_str().unwrap();
    for at in [0, whole.len() / 2, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        std::fs::write(victim, &bytes).unwrap();
        assert_every_reader_reports(&fixture, &image, &["damaged", name, "block \"mem.ram\", from byte 0x"]);
    }
    std::fs::write(victim, &whole[..whole.len() / 2]).unwrap();
    assert_every_reader_reports(&fixture, &image, &["damaged", name, "block \"mem.ram\", from byte 0x"]);
    std::fs::write(victim, &whole).unwrap();
    fixture.done(&["inspect", "--verify", &image]);
}

#[test]
fn a_chunk_under_another_name_is_refused() {
    let (fixture, image, chunks) = stored();
    std::fs::copy(&chunks[0], &chunks[1]).unwrap();
    let name = chunks[1].file_name().unwrap().to_str().unwrap();
    assert_every_reader_reports(&fixture, &image, &["damaged", name, "its BLAKE3 is"]);
}

#[test]
#[ignore = "nightly"]
fn a_missing_chunk_is_named_and_can_be_stored_again() {
    let (fixture, image, chunks) = stored();
    std::fs::remove_file(&chunks[0]).unwrap();
    let name = chunks[0].file_name().unwrap().to_str().unwrap();
    assert_every_reader_reports(
        &fixture,
        &image,
        &["is missing in the store", name, "block \"mem.ram\", from byte 0x"],
    );
    let again = fixture.done(&["copy", "--overwrite", "mem:24M,seed=4", &image]);
    assert_eq!(crate::support::uploaded(&again, "sent-chunks"), 1, "{again}");
    fixture.done(&["inspect", "--verify", &image]);
}

#[test]
fn a_truncated_index_is_refused() {
    let (fixture, image, _) = stored();
    let path = fixture.path("vm/a.towline");
    let whole = std::fs::read(&path).unwrap();
    for length in [10, 20, 60, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert_every_reader_reports(&fixture, &image, &["truncated"]);
    }
    // While the index is unreadable, no collection can know the garbage.
    let error = fixture.refused(&["store", "gc", "--min-age", "0", &fixture.store("vm")]);
    assert!(error.contains("a.towline") && error.contains("nothing was removed"), "{error}");
}
