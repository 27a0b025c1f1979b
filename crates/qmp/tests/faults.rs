//! Faults that no real QEMU makes on demand, made by a scripted peer.

#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use towline_qmp::codec::{CodecError, MESSAGE_BYTES_MAX};
use towline_qmp::commands::{QueryStatus, RunState};
use towline_qmp::{Client, CommandRequest, DisconnectReason, Error, Options};

const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;
const STATUS: &str = r#"{"return": {"status": "running", "running": true}, "id": 2}"#;

/// Deadline of a reply that does not come.
const SHORT: Duration = Duration::from_millis(300);
/// Deadline of anything that comes, and of waits that are interrupted.
const MINUTE: Duration = Duration::from_secs(60);

fn options() -> Options {
    Options { deadline: MINUTE, greeting_deadline: MINUTE, ..Options::default() }
}

/// Sends messages whose ids count a client's commands from 1.
struct Replies {
    stream: UnixStream,
    first_id: u64,
}

impl Replies {
    /// Greets a client that begins to negotiate, and replies to that.
    fn greet(mut stream: UnixStream, lines: &mut BufReader<UnixStream>) -> Self {
        writeln!(stream, "{GREETING}").unwrap();
        Self::negotiate(stream, lines)
    }

    fn negotiate(stream: UnixStream, lines: &mut BufReader<UnixStream>) -> Self {
        let negotiate: serde_json::Value = serde_json::from_str(&line(lines)).unwrap();
        assert_eq!(negotiate["execute"], "qmp_capabilities");
        let mut replies = Self { stream, first_id: negotiate["id"].as_u64().unwrap() };
        replies.send("{\"return\": {}, \"id\": 1}");
        replies
    }

    fn send(&mut self, messages: &str) {
        let mut parts = messages.split("\"id\": ");
        let mut sent = parts.next().unwrap().to_owned();
        for part in parts {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap();
            let id = self.first_id - 1 + part[..digits].parse::<u64>().unwrap();
            sent.push_str(&format!("\"id\": {id}{}", &part[digits..]));
        }
        self.stream.write_all(sent.as_bytes()).unwrap();
    }
}

/// A peer that runs `script` after the negotiation.
fn peer(script: impl FnOnce(Replies, BufReader<UnixStream>) + Send + 'static) -> (Client, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let handle = thread::spawn(move || {
        let mut lines = BufReader::new(theirs.try_clone().unwrap());
        let replies = Replies::greet(theirs, &mut lines);
        script(replies, lines);
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
        let mut lines = BufReader::new(theirs.try_clone().unwrap());
        Replies::negotiate(theirs, &mut lines);
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

/// A process that was not scheduled for a while finds an event and its reply behind it.
#[test]
fn a_reply_that_has_arrived_is_not_late() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let handle = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        write!(stream, "{GREETING}{{\"return\": {{}}, \"id\": 1}}{{\"event\": \"RESUME\"}}{STATUS}").unwrap();
        stream.write_all(b"{\"event\": \"STOP\"}{\"event\": \"RESET\"}").unwrap();
        stream
    });
    let requests = [CommandRequest::new(&QueryStatus).unwrap()];
    let (mut client, submitted) = Client::connect_ahead(&path, &options(), &requests).unwrap();
    let _stream = handle.join().unwrap();
    client.set_deadline(Duration::ZERO);
    let reply = client.replies(submitted).unwrap().remove(0);
    assert_eq!(reply.of::<QueryStatus>().unwrap().status, RunState::RUNNING);
    assert_eq!(client.wait_event(|event| event.name == "RESET", Duration::ZERO).unwrap().name, "RESET");
    assert_eq!(client.next_event(Duration::ZERO).unwrap().unwrap().name, "RESUME");
    assert_eq!(client.next_event(Duration::ZERO).unwrap().unwrap().name, "STOP");
    assert_eq!(client.next_event(Duration::ZERO).unwrap(), None);
}

#[test]
fn a_peer_that_sends_without_end_does_not_outlast_a_deadline() {
    for text in ["{\"event\": \"STOP\"}", "                "] {
        let (mut client, handle) = peer(move |mut replies, _| {
            let flood = text.repeat(4096);
            while replies.stream.write_all(flood.as_bytes()).is_ok() {}
        });
        let (sender, receiver) = std::sync::mpsc::channel();
        let checking = thread::spawn(move || {
            sender.send(client.check_connected().is_ok()).unwrap();
            assert!(client.next_event(SHORT).is_ok());
            client.set_deadline(SHORT);
            sender.send(matches!(client.execute(&QueryStatus), Err(Error::Timeout { .. }))).unwrap();
        });
        assert!(receiver.recv_timeout(MINUTE).unwrap() && receiver.recv_timeout(MINUTE).unwrap(), "{text}");
        checking.join().unwrap();
        handle.join().unwrap();
    }
}

