//! `towline record`: images of a running guest at each interval, and guests that run from any of them.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::counting::make_ext4;
use towline_lab::expect::{number, qmp};
use towline_lab::{Finished, Towline, Version, require_lab, signal, wait_until};

use crate::forks::{with_disk, with_disk_of};
use crate::support::{MIB, Saved, WITHIN};

/// Directory of the record.
pub(crate) const RECORD: &str = "record";

impl Saved {
    /// Starts to record a guest of this test.
    pub(crate) fn record(&self, guest: &str, place: &str, options: &[&str]) -> Towline {
        let place = self.path(place).display().to_string();
        let words =
            ["record", guest, &place, "--json", "--log", "info"].into_iter().chain(options.iter().copied());
        self.towline(words.map(str::to_owned))
    }

    /// Names of the images of the record, in their order.
    fn recorded(&self) -> Vec<String> {
        let names = fs::read_dir(self.path(RECORD)).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.retain(|name| name.ends_with(".img") && !name.starts_with('.'));
        names.sort();
        names
    }

    /// Every image of the record has all that it is based on, and nothing is unfinished.
    fn assert_record_is_whole(&self) {
        let record = self.path(RECORD).display().to_string();
        let listed =
            self.towline(["store", "ls", "--json", &record].map(str::to_owned)).wait_done(WITHIN).unwrap();
        assert_eq!(listed.stdout.lines().count(), self.recorded().len() + 1, "{}", listed.stdout);
        let names =
            fs::read_dir(&record).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let partial: Vec<_> =
            names.filter(|name| name.contains("partial") || name.ends_with(".new")).collect();
        assert!(partial.is_empty(), "{partial:?}");
    }
}

fn events(stdout: &str) -> impl Iterator<Item = Value> {
    // The last line of a killed process may be a part of one.
    stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok())
}

pub(crate) fn stored(stdout: &str) -> Vec<Value> {
    events(stdout).filter(|event| event["event"] == "instant").collect()
}

pub(crate) fn wait_stored(record: &mut Towline, count: usize) {
    let found = wait_until("images of a record", WITHIN, || {
        record.check()?;
        Ok((stored(&record.stdout()).len() >= count).then_some(()))
    });
    found.unwrap_or_else(|error| panic!("{error:#}: {}{}", record.stdout(), record.stderr()));
}

fn interrupted(record: Towline) -> Finished {
    signal(record.pid(), Signal::INT);
    record.wait(WITHIN).unwrap()
}

fn bytes_below(path: &Path) -> u64 {
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let bytes = |path: std::path::PathBuf| match path.is_dir() {
        true => bytes_below(&path),
        false => fs::metadata(&path).unwrap().blocks() * 512,
    };
    entries.map(bytes).sum()
}

/// Prints what the images cost: the standstills that the log has, and the room on the disk.
fn print_summary(saved: &Saved, logs: &str, length: Duration, end: &Value) {
    let mut standstills: Vec<u64> = logs
        .split("standstill_us=")
        .skip(1)
        .map(|text| text.split(' ').next().unwrap().parse().unwrap())
        .collect();
    standstills.sort_unstable();
    let quantile = |percent: usize| standstills[(standstills.len() - 1) * percent / 100] as f64 / 1000.0;
    println!(
        "{} instants in {:.0} s: standstill p50 {:.1} ms, p99 {:.1} ms; {} images in {} MiB, of disks {} MiB; {end}",
        standstills.len(),
        length.as_secs_f64(),
        quantile(50),
        quantile(99),
        saved.recorded().len(),
        bytes_below(&saved.path(RECORD)) >> 20,
        bytes_below(&saved.path(&format!("{RECORD}/disks"))) >> 20,
    );
}

