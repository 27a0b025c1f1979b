//! Crashes, failures and races at every step of every writer: in every case the name refers to the complete
//! old image or to the complete new one, which opens and verifies.
//!
//! `TOWLINE_SOAK_CRASHES` (`cargo xtask soak image-crashes`) is the number of rounds with other guests and
//! with a second writer after each crash, which crashes too.

mod disk;
mod races;

use std::collections::BTreeSet;
use std::path::Path;

use rustix::io::Errno;
use tempfile::TempDir;
use towline_protocol::{BlockIndex, PageRef};

use self::disk::Disk;
use self::races::races;
use crate::journal::{Interventions, Op, PublicationBug, record};
use crate::manifest::{Digest, Manifest, sidecar_path};
use crate::sidecar::staged_path;
use crate::testing::{PAGE, TestGuest, delivered, directory};
use crate::{Existing, Image, WorkingSet};

/// Errors of failing steps.
const ERRNOS: [Errno; 3] = [Errno::PERM, Errno::DQUOT, Errno::IO];
const NAME: &str = "guest.img";

/// State of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Absent,
    /// An image that opens, and verifies if it has a manifest; compared by its delivered content.
    Image {
        delivered: Digest,
        has_manifest: bool,
    },
    /// Number of runs of a working set.
    WorkingSet(usize),
    Broken(String),
}

/// Inspects a directory.
type Inspect = fn(&Path) -> Outcome;
/// Modifies a directory.
type Action = fn(&Path) -> Result<(), String>;

/// A writer, and the state before it.
#[derive(Clone, Copy)]
struct Scenario {
    name: &'static str,
    before: Action,
    write: Action,
    inspect: Inspect,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    runs: usize,
    steps: usize,
    states: usize,
    writers_after: usize,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.runs += other.runs;
        self.steps += other.steps;
        self.states += other.states;
        self.writers_after += other.writers_after;
    }
}

fn image(directory: &Path) -> Outcome {
    let path = directory.join(NAME);
    if !path.exists() {
        return Outcome::Absent;
    }
    let image = match Image::open(&path) {
        Ok(image) => image,
        Err(error) => return Outcome::Broken(error.to_string()),
    };
    let has_manifest = image.manifest().is_some();
    match has_manifest.then(|| image.verify(1, &|_| {})).transpose() {
        Ok(_) => Outcome::Image { delivered: delivered(&image), has_manifest },
        Err(error) => Outcome::Broken(error.to_string()),
    }
}

fn working_set(directory: &Path) -> Outcome {
    let state = old().device_state();
    let set = WorkingSet::load(&directory.join(NAME), &TestGuest::blocks(), state.bytes());
    Outcome::WorkingSet(set.runs().len())
}

fn old() -> TestGuest {
    TestGuest::new(11, 1)
}

/// Different memory with the same devices: its manifest also describes the old image's guest.
fn new() -> TestGuest {
    TestGuest::new(22, 1)
}

fn store(guest: &TestGuest, path: &Path, existing: Existing, base: Option<&Path>) -> Result<(), String> {
    guest.store(path, existing, base).map(drop).map_err(|error| error.to_string())
}

fn nothing(_: &Path) -> Result<(), String> {
    Ok(())
}

fn old_image(directory: &Path) -> Result<(), String> {
    store(&old(), &directory.join(NAME), Existing::Refuse, None)
}

fn fresh(directory: &Path) -> Result<(), String> {
    store(&new(), &directory.join(NAME), Existing::Refuse, None)
}

fn overwrite(directory: &Path) -> Result<(), String> {
    store(&new(), &directory.join(NAME), Existing::Replace, None)
}

/// An image as QEMU writes it.
fn image_by_qemu(directory: &Path) -> Result<(), String> {
    old_image(directory)?;
    std::fs::remove_file(sidecar_path(&directory.join(NAME))).map_err(|error| error.to_string())
}

/// An image of the first version: no seal, and no hashes of bitmaps in the manifest.
fn image_of_first_version(directory: &Path) -> Result<(), String> {
    old_image(directory)?;
    unseal(&directory.join(NAME));
    Ok(())
}

