//! Ctrl-C, SIGTERM and SIGHUP: the copy ends in order, and the source runs on.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};
use rustix::process::Signal;
use towline_lab::{Towline, require_lab, wait_until};

use crate::support::{
    Fixture, SLOW, WITHIN, assert_ended, assert_runs, assert_safe, assert_waits, counting, guest, listens_at,
    qmp, save, signal, small_guest, wait_soon, wait_stderr, wait_transferred, waiting,
};

/// Sends the signal and expects the exit of a cancelled copy.
#[track_caller]
fn cancel(towline: Towline, by: Signal) {
    let name = match by {
        Signal::INT => "SIGINT",
        Signal::TERM => "SIGTERM",
        _ => "SIGHUP",
    };
    let since = Instant::now();
    signal(towline.pid(), by);
    let finished = wait_soon(towline, since);
    assert_safe(
        &finished,
        &[&format!("towline: {name}: cancelling; the source keeps its guest"), "towline: cancelled"],
    );
}

#[test]
fn a_signal_while_listening_or_connecting_ends_in_order() {
    if !require_lab("a_signal_while_listening_or_connecting_ends_in_order") {
        return;
    }
    let fixture = Fixture::new();
    save(&fixture, guest(), "guest.img");
    let destination = waiting(&guest());
    for by in [Signal::INT, Signal::TERM, Signal::HUP] {
        for to in [fixture.name("new.img"), qmp(&destination)] {
            let socket = fixture.name("listen.sock");
            let mut towline = fixture.towline(&format!("copy unix:{socket} {to}"));
            listens_at(&mut towline);
            cancel(towline, by);
            assert_waits(&destination);
        }
        // A peer that accepts the connection and never sends anything.
        let silent = UnixListener::bind(fixture.path("silent.sock")).unwrap();
        let line = format!("copy {} unix:{}", fixture.name("guest.img"), fixture.name("silent.sock"));
        let towline = fixture.towline(&line);
        let _connection = silent.accept().unwrap();
        cancel(towline, by);
        std::fs::remove_file(fixture.path("silent.sock")).unwrap();
        fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
    }
}

/// A TCP port on which connections are not answered: the queue of its listener is full.
struct FullPort {
    address: SocketAddr,
    _listener: OwnedFd,
    _queued: Vec<TcpStream>,
}

impl FullPort {
    fn new() -> Self {
        let listener = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&listener, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        listen(&listener, 0).unwrap();
        let address: SocketAddr = getsockname(&listener).unwrap().try_into().unwrap();
        let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
        let queued = std::iter::from_fn(connect).collect();
        Self { address, _listener: listener, _queued: queued }
    }
}

