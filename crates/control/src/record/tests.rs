use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use towline_image::manifest::Timestamp;

use super::retention::{Entries, Entry, mergeable, removable};
use super::*;
use crate::journal::UndoRecord;
use crate::plan::fake_qemu::FakeQemu;
use crate::qemu::Qemu;

fn instant(sequence: u64, elapsed_ms: u64) -> RecordedInstant {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(1_795_000_000_000 + elapsed_ms % 1_000_000_000);
    RecordedInstant { sequence, elapsed: Duration::from_millis(elapsed_ms), at: at.into() }
}

fn seconds(windows: &[u64]) -> Keep {
    Keep::new(windows.iter().map(|window| Duration::from_secs(*window)).collect()).unwrap()
}

/// The rule as its help describes it, instant by instant.
fn is_kept_by_rule(entries: &Entries, windows: &[u64], sequence: u64) -> bool {
    let ms = |entry: &Entry| entry.instant.elapsed.as_millis() as u64;
    let newest = ms(entries.values().last().unwrap());
    let own = ms(&entries[&sequence]);
    let Some(window) = windows.iter().position(|window| newest - own <= window * 1000) else { return false };
    let period = match window {
        0 => return true,
        window => windows[window - 1] * 1000,
    };
    !entries.values().any(|other| other.instant.sequence > sequence && ms(other) / period == own / period)
}

fn bases(entries: &Entries, sequence: u64) -> Vec<u64> {
    std::iter::successors(entries[&sequence].base, |base| entries[base].base).collect()
}

#[test]
fn names_are_read_as_they_are_written() {
    let shown = "00000042-000001893250-20261126T140305Z";
    let parsed: RecordedInstant = shown.parse().unwrap();
    assert_eq!(parsed.to_string(), shown);
    assert_eq!((parsed.sequence, parsed.elapsed), (42, Duration::from_millis(1_893_250)));
    assert_eq!(parsed.at, Timestamp::try_from("2026-11-26T14:03:05Z".to_owned()).unwrap());
    for other in [
        "guest",
        "42-1893250-20261126T140305Z",
        "00000042-000001893250-20261326T140305Z",
        "00000042-000001893250-２０２６１１２６T",
    ] {
        assert!(other.parse::<RecordedInstant>().is_err(), "{other}");
    }
}

#[test]
fn a_clock_that_steps_changes_no_order_and_no_age() {
    let mut record = vec![instant(1, 0), instant(2, 10_000), instant(3, 20_000), instant(4, 30_000)];
    // Set back by an hour before the third.
    for late in &mut record[2..] {
        late.at = (SystemTime::from(late.at) - Duration::from_secs(3600)).into();
    }
    let chosen = |choice: InstantChoice| choice.of(&record).map(|instant| instant.sequence);
    assert_eq!(chosen(InstantChoice::Newest), Some(4));
    assert_eq!(chosen(InstantChoice::Before(Duration::from_secs(10))), Some(3));
    assert_eq!(chosen(InstantChoice::Before(Duration::from_secs(15))), Some(2));
    assert_eq!(chosen(InstantChoice::Before(Duration::from_secs(31))), None);
    assert_eq!(chosen(InstantChoice::Sequence(2)), Some(2));
    assert_eq!(chosen(InstantChoice::At(record[2].at)), Some(3));
    assert_eq!(chosen(InstantChoice::At(record[1].at)), Some(4));
    let clock = RecordClock::after(record.last());
    let next = clock.next(record.last()).unwrap();
    assert!(next.sequence == 5 && next.elapsed > record[3].elapsed);
    // One in the future, of a clock that was set back since.
    let ahead = RecordedInstant { at: (SystemTime::now() + Duration::from_secs(7200)).into(), ..record[3] };
    let next = RecordClock::after(Some(&ahead)).next(Some(&ahead)).unwrap();
    assert!(next.elapsed > ahead.elapsed && next.elapsed < ahead.elapsed + Duration::from_secs(60), "{next}");
    for last in [instant(u64::MAX, 0), instant(1, u64::MAX)] {
        assert!(RecordClock::after(Some(&last)).next(Some(&last)).is_none(), "{last}");
    }
}

/// Writes a file and a manifest of its base, which is all that retention reads.
fn image(directory: &Path, name: &str, manifest: &str, base: Option<&str>) {
    fs::write(directory.join(name), name).unwrap();
    let base = base.map(|path| serde_json::json!({ "path": path, "content": "0".repeat(64) }));
    let manifest = directory.join(format!("{name}.{manifest}"));
    fs::write(manifest, serde_json::json!({ "base": base }).to_string()).unwrap();
}

fn opened(directory: &Path) -> Record {
    Record::open(&Place::Directory(directory.to_owned()), &Cancel::new().unwrap()).unwrap()
}

