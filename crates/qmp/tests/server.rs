//! The server side of QMP, with our own client and with misbehaving sockets.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use towline_qmp::{CLIENTS_MAX, Client, CommandError, Commands, Error, Options, REQUEST_BYTES_MAX, Server};

const WITHIN: Duration = Duration::from_secs(120);

/// Adds, refuses, and blocks until it is released.
struct Sums {
    asked: AtomicUsize,
    gate: Barrier,
}

impl Commands for Sums {
    fn names(&self) -> &[&'static str] {
        &["sum", "fail", "wait"]
    }

    fn execute(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match name {
            "sum" => Ok(json!(arguments.values().filter_map(Value::as_u64).sum::<u64>())),
            "fail" => Err(CommandError::generic("it fails, as it should")),
            "wait" => {
                self.gate.wait();
                Ok(json!({}))
            }
            _ => Err(CommandError::NotFound),
        }
    }
}

struct Place {
    server: Server,
    sums: Arc<Sums>,
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let sums = Arc::new(Sums { asked: AtomicUsize::new(0), gate: Barrier::new(2) });
        let server = Server::start(&directory.path().join("qmp.sock"), Arc::clone(&sums) as _).unwrap();
        Self { server, sums, directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("qmp.sock")
    }

    fn client(&self) -> Client {
        Client::connect(self.path(), &Options::default()).unwrap()
    }

    /// A connection past its greeting, which is checked.
    fn raw(&self) -> (UnixStream, BufReader<UnixStream>) {
        let stream = UnixStream::connect(self.path()).unwrap();
        stream.set_read_timeout(Some(WITHIN)).unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        let greeting = next(&mut lines);
        assert_eq!(greeting["QMP"]["capabilities"], json!([]), "{greeting}");
        assert!(greeting["QMP"]["version"]["qemu"]["major"].is_u64(), "{greeting}");
        (stream, lines)
    }
}

fn next(lines: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

fn object(value: Value) -> Option<Map<String, Value>> {
    match value {
        Value::Object(object) => Some(object),
        _ => None,
    }
}

#[test]
fn a_client_is_greeted_and_answered() {
    let place = Place::new();
    let mode = std::fs::metadata(place.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "a client that can connect can cancel");
    let mut client = place.client();
    assert_eq!(client.execute_raw("sum", object(json!({ "a": 1, "b": 2 }))).unwrap(), 3);
    let commands = client.execute_raw("query-commands", None).unwrap();
    let names: Vec<_> = commands.as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["qmp_capabilities", "query-version", "query-commands", "sum", "fail", "wait"]);
    let version = client.execute_raw("query-version", None).unwrap();
    assert!(version["package"].as_str().unwrap().starts_with("towline "), "{version}");
    for (command, wanted) in [
        ("fail", ("GenericError", "it fails, as it should")),
        ("sums", ("CommandNotFound", "The command sums has not been found")),
    ] {
        let Err(Error::Refusal { class, desc, .. }) = client.execute_raw(command, None) else {
            panic!("{command} was not refused")
        };
        assert_eq!((class.as_str(), desc.as_str()), wanted);
    }
}

#[test]
fn requests_are_answered_in_order_with_their_ids() {
    let place = Place::new();
    let (mut stream, mut lines) = place.raw();
    // Two in one write, one in pieces, and JSON of several lines.
    stream
        .write_all(
            b"{\"execute\":\"sum\",\"id\":0}{\"execute\":\"qmp_capabilities\",\"id\":{\"x\":[1]}}\n{\"exe",
        )
        .unwrap();
    stream.write_all(b"cute\":\"sum\",\n \"arguments\":{\"a\":7}\n, \"id\":\"seven\"}").unwrap();
    let early = next(&mut lines);
    assert_eq!((&early["id"], &early["error"]["class"]), (&json!(0), &json!("CommandNotFound")), "{early}");
    assert_eq!(next(&mut lines), json!({ "return": {}, "id": { "x": [1] } }));
    assert_eq!(next(&mut lines), json!({ "return": 7, "id": "seven" }));
    for (request, wanted) in [
        ("{}", "QMP input lacks member 'execute', a string"),
        ("{\"execute\":\"sum\",\"arguments\":[]}", "QMP input member 'arguments' must be an object"),
        ("{\"execute\":\"sum\",\"other\":1}", "QMP input member 'other' is unexpected"),
    ] {
        stream.write_all(request.as_bytes()).unwrap();
        assert_eq!(next(&mut lines)["error"]["desc"], wanted);
    }
}

