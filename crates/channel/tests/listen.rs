//! Reaching each other: listeners, their files, deadlines and cancelling.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{cancel, recv_exact, send_all, soon, spawn_asleep, through, unix_address};
use rustix::io::Errno;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_channel::{Address, Cancel, Channel, ConnectOptions, Error, Listener, connect, connect_with};

fn in_a_moment() -> Instant {
    Instant::now() + Duration::from_millis(50)
}

fn bind(text: &str) -> Listener {
    Listener::bind(&text.parse().unwrap()).unwrap()
}

fn port(listener: &Listener) -> u16 {
    match listener.local_address() {
        Address::Tcp { port, .. } => *port,
        other => panic!("{other}"),
    }
}

fn assert_talk(near: &dyn Channel, far: &dyn Channel) {
    send_all(near, b"ping").unwrap();
    assert_eq!(recv_exact(far, 4).unwrap(), b"ping");
}

#[test]
fn tcp_reports_the_chosen_port_and_names_its_peers() {
    let listener = bind("tcp:127.0.0.1:0");
    assert_ne!(port(&listener), 0);
    let (near, far) = through(&listener);
    assert_eq!(near.peer(), listener.local_address().to_string());
    assert!(far.peer().starts_with("tcp:127.0.0.1:"), "{}", far.peer());
    assert_talk(&*near, &*far);
}

#[test]
fn tcp_without_a_host_and_by_name() {
    let listener = bind("tcp::0");
    for host in ["", "0", "127.0.0.1", "localhost"] {
        let address = Address::Tcp { host: host.into(), port: port(&listener) };
        let near = connect(&address, soon(), &cancel()).unwrap();
        let far = listener.accept(soon(), &cancel()).unwrap();
        assert_talk(&*near, &*far);
    }
    // There is no listener at the first address of this machine's names: the next one is tried.
    let only_ipv4 = bind("tcp:127.0.0.1:0");
    let address = Address::Tcp { host: String::new(), port: port(&only_ipv4) };
    connect(&address, soon(), &cancel()).unwrap();
}

#[test]
fn a_refused_connection_is_retried_only_on_request() {
    let address = bind("tcp:127.0.0.1:0").local_address().clone();
    let error = connect(&address, soon(), &cancel()).unwrap_err();
    assert!(
        matches!(&error, Error::Io { op: "connect", peer, .. } if *peer == address.to_string()),
        "{error:?}"
    );
    assert_eq!(error.raw_os_error(), Some(Errno::CONNREFUSED.raw_os_error()));
    let retry = ConnectOptions { retry: true, ..Default::default() };
    let error = connect_with(&address, in_a_moment(), &cancel(), &retry).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::CONNREFUSED.raw_os_error()), "that of the last attempt");

    let directory = TempDir::new().unwrap();
    let address = unix_address(directory.path());
    let error = connect(&address, soon(), &cancel()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::NOENT.raw_os_error()));
    std::thread::scope(|scope| {
        let near = spawn_asleep(scope, || connect_with(&address, soon(), &cancel(), &retry));
        let listener = Listener::bind(&address).unwrap();
        let far = listener.accept(soon(), &cancel()).unwrap();
        assert_talk(&*near.join().unwrap().unwrap(), &*far);
    });
}

#[test]
fn accept_and_connect_meet_their_deadline() {
    let listener = bind("tcp:127.0.0.1:0");
    let error = listener.accept(in_a_moment(), &cancel()).unwrap_err();
    assert!(matches!(error, Error::Timeout { op: "accept", .. }), "{error:?}");
    let (address, _full) = full_tcp();
    let error = connect(&address, in_a_moment(), &cancel()).unwrap_err();
    assert!(matches!(error, Error::Timeout { op: "connect", .. }), "{error:?}");
    let directory = TempDir::new().unwrap();
    let (address, _full) = full_unix(&directory);
    let error = connect(&address, in_a_moment(), &cancel()).unwrap_err();
    assert!(matches!(error, Error::Timeout { op: "connect", .. }), "{error:?}");
}

#[test]
fn cancelling_wakes_accept_and_connect() {
    let listener = bind("tcp:127.0.0.1:0");
    let directory = TempDir::new().unwrap();
    let unix_listener = Listener::bind(&unix_address(directory.path())).unwrap();
    let (tcp, _full_tcp) = full_tcp();
    let other = TempDir::new().unwrap();
    let (unix, _full_unix) = full_unix(&other);
    let refused = bind("tcp:127.0.0.1:0").local_address().clone();
    let token = cancel();
    std::thread::scope(|scope| {
        let waiting = [
            spawn_asleep(scope, || listener.accept(soon(), &token)),
            spawn_asleep(scope, || unix_listener.accept(soon(), &token)),
            spawn_asleep(scope, || connect(&tcp, soon(), &token)),
            spawn_asleep(scope, || connect(&unix, soon(), &token)),
            spawn_asleep(scope, || {
                connect_with(&refused, soon(), &token, &ConnectOptions { retry: true, ..Default::default() })
            }),
        ];
        token.clone().cancel();
        for thread in waiting {
            let result = thread.join().unwrap();
            assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
        }
    });
    assert!(token.is_cancelled());
    assert!(matches!(listener.accept(soon(), &token), Err(Error::Cancelled)), "once and for all");
    assert!(matches!(token.check(), Err(Error::Cancelled)));
}