#[test]
fn what_an_image_needs_is_read_from_both_of_its_manifests() {
    let directory = tempfile::tempdir().unwrap();
    let path = &directory.path().canonicalize().unwrap();
    fs::create_dir(path.join("record")).unwrap();
    let record = &path.join("record");
    let name = |sequence| format!("{}.img", instant(sequence, sequence));
    let (one, two, three) = (name(1), name(2), name(3));
    let guest = path.join("guest.img");
    image(path, "guest.img", "manifest.json", None);
    image(record, &one, "manifest.json", None);
    // Killed before its manifest had its name.
    image(record, &two, "manifest.json.new", Some(&one));
    image(record, &three, "manifest.json", Some(&two));
    image(record, &name(4), "manifest.json", Some(guest.to_str().unwrap()));
    image(record, &name(5), "manifest.json", Some(&name(6)));
    image(record, &name(6), "manifest.json", Some(&name(5)));
    // None of a record.
    fs::write(record.join(name(u64::MAX)), "").unwrap();
    let mut opened = opened(record);
    let bases: Vec<_> = opened.entries.values().map(|entry| entry.base).collect();
    assert_eq!(bases, [None, Some(1), Some(2), None, None, Some(5)]);
    // A merge does not make an image depend on one of the record.
    assert_eq!(place::base_of_merge(&record.join(&three)), None);
    assert_eq!(place::base_of_merge(&record.join(name(4))), Some(guest));
    // It is read again after a merge, of which one of the manifests is left.
    image(record, &three, "manifest.json.new", None);
    opened.add(instant(3, 3)).unwrap();
    assert_eq!(opened.entries[&3].base, Some(2));
    image(record, &three, "manifest.json", None);
    opened.add(instant(3, 3)).unwrap();
    assert_eq!(opened.entries[&3].base, None);
}

#[test]
fn images_that_cannot_be_removed_keep_no_others() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let name = |sequence| format!("{}.img", instant(sequence, sequence));
    image(path, &name(1), "manifest.json", None);
    fs::write(path.join(name(1)), "QEVM").unwrap();
    // A chain whose files cannot be removed, as those of a guest that runs from them, and images that a person has removed.
    for sequence in 2..=40 {
        let base = (sequence > 2).then(|| name(sequence - 1));
        image(path, &name(sequence), "manifest.json", base.as_deref());
    }
    (41..=80).for_each(|sequence| image(path, &name(sequence), "manifest.json", None));
    image(path, &name(81), "manifest.json", None);
    let mut record = opened(path);
    (41..=80).for_each(|sequence| fs::remove_file(path.join(name(sequence))).unwrap());
    let kept = BTreeSet::from([81]);
    for _ in 0..4 {
        record.remove(&removable(&record.entries, kept.clone()));
    }
    let left: Vec<_> = record.entries.keys().copied().collect();
    assert_eq!(left, (2..=40).chain([81]).collect::<Vec<_>>());
    assert!(!path.join(name(1)).exists());
}

#[test]
fn a_record_that_a_clock_would_remove_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let day = 24 * 3600;
    for (sequence, days) in [(1, 81), (2, 80)] {
        let at = (SystemTime::now() - Duration::from_secs(days * day)).into();
        let name = format!("{}.img", RecordedInstant { at, ..instant(sequence, sequence) });
        image(directory.path(), &name, "manifest.json", None);
    }
    let record = opened(directory.path());
    assert!(check_gap(&record, &seconds(&[90 * day])).is_ok());
    let refused = check_gap(&record, &seconds(&[3600, day])).unwrap_err().to_string();
    assert!(refused.contains("80 days ago"), "{refused}");
}

#[test]
fn an_image_for_which_there_is_no_room_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    assert!(place::check_room(directory.path(), 0).is_ok(), "this host has room");
    assert!(matches!(place::check_room(directory.path(), u64::MAX), Err(Error::NoRoom { .. })));
}

/// Writes the header of a qcow2 file.
fn overlay(path: &Path, backing: &str, at: SystemTime) {
    let mut header = b"QFI\xfb\0\0\0\x03".to_vec();
    header.extend(24_u64.to_be_bytes());
    header.extend(u32::try_from(backing.len()).unwrap().to_be_bytes());
    header.extend([0; 4]);
    header.extend(backing.as_bytes());
    fs::write(path, header).unwrap();
    fs::File::options().write(true).open(path).unwrap().set_modified(at).unwrap();
}

#[test]
fn the_last_disk_of_a_guest_that_has_ended_stays_with_its_backing_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let oldest = SystemTime::now() - Duration::from_secs(100);
    let [before, after] = [oldest - Duration::from_secs(50), oldest + Duration::from_secs(50)];
    overlay(&path.join("instant"), "/disk.raw", before);
    overlay(&path.join("last"), "instant", after);
    overlay(&path.join("earlier"), "instant", before);
    fs::write(path.join("not-completed"), "").unwrap();
    // The instant's disk is needed until retention removes that.
    let files = DiskFiles::of(path.to_owned(), &[path.join("instant")]).unwrap();
    overlay(&path.join("joined"), "instant", after);
    files.remove_unneeded(Vec::new(), oldest).unwrap();
    let mut left: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["instant", "last", "not-completed"]);
    files.remove_unneeded(Vec::new(), SystemTime::now() + Duration::from_secs(1)).unwrap();
    assert_eq!(fs::read_dir(path).unwrap().count(), 0);
}