#[test]
fn events_reach_negotiated_clients() {
    let place = Place::new();
    let (_silent, mut silent_lines) = place.raw();
    let mut client = place.client();
    place.server.emitter().emit("MIGRATION", object(json!({ "status": "active" })).unwrap());
    let event = client.next_event(WITHIN).unwrap().unwrap();
    assert_eq!((event.name.as_str(), &event.data["status"]), ("MIGRATION", &json!("active")));
    assert!(event.timestamp.seconds > 1_600_000_000, "{event:?}");
    drop(place);
    // Nothing but the end.
    let mut rest = Vec::new();
    silent_lines.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"");
}

#[test]
fn a_client_that_waits_holds_up_no_other() {
    let place = Place::new();
    let waits = std::thread::scope(|scope| {
        let waits = scope.spawn(|| place.client().execute_raw("wait", None).unwrap());
        let mut client = place.client();
        for number in 0..1000_u64 {
            assert_eq!(client.execute_raw("sum", object(json!({ "number": number }))).unwrap(), number);
        }
        place.sums.gate.wait();
        waits.join().unwrap()
    });
    assert_eq!(waits, json!({}));
}

#[test]
fn a_client_that_does_not_read_holds_up_no_other() {
    let place = Place::new();
    let (mut deaf, _lines) = place.raw();
    deaf.write_all(b"{\"execute\":\"qmp_capabilities\"}").unwrap();
    let mut client = place.client();
    // More than its outbox and its socket's buffer hold.
    let data = object(json!({ "text": "x".repeat(10_000) })).unwrap();
    for number in 0..1000_u64 {
        place.server.emitter().emit("NOISE", data.clone());
        let sum = client.execute_raw("sum", object(json!({ "number": number })));
        assert_eq!(sum.unwrap(), number);
    }
}

#[test]
fn garbage_ends_a_connection_with_an_error() {
    let place = Place::new();
    let long = format!("{{\"execute\":\"{}", "a".repeat(REQUEST_BYTES_MAX));
    let too_long = format!("longer than {REQUEST_BYTES_MAX} bytes");
    for (garbage, wanted) in [("]", "expected a QMP message"), (long.as_str(), too_long.as_str())] {
        let (mut stream, mut lines) = place.raw();
        // It may close before it has read all.
        let _ = stream.write_all(garbage.as_bytes());
        let said = next(&mut lines);
        assert!(said["error"]["desc"].as_str().unwrap().contains(wanted), "{said}");
        assert_eq!(lines.read_line(&mut String::new()).unwrap_or(0), 0);
    }
    assert_eq!(place.client().execute_raw("sum", None).unwrap(), 0);
    assert_eq!(place.sums.asked.load(Ordering::Relaxed), 1);
}

#[test]
fn one_client_too_many_is_refused_and_a_disconnect_frees_its_place() {
    let place = Place::new();
    let mut clients: Vec<_> = (0..CLIENTS_MAX).map(|_| place.raw()).collect();
    let mut turned_away = UnixStream::connect(place.path()).unwrap();
    assert_eq!(turned_away.read(&mut [0; 64]).unwrap_or(0), 0);
    clients.pop();
    let deadline = std::time::Instant::now() + WITHIN;
    let mut greeting = [0; 6];
    while UnixStream::connect(place.path()).unwrap().read_exact(&mut greeting).is_err() {
        assert!(std::time::Instant::now() < deadline, "the place is not free");
    }
    assert_eq!(&greeting, b"{\"QMP\"");
}

#[test]
fn a_server_that_ends_takes_its_file_along() {
    let place = Place::new();
    let (path, _client) = (place.path(), place.client());
    let Place { server, directory, .. } = place;
    drop(server);
    assert!(!path.exists());
    let error = Client::connect(&path, &Options::default()).unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
    drop(directory);
}

/// Signals another thread, which then drops the server.
struct Ends(Mutex<Sender<()>>);

impl Commands for Ends {
    fn names(&self) -> &[&'static str] {
        &["end"]
    }

    fn execute(&self, _: &str, _: &Map<String, Value>) -> Result<Value, CommandError> {
        self.0.lock().unwrap().send(()).unwrap();
        Ok(json!({}))
    }
}

#[test]
fn a_client_that_ends_the_server_receives_its_reply() {
    for _ in 0..50 {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("qmp.sock");
        let (told, tells) = channel();
        let server = Server::start(&path, Arc::new(Ends(Mutex::new(told)))).unwrap();
        let mut client = Client::connect(&path, &Options::default()).unwrap();
        let ends = std::thread::spawn(move || {
            tells.recv().unwrap();
            drop(server);
        });
        assert_eq!(client.execute_raw("end", None).unwrap(), json!({}));
        ends.join().unwrap();
    }
}