#[test]
fn no_greeting_means_that_another_client_uses_the_monitor() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let options = Options { greeting_deadline: SHORT, ..options() };
    let error = Client::from_stream(ours, "the peer", &options).unwrap_err();
    assert!(matches!(&error, Error::NoGreeting { socket, waited } if socket == "the peer"
        && *waited >= SHORT));
    assert!(error.to_string().contains("another client holds this monitor"), "{error}");
}

/// A client of a peer that sends `early` before it greets.
fn connect_after(early: &str) -> Result<Client, Error> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(early.as_bytes()).unwrap();
    let handle = thread::spawn(move || {
        let mut lines = BufReader::new(theirs.try_clone().unwrap());
        if writeln!(theirs, "{GREETING}").is_ok() && lines.fill_buf().is_ok_and(|sent| !sent.is_empty()) {
            Replies::negotiate(theirs, &mut lines);
        }
    });
    let connected = Client::from_stream(ours, "the peer", &options());
    handle.join().unwrap();
    connected
}

/// As QEMU sends them to the next client after the one that it executed them for was killed.
#[test]
fn replies_to_a_former_client_precede_the_greeting() {
    for reply in [
        "{\"return\": {}, \"id\": 6}\r\n",
        "{\"return\": {}}",
        "{\"error\": {\"class\": \"X\", \"desc\": \"\"}}",
    ] {
        assert_eq!(connect_after(&reply.repeat(2)).unwrap().greeting().capabilities, ["oob"]);
    }
    let error = connect_after("{\"answer\": 42}").unwrap_err();
    assert!(error.to_string().contains("is not a QMP socket"), "{error}");
}

/// QEMU sends events to a monitor as soon as it has a client, and the greeting from another thread.
#[test]
fn events_before_the_greeting_are_kept() {
    let mut client = connect_after("{\"event\": \"STOP\"}{\"event\": \"RESUME\"}\r\n").unwrap();
    let mut next = || client.next_event(Duration::ZERO).unwrap().unwrap().name;
    assert_eq!([next(), next()], ["STOP", "RESUME"]);
    let error = connect_after(&"{\"event\": \"STOP\"}".repeat(5000)).unwrap_err();
    assert!(matches!(&error, Error::NotQmp { found, .. } if found.contains("1024")), "{error}");
}

/// As QEMU sends it if it executes a command for longer than the client lives that sent it.
#[test]
fn a_reply_to_a_former_client_after_the_greeting_is_not_mistaken_for_ours() {
    let (mut client, handle) = peer(|mut replies, mut lines| {
        line(&mut lines);
        for id in 1..100 {
            let stale =
                format!("{{\"return\": {{\"status\": \"paused\", \"running\": false}}, \"id\": {id}}}");
            replies.stream.write_all(stale.as_bytes()).unwrap();
        }
        replies.send(STATUS);
    });
    assert_eq!(client.execute(&QueryStatus).unwrap().status, RunState::RUNNING);
    handle.join().unwrap();
}

/// Runs `wait`, whose options' interrupt is raised while this thread sleeps in it.
fn interrupted(what: &str, wait: impl FnOnce(&Options) -> Error) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let interrupt = Some(std::sync::Arc::new(reader.into()));
    let options = Options { interrupt, ..options() };
    let stat = std::fs::read_link("/proc/thread-self").unwrap();
    let raiser = thread::spawn(move || {
        let stat = std::path::Path::new("/proc").join(stat).join("stat");
        while !std::fs::read_to_string(&stat).unwrap().contains(") S ") {
            thread::yield_now();
        }
        writer.write_all(b"x").unwrap();
        (Instant::now(), writer)
    });
    let error = wait(&options);
    let returned = Instant::now();
    assert!(matches!(error, Error::Cancelled { .. }), "{what}: {error}");
    let after = returned.saturating_duration_since(raiser.join().unwrap().0);
    assert!(after < MINUTE / 2, "{what}: {after:?}");
}

