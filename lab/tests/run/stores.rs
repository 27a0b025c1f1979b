//! Guests of an image in an object store behind a delay: the times until they run.

use std::path::Path;
use std::time::{Duration, Instant};

use towline_lab::downtime::Times;
use towline_lab::expect::number;
use towline_lab::{Version, require_lab, wait_until};

use crate::store::{BUCKET, Fixture, S3};
use crate::support::{Saved, WITHIN};

/// Delay of each response in milliseconds; `TOWLINE_SOAK_STORE_DELAY_MS` sets another.
const DELAY_MS: u64 = 20;
/// Delay with which a guest's memory takes long to arrive.
const SLOW_MS: u32 = 300;
/// Runs of each kind.
const RUNS: u64 = 1;

/// Way in which a guest gets its memory from a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// At once, on demand.
    Postcopy,
    /// By a file of the host that is made first.
    File,
    /// By the file that is there.
    WarmFile,
}

fn delay_ms() -> u32 {
    u32::try_from(number("TOWLINE_SOAK_STORE_DELAY_MS", DELAY_MS)).unwrap()
}

/// Times of a guest to its first tick, and what its store was asked for until then.
struct Ticked {
    /// From the command.
    command: Duration,
    /// From the answer of its QEMU's monitor.
    answer: Duration,
    requests: u64,
}

/// An image in a store behind a delay.
struct Stored<'a> {
    s3: &'a S3,
    fixture: Fixture,
    saved: &'a Saved,
    image: String,
}

impl<'a> Stored<'a> {
    fn new(s3: &'a S3, saved: &'a Saved) -> Self {
        let mut fixture = s3.fixture();
        fixture.set("XDG_RUNTIME_DIR", saved.path("").to_str().unwrap());
        let image = format!("s3://{BUCKET}/vm/web");
        fixture.done(&["copy", &saved.image(), &image]);
        Self { s3, fixture, saved, image }
    }

    /// Runs the guest to its first tick.
    fn run(&self, way: Way, cache: &Path) -> Ticked {
        let (binary, cache) = (self.saved.binary(), cache.display().to_string());
        let memory = if way == Way::Postcopy { "--postcopy" } else { "--share" };
        let options =
            ["run", "--json", &self.image, "--name", "web", "--qemu", &binary, "--cache-dir", &cache];
        let settings = self.saved.set();
        let settings = settings.iter().map(String::as_str);
        let words: Vec<&str> = options.into_iter().chain([memory]).chain(settings).collect();
        self.s3.misbehave(0, 0, delay_ms());
        let begun = Instant::now();
        let mut run = self.fixture.start(&words);
        let running = wait_until("a guest that runs", WITHIN, || {
            assert!(run.runs()?, "towline has ended: {}{}", run.stdout(), run.stderr());
            let events = run.stdout();
            let event = events.lines().find(|line| line.contains(r#""event":"running""#));
            Ok(event.map(|event| serde_json::from_str::<serde_json::Value>(event).unwrap()))
        })
        .unwrap();
        let microseconds = |name: &str| Duration::from_micros(running[name].as_u64().unwrap());
        let seen = begun.elapsed();
        if way == Way::Postcopy {
            // Its memory is not the file's: it is asked itself.
            self.saved.agent("web").wait_ticking(WITHIN).unwrap();
        } else {
            self.saved.wait_first_tick_in(running["pid"].as_u64().unwrap(), ".img");
        }
        let command = begun.elapsed();
        let answer = microseconds("running-us") - microseconds("answered-us") + (command - seen);
        let state = self.s3.state();
        let [requests, indexes] = ["requests", "indexes"].map(|name| state[name].as_u64().unwrap());
        self.saved.assert_is_saved_guest(&mut self.saved.agent("web"));
        // With an existing file only the index is read; a guest that runs at once reads it once, protected by
        // its lease.
        assert_eq!(requests == 1, way == Way::WarmFile, "{requests} requests, {way:?}");
        assert_eq!(indexes == 2, way == Way::Postcopy, "{indexes} requests for the index, {way:?}");
        self.saved.interrupt(run);
        Ticked { command, answer, requests }
    }
}

#[test]
#[ignore = "nightly"]
fn guests_of_a_slow_store_run_at_once_or_from_a_file_of_the_host() {
    let test = "guests_of_a_slow_store_run_at_once_or_from_a_file_of_the_host";
    if !require_lab(test) {
        return;
    }
    let Some(s3) = S3::start(test) else { return };
    let saved = Saved::new(Version::V10_0);
    let stored = Stored::new(&s3, &saved);
    let runs = number("TOWLINE_SOAK_STORE_RUNS", RUNS);
    let ways = [Way::Postcopy, Way::File, Way::WarmFile];
    let mut times = ways.map(|_| [Times::default(), Times::default()]);
    let mut requests = [0; 3];
    for run in 0..runs {
        let cache = saved.path(&format!("cache-{run}"));
        for ((way, [command, answer]), requests) in ways.into_iter().zip(&mut times).zip(&mut requests) {
            let found = stored.run(way, &cache);
            command.push(found.command.as_secs_f64() * 1e3);
            answer.push(found.answer.as_secs_f64() * 1e3);
            *requests = found.requests;
        }
        std::fs::remove_dir_all(&cache).unwrap();
    }
    let delay = delay_ms();
    for ((way, [command, answer]), requests) in ways.into_iter().zip(&times).zip(requests) {
        println!(
            "{way:?}, {delay} ms for each response, {runs} runs: first tick after the command {command}; after QEMU's answer {answer}; {requests} requests until then in the last run"
        );
    }
}

/// Credentials that expire while a guest waits for its memory, and are renewed.
#[test]
#[ignore = "nightly"]
fn a_store_that_cannot_be_read_for_a_time_is_read_again() {
    let test = "a_store_that_cannot_be_read_for_a_time_is_read_again";
    if !require_lab(test) {
        return;
    }
    let Some(s3) = S3::start(test) else { return };
    let saved = Saved::new(Version::V10_0);
    let mut fixture = s3.fixture();
    fixture.set("XDG_RUNTIME_DIR", saved.path("").to_str().unwrap());
    let image = format!("s3://{BUCKET}/vm/web");
    fixture.done(&["copy", &saved.image(), &image]);
    let (cache, binary) = (saved.path("cache").display().to_string(), saved.binary());
    let settings = saved.settings();
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting.as_str()]).collect();
    let options =
        ["run", &image, "--name", "web", "--qemu", &binary, "--cache-dir", &cache, "--postcopy", "--json"];
    s3.misbehave(0, 0, SLOW_MS);
    let mut run = fixture.start(&[&options[..], &settings].concat());
    let mut wait_for = |text: &str| {
        wait_until(text, WITHIN, || {
            assert!(run.runs()?, "towline has ended: {}{}", run.stdout(), run.stderr());
            let output = run.stdout();
            assert!(
                !text.contains("again") || !output.contains("\"completed\""),
                "it was too fast: {output}"
            );
            Ok(output.contains(text).then_some(()))
        })
        .unwrap();
    };
    wait_for("\"event\":\"running\"");
    s3.misbehave(1, 403, 0);
    wait_for("reading is tried again");
    let refused = s3.state()["failed"].as_u64().unwrap();
    wait_until("further attempts", WITHIN, || {
        Ok((s3.state()["failed"].as_u64() > Some(refused + 2)).then_some(()))
    })
    .unwrap();
    s3.misbehave(0, 0, 0);
    wait_for("\"event\":\"completed\"");
    saved.assert_is_saved_guest(&mut saved.agent("web"));
    saved.interrupt(run);
}