#[test]
fn several_threads_accept_from_one_listener() {
    let listener = bind("tcp:127.0.0.1:0");
    std::thread::scope(|scope| {
        let accepting: Vec<_> =
            (0..4).map(|_| spawn_asleep(scope, || listener.accept(soon(), &cancel()))).collect();
        let near: Vec<_> =
            (0..4).map(|_| connect(listener.local_address(), soon(), &cancel()).unwrap()).collect();
        for thread in accepting {
            thread.join().unwrap().unwrap();
        }
        drop(near);
    });
}

#[test]
fn a_stale_socket_file_is_replaced_and_ours_is_removed() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = Listener::bind(&Address::Unix(path.clone())).unwrap();
    let (near, far) = through(&listener);
    assert_eq!(near.peer(), format!("unix:{}", path.display()));
    assert_talk(&*near, &*far);
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn a_socket_file_in_use_is_not_replaced() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("s");
    let address = Address::Unix(path.clone());
    let first = Listener::bind(&address).unwrap();
    let in_use = |expected: &str| match Listener::bind(&address) {
        Err(Error::InUse { path: found, by }) => assert_eq!((found, by), (path.clone(), expected)),
        other => panic!("{other:?}"),
    };
    in_use("a listening process");
    first.accept(soon(), &cancel()).expect("the probe for a listener is a connection too");
    assert_talk(&*connect(&address, soon(), &cancel()).unwrap(), &*first.accept(soon(), &cancel()).unwrap());
    drop(first);
    std::fs::write(&path, "precious").unwrap();
    in_use("a file that is not a socket");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn the_socket_file_of_another_process_is_not_removed() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("s");
    let ours = Listener::bind(&Address::Unix(path.clone())).unwrap();
    std::fs::remove_file(&path).unwrap();
    let _theirs = UnixListener::bind(&path).unwrap();
    drop(ours);
    UnixStream::connect(&path).unwrap();
}

#[test]
fn of_many_processes_that_replace_a_stale_socket_one_wins() {
    const RACERS: usize = 8;
    for _ in 0..20 {
        let directory = TempDir::new().unwrap();
        let address = unix_address(directory.path());
        drop(UnixListener::bind(directory.path().join("s")).unwrap());
        let (start, winners) = (Barrier::new(RACERS), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..RACERS {
                scope.spawn(|| {
                    start.wait();
                    match Listener::bind(&address) {
                        Ok(listener) => winners.lock().unwrap().push(listener),
                        Err(Error::InUse { by: "a listening process", .. }) => {}
                        Err(other) => panic!("{other:?}"),
                    }
                });
            }
        });
        let winners = winners.into_inner().unwrap();
        assert_eq!(winners.len(), 1);
        connect(&address, soon(), &cancel()).expect("the winner's file is the one that is there");
    }
}

#[test]
fn a_path_that_fits_no_socket_is_refused() {
    let address = Address::Unix("/tmp/".to_owned().repeat(30).into());
    assert!(matches!(connect(&address, soon(), &cancel()), Err(Error::BadAddress { .. })));
    assert!(matches!(Listener::bind(&address), Err(Error::BadAddress { .. })));
}

/// A TCP listener whose queue is full, so connecting takes forever, and what fills it.
fn full_tcp() -> (Address, impl Sized) {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};
    let listener = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&listener, &std::net::SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    listen(&listener, 0).unwrap();
    let local = std::net::SocketAddr::try_from(getsockname(&listener).unwrap()).unwrap();
    let address: Address = format!("tcp:{local}").parse().unwrap();
    let fillers = fill(&address);
    (address, (listener, fillers))
}

#[test]
fn a_directory_that_another_process_has_locked_for_seconds_is_waited_for() {
    let directory = TempDir::new().unwrap();
    let lock = std::fs::File::open(directory.path()).unwrap();
    lock.lock().unwrap();
    std::thread::scope(|scope| {
        let listener = scope.spawn(|| Listener::bind(&unix_address(directory.path())));
        std::thread::sleep(Duration::from_millis(1200));
        drop(lock);
        listener.join().unwrap().unwrap();
    });
}

/// As [`full_tcp`].
fn full_unix(directory: &TempDir) -> (Address, impl Sized) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(directory.path().join("s")).unwrap()).unwrap();
    listen(&listener, 0).unwrap();
    let address = unix_address(directory.path());
    let fillers = fill(&address);
    (address, (listener, fillers))
}

fn fill(address: &Address) -> Vec<Box<dyn Channel>> {
    let never: Cancel = cancel();
    std::iter::from_fn(|| connect(address, in_a_moment(), &never).ok()).take(100).collect()
}
