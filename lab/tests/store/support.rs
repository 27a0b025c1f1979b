//! Stores for tests, and towlines that use them.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
pub(crate) use towline_lab::expect::number;
use towline_lab::{Finished, Towline, paths, skip, towline_binary, wait_until};

pub(crate) const WITHIN: Duration = Duration::from_secs(120);
/// Name of a test's bucket.
pub(crate) const BUCKET: &str = "towline-lab";
/// Secret that must not appear anywhere.
pub(crate) const SECRET: &str = "hunter2SECRETmarkedForTheTest";

/// A directory that is removed with the test; stores in it are `store:DIRECTORY/PREFIX/NAME`.
pub(crate) struct Fixture {
    directory: TempDir,
    /// Environment of every towline.
    environment: Vec<(String, String)>,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
        Self { directory, environment: Vec::new() }
    }

    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.environment.push((name.into(), value.into()));
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Endpoint of an image in a directory.
    pub(crate) fn store(&self, name: &str) -> String {
        format!("store:{}", self.name(name))
    }

    /// Starts a towline with this command line.
    pub(crate) fn start(&self, arguments: &[&str]) -> Towline {
        // The user's own environment does not affect the tests.
        let mut line: Vec<OsString> = ["-u", "AWS_PROFILE", "-u", "AWS_ENDPOINT_URL"].map(Into::into).into();
        line.push(format!("HOME={}", self.directory.path().display()).into());
        line.push(format!("TMPDIR={}", self.directory.path().display()).into());
        line.extend(self.environment.iter().map(|(name, value)| format!("{name}={value}").into()));
        line.push(towline_binary().unwrap().into());
        line.extend(arguments.iter().map(Into::into));
        Towline::start(Path::new("/usr/bin/env"), line).unwrap()
    }

    /// Runs a towline that must succeed; returns its last event.
    pub(crate) fn done(&self, arguments: &[&str]) -> Value {
        let finished = self.start(&[arguments, &["--json"]].concat()).wait_done(WITHIN).unwrap();
        last_event(&finished)
    }

    /// Sends a command to a running towline; returns the reply.
    pub(crate) fn ctl(&self, socket: &str, words: &[&str]) -> Value {
        let finished = self.start(&[&["ctl", socket], words].concat()).wait_done(WITHIN).unwrap();
        serde_json::from_str(&finished.stdout).unwrap()
    }

    /// Runs a towline that must be refused, or fail with its guest safe; returns its standard error.
    pub(crate) fn refused(&self, arguments: &[&str]) -> String {
        let finished = self.start(arguments).wait(WITHIN).unwrap();
        assert_eq!(finished.status.code(), Some(1), "{}{}", finished.stdout, finished.stderr);
        finished.stderr
    }

    /// Image files of guests that wait for their upload, and what is left of them.
    pub(crate) fn waiting(&self) -> Vec<PathBuf> {
        self.files(&format!("towline-{}", rustix::process::geteuid().as_raw()))
    }

    /// Sorted paths of all files whose path below this directory begins with `name`.
    pub(crate) fn files(&self, name: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut left = vec![self.path(name)];
        while let Some(directory) = left.pop() {
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() { &mut left } else { &mut found }.push(path);
            }
        }
        found.sort();
        found
    }
}

pub(crate) fn last_event(finished: &Finished) -> Value {
    serde_json::from_str(finished.stdout.lines().last().unwrap()).unwrap()
}

/// A counter of an upload.
#[track_caller]
pub(crate) fn uploaded(event: &Value, name: &str) -> u64 {
    event["uploaded"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {event}"))
}

/// A real S3 server.
pub(crate) struct S3 {
    _server: Towline,
    port: u16,
}

impl S3 {
    /// Starts the server; `None`, with a printed skip, where the set-up could not install it.
    pub(crate) fn start(test: &str) -> Option<Self> {
        let python = paths::lab_directory().join("python-s3/bin/python");
        if !python.is_file() {
            skip(test, &format!("{} is missing; run `cargo xtask setup`", python.display()));
            return None;
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/store/server.py");
        let mut server = Towline::start(&python, [script]).unwrap();
        let port = wait_until("an S3 server that listens", WITHIN, || {
            assert!(server.runs()?, "it ended: {}", server.stderr());
            Ok(server.stdout().strip_prefix("listening ").and_then(|port| port.trim().parse().ok()))
        });
        let s3 = Self { _server: server, port: port.unwrap() };
        s3.request("PUT", &format!("/{BUCKET}"));
        Some(s3)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// A directory whose towlines are configured for the server, by AWS's own variables.
    pub(crate) fn fixture(&self) -> Fixture {
        let mut fixture = Fixture::new();
        fixture.set("AWS_ENDPOINT_URL", &format!("http://127.0.0.1:{}", self.port));
        fixture.set("AWS_ALLOW_HTTP", "true");
        fixture.set("AWS_ACCESS_KEY_ID", "AKIALAB");
        fixture.set("AWS_SECRET_ACCESS_KEY", SECRET);
        fixture
    }

    /// Makes every `nth` request from now on fail with `status`, and delays each by `slow` milliseconds.
    pub(crate) fn misbehave(&self, nth: u32, status: u32, slow: u32) {
        self.request("GET", &format!("/lab/reset?fail={nth}&status={status}&slow={slow}"));
    }

    /// Changes the server from now on; see its text.
    pub(crate) fn set(&self, options: &str) {
        self.request("GET", &format!("/lab/reset?{options}"));
    }

    /// Counters since then.
    pub(crate) fn state(&self) -> Value {
        serde_json::from_str(&self.request("GET", "/lab/state")).unwrap()
    }

    /// Keys of all objects.
    pub(crate) fn keys(&self) -> Vec<String> {
        let listing = self.request("GET", &format!("/{BUCKET}?list-type=2&max-keys=100000"));
        let keys = listing.split("<Key>").skip(1);
        keys.map(|rest| rest.split_once("</Key>").unwrap().0.to_owned()).collect()
    }

    /// Sends a plain request, independent of towline's code. Returns the body of the response.
    pub(crate) fn request(&self, method: &str, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(WITHIN)).unwrap();
        let host = format!("127.0.0.1:{}", self.port);
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 2"), "{method} {path}: {answer}");
        body.to_owned()
    }
}
