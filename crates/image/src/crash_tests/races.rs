//! Concurrent changes of the same names: another image is renamed to them, a base is removed, a reader opens,
//! a name is used by another file.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{
    NAME, Outcome, SCENARIOS, Scenario, a_working_set, copy_files, image, new, old, prepared, steps, store,
};
use crate::atomic_file;
use crate::journal::{Interventions, Op, PublicationBug, record};
use crate::manifest::sidecar_path;
use crate::sidecar::staged_path;
use crate::testing::{TestGuest, directory};
use crate::{Error, Existing, Image};

/// Deadline for concurrent operations.
const DEADLINE: Duration = Duration::from_secs(60);

/// An image that another program moves to the name, with its manifest.
struct OtherImage {
    directory: TempDir,
    outcome: Outcome,
}

impl OtherImage {
    fn new() -> Self {
        let directory = crate::testing::directory();
        store(&TestGuest::new(77, 1), &directory.path().join(NAME), Existing::Refuse, None).unwrap();
        let outcome = image(directory.path());
        Self { directory, outcome }
    }

    /// Moves one of its files into a directory.
    fn comes(&self, to: &Path, part: fn(&Path) -> PathBuf) -> Box<dyn FnOnce()> {
        self.moves(part, part(&to.join(NAME)))
    }

    /// Moves one of its files to a path.
    fn moves(&self, part: fn(&Path) -> PathBuf, to: PathBuf) -> Box<dyn FnOnce()> {
        let (from, way) = (part(&self.directory.path().join(NAME)), to.with_extension("moving"));
        Box::new(move || {
            std::fs::copy(from, &way).unwrap();
            std::fs::rename(way, to).unwrap();
        })
    }
}

/// Runs a scenario with the files of another image arriving at all pairs of steps. The image that has the
/// name at the end must be complete.
pub(super) fn races(scenario: &Scenario, fault: Option<PublicationBug>) -> Result<usize, String> {
    let (from, work, foreign) = (prepared(scenario), directory(), OtherImage::new());
    let directory = work.path();
    let steps = steps(scenario, from.path());
    let whole = {
        copy_files(from.path(), directory);
        (scenario.write)(directory)?;
        image(directory)
    };
    let mut runs = 0;
    let mut one = |moments: [usize; 2], image_first: bool| {
        copy_files(from.path(), directory);
        let parts: [fn(&Path) -> PathBuf; 2] =
            if image_first { [Path::to_owned, sidecar_path] } else { [sidecar_path, Path::to_owned] };
        let comes = |index: usize| (moments[index], foreign.comes(directory, parts[index]));
        let plan = Interventions { before: vec![comes(0), comes(1)], fault, ..Interventions::default() };
        let (written, _) = record(plan, || (scenario.write)(directory));
        runs += 1;
        let found = image(directory);
        if found == foreign.outcome || (written.is_ok() && found == whole) {
            Ok(())
        } else {
            Err(format!("{}: moments {moments:?}, {written:?}: {found:?}", scenario.name))
        }
    };
    for first in 0..steps {
        // Both at once, in either order; and the manifest some steps before its image.
        one([first, first], true)?;
        one([first, first], false)?;
        for second in (first + 1..steps).filter(|_| first + 24 >= steps) {
            one([first, second], false)?;
        }
    }
    Ok(runs)
}

#[test]
fn an_image_moved_to_the_name_meanwhile_stays_complete_or_is_replaced() {
    for scenario in &SCENARIOS[..2] {
        let runs = races(scenario, None).unwrap();
        println!("{}: {runs} races", scenario.name);
        assert!(runs > 100, "{runs}");
    }
}

/// A concurrent change of a base.
#[derive(Debug, Clone, Copy)]
enum BaseChange {
    Removed,
    Replaced,
}

impl BaseChange {
    fn actions(self, directory: &Path, other: &OtherImage) -> Vec<Box<dyn FnOnce()>> {
        let base = directory.join("base.img");
        match self {
            Self::Removed => {
                vec![Box::new(move || std::fs::rename(&base, base.with_extension("gone")).unwrap())]
            }
            Self::Replaced => [sidecar_path, Path::to_owned as fn(&Path) -> PathBuf]
                .map(|part| other.moves(part, part(&base)))
                .into(),
        }
    }
}