/// Reduces an image to the format of the first version.
pub(crate) fn unseal(path: &Path) {
    use std::os::unix::fs::FileExt as _;

    let sidecar = sidecar_path(path);
    let mut text: serde_json::Value = serde_json::from_slice(&std::fs::read(&sidecar).unwrap()).unwrap();
    let seal = text["image"].as_object_mut().unwrap().remove("seal").unwrap().as_u64().unwrap();
    for block in text["blocks"].as_array_mut().unwrap() {
        block.as_object_mut().unwrap().remove("bitmap");
    }
    std::fs::write(sidecar, serde_json::to_vec(&text).unwrap()).unwrap();
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&[0; crate::seal::BYTES], seal).unwrap();
}

fn a_base(directory: &Path) -> Result<(), String> {
    store(&old(), &directory.join("base.img"), Existing::Refuse, None)
}

fn a_base_and_an_increment(directory: &Path) -> Result<(), String> {
    a_base(directory)?;
    let guest = TestGuest::new(33, 1);
    store(&guest, &directory.join(NAME), Existing::Refuse, Some(&directory.join("base.img")))
}

fn increment(directory: &Path) -> Result<(), String> {
    store(&new(), &directory.join(NAME), Existing::Refuse, Some(&directory.join("base.img")))
}

fn overwrite_increment(directory: &Path) -> Result<(), String> {
    store(&new(), &directory.join(NAME), Existing::Replace, Some(&directory.join("base.img")))
}

fn record_pages(directory: &Path, pages: u64) -> Result<(), String> {
    let state = old().device_state();
    let mut set = WorkingSet::load(&directory.join(NAME), &TestGuest::blocks(), state.bytes());
    let page = |index| PageRef { block: BlockIndex(0), offset: 2 * index * PAGE as u64 };
    set.add(&(0..pages).map(page).collect::<Vec<_>>());
    set.store().map_err(|error| error.to_string())
}

fn a_working_set(directory: &Path) -> Result<(), String> {
    record_pages(directory, 3)
}

fn a_larger_working_set(directory: &Path) -> Result<(), String> {
    record_pages(directory, 40)
}

const SCENARIOS: [Scenario; 8] = [
    Scenario { name: "a new image", before: nothing, write: fresh, inspect: image },
    Scenario { name: "an image in place of another", before: old_image, write: overwrite, inspect: image },
    Scenario { name: "in place of one of QEMU's", before: image_by_qemu, write: overwrite, inspect: image },
    Scenario {
        name: "in place of an old one",
        before: image_of_first_version,
        write: overwrite,
        inspect: image,
    },
    Scenario { name: "an increment", before: a_base, write: increment, inspect: image },
    Scenario {
        name: "an increment in place of another",
        before: a_base_and_an_increment,
        write: overwrite_increment,
        inspect: image,
    },
    Scenario { name: "a working set", before: nothing, write: a_working_set, inspect: working_set },
    Scenario {
        name: "a working set in place of another",
        before: a_working_set,
        write: a_larger_working_set,
        inspect: working_set,
    },
];

/// Options of a run.
#[derive(Clone, Copy, Default)]
struct RunOptions {
    fault: Option<PublicationBug>,
    /// A step that fails, and its error.
    fails: Option<(usize, Errno)>,
    /// Run another writer after every n-th crash.
    writer_every: Option<usize>,
}

fn plan(fault: Option<PublicationBug>) -> Interventions {
    Interventions { fault, ..Interventions::default() }
}