/// Nothing was changed in the source's QEMU yet, and where its guest is has to be asked all the same.
#[test]
fn a_signal_while_a_source_waits_for_its_peer_ends_in_order() {
    if !require_lab("a_signal_while_a_source_waits_for_its_peer_ends_in_order") {
        return;
    }
    let (fixture, source, full) = (Fixture::new(), counting(guest()), FullPort::new());
    for by in [Signal::INT, Signal::HUP] {
        let line = format!("copy --json --connect-timeout 60 {} tcp:{}", qmp(&source), full.address);
        let mut towline = fixture.towline(&line);
        wait_until("a connection", WITHIN, || {
            assert!(towline.runs()?, "towline ended: {}", towline.stderr());
            Ok(towline.stdout().contains(r#""phase":"connect""#).then_some(()))
        })
        .unwrap();
        cancel(towline, by);
        assert_runs(&source);
    }
}

#[test]
fn a_signal_under_way_lets_the_source_run_on() {
    if !require_lab("a_signal_under_way_lets_the_source_run_on") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    save(&fixture, guest(), "guest.img");
    for (by, from, to) in [
        (Signal::INT, qmp(&source), None),
        (Signal::TERM, qmp(&source), Some("--multifd-channels 0")),
        (Signal::HUP, qmp(&source), None),
        (Signal::INT, qmp(&source), Some("--multifd-channels 3")),
        (Signal::INT, fixture.name("guest.img"), Some("--stream")),
        (Signal::TERM, fixture.name("guest.img"), Some("--stream --multifd-channels 0")),
    ] {
        let destination = waiting(&guest());
        let to = to.map_or(fixture.name("new.img"), |options| format!("{options} {}", qmp(&destination)));
        let mut towline = fixture.towline(&format!("copy --json {SLOW} {from} {to}"));
        wait_transferred(&mut towline, 1 << 20);
        // Ctrl-Z: a stopped towline would stop the guest, too.
        signal(towline.pid(), Signal::TSTP);
        wait_stderr(&mut towline, "SIGTSTP: ignored");
        cancel(towline, by);
        assert_runs(&source);
        assert_waits(&destination);
        fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
    }
}

/// At any moment of a whole copy: either it is cancelled and leaves no file, or it is complete.
#[test]
fn a_signal_at_any_moment_leaves_an_image_or_nothing() {
    if !require_lab("a_signal_at_any_moment_leaves_an_image_or_nothing") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(small_guest()));
    let line = format!("copy --resume {} {}", qmp(&source), fixture.name("guest.img"));
    let remove = || {
        fixture.assert_holds(&["guest.img", "guest.img.manifest.json"]);
        std::fs::remove_file(fixture.path("guest.img")).unwrap();
        std::fs::remove_file(fixture.path("guest.img.manifest.json")).unwrap();
    };
    let begun = Instant::now();
    assert_ended(&fixture.run(&line), 0, &[]);
    let took = begun.elapsed();
    remove();
    for step in 1..=12 {
        let mut towline = fixture.towline(&line);
        std::thread::sleep(took * step / 12);
        if towline.runs().unwrap() {
            signal(towline.pid(), Signal::INT);
        }
        let finished = towline.wait(WITHIN).unwrap();
        match (finished.status.code(), finished.status.signal()) {
            (Some(0), _) => remove(),
            // The signal came before towline had installed its handler.
            (_, Some(2)) => fixture.assert_holds(&[]),
            _ => {
                assert_safe(&finished, &["towline: cancelled"]);
                fixture.assert_holds(&[]);
            }
        }
        assert_runs(&source);
    }
}

/// `nohup` and service managers start programs with SIGHUP ignored, which must stay so.
#[test]
fn an_ignored_hang_up_stays_ignored() {
    if !require_lab("an_ignored_hang_up_stays_ignored") {
        return;
    }
    let fixture = Fixture::new();
    let mut towline = fixture.start(&["nohup"], &format!("copy unix:{} null:", fixture.name("listen.sock")));
    listens_at(&mut towline);
    signal(towline.pid(), Signal::HUP);
    let status = std::fs::read_to_string(format!("/proc/{}/status", towline.pid())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() & 1, 1, "SIGHUP is the first");
    cancel(towline, Signal::TERM);
}

/// QEMU hangs, so the orderly end takes a while; a second SIGINT or SIGTERM ends towline at once.
#[test]
fn a_second_signal_ends_at_once() {
    if !require_lab("a_second_signal_ends_at_once") {
        return;
    }
    let (fixture, source) = (Fixture::new(), counting(guest()));
    let mut towline =
        fixture.towline(&format!("copy --json {SLOW} {} {}", qmp(&source), fixture.name("guest.img")));
    wait_transferred(&mut towline, 1 << 20);
    signal(source.pid(), Signal::STOP);
    signal(towline.pid(), Signal::INT);
    wait_stderr(&mut towline, "; a second SIGINT or SIGTERM ends towline at once");
    std::thread::sleep(Duration::from_millis(300));
    assert!(towline.runs().unwrap(), "it waits for QEMU: {}", towline.stderr());
    let since = Instant::now();
    signal(towline.pid(), Signal::INT);
    let finished = wait_soon(towline, since);
    assert_eq!(finished.status.signal(), Some(2), "{}", finished.status);
    signal(source.pid(), Signal::CONT);
    source.qmp().wait_migration("failed", WITHIN).unwrap();
    assert_runs(&source);
}

/// Time limit of towline to end, from the signal on, on a busy machine: a fifth of the time for which a monitor is waited for.
const HEARD_WITHIN: Duration = Duration::from_secs(2);

/// Starts towline so that it and this thread do not wait for a processor behind other tests, as they have a time limit.
fn start_first(fixture: &Fixture, environment: &[&str], line: &str) -> Towline {
    rustix::process::nice(-20).unwrap();
    fixture.start(&[environment, &["nice", "-n", "-20"]].concat(), line)
}

#[track_caller]
fn assert_heard(what: &str, towline: Towline) {
    let since = Instant::now();
    signal(towline.pid(), Signal::INT);
    let finished = towline.wait(WITHIN).unwrap();
    let after = since.elapsed();
    println!("{what}: ended {after:?} after the signal");
    assert_ended(&finished, 1, &["towline: SIGINT: cancelling", "cancelled"]);
    assert!(after <= HEARD_WITHIN, "{what}: {after:?}");
}

/// The monitor of a QEMU that is held by another client, or hangs after its greeting.
#[test]
fn a_wait_for_a_monitor_is_interrupted() {
    const GREETING: &[u8] = b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";
    let fixture = Fixture::in_memory();
    let silent = fixture.path("silent.sock");
    // A new socket for each command: a connection of an earlier one may still be queued at the old socket.
    let listen = || {
        let _ = std::fs::remove_file(&silent);
        UnixListener::bind(&silent).unwrap()
    };
    let monitor = format!("qmp:{}", fixture.name("silent.sock"));
    // So the command does not wait for it; a source is connected to first.
    let _other = UnixListener::bind(fixture.path("other.sock")).unwrap();
    let image = fixture.name("new.img");
    for line in [
        format!("copy {monitor} {image}"),
        format!("copy tcp:127.0.0.1:0 {monitor}"),
        format!("move --postcopy {monitor} qmp:{}", fixture.name("other.sock")),
        format!("upgrade {monitor}"),
    ] {
        let listener = listen();
        let towline = start_first(&fixture, &[], &line);
        let held = listener.accept().unwrap();
        assert_heard(&format!("a greeting, {line}"), towline);
        drop(held);

        let listener = listen();
        let towline = start_first(&fixture, &[], &line);
        let mut hanging = listener.accept().unwrap().0;
        // The first one may only ask who listens, and ends.
        while hanging.write_all(GREETING).and_then(|()| hanging.read_exact(&mut [0])).is_err() {
            hanging = listener.accept().unwrap().0;
        }
        assert_heard(&format!("a reply, {line}"), towline);
    }
    fixture.assert_holds(&["other.sock", "silent.sock"]);
}

/// Peers and stores that take a connection, or not even that, and are silent.
#[test]
fn a_wait_for_a_peer_is_interrupted() {
    let fixture = Fixture::in_memory();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let image = fixture.name("new.img");
    let mut towline = start_first(&fixture, &[], &format!("copy tcp:127.0.0.1:0 {image}"));
    listens_at(&mut towline);
    assert_heard("a source that connects", towline);

    let store = [format!("AWS_ENDPOINT_URL=http://127.0.0.1:{port}")];
    let fixed = ["AWS_ALLOW_HTTP=true", "AWS_ACCESS_KEY_ID=a", "AWS_SECRET_ACCESS_KEY=b"];
    let store: Vec<&str> = store.iter().map(String::as_str).chain(fixed).collect();
    for (environment, line) in [
        (&[][..], format!("copy --multifd-channels 0 mem:1M tcp:127.0.0.1:{port}")),
        (&[][..], format!("copy --multifd-channels 0 mem:1M ws://127.0.0.1:{port}")),
        (&store, format!("copy s3://guests/a.img {image}")),
        (&store, "copy mem:1M s3://guests/a.img".to_owned()),
    ] {
        let towline = start_first(&fixture, environment, &line);
        let (mut silent, _) = listener.accept().unwrap();
        // It has sent something, and waits for the answer.
        silent.read_exact(&mut [0]).unwrap();
        assert_heard(&format!("an answer, {line}"), towline);
    }

    // A host that drops what it is sent: here, the queue of a listener that accepts nothing.
    rustix::net::listen(&listener, 0).unwrap();
    let full = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let line = format!("copy --multifd-channels 0 mem:1M tcp:127.0.0.1:{port}");
    let towline = start_first(&fixture, &[], &line);
    wait_until("a connection that is being made", WITHIN, || {
        let connections = std::fs::read_to_string("/proc/net/tcp")?;
        // In state SYN_SENT.
        let to = format!(":{port:04X} 02 ");
        Ok(connections.contains(&to).then_some(()))
    })
    .unwrap();
    assert_heard("a connection", towline);
    drop(full);
    fixture.assert_holds(&[]);
}