/// Numbers of steps at which the change leaves an increment without its base, and at which it leads to a
/// whole image.
fn without_base(event: BaseChange, fault: Option<PublicationBug>) -> [usize; 2] {
    let (scenario, other) = (&SCENARIOS[4], OtherImage::new());
    let from = prepared(scenario);
    let (steps, [mut broken, mut whole]) = (steps(scenario, from.path()), [0; 2]);
    for moment in 0..steps - 1 {
        let work = directory();
        copy_files(from.path(), work.path());
        let before = event.actions(work.path(), &other).into_iter().map(|event| (moment, event)).collect();
        let plan = Interventions { before, fault, ..Interventions::default() };
        let (written, ops) = record(plan, || (scenario.write)(work.path()));
        // After the rename the increment's base must stay, as for any other.
        let named = ops.iter().position(|op| matches!(op, Op::Rename { to, .. } if to == NAME));
        if named.is_some_and(|named| moment > named) {
            break;
        }
        let is_stored = matches!(image(work.path()), Outcome::Image { has_manifest: true, .. });
        match written {
            Ok(()) if is_stored => whole += usize::from(!ops.iter().any(|op| matches!(op, Op::Punch { .. }))),
            Ok(()) => broken += 1,
            // The source keeps its guest.
            Err(error) => assert!(!work.path().join(NAME).exists(), "{moment}: {error}"),
        }
    }
    println!("{event:?}, {fault:?}: of {steps} steps {broken} leave no readable image, {whole} a whole one");
    [broken, whole]
}

#[test]
fn an_increment_becomes_whole_if_its_base_changes_meanwhile() {
    for event in [BaseChange::Removed, BaseChange::Replaced] {
        let [broken, whole] = without_base(event, None);
        // Two: between the last check and the rename.
        assert!(broken <= 2 && whole > 5, "{event:?}: {broken} broken, {whole} whole");
        let [broken, _] = without_base(event, Some(PublicationBug::BaseNotRechecked));
        assert!(broken > 10, "{event:?}: the bug is not detected");
    }
}

#[test]
fn an_image_opened_during_its_replacement_is_complete() {
    let directory = crate::testing::directory();
    let path = directory.path().join(NAME);
    let guests = [old(), new()];
    store(&guests[0], &path, Existing::Refuse, None).unwrap();
    let (done, opened) = (AtomicBool::new(false), AtomicUsize::new(0));
    let deadline = Instant::now() + DEADLINE;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let image = Image::open(&path).unwrap();
                assert!(image.manifest().is_some());
                image.verify(1, &|_| {}).unwrap();
                opened.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut turn = 0;
        while turn < 40 || opened.load(Ordering::Relaxed) < 20 {
            assert!(Instant::now() < deadline, "{opened:?} opened in {turn} turns");
            turn += 1;
            store(&guests[turn % 2], &path, Existing::Replace, None).unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_base_is_not_replaced_while_an_increment_is_stored_on_it() {
    let directory = crate::testing::directory();
    let (base, next) = (directory.path().join("base.img"), directory.path().join("next.img"));
    old().store(&base, Existing::Refuse, None).unwrap();
    let writer = new().write(&next, Existing::Refuse, Some(&base)).unwrap();
    let error = new().write(&base, Existing::Replace, None).unwrap_err().to_string();
    let ours = format!("process {} (", std::process::id());
    assert!(error.contains("base.img is in use: ") && error.contains(&ours), "{error}");
    drop(writer);
    // And vice versa.
    let writer = new().write(&base, Existing::Replace, None).unwrap();
    let error = new().write(&next, Existing::Refuse, Some(&base)).unwrap_err();
    assert!(matches!(&error, Error::BaseBusy { path, .. } if *path == base), "{error}");
    drop(writer);
    new().store(&next, Existing::Refuse, Some(&base)).unwrap();
}

#[test]
fn reserved_names_and_files_of_other_kinds_are_refused() {
    let directory = crate::testing::directory();
    let path = directory.path().join(NAME);
    old().store(&path, Existing::Refuse, None).unwrap();
    for name in
        ["guest.img.manifest.json", "other.manifest.json.new", "x.working-set.json", ".guest.img.partial"]
    {
        let error = new().write(&directory.path().join(name), Existing::Replace, None).unwrap_err();
        let is_reserved = matches!(&error, Error::AtomicFile(atomic_file::Error::Reserved { .. }));
        assert!(is_reserved, "{name}: {error}");
    }
    for part in [sidecar_path(&path), staged_path(&path)] {
        let theirs = std::fs::read(&part).ok();
        std::fs::write(&part, "other content").unwrap();
        let error = new().write(&path, Existing::Replace, None).unwrap_err();
        let is_foreign =
            matches!(&error, Error::AtomicFile(atomic_file::Error::Foreign { path, .. }) if *path == part);
        assert!(is_foreign, "{error}");
        assert_eq!(std::fs::read(&part).unwrap(), b"other content");
        match theirs {
            Some(bytes) => std::fs::write(&part, bytes).unwrap(),
            None => std::fs::remove_file(&part).unwrap(),
        }
    }
    let set = directory.path().join("guest.img.working-set.json");
    std::fs::write(&set, "other content").unwrap();
    assert!(a_working_set(directory.path()).unwrap_err().contains("is not a working set"));
    assert_eq!(std::fs::read(&set).unwrap(), b"other content");
    Image::open(&path).unwrap().verify(1, &|_| {}).unwrap();
}
