//! Faults that no real QEMU makes on demand, made by a scripted peer.

#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use towline_qmp::codec::{CodecError, MESSAGE_BYTES_MAX};
use towline_qmp::commands::{QueryStatus, RunState};
use towline_qmp::{Client, CommandRequest, DisconnectReason, Error, Options};

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;
const STATUS: &str = r#"{"return": {"status": "running", "running": true}, "id": 2}"#;

fn options() -> Options {
    let short = Duration::from_millis(300);
    Options { deadline: short, greeting_deadline: short, ..Options::default() }
}

/// A peer that runs `script` after the negotiation.
fn peer(script: impl FnOnce(UnixStream, BufReader<UnixStream>) + Send + 'static) -> (Client, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let handle = thread::spawn(move || {
        let mut lines = BufReader::new(theirs.try_clone().unwrap());
        writeln!(theirs, "{GREETING}").unwrap();
        assert_eq!(line(&mut lines), "{\"execute\":\"qmp_capabilities\",\"id\":1}\r\n");
        writeln!(theirs, "{{\"return\": {{}}, \"id\": 1}}").unwrap();
        script(theirs, lines);
    });
    (Client::from_stream(ours, "the peer", &options()).unwrap(), handle)
}

fn line(lines: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    line
}

#[test]
fn a_greeting_may_come_in_pieces() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let handle = thread::spawn(move || {
        for byte in GREETING.bytes() {
            theirs.write_all(&[byte]).unwrap();
            thread::yield_now();
        }
        line(&mut BufReader::new(theirs.try_clone().unwrap()));
        write!(theirs, "{{\"return\": {{}}, \"id\": 1}}").unwrap();
    });
    let client = Client::from_stream(ours, "the peer", &Options::default()).unwrap();
    assert_eq!(client.greeting().capabilities, ["oob"]);
    handle.join().unwrap();
}

/// A QEMU that is being started reads its monitor before it greets.
#[test]
fn commands_are_sent_ahead_of_the_greeting() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let handle = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        let sent: Vec<_> = (0..3).map(|_| line(&mut lines)).collect();
        assert_eq!(sent[0], "{\"execute\":\"qmp_capabilities\",\"id\":1}\r\n");
        assert!(sent[1].contains("query-status") && sent[2].contains("teleport"), "{sent:?}");
        write!(stream, "{GREETING}{{\"return\": {{}}, \"id\": 1}}{STATUS}").unwrap();
        stream.write_all(br#"{"error": {"class": "CommandNotFound", "desc": "no"}, "id": 3}"#).unwrap();
    });
    let requests = [CommandRequest::new(&QueryStatus).unwrap(), CommandRequest::raw("teleport", None)];
    let (mut client, submitted) = Client::connect_ahead(&path, &options(), &requests).unwrap();
    assert_eq!(client.greeting().capabilities, ["oob"]);
    let mut replies = client.replies(submitted).unwrap().into_iter();
    assert_eq!(replies.next().unwrap().of::<QueryStatus>().unwrap().status, RunState::RUNNING);
    assert!(replies.next().unwrap().value().unwrap_err().is_command_not_found());
    handle.join().unwrap();
    let error = client.check_connected().unwrap_err();
    assert!(matches!(error, Error::Disconnected { by: DisconnectReason::PeerClosed, .. }), "{error}");
}

#[test]
fn no_greeting_means_that_another_client_uses_the_monitor() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let error = Client::from_stream(ours, "the peer", &options()).unwrap_err();
    assert!(matches!(&error, Error::NoGreeting { socket, waited } if socket == "the peer"
        && *waited >= Duration::from_millis(300)));
    assert!(error.to_string().contains("another client holds this monitor"), "{error}");
}

/// As QEMU sends them to the next client after the one that it executed them for was killed.
#[test]
fn replies_to_a_former_client_precede_the_greeting() {
    let connect = |replies: usize| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        for _ in 0..replies {
            theirs.write_all(b"{\"return\": {}, \"id\": 6}\r\n").unwrap();
        }
        write!(theirs, "{GREETING}{{\"return\": {{}}, \"id\": 1}}\r\n").unwrap();
        Client::from_stream(ours, "the peer", &options())
    };
    assert_eq!(connect(2).unwrap().greeting().capabilities, ["oob"]);
    let error = connect(100).unwrap_err();
    assert!(error.to_string().contains("is not a QMP socket"), "{error}");
}

#[test]
fn another_protocol_is_named() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
    let error = Client::from_stream(ours, "the peer", &options()).unwrap_err();
    let expected = "the peer is not a QMP socket: expected QEMU's greeting, found \"SSH-2.0-OpenSSH_9.2\\r\\n\"; \
                    use the socket given with -qmp";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn garbage_ends_the_connection() {
    let (mut client, handle) = peer(|mut stream, mut lines| {
        line(&mut lines);
        stream.write_all(b"{\"event\": \"LAST\"}\nSegmentation fault\n").unwrap();
    });
    let garbage = |error: &Error| {
        matches!(error, Error::Disconnected { by: DisconnectReason::InvalidData(CodecError::NotJson { excerpt }), .. }
            if excerpt == "Segmentation fault\\n")
    };
    let error = client.execute(&QueryStatus).unwrap_err();
    assert!(garbage(&error), "{error}");
    // Earlier messages are still there, and nothing comes after them.
    assert_eq!(client.next_event(Duration::ZERO).unwrap().unwrap().name, "LAST");
    assert!(garbage(&client.next_event(Duration::ZERO).unwrap_err()));
    assert!(garbage(&client.execute(&QueryStatus).unwrap_err()));
    handle.join().unwrap();
}

