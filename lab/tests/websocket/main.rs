//! WebSockets with Python's `websockets` as client and as server: fragments, pings, lanes, and a guest that
//! arrives unchanged.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use towline_lab::certificates::Authority;
use towline_lab::{Towline, paths, skip, towline, wait_until};

const WITHIN: Duration = Duration::from_secs(60);

/// Python with its `websockets`; `None`, with a printed skip, if the set-up could not install it.
fn python(test: &str) -> Option<PathBuf> {
    let python = paths::lab_directory().join("python/bin/python");
    if python.is_file() {
        return Some(python);
    }
    skip(test, &format!("{} is missing; run `cargo xtask setup`", python.display()));
    None
}

/// Files that are shared by Python and two towlines.
struct Fixture {
    python: PathBuf,
    directory: TempDir,
    secure: bool,
}

impl Fixture {
    fn new(python: PathBuf, secure: bool) -> Self {
        let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
        Authority::new("the lab's CA").unwrap().furnish(directory.path()).unwrap();
        Self { python, directory, secure }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    /// Starts a Python relay; returns the port that it listens on, too.
    fn relay(&self, arguments: &[&str]) -> (Towline, u16) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/websocket/relay.py");
        let directory = self.directory.path().to_str().unwrap();
        let mut line = vec![script.to_str().unwrap()];
        line.extend(arguments);
        line.extend(self.secure.then_some(directory));
        let relay = Towline::start(&self.python, line).unwrap();
        let port = wait_until("a relay that listens", WITHIN, || {
            Ok(relay.stdout().strip_prefix("listening ").and_then(|port| port.trim().parse().ok()))
        });
        (relay, port.unwrap())
    }

    /// Starts `towline copy` from or to a WebSocket.
    fn copy(&self, arguments: &[&str]) -> Towline {
        let directory = self.directory.path().to_str().unwrap();
        let tls: &[&str] = if self.secure { &["--tls-creds", directory] } else { &[] };
        towline([&["copy"], tls, arguments].concat()).unwrap()
    }

    fn scheme(&self) -> &str {
        if self.secure { "wss" } else { "ws" }
    }

    /// Path of an image, and of its copy.
    fn images(&self) -> (String, String) {
        let (from, to) = (self.path("from.img"), self.path("to.img"));
        towline(["copy", "mem:48M", &from]).unwrap().wait_done(WITHIN).unwrap();
        (from, to)
    }
}

/// Waits until a towline listens, and returns its address.
fn listens_at(towline: &mut Towline) -> String {
    towline.listens_at(WITHIN).unwrap()
}

fn prove(from: &str, to: &str) {
    for image in [from, to] {
        towline(["inspect", "--verify", image]).unwrap().wait_done(WITHIN).unwrap();
    }
    let blocks = |image: &str| {
        let inspected = towline(["inspect", "--json", image]).unwrap().wait_done(WITHIN).unwrap();
        serde_json::from_str::<serde_json::Value>(&inspected.stdout).unwrap()["blocks"].take()
    };
    assert_eq!(blocks(from), blocks(to));
}

/// Sends an image to Python's server, which forwards it by TCP to another towline.
fn to_a_server(python: PathBuf, secure: bool, lanes: &str) {
    let fixture = Fixture::new(python, secure);
    let (from, to) = fixture.images();
    let mut far = towline(["copy", "--multifd-channels", lanes, "tcp:127.0.0.1:0", &to]).unwrap();
    let port = listens_at(&mut far).rsplit_once(':').unwrap().1.to_owned();
    let (_relay, port) = fixture.relay(&["serve", "127.0.0.1", &port]);
    let there = format!("{}://localhost:{port}/vm", fixture.scheme());
    fixture.copy(&["--multifd-channels", lanes, &from, &there]).wait_done(WITHIN).unwrap();
    far.wait_done(WITHIN).unwrap();
    prove(&from, &to);
}

/// Sends an image by TCP to Python, which is the client of a listening towline.
fn from_a_client(python: PathBuf, secure: bool, lanes: &str) {
    let fixture = Fixture::new(python, secure);
    let (from, to) = fixture.images();
    let here = format!("{}://127.0.0.1:0/vm", fixture.scheme());
    let mut far = fixture.copy(&["--multifd-channels", lanes, &here, &to]);
    let (_relay, port) = fixture.relay(&["connect", &listens_at(&mut far)]);
    let there = format!("tcp:127.0.0.1:{port}");
    towline(["copy", "--multifd-channels", lanes, &from, &there]).unwrap().wait_done(WITHIN).unwrap();
    far.wait_done(WITHIN).unwrap();
    prove(&from, &to);
}

macro_rules! tests {
    ($($name:ident: $run:ident, $secure:expr, $lanes:expr;)*) => {$(
        #[test]
        fn $name() {
            if let Some(python) = python(stringify!($name)) {
                $run(python, $secure, $lanes);
            }
        }
    )*};
}

tests! {
    an_image_to_a_python_server: to_a_server, false, "0";
    an_image_over_lanes_to_a_python_server: to_a_server, false, "2";
    an_image_to_a_python_server_with_tls: to_a_server, true, "2";
    an_image_from_a_python_client: from_a_client, false, "0";
    an_image_over_lanes_from_a_python_client: from_a_client, false, "2";
    an_image_from_a_python_client_with_tls: from_a_client, true, "2";
}

#[test]
fn images_go_between_two_towlines_and_wrong_peers_are_refused() {
    let fixture = Fixture::new(PathBuf::new(), false);
    let (from, to) = fixture.images();
    let mut far = fixture.copy(&["--multifd-channels", "2", "ws://127.0.0.1:0/vm/a", &to]);
    let here = listens_at(&mut far);
    let another = here.replace("/vm/a", "/vm/b");
    let refused = fixture.copy(&["--multifd-channels", "2", &from, &another]).wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    assert!(
        refused.stderr.contains("it answered with HTTP 404 Not Found, expected 101"),
        "{}",
        refused.stderr
    );
    let plain = here.replace("ws://", "tcp:").replace("/vm/a", "");
    let refused = fixture.copy(&[&from, &plain]).wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    fixture.copy(&["--multifd-channels", "2", &from, &here]).wait_done(WITHIN).unwrap();
    let far = far.wait_done(WITHIN).unwrap();
    assert!(far.stderr.contains("it requested the path /vm/b, expected /vm/a"), "{}", far.stderr);
    assert!(far.stderr.contains("it does not speak WebSocket"), "{}", far.stderr);
    prove(&from, &to);

    let usage = |arguments: &[&str], text: &str| {
        let refused = towline([&["copy"], arguments].concat()).unwrap().wait(WITHIN).unwrap();
        assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
        assert!(refused.stderr.contains(text), "{}", refused.stderr);
    };
    usage(&[&from, "wss://localhost:1/vm"], "wss://localhost:1/vm needs --tls-creds DIR");
    let directory = fixture.directory.path().to_str().unwrap();
    usage(
        &["--tls-creds", directory, &from, "ws://localhost:1/vm"],
        "only tcp:, unix: and wss:// support TLS",
    );
    usage(&[&from, "ws:localhost"], "expected ws://HOST[:PORT][/PATH], or wss://");
}
