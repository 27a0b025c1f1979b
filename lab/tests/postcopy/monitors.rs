//! A proxy in front of the source's monitor that ends when it has forwarded `migrate-start-postcopy`: the reply
//! is lost, and with it whether the source switches.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::Value;
use towline_lab::{Qemu, Version, require_lab};

use crate::support::{Scratch, WITHIN, assert_ended, qmp, run, small, waiting};

const SWITCH: &[u8] = b"migrate-start-postcopy";

/// End of the proxy after it has forwarded the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// It accepts no further connection.
    Ends,
    /// It has closed its connection, and accepts another one.
    AcceptsAgain,
}

/// Starts the proxy; returns the name of its endpoint, and whether it has seen the command.
fn start_proxy(source: &Qemu, path: &Path, then: Then) -> (String, Arc<AtomicBool>) {
    let (listener, monitor) = (UnixListener::bind(path).unwrap(), source.qmp_path());
    let (endpoint, path) = (format!("qmp:{}", path.display()), path.to_owned());
    let has_fired = Arc::new(AtomicBool::new(false));
    let fired = Arc::clone(&has_fired);
    thread::spawn(move || accept(&listener, &monitor, path, then, &fired));
    (endpoint, has_fired)
}

fn accept(listener: &UnixListener, monitor: &Path, path: PathBuf, then: Then, fired: &Arc<AtomicBool>) {
    for client in listener.incoming() {
        let client = client.unwrap();
        let Ok(server) = UnixStream::connect(monitor) else { return };
        let (replies, to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let nothing = Arc::new(AtomicBool::new(true));
        let back = thread::spawn(move || forward(replies, to_client, &nothing));
        forward(client, server, fired);
        back.join().unwrap();
        if fired.load(Ordering::Acquire) && then == Then::Ends {
            break;
        }
    }
    std::fs::remove_file(path).unwrap();
}

/// Forwards in one direction until the command has been forwarded, or one end has closed its connection.
fn forward(mut from: UnixStream, mut to: UnixStream, fired: &AtomicBool) {
    let mut buffer = [0; 16 << 10];
    while let Ok(received @ 1..) = from.read(&mut buffer) {
        let bytes = &buffer[..received];
        if to.write_all(bytes).is_err() {
            break;
        }
        let switches = bytes.windows(SWITCH.len()).any(|window| window == SWITCH);
        if switches && !fired.swap(true, Ordering::AcqRel) {
            break;
        }
    }
    for stream in [from, to] {
        // The peer may have closed the connection.
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// Slow enough that the first pass does not complete the migration.
const SLOW: &str = "--postcopy --max-bandwidth 8M --downtime-limit 1";

#[test]
fn a_lost_reply_to_the_switch_does_not_return_the_guest_to_its_source() {
    if !require_lab("a_lost_reply_to_the_switch_does_not_return_the_guest_to_its_source") {
        return;
    }
    let (scratch, builder) = (Scratch::new(), small(Version::V7_2));
    let (source, destination) = (builder.clone().start().unwrap(), waiting(&builder));
    source.wait_counting(WITHIN).unwrap();
    let (endpoint, has_fired) = start_proxy(&source, &scratch.path("a.qmp"), Then::Ends);
    let finished = run(&format!("move {SLOW} {endpoint} {}", qmp(&destination)));
    assert!(has_fired.load(Ordering::Acquire), "{}", finished.stderr);
    assert_ended(
        &finished,
        3,
        &["the guest: it is not known whether its source still has it; ", " at its destination"],
    );
    assert!(!finished.stderr.contains("safe at its source"), "{}", finished.stderr);
    assert!(!finished.stderr.contains("resume it at its source"), "{}", finished.stderr);
    // The source has switched: its guest is the destination's, as soon as the named step is taken.
    source.qmp().wait_migration("completed", WITHIN).unwrap();
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    destination.qmp().wait_migration("completed", WITHIN).unwrap();
    destination.qmp().execute("cont", Value::Null).unwrap();
    destination.qmp().wait_status("running", WITHIN).unwrap();
}

#[test]
fn a_lost_reply_to_the_switch_is_made_up_for_over_another_connection() {
    if !require_lab("a_lost_reply_to_the_switch_is_made_up_for_over_another_connection") {
        return;
    }
    let (scratch, builder) = (Scratch::new(), small(Version::V7_2));
    let (source, destination) = (builder.clone().start().unwrap(), waiting(&builder));
    source.wait_counting(WITHIN).unwrap();
    let (endpoint, has_fired) = start_proxy(&source, &scratch.path("a.qmp"), Then::AcceptsAgain);
    let finished = run(&format!("move {SLOW} {endpoint} {}", qmp(&destination)));
    assert!(has_fired.load(Ordering::Acquire), "{}", finished.stderr);
    assert_ended(&finished, 0, &[]);
    assert!(source.wait_exit(WITHIN).unwrap().success());
    destination.qmp().wait_status("running", WITHIN).unwrap();
}