#[test]
fn an_endless_message_ends_the_connection() {
    let (mut client, handle) = peer(|mut stream, mut lines| {
        line(&mut lines);
        stream.write_all(b"{\"return\": \"").unwrap();
        let zeroes = vec![b'0'; 64 << 10];
        for _ in 0..=MESSAGE_BYTES_MAX / zeroes.len() {
            if stream.write_all(&zeroes).is_err() {
                break;
            }
        }
    });
    client.set_deadline(Duration::from_secs(60));
    let error = client.execute(&QueryStatus).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Disconnected { by: DisconnectReason::InvalidData(CodecError::TooLong { .. }), .. }
        ),
        "{error}"
    );
    drop(client);
    handle.join().unwrap();
}

#[test]
fn a_late_reply_is_not_mistaken_for_another() {
    let (mut client, handle) = peer(|mut stream, mut lines| {
        line(&mut lines);
        line(&mut lines);
        writeln!(stream, "{STATUS}").unwrap();
        writeln!(stream, "{}", STATUS.replace("running\", ", "paused\", ").replace("\"id\": 2", "\"id\": 3"))
            .unwrap();
    });
    let error = client.execute(&QueryStatus).unwrap_err();
    assert!(matches!(&error, Error::Timeout { command, socket, .. }
        if command == "query-status" && socket == "the peer"));
    assert_eq!(client.execute(&QueryStatus).unwrap().status, RunState::PAUSED);
    handle.join().unwrap();
}

#[test]
fn an_error_without_an_id_is_the_reply() {
    let (mut client, handle) = peer(|mut stream, mut lines| {
        line(&mut lines);
        stream.write_all(br#"{"error": {"class": "GenericError", "desc": "JSON parse error"}}"#).unwrap();
    });
    let error = client.execute(&QueryStatus).unwrap_err();
    assert_eq!(error.to_string(), "QEMU on the peer refuses query-status: JSON parse error");
    handle.join().unwrap();
}

#[test]
fn late_replies_to_several_commands_are_not_mistaken_for_others() {
    let (mut client, handle) = peer(|mut stream, mut lines| {
        (0..3).for_each(|_| drop(line(&mut lines)));
        // One reply in time, none to the others before the client asks again.
        write!(stream, "{STATUS}").unwrap();
        line(&mut lines);
        for id in 3..5 {
            write!(stream, r#"{{"return": {{"status": "paused", "running": false}}, "id": {id}}}"#).unwrap();
        }
        write!(stream, r#"{{"return": {{"status": "running", "running": true}}, "id": 5}}"#).unwrap();
    });
    let requests = vec![CommandRequest::new(&QueryStatus).unwrap(); 3];
    let error = client.execute_all(&requests).unwrap_err();
    assert!(matches!(&error, Error::Timeout { command, .. } if command == "query-status"), "{error}");
    assert_eq!(client.execute(&QueryStatus).unwrap().status, RunState::RUNNING);
    handle.join().unwrap();
}

#[test]
fn a_monitor_that_closes_between_several_replies_is_an_error() {
    let (mut client, handle) = peer(|mut stream, mut lines| {
        (0..3).for_each(|_| drop(line(&mut lines)));
        write!(stream, "{STATUS}").unwrap();
    });
    let error = client.execute_all(&vec![CommandRequest::new(&QueryStatus).unwrap(); 3]).unwrap_err();
    assert!(matches!(&error, Error::Disconnected { by: DisconnectReason::PeerClosed, .. }), "{error}");
    handle.join().unwrap();
}

#[test]
fn an_unexpected_reply_is_shown() {
    let (mut client, handle) = peer(|mut stream, mut lines| {
        line(&mut lines);
        stream.write_all(br#"{"return": {"status": 7, "running": true}, "id": 2}"#).unwrap();
    });
    let error = client.execute(&QueryStatus).unwrap_err();
    assert!(
        matches!(&error, Error::Shape { command, reason, excerpt, .. } if command == "query-status"
        && reason.contains("integer `7`") && excerpt.contains("status")),
        "{error}"
    );
    handle.join().unwrap();
}

#[test]
fn unread_events_are_bounded_and_the_oldest_goes() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let handle = thread::spawn(move || {
        writeln!(theirs, "{GREETING}").unwrap();
        for number in 0..5 {
            writeln!(theirs, "{{\"event\": \"E{number}\", \"data\": {{}}}}").unwrap();
        }
        line(&mut BufReader::new(theirs.try_clone().unwrap()));
        writeln!(theirs, "{{\"return\": {{}}, \"id\": 1}}").unwrap();
    });
    let options = Options { events_max: 2, ..options() };
    let mut client = Client::from_stream(ours, "the peer", &options).unwrap();
    handle.join().unwrap();
    assert_eq!(client.events_dropped(), 3);
    assert_eq!(client.next_event(Duration::ZERO).unwrap().unwrap().name, "E3");
    assert_eq!(client.next_event(Duration::ZERO).unwrap().unwrap().name, "E4");
    assert!(matches!(
        client.next_event(Duration::ZERO),
        Err(Error::Disconnected { by: DisconnectReason::PeerClosed, .. })
    ));
}

#[test]
fn a_peer_that_does_not_read_cannot_block_the_sender() {
    let (mut client, handle) = peer(|mut stream, _| {
        // Never read, until the client is dropped.
        while stream.write_all(b"\n").is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
    });
    let big = serde_json::Map::from_iter([("text".to_owned(), "x".repeat(4 << 20).into())]);
    let error = client.execute_raw("much", Some(big)).unwrap_err();
    assert!(matches!(&error, Error::Timeout { command, .. } if command == "much"), "{error}");
    let error = client.execute(&QueryStatus).unwrap_err();
    assert!(matches!(&error, Error::Disconnected { by: DisconnectReason::PartialSend, .. }), "{error}");
    drop(client);
    handle.join().unwrap();
}