/// `cargo xtask soak record` does so for an hour. A guest that had the disk of another instant would find its file system damaged, and
/// damage it further.
#[test]
fn instants_of_a_guest_that_writes_run_with_their_disks_also_after_a_kill() {
    if !require_lab("instants_of_a_guest_that_writes_run_with_their_disks_also_after_a_kill") {
        return;
    }
    let saved = with_disk_of(make_ext4);
    let mut web = saved.agent("web");
    web.begin_to_count();
    web.dirty(4 * MIB, 64 * MIB).unwrap();
    let length = Duration::from_secs(number("TOWLINE_SOAK_RECORD_SECONDS", 20));
    let (begun, options) = (Instant::now(), ["--every", "1s", "--keep", "2min,20min"]);
    let mut record = saved.record("web", RECORD, &options);
    wait_stored(&mut record, 3);
    let second = saved.record("web", "other", &[]).wait(WITHIN).unwrap();
    assert_eq!(second.status.code(), Some(1));
    let text = format!("is recorded already, by process {}", record.pid());
    assert!(second.stderr.contains(&text), "{}", second.stderr);
    wait_until("half of the time", length + WITHIN, || {
        record.check()?;
        Ok((begun.elapsed() > length / 2).then_some(()))
    })
    .unwrap();
    // At any moment: the image under way is there or not.
    record.kill().unwrap();
    let killed_stderr = record.stderr();
    drop(record);
    let before = saved.recorded();
    let mut record = saved.record("web", RECORD, &options);
    wait_stored(&mut record, 3);
    let next = &stored(&record.stdout())[0];
    let last: u64 = before.last().unwrap()[..8].parse().unwrap();
    assert_eq!(next["sequence"], last + 1, "{next}");
    wait_until("all of the time", length + WITHIN, || {
        record.check()?;
        Ok((begun.elapsed() > length).then_some(()))
    })
    .unwrap();
    let finished = interrupted(record);
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    saved.assert_record_is_whole();
    web.check().unwrap();
    drop(web);

    let end = events(&finished.stdout).last().unwrap();
    assert_eq!(
        (&end["event"], &end["failed-images"]),
        (&json!("recorded"), &json!(0)),
        "{end} {}",
        finished.stderr
    );
    let images = saved.recorded();
    assert_eq!(end["images"], images.len());
    let seed = number("TOWLINE_SOAK_SEED", 7);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut chosen: Vec<_> = images.clone();
    random.shuffle(&mut chosen);
    chosen.truncate(number("TOWLINE_SOAK_RECORD_RUNS", 5) as usize);
    for image in &chosen {
        saved.assert_runs_on_its_disk(&format!("{RECORD}/{image}"));
    }
    print_summary(&saved, &[killed_stderr, finished.stderr].concat(), length, &end);
    saved.quit("web");
}

#[test]
fn a_record_goes_on_after_a_pause_a_failure_and_a_reset_and_ends_with_its_guest() {
    if !require_lab("a_record_goes_on_after_a_pause_a_failure_and_a_reset_and_ends_with_its_guest") {
        return;
    }
    let saved = with_disk();
    let mut record = saved.record("web", RECORD, &["--every", "200ms", "--keep", "2s"]);
    wait_stored(&mut record, 2);
    saved.monitor("web").execute("stop", Value::Null).unwrap();
    wait_until("a notice of the pause", WITHIN, || {
        record.check()?;
        Ok(record.stdout().contains("its state is `paused`").then_some(()))
    })
    .unwrap();
    let count = stored(&record.stdout()).len();
    saved.monitor("web").execute("cont", Value::Null).unwrap();
    wait_stored(&mut record, count + 2);
    // Its place is not there for some intervals, which is said once.
    fs::rename(saved.path(RECORD), saved.path("away")).unwrap();
    wait_until("a notice of the failure", WITHIN, || {
        record.check()?;
        Ok(record.stdout().contains("the next interval tries again").then_some(()))
    })
    .unwrap();
    fs::rename(saved.path("away"), saved.path(RECORD)).unwrap();
    let count = stored(&record.stdout()).len();
    wait_stored(&mut record, count + 2);
    let monitor = saved.monitor("web");
    // In spite of its `-no-reboot`.
    monitor.execute("set-action", json!({ "reboot": "reset" })).unwrap();
    monitor.execute("system_reset", Value::Null).unwrap();
    drop(monitor);
    let count = stored(&record.stdout()).len();
    wait_stored(&mut record, count + 30);
    saved.quit("web");
    let finished = record.wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(7), "{}", finished.stderr);
    let end = events(&finished.stdout).last().unwrap();
    assert_eq!(end["outcome"], "ended", "{end}");
    assert!(end["removed"].as_u64().unwrap() > 0 && end["failed-images"].as_u64().unwrap() > 0, "{end}");
    assert_eq!(finished.stdout.matches("the next interval tries again").count(), 1, "{}", finished.stdout);
    saved.assert_record_is_whole();
    // The oldest ones were removed with their disks.
    let disks = fs::read_dir(saved.path(&format!("{RECORD}/disks"))).unwrap().count();
    assert!(disks <= saved.recorded().len() + 30, "{disks} disks, {:?}", saved.recorded());
}

#[test]
fn a_guest_with_a_disk_that_runs_on_no_image_is_not_recorded() {
    if !require_lab("a_guest_with_a_disk_that_runs_on_no_image_is_not_recorded") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let guest = saved.guest_on_no_image();
    let refused = saved.record(&qmp(&guest), RECORD, &[]).wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        refused.stderr.contains("writes to drive disk0 and does not run on an image"),
        "{}",
        refused.stderr
    );
    assert!(saved.recorded().is_empty());
}