/// The journal is that of QEMU's process, which is this one here.
#[test]
fn a_guest_that_a_killed_towline_has_stopped_runs_on() {
    let cancel = Cancel::new().unwrap();
    let fake = FakeQemu::start("paused");
    fake.script().vcpus = vec![std::process::id().cast_signed()];
    let left = Qemu::connect(fake.path(), &towline_qmp::Options::default()).unwrap();
    left.record(&UndoRecord::Stopped { overlays: Vec::new() }).unwrap();
    drop(left);
    drop(RecordedGuest::connect(&fake.path(), &cancel));
    assert_eq!((fake.commands(), fake.script().status), (vec!["cont".to_owned()], "running"));
}

#[test]
fn windows_increase() {
    let keep =
        |windows: &[u64]| Keep::new(windows.iter().map(|window| Duration::from_secs(*window)).collect());
    assert!(
        keep(&[]).is_none() && keep(&[0]).is_none() && keep(&[5, 5]).is_none() && keep(&[1, 5]).is_some()
    );
}

proptest! {
    /// Images are added, some of them in a new series, removed but for those that a guest runs from, and merged.
    #[test]
    fn what_stays_is_what_the_rule_says_and_all_of_it_runs(
        mut windows in prop::collection::btree_set(1_u64..400, 1..4),
        steps in prop::collection::vec((1_u64..20_000, 0_u8..20, 0_u8..10), 1..300),
    ) {
        windows.insert(1000);
        let windows: Vec<_> = windows.into_iter().collect();
        let keep = seconds(&windows);
        let (mut entries, mut series, mut elapsed) = (Entries::new(), Vec::<(u64, u64)>::new(), 0);
        // What the files are based on; a merge is done some steps after it began.
        let (mut stored, mut merging) = (BTreeMap::<u64, Option<u64>>::new(), None::<(u64, u8)>);
        let mut number = 0_u64;
        for (sequence, (gap, restart, busy)) in (1..).zip(steps) {
            elapsed += gap;
            if restart == 0 {
                (number, series) = (0, Vec::new());
            }
            let base = (number % SERIES) & (number % SERIES).wrapping_sub(1);
            series.retain(|(of, _)| !number.is_multiple_of(SERIES) && *of <= base);
            let base = series.last().map(|(_, sequence)| *sequence);
            prop_assert!(base.is_none_or(|base| entries.contains_key(&base)), "the next base is there");
            entries.insert(sequence, Entry { instant: instant(sequence, elapsed), base, disks: Vec::new() });
            stored.insert(sequence, base);
            series.push((number % SERIES, sequence));
            number += 1;
            prop_assert!(bases(&entries, sequence).len() <= 8);

            let kept = keep.kept(&entries);
            let by_rule: BTreeSet<u64> =
                entries.keys().copied().filter(|sequence| is_kept_by_rule(&entries, &windows, *sequence)).collect();
            prop_assert_eq!(&kept, &by_rule);
            prop_assert!(kept.contains(&sequence), "the newest stays");

            let mut needed = kept.clone();
            needed.extend(merging.map(|(merged, _)| merged));
            needed.extend(entries.keys().copied().filter(|sequence| busy > 0 && sequence % 7 == u64::from(busy)));
            for removed in removable(&entries, needed) {
                prop_assert!(!entries.values().any(|entry| entry.base == Some(removed)), "each after its increments");
                entries.remove(&removed);
                stored.remove(&removed);
            }
            for sequence in &kept {
                prop_assert!(bases(&entries, *sequence).iter().all(|base| entries.contains_key(base)));
            }
            prop_assert!(stored.values().flatten().all(|base| stored.contains_key(base)), "all of it runs");
            match merging {
                None => merging = mergeable(&entries, &kept, &keep).map(|merged| (merged, busy)),
                Some((merged, 0)) => {
                    prop_assert!(!stored.values().any(|base| *base == Some(merged)), "nothing loses its base");
                    // As `Record::add` reads it again.
                    stored.insert(merged, None);
                    entries.get_mut(&merged).unwrap().base = stored[&merged];
                    merging = None;
                }
                Some((merged, steps)) => merging = Some((merged, steps - 1)),
            }
        }
        // Merges end, and then only what the rule keeps is there, but for the bases of the first window.
        loop {
            let kept = keep.kept(&entries);
            removable(&entries, kept.clone()).iter().for_each(|removed| drop(entries.remove(removed)));
            let Some(merged) = mergeable(&entries, &kept, &keep) else { break };
            entries.get_mut(&merged).unwrap().base = None;
        }
        let (kept, newest) = (keep.kept(&entries), elapsed);
        let is_recent = |entry: &&Entry| newest - (entry.instant.elapsed.as_millis() as u64) <= windows[0] * 1000;
        let of_recent: BTreeSet<u64> = entries.values().filter(is_recent).flat_map(|entry| bases(&entries, entry.instant.sequence)).collect();
        let extra: Vec<_> = entries.keys().filter(|sequence| !kept.contains(sequence) && !of_recent.contains(sequence)).collect();
        prop_assert!(extra.is_empty(), "{:?}", extra);
    }
}
