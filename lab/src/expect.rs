//! Assertions on a towline: its exit, its output, its events, and a directory for its files.
//!
//! These functions panic, with the whole output of towline, and so fail the calling test.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::{Builder, Finished, Qemu, Towline, wait_until};

/// A directory for images and sockets, removed with the test.
pub struct Scratch(TempDir);

impl Scratch {
    /// Creates an empty directory.
    ///
    /// # Panics
    /// If it cannot be created.
    #[expect(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        Self(tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap())
    }

    /// Path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Path of a file in it, as an argument.
    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }
}

/// Waits until a towline with `--json` has transferred this much.
///
/// # Panics
/// If it ends before, or takes longer than `within`.
#[track_caller]
pub fn wait_transferred(towline: &mut Towline, bytes: u64, within: Duration) {
    let has_moved = |event: &Value| event["ram"]["transferred"].as_u64() >= Some(bytes);
    wait_event(towline, &format!("{bytes} bytes"), within, has_moved);
}

/// Returns the number in this environment variable, which long runs set.
///
/// # Panics
/// If it is not a number.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// Endpoint of a QEMU's QMP socket.
pub fn qmp(qemu: &Qemu) -> String {
    format!("qmp:{}", qemu.qmp_path().display())
}

/// Starts a QEMU that waits for a guest of this kind.
///
/// # Panics
/// If it does not start.
pub fn waiting(builder: &Builder) -> Qemu {
    builder.clone().incoming_defer().start().unwrap()
}

/// Lifts the rate limit of a copy that listens at `--qmp CONTROL`.
///
/// # Panics
/// If it does not listen there, or refuses.
pub fn lift_rate_limit(control: &Path) {
    let copy = crate::Qmp::connect(control, std::time::Duration::from_secs(10)).unwrap();
    copy.execute("migrate-set-parameters", serde_json::json!({ "max-bandwidth": 0 })).unwrap();
}

/// Asserts the exit status, and that the standard error contains all of `texts` in this order.
///
/// # Panics
/// If one of them differs.
#[track_caller]
pub fn assert_ended(finished: &Finished, code: i32, texts: &[&str]) {
    let Finished { status, stdout, stderr } = finished;
    assert_eq!(status.code(), Some(code), "{status}: {stdout}{stderr}");
    let mut at = 0;
    for text in texts {
        match stderr[at..].find(text) {
            Some(found) => at += found + text.len(),
            None => panic!("{text:?} is not in (or not in this order): {stderr}"),
        }
    }
}

/// Events of `--json` so far, without a last line that may be incomplete.
pub fn events(stdout: &str) -> Vec<Value> {
    stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Returns the last event of `--json`, which must be `completed`.
///
/// # Panics
/// If towline failed, or its last event is another one.
#[track_caller]
pub fn completed(finished: &Finished) -> Value {
    assert_ended(finished, 0, &[]);
    let last = events(&finished.stdout).pop().unwrap();
    assert_eq!(last["event"], "completed", "{last}");
    last
}

/// Waits for an event of a towline with `--json`; towline must not exit before.
///
/// # Panics
/// If towline exits before, or the event does not come in time.
#[track_caller]
pub fn wait_event(
    towline: &mut Towline,
    what: &str,
    within: Duration,
    wanted: impl Fn(&Value) -> bool,
) -> Value {
    wait_until(what, within, || {
        // Read before the events: the last event may come between the two.
        let runs = towline.runs()?;
        let found = events(&towline.stdout()).into_iter().find(|event| wanted(event));
        assert!(found.is_some() || runs, "it ended: {}{}", towline.stdout(), towline.stderr());
        Ok(found)
    })
    .unwrap()
}

/// Migration settings of a QEMU, its capabilities and parameters, by their names.
pub type Settings = Map<String, Value>;

/// Queries the migration settings of a QEMU.
///
/// # Panics
/// If QEMU does not reply.
#[must_use]
pub fn settings(qemu: &Qemu) -> Settings {
    let query = |command: &str| qemu.qmp().execute(command, Value::Null).unwrap();
    let mut settings = query("query-migrate-parameters").as_object().unwrap().clone();
    for capability in query("query-migrate-capabilities").as_array().unwrap() {
        settings.insert(capability["capability"].as_str().unwrap().into(), capability["state"].clone());
    }
    settings
}