/// Its memory is sent by QEMU.
#[test]
fn a_guest_that_runs_on_no_image_is_recorded_by_background_snapshots() {
    if !require_lab("a_guest_that_runs_on_no_image_is_recorded_by_background_snapshots") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let mut run = saved.run(&["--name", "web", "--copy", "--detach"], &saved.settings());
    run.check().unwrap();
    run.wait_done(WITHIN).unwrap();
    let mut record = saved.record("web", RECORD, &["--every", "500ms"]);
    wait_stored(&mut record, 3);
    assert_eq!(interrupted(record).status.code(), Some(0));
    saved.assert_record_is_whole();
    saved.quit("web");
    saved.wait_for_guests(&[]);
    let newest = format!("{}@newest", saved.path(RECORD).display());
    let run = saved.run_image(&newest, &["--name", "then", "--detach", "--overlay"]);
    run.wait_done(WITHIN).unwrap();
    saved.assert_is_saved_guest(&mut saved.agent("then"));
    assert!(saved.listed()[0]["image"].as_str().unwrap().ends_with(saved.recorded().last().unwrap()));
    saved.quit("then");
    let none = format!("{}@-1d", saved.path(RECORD).display());
    let refused = saved.run_image(&none, &[]).wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(refused.stderr.contains("no such instant; the first one is 1 of"), "{}", refused.stderr);
}

#[test]
fn the_newest_image_runs_in_a_drill_that_leaves_nothing() {
    if !require_lab("the_newest_image_runs_in_a_drill_that_leaves_nothing") {
        return;
    }
    let saved = with_disk();
    let mut record = saved.record("web", RECORD, &["--every", "500ms"]);
    wait_stored(&mut record, 2);
    let place = saved.path(RECORD).display().to_string();
    let binary = saved.binary();
    let drill = |options: &[&str]| {
        let words = ["record", "--verify-restore", &place, "--for", "1s", "--trust-command-line"]
            .into_iter()
            .chain(["--qemu", &binary])
            .map(str::to_owned);
        let words = words.chain(options.iter().map(|option| (*option).to_owned())).chain(saved.set());
        saved.towline(words).wait(WITHIN).unwrap()
    };
    // Of a drill that was killed, and of a guest that was restored under the drill's name.
    fs::create_dir(saved.path(&format!("{RECORD}/.drill.drill"))).unwrap();
    fs::write(saved.path(&format!("{RECORD}/.drill.drill/drill.disk0.qcow2")), "").unwrap();
    let restored = saved.path(&format!("{RECORD}/drill.disk.qcow2"));
    fs::write(&restored, "").unwrap();
    let finished = drill(&[]);
    assert!(finished.status.success(), "{}{}", finished.stdout, finished.stderr);
    fs::remove_file(restored).unwrap();
    assert!(!saved.path(&format!("{RECORD}/.drill.drill")).exists());
    assert!(finished.stdout.contains("drill has run for 1 s"), "{}", finished.stdout);
    record.check().unwrap();
    assert_eq!(interrupted(record).status.code(), Some(0));
    assert_eq!(saved.guests(), ["web"]);
    assert_eq!(saved.overlays(), [""; 0]);
    let overlays = fs::read_dir(&place)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().extension() == Some("qcow2".as_ref()));
    assert_eq!(overlays.count(), 0);
    // Its disk is not that of its instant any more.
    let disk = saved.disk_of(&format!("{RECORD}/{}", saved.recorded().last().unwrap()));
    fs::remove_file(disk).unwrap();
    let failed = drill(&[]);
    assert_eq!(failed.status.code(), Some(1), "{}", failed.stdout);
    assert!(failed.stderr.contains("was changed or removed since image"), "{}", failed.stderr);
    saved.quit("web");
}

#[test]
fn a_record_in_a_store_is_kept_and_run_like_one_in_a_directory() {
    if !require_lab("a_record_in_a_store_is_kept_and_run_like_one_in_a_directory") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    saved.run(&["--name", "web", "--detach"], &saved.settings()).wait_done(WITHIN).unwrap();
    fs::create_dir(saved.path("store")).unwrap();
    let place = format!("store:{}", saved.path("store").display());
    let words = ["record", "web", &place, "--json", "--log", "info", "--every", "100ms", "--keep", "1s"]
        .map(str::to_owned);
    let mut record = saved.towline(words);
    wait_until("images that were removed", WITHIN * 2, || {
        record.check()?;
        let stored = stored(&record.stdout());
        Ok(stored
            .last()
            .is_some_and(|last| last["images"].as_u64() < last["sequence"].as_u64())
            .then_some(()))
    })
    .unwrap();
    let finished = interrupted(record);
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    saved.quit("web");
    saved.wait_for_guests(&[]);
    saved.run_image(&format!("{place}@newest"), &["--name", "then", "--detach"]).wait_done(WITHIN).unwrap();
    saved.assert_is_saved_guest(&mut saved.agent("then"));
    saved.quit("then");
}
