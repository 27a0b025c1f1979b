//! What tests expect of a towline: how it ended, what it said, and a place for what it writes.
//!
//! These fail the test that calls them, by panicking with all that towline said.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::{Finished, Qemu, Towline, wait_until};

/// A directory for images and sockets, that goes with the test.
pub struct Scratch(TempDir);

impl Scratch {
    /// An empty one.
    ///
    /// # Panics
    /// If it cannot be made.
    #[expect(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        Self(tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap())
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A path in it as an argument.
    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }
}

/// The number that this environment variable holds, for long runs.
///
/// # Panics
/// If it holds something else.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// The endpoint that a QEMU is by its QMP socket.
pub fn qmp(qemu: &Qemu) -> String {
    format!("qmp:{}", qemu.qmp_path().display())
}

/// Fails unless it ended with this code and said all this on its standard error, in this order.
///
/// # Panics
/// If it did not.
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

/// The lines of `--json` so far; the last one may be half written.
pub fn events(stdout: &str) -> Vec<Value> {
    stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The event that `--json` ends with.
///
/// # Panics
/// If it failed, or ended with another event.
#[track_caller]
pub fn completed(finished: &Finished) -> Value {
    assert_ended(finished, 0, &[]);
    let last = events(&finished.stdout).pop().unwrap();
    assert_eq!(last["event"], "completed", "{last}");
    last
}

/// Waits until a towline with `--json` has told of such an event; it must not end before.
///
/// # Panics
/// If it ends before, or does not tell of it within that time.
pub fn tells(towline: &mut Towline, what: &str, within: Duration, wanted: impl Fn(&Value) -> bool) -> Value {
    wait_until(what, within, || {
        // Asked first: what it says last may come between.
        let runs = towline.runs()?;
        let found = events(&towline.stdout()).into_iter().find(|event| wanted(event));
        assert!(found.is_some() || runs, "it ended: {}{}", towline.stdout(), towline.stderr());
        Ok(found)
    })
    .unwrap()
}

/// The migration settings of a QEMU.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// As `query-migrate-capabilities` returns them.
    pub capabilities: BTreeMap<String, bool>,
    /// As `query-migrate-parameters` returns them.
    pub parameters: Map<String, Value>,
}

/// Queries the migration settings of a QEMU.
///
/// # Panics
/// QEMU does not answer.
#[must_use]
pub fn settings(qemu: &Qemu) -> Settings {
    let capabilities = qemu.qmp().execute("query-migrate-capabilities", Value::Null).unwrap();
    let parameters = qemu.qmp().execute("query-migrate-parameters", Value::Null).unwrap();
    let one =
        |state: &Value| (state["capability"].as_str().unwrap().to_owned(), state["state"].as_bool().unwrap());
    Settings {
        capabilities: capabilities.as_array().unwrap().iter().map(one).collect(),
        parameters: parameters.as_object().unwrap().clone(),
    }
}