/// Each wait of a client: for the greeting, the backlog, a reply, an event, and room for a command.
#[test]
fn every_wait_is_interrupted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    interrupted("the greeting", |options| Client::connect(&path, options).unwrap_err());
    rustix::net::listen(&listener, 0).unwrap();
    let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
    let mut queue = Vec::new();
    loop {
        let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM);
        let flags = rustix::net::SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, kind, flags, None).unwrap();
        if rustix::net::connect(&socket, &address).is_err() {
            break;
        }
        queue.push(socket);
    }
    interrupted("the backlog", |options| Client::connect(&path, options).unwrap_err());

    let negotiated = || {
        let (client, handle) = peer(|replies, _| {
            // Reads nothing, until the client is dropped.
            let _ = rustix::event::poll(
                &mut [rustix::event::PollFd::new(&replies.stream, rustix::event::PollFlags::RDHUP)],
                None,
            );
        });
        (client, handle)
    };
    let (mut client, handle) = negotiated();
    interrupted("a reply", |options| {
        client.set_interrupt(options.interrupt.clone());
        client.execute(&QueryStatus).unwrap_err()
    });
    interrupted("an event", |options| {
        client.set_interrupt(options.interrupt.clone());
        client.wait_event(|_| true, MINUTE).unwrap_err()
    });
    interrupted("the next event", |options| {
        client.set_interrupt(options.interrupt.clone());
        client.next_event(MINUTE).unwrap_err()
    });
    client.set_interrupt(None);
    client.set_deadline(Duration::ZERO);
    // More than any socket's buffer holds.
    for _ in 0..5000 {
        client.execute(&QueryStatus).unwrap_err();
    }
    client.set_deadline(MINUTE);
    interrupted("room for a command", |options| {
        client.set_interrupt(options.interrupt.clone());
        client.execute(&QueryStatus).unwrap_err()
    });
    drop(client);
    handle.join().unwrap();
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
    let (mut client, handle) = peer(|mut replies, mut lines| {
        line(&mut lines);
        replies.stream.write_all(b"{\"event\": \"LAST\"}\nSegmentation fault\n").unwrap();
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
    let (mut client, handle) = peer(|mut replies, mut lines| {
        line(&mut lines);
        replies.send("{\"return\": \"");
        let zeroes = vec![b'0'; 64 << 10];
        for _ in 0..=MESSAGE_BYTES_MAX / zeroes.len() {
            if replies.stream.write_all(&zeroes).is_err() {
                break;
            }
        }
    });
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
    let (mut client, handle) = peer(|mut replies, mut lines| {
        line(&mut lines);
        line(&mut lines);
        replies.send(STATUS);
        replies.send(&STATUS.replace("running\", ", "paused\", ").replace("\"id\": 2", "\"id\": 3"));
    });
    client.set_deadline(SHORT);
    let error = client.execute(&QueryStatus).unwrap_err();
    assert!(matches!(&error, Error::Timeout { command, socket, .. }
        if command == "query-status" && socket == "the peer"));
    client.set_deadline(MINUTE);
    assert_eq!(client.execute(&QueryStatus).unwrap().status, RunState::PAUSED);
    handle.join().unwrap();
}

#[test]
fn an_error_without_an_id_is_the_reply() {
    let (mut client, handle) = peer(|mut replies, mut lines| {
        line(&mut lines);
        replies.send(r#"{"error": {"class": "GenericError", "desc": "JSON parse error"}}"#);
    });
    let error = client.execute(&QueryStatus).unwrap_err();
    assert_eq!(error.to_string(), "QEMU on the peer refuses query-status: JSON parse error");
    handle.join().unwrap();
}

#[test]
fn late_replies_to_several_commands_are_not_mistaken_for_others() {
    let (mut client, handle) = peer(|mut replies, mut lines| {
        (0..3).for_each(|_| drop(line(&mut lines)));
        // One reply in time, none to the others before the client asks again.
        replies.send(STATUS);
        line(&mut lines);
        for id in 3..5 {
            replies.send(&format!(r#"{{"return": {{"status": "paused", "running": false}}, "id": {id}}}"#));
        }
        replies.send(r#"{"return": {"status": "running", "running": true}, "id": 5}"#);
    });
    let requests = vec![CommandRequest::new(&QueryStatus).unwrap(); 3];
    client.set_deadline(SHORT);
    let error = client.execute_all(&requests).unwrap_err();
    assert!(matches!(&error, Error::Timeout { command, .. } if command == "query-status"), "{error}");
    client.set_deadline(MINUTE);
    assert_eq!(client.execute(&QueryStatus).unwrap().status, RunState::RUNNING);
    handle.join().unwrap();
}

#[test]
fn a_monitor_that_closes_between_several_replies_is_an_error() {
    let (mut client, handle) = peer(|mut replies, mut lines| {
        (0..3).for_each(|_| drop(line(&mut lines)));
        replies.send(STATUS);
    });
    let error = client.execute_all(&vec![CommandRequest::new(&QueryStatus).unwrap(); 3]).unwrap_err();
    assert!(matches!(&error, Error::Disconnected { by: DisconnectReason::PeerClosed, .. }), "{error}");
    handle.join().unwrap();
}

#[test]
fn an_unexpected_reply_is_shown() {
    let (mut client, handle) = peer(|mut replies, mut lines| {
        line(&mut lines);
        replies.send(r#"{"return": {"status": 7, "running": true}, "id": 2}"#);
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
        let mut lines = BufReader::new(theirs.try_clone().unwrap());
        Replies::negotiate(theirs, &mut lines);
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
    let (mut client, handle) = peer(|mut replies, _| {
        // Never read, until the client is dropped.
        while replies.stream.write_all(b"\n").is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
    });
    client.set_deadline(SHORT);
    let big = serde_json::Map::from_iter([("text".to_owned(), "x".repeat(4 << 20).into())]);
    let error = client.execute_raw("much", Some(big)).unwrap_err();
    assert!(matches!(&error, Error::Timeout { command, .. } if command == "much"), "{error}");
    let error = client.execute(&QueryStatus).unwrap_err();
    assert!(matches!(&error, Error::Disconnected { by: DisconnectReason::PartialSend, .. }), "{error}");
    drop(client);
    handle.join().unwrap();
}