fn copy_files(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(to).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Runs a scenario on the files of `from` and inspects every state that a crash may leave; returns the
/// numbers of states, or the first violation.
fn run(
    scenario: &Scenario,
    from: &Path,
    options: RunOptions,
    random: &mut fastrand::Rng,
) -> Result<Counts, String> {
    let inspect = |directory: &Path| record(plan(options.fault), || (scenario.inspect)(directory)).0;
    let (work, crashed) = (directory(), directory());
    copy_files(from, work.path());
    let before = inspect(work.path());
    let disk = Disk::of(work.path());
    // Result without a failure.
    (scenario.write)(work.path()).map_err(|error| format!("{}: {error}", scenario.name))?;
    let after = inspect(work.path());
    copy_files(from, work.path());
    let plan = Interventions { fails: options.fails, fault: options.fault, ..Interventions::default() };
    let (written, ops) = record(plan, || (scenario.write)(work.path()));
    let failure = |what: &str, found: &Outcome| {
        let (name, fails, fault) = (scenario.name, options.fails, options.fault);
        format!(
            "{name} (failing step: {fails:?}, bug: {fault:?}): {what}: {found:?}, expected {before:?} or {after:?}"
        )
    };
    let now = inspect(work.path());
    if now != after && (written.is_ok() || now != before) {
        return Err(failure(&format!("the writer returned {written:?}"), &now));
    }
    let mut counts = Counts { runs: 1, steps: ops.len(), ..Counts::default() };
    let mut seen = BTreeSet::new();
    for done in (0..=ops.len()).rev() {
        for state in disk.states(&ops, done, random) {
            // From the end, since a state after success is checked more strictly.
            if !seen.insert(state.clone()) {
                continue;
            }
            disk.make(&state, &ops, crashed.path());
            counts.states += 1;
            let found = inspect(crashed.path());
            let must_be_new = done == ops.len() && written.is_ok();
            if found != after && (must_be_new || found != before) {
                let last = ops[..done].last();
                return Err(failure(
                    &format!("after {done} of {} steps ({:?}), {state:?}", ops.len(), last.map(brief)),
                    &found,
                ));
            }
            if options.writer_every.is_some_and(|each| counts.states.is_multiple_of(each)) {
                counts.writers_after += 1;
                (scenario_after(scenario).write)(crashed.path())
                    .map_err(|error| failure(&format!("the next writer after {state:?}: {error}"), &found))?;
                let found = inspect(crashed.path());
                if found != after {
                    return Err(failure(&format!("the next writer after {state:?}"), &found));
                }
            }
        }
    }
    Ok(counts)
}

/// The same scenario for a name that may exist.
fn scenario_after(scenario: &Scenario) -> Scenario {
    let write = match scenario.name {
        "a new image" => overwrite,
        "an increment" => overwrite_increment,
        _ => scenario.write,
    };
    Scenario { write, ..*scenario }
}

fn brief(op: &Op) -> String {
    match op {
        Op::Write { node, at, bytes } => format!("{} bytes at {at:#x} of file {node}", bytes.len()),
        op => format!("{op:?}"),
    }
}

fn prepared(scenario: &Scenario) -> TempDir {
    let directory = crate::testing::directory();
    (scenario.before)(directory.path()).unwrap();
    directory
}

/// Number of rounds of a soak run; 0 in an ordinary one.
fn rounds() -> u64 {
    std::env::var("TOWLINE_SOAK_CRASHES").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

#[test]
fn a_crash_at_any_step_leaves_the_old_image_or_the_new_one() {
    let mut random = fastrand::Rng::with_seed(1);
    for scenario in &SCENARIOS {
        let options = RunOptions { writer_every: Some(3), ..RunOptions::default() };
        let counts = run(scenario, prepared(scenario).path(), options, &mut random).unwrap();
        println!("{}: {counts:?}", scenario.name);
        assert!(counts.states >= 3 && counts.writers_after > 0, "{}: {counts:?}", scenario.name);
    }
}

#[test]
fn a_failing_step_and_a_crash_leave_the_old_image_or_the_new_one() {
    let mut random = fastrand::Rng::with_seed(2);
    for scenario in &SCENARIOS {
        let from = prepared(scenario);
        let steps = steps(scenario, from.path());
        let mut total = Counts::default();
        for step in 0..steps {
            let errno = ERRNOS[step % ERRNOS.len()];
            let options = RunOptions { fails: Some((step, errno)), ..RunOptions::default() };
            total.add(run(scenario, from.path(), options, &mut random).unwrap());
        }
        println!("{}: {total:?}", scenario.name);
        assert_eq!(total.runs, steps);
    }
}

/// Number of steps of a scenario without failures.
fn steps(scenario: &Scenario, from: &Path) -> usize {
    let work = directory();
    copy_files(from, work.path());
    let (written, ops) = record(Interventions::default(), || (scenario.write)(work.path()));
    written.unwrap();
    ops.len()
}

#[test]
fn each_bug_of_earlier_versions_is_detected() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut crashes = |scenario: &Scenario, fault| {
        let options = RunOptions { fault: Some(fault), ..RunOptions::default() };
        run(scenario, prepared(scenario).path(), options, &mut random).map(drop)
    };
    let over = &SCENARIOS[1];
    let found = |fault: PublicationBug, result: Result<(), String>| match result {
        Ok(()) => panic!("{fault:?} is not detected"),
        Err(text) => println!("{fault:?}: {}", &text[..text.len().min(300)]),
    };
    for fault in [
        PublicationBug::ManifestFirst,
        PublicationBug::FileNotSynced,
        PublicationBug::DirectoryNotSynced,
        PublicationBug::SealIgnored,
    ] {
        found(fault, crashes(over, fault));
    }
    found(PublicationBug::SidecarInPlace, crashes(&SCENARIOS[7], PublicationBug::SidecarInPlace));
    found(PublicationBug::ReplacedUnchecked, races(over, Some(PublicationBug::ReplacedUnchecked)).map(drop));
    let from = prepared(over);
    let fails = (0..steps(over, from.path())).find_map(|step| {
        let fails = Some((step, Errno::IO));
        let options =
            RunOptions { fault: Some(PublicationBug::StagedManifestRemoved), fails, ..RunOptions::default() };
        run(over, from.path(), options, &mut random).err()
    });
    found(PublicationBug::StagedManifestRemoved, fails.map_or(Ok(()), Err));
}

/// Soak test: other guests in each round, every step failing with some error, and a second writer after each
/// crash, which crashes too.
#[test]
fn crashes_of_writers_after_crashes() {
    let mut total = Counts::default();
    for round in 0..rounds() {
        let mut random = fastrand::Rng::with_seed(round);
        for scenario in &SCENARIOS {
            let from = prepared(scenario);
            let options = RunOptions { writer_every: Some(1), ..RunOptions::default() };
            total.add(run(scenario, from.path(), options, &mut random).unwrap());
            for step in 0..steps(scenario, from.path()) {
                let options = RunOptions {
                    fails: Some((step, ERRNOS[random.usize(..ERRNOS.len())])),
                    writer_every: Some(5),
                    ..RunOptions::default()
                };
                total.add(run(scenario, from.path(), options, &mut random).unwrap());
            }
            total.add(after_crashes(scenario, from.path(), &mut random).unwrap());
        }
        println!("round {round}: {total:?}");
    }
}

/// Runs a scenario again from each state that a crash of it may leave.
fn after_crashes(scenario: &Scenario, from: &Path, random: &mut fastrand::Rng) -> Result<Counts, String> {
    let (work, crashed) = (directory(), directory());
    copy_files(from, work.path());
    let disk = Disk::of(work.path());
    let (written, ops) = record(Interventions::default(), || (scenario.write)(work.path()));
    written?;
    let mut states = BTreeSet::new();
    (0..=ops.len()).for_each(|done| states.extend(disk.states(&ops, done, random)));
    let (again, mut total) = (scenario_after(scenario), Counts::default());
    for state in states {
        disk.make(&state, &ops, crashed.path());
        total.add(run(&again, crashed.path(), RunOptions::default(), random)?);
    }
    Ok(total)
}

#[test]
fn a_staged_manifest_is_found_and_renamed_by_the_next_writer() {
    let directory = crate::testing::directory();
    let path = directory.path().join(NAME);
    old().store(&path, Existing::Refuse, None).unwrap();
    let pending = staged_path(&path);
    std::fs::rename(sidecar_path(&path), &pending).unwrap();
    store(&new(), &directory.path().join("other.img"), Existing::Refuse, None).unwrap();
    std::fs::rename(sidecar_path(&directory.path().join("other.img")), sidecar_path(&path)).unwrap();
    let image = Image::open(&path).unwrap();
    image.verify(1, &|_| {}).unwrap();
    assert_eq!(image.manifest_path().as_deref(), Some(&*pending));
    // Even a writer that is dropped completes the rename.
    drop(new().write(&path, Existing::Replace, None).unwrap());
    let image = Image::open(&path).unwrap();
    image.verify(1, &|_| {}).unwrap();
    assert_eq!(image.manifest_path(), Some(sidecar_path(&path)));
    assert!(!pending.exists());
    let (manifest, _) = Manifest::load(&sidecar_path(&path), &TestGuest::blocks()).unwrap().unwrap();
    assert_eq!(Some(&manifest), image.manifest());
}
