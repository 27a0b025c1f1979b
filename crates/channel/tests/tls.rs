//! TLS between our own two ends: both directions at once, ends, cuts, and every reason to refuse. With
//! others' ends it is tried in the lab.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{cancel, pattern, recv_exact, recv_to_end, send_all, soon, spawn_asleep, tcp, tls_over};
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_channel::fault::{Cut, Direction, FlipReceived};
use towline_channel::{
    Address, Channel, ConnectOptions, Error, IoBuf, IoBufMut, ListenOptions, Listener, OneTimeKey, RecvFlags,
    SendFlags, TlsChannel, TlsClient, TlsServer, connect_with,
};
use towline_lab::certificates::{Authority, Holder};

fn pair() -> (TlsChannel, TlsChannel) {
    let (client, server) = tls_over(tcp());
    (client.unwrap(), server.unwrap())
}

#[test]
fn one_thread_receives_while_another_sends() {
    let (client, server) = pair();
    let data = pattern(8 << 20);
    std::thread::scope(|scope| {
        for channel in [&client, &server] {
            scope.spawn(|| send_all(channel, &data).unwrap());
            scope.spawn(|| assert!(recv_exact(channel, data.len()).unwrap() == data));
        }
    });
}

/// A receiver that waits does not keep a sender of the same end from sending, nor the other way round.
#[test]
fn a_direction_that_waits_holds_up_no_other() {
    let (client, server) = pair();
    std::thread::scope(|scope| {
        let receiver = spawn_asleep(scope, || recv_exact(&client, 1));
        send_all(&client, b"abc").unwrap();
        assert_eq!(recv_exact(&server, 3).unwrap(), b"abc");
        let sender = spawn_asleep(scope, || send_all(&server, &pattern(32 << 20)));
        send_all(&client, b"def").unwrap();
        assert_eq!(recv_exact(&server, 3).unwrap(), b"def");
        assert_eq!(receiver.join().unwrap().unwrap(), [0]);
        assert_eq!(recv_exact(&client, (32 << 20) - 1).unwrap().len(), (32 << 20) - 1);
        sender.join().unwrap().unwrap();
    });
}

/// A bit that is changed on the way changes the same bit of the decrypted byte.
#[test]
fn memory_is_written_before_it_is_authenticated_only_with_permission() {
    // None is zero, as untouched memory is, also when changed.
    let data: Vec<u8> = pattern(1 << 20).into_iter().map(|byte| byte | 1).collect();
    for flags in [RecvFlags::empty(), RecvFlags::UNAUTHENTICATED] {
        let (near, far) = tcp();
        // In the middle of a record: the handshake before them has less than 14,000 bytes.
        let at = 18 * (16_384 + 22) + 14_700;
        let (client, server) = tls_over((near, Box::new(FlipReceived::new(far, at, 0x40))));
        let (client, server) = (client.unwrap(), server.unwrap());
        let mut memory = vec![0; data.len()];
        let error = std::thread::scope(|scope| {
            scope.spawn(|| send_all(&client, &data));
            let (mut rest, mut received) = (&mut memory[..], 0);
            let error = loop {
                match server.recv(&mut [IoBufMut::from(&mut *rest)], flags) {
                    Ok(count) => {
                        assert!(rest[..count] == data[received..received + count], "authenticated");
                        received += count;
                        rest = &mut rest[count..];
                    }
                    Err(error) => break error,
                }
            };
            server.shutdown(Shutdown::Both).unwrap();
            error
        });
        assert!(
            error.to_string().contains("a TLS record from it was damaged or forged on the way"),
            "{error}"
        );
        let changed = memory.iter().zip(&data).filter(|(found, sent)| *found ^ *sent == 0x40 && **found != 0);
        assert_eq!(changed.count(), usize::from(flags == RecvFlags::UNAUTHENTICATED));
    }
}

#[test]
fn dropping_a_channel_signals_eof_and_losing_it_does_not() {
    let (client, server) = pair();
    send_all(&client, b"all").unwrap();
    drop(client);
    assert_eq!(recv_to_end(&server).unwrap(), b"all");

    let (near, far) = tcp();
    let number = near.as_fd().unwrap().try_clone_to_owned().unwrap();
    let (client, server) = tls_over((near, far));
    let (client, server) = (client.unwrap(), server.unwrap());
    send_all(&client, b"some").unwrap();
    // Without TLS, as a process that is killed would.
    rustix::net::shutdown(&number, rustix::net::Shutdown::Both).unwrap();
    assert_eq!(recv_exact(&server, 4).unwrap(), b"some");
    let cut = recv_exact(&server, 1).unwrap_err();
    assert!(matches!(cut, Error::Cut { .. }), "{cut:?}");
    let again = recv_exact(&server, 1).unwrap_err();
    assert!(matches!(again, Error::Cut { .. }), "{again:?}");
}

/// Data received ahead is returned although the descriptor is not readable.
#[test]
fn data_received_ahead_is_reported_by_has_buffered() {
    let (client, server) = pair();
    assert!(!server.has_buffered());
    send_all(&client, b"QEVM and more").unwrap();
    let mut magic = [0; 4];
    server.recv(&mut [IoBufMut::from(&mut magic)], RecvFlags::PEEK).unwrap();
    assert_eq!(&magic, b"QEVM");
    assert!(server.has_buffered());
    assert_eq!(recv_exact(&server, 13).unwrap(), b"QEVM and more");
    assert!(!server.has_buffered());
}

/// A byte a record: a peek at four bytes is a peek into four records.
#[test]
fn a_peek_sees_over_the_seams_of_records() {
    let (client, server) = pair();
    for byte in b"abcdef" {
        send_all(&client, &[*byte]).unwrap();
    }
    client.shutdown(Shutdown::Write).unwrap();
    let mut seen = [0; 6];
    common::wait_for("six records", || {
        server.recv(&mut [IoBufMut::from(&mut seen)], RecvFlags::PEEK).unwrap() == 6
    });
    assert_eq!(&seen, b"abcdef");
    assert_eq!(recv_to_end(&server).unwrap(), b"abcdef");
}

#[test]
fn a_timeout_in_the_middle_loses_nothing() {
    let (client, server) = pair();
    let limit = Some(Duration::from_millis(20));
    client.set_timeouts(limit, limit).unwrap();
    let data = pattern(1 << 16);
    let mut sent = Vec::new();
    let full = loop {
        match client.send(&[IoBuf::from(&data[..])], SendFlags::empty()) {
            Ok(taken) => sent.extend_from_slice(&data[..taken]),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, Error::Timeout { .. }), "{full:?}");
    client.set_timeouts(None, None).unwrap();
    std::thread::scope(|scope| {
        let received = scope.spawn(|| recv_to_end(&server).unwrap());
        send_all(&client, b"the end").unwrap();
        sent.extend_from_slice(b"the end");
        client.shutdown(Shutdown::Write).unwrap();
        assert!(received.join().unwrap() == sent);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Cut at any byte, on either side: a prefix of the data comes and then an error, and never the end of a
    /// stream that is whole.
    #[test]
    fn a_cut_at_any_byte_is_an_error(after in 0..60_000_u64, server_sends: bool) {
        let (near, far) = tcp();
        let cut = |inner| -> Box<dyn Channel> { Box::new(Cut::new(inner, after, Direction::Send)) };
        let ends = if server_sends { (near, cut(far)) } else { (cut(near), far) };
        let data = pattern(60_000);
        let (client, server) = tls_over(ends);
        // Cut in the handshake, or right after it.
        if let (Ok(client), Ok(server)) = (client, server) {
            let (tx, rx) = if server_sends { (server, client) } else { (client, server) };
            std::thread::scope(|scope| {
                scope.spawn(|| send_all(&tx, &data).unwrap_err());
                let mut received = Vec::new();
                let error = loop {
                    let mut bytes = [0; 5000];
                    match rx.recv(&mut [IoBufMut::from(&mut bytes)], RecvFlags::empty()) {
                        Ok(0) => panic!("the end of a stream that was cut at {after}"),
                        Ok(n) => received.extend_from_slice(&bytes[..n]),
                        Err(error) => break error,
                    }
                };
                assert!(data.starts_with(&received));
                assert!(matches!(error, Error::Cut { .. } | Error::Tls { .. } | Error::Io { .. }), "{error:?}");
            });
        }
    }
}

/// A client and its accepted connection, after failed ones.
fn meet_at(listener: &Listener, options: &ConnectOptions) -> (Box<dyn Channel>, Box<dyn Channel>) {
    std::thread::scope(|scope| {
        let far = scope.spawn(|| {
            loop {
                match listener.accept(soon(), &cancel()) {
                    Err(Error::Tls { .. }) => {}
                    far => return far.unwrap(),
                }
            }
        });
        let near = connect_with(listener.local_address(), soon(), &cancel(), options).unwrap();
        (near, far.join().unwrap())
    })
}

/// Directories for the two ends, to be spoiled.
struct Directories {
    authority: Authority,
    near: TempDir,
    far: TempDir,
}

impl Directories {
    fn new() -> Self {
        let authority = Authority::new("the test's CA").unwrap();
        let (near, far) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        authority.furnish(near.path()).unwrap();
        authority.furnish(far.path()).unwrap();
        Self { authority, near, far }
    }

    /// Connects with TLS; returns the result at each end.
    fn meet(&self, hostname: Option<&str>) -> (String, String) {
        let client = TlsClient::load(self.near.path(), hostname).unwrap();
        meet(client, TlsServer::load(self.far.path()).unwrap())
    }

    #[track_caller]
    fn refuse(&self, hostname: Option<&str>, near: &str, far: &str) {
        let said = self.meet(hostname);
        let place = |text: &str| {
            let (near, far) = (self.near.path().display().to_string(), self.far.path().display().to_string());
            text.replace("NEAR", &near).replace("FAR", &far)
        };
        assert!(said.0.contains(&place(near)), "near: {}", said.0);
        assert!(said.1.contains(&place(far)), "far: {}", said.1);
    }
}

/// Connects with TLS; returns the result at each end.
fn meet(client: TlsClient, server: TlsServer) -> (String, String) {
    let options = ListenOptions { tls: Some(server), ..Default::default() };
    let listener = Listener::bind_with(&"tcp:127.0.0.1:0".parse().unwrap(), &options).unwrap();
    let (deadline, cancel) = (soon(), cancel());
    let begun = Instant::now();
    let said = std::thread::scope(|scope| {
        let far = scope.spawn(|| {
            let channel = listener.accept(deadline, &cancel)?;
            recv_exact(channel.as_ref(), 2)?;
            send_all(channel.as_ref(), b"!")
        });
        let options = ConnectOptions { tls: Some(client), ..Default::default() };
        let near = connect_with(listener.local_address(), deadline, &cancel, &options);
        // A client of TLS 1.3 has completed the handshake before the server has verified its certificate.
        let near = near.and_then(|channel| {
            send_all(channel.as_ref(), b"hi")?;
            recv_exact(channel.as_ref(), 1)
        });
        let text = |error: Option<Error>| error.map(|error| error.to_string()).unwrap_or_default();
        (text(near.err()), text(far.join().unwrap().err()))
    });
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    said
}

fn write(directory: &Path, name: &str, content: &str) {
    std::fs::write(directory.join(name), content).unwrap();
}

#[test]
fn an_untrusted_peer_is_refused_with_the_reason_at_both_ends() {
    let good = Directories::new();
    assert_eq!(good.meet(Some("localhost")), (String::new(), String::new()));
    let other = Authority::new("another CA").unwrap();

    let d = Directories::new();
    other.write(d.near.path()).unwrap();
    d.refuse(
        None,
        "its server certificate is not signed by the CA of NEAR/ca-cert.pem",
        "it does not know the CA that signed FAR/server-cert.pem: both ends need the same ca-cert.pem",
    );

    let d = Directories::new();
    other.write(d.far.path()).unwrap();
    d.refuse(
        None,
        "it does not know the CA that signed this side's certificate",
        "its client certificate is not signed by the CA of FAR/ca-cert.pem",
    );

    let d = Directories::new();
    d.authority.issue(d.far.path(), Holder { until: 2011, ..Holder::SERVER }).unwrap();
    d.refuse(None, "its server certificate has expired", "it says that FAR/server-cert.pem has expired");

    let d = Directories::new();
    d.authority.issue(d.near.path(), Holder { until: 2011, ..Holder::CLIENT }).unwrap();
    d.refuse(None, "this side's certificate has expired", "its client certificate has expired");

    let name = "its certificate is for localhost, 127.0.0.1, not for \"other.lab\": name the host that it is for (--tls-hostname)";
    Directories::new().refuse(Some("other.lab"), name, "it does not accept FAR/server-cert.pem");

    let d = Directories::new();
    d.authority.revoke(d.far.path(), Holder::CLIENT.serial).unwrap();
    d.refuse(
        None,
        "this side's certificate is revoked",
        "its client certificate is revoked by FAR/ca-crl.pem",
    );

    let d = Directories::new();
    for name in ["client-cert.pem", "client-key.pem"] {
        std::fs::remove_file(d.near.path().join(name)).unwrap();
    }
    d.refuse(
        None,
        "it wants a client certificate",
        "it sent no client certificate, and every client needs one",
    );
}

#[test]
fn invalid_files_are_named() {
    let load = |spoil: &dyn Fn(&Path)| {
        let d = Directories::new();
        spoil(d.far.path());
        let (server, client) = (TlsServer::load(d.far.path()), TlsClient::load(d.far.path(), None));
        let text = |error: Option<Error>| {
            let text = error.map(|error| error.to_string()).unwrap_or_default();
            text.replace(d.far.path().to_str().unwrap(), "DIR")
        };
        (text(server.err()), text(client.err()))
    };
    let remove = |name: &'static str| move |at: &Path| std::fs::remove_file(at.join(name)).unwrap();
    let (server, client) = load(&remove("ca-cert.pem"));
    assert_eq!(server, "TLS credentials, DIR/ca-cert.pem: No such file or directory (os error 2)");
    assert_eq!(client, server);
    assert!(load(&remove("server-key.pem")).0.starts_with("TLS credentials, DIR/server-key.pem: No such"));
    assert!(load(&remove("client-cert.pem")).1.starts_with("TLS credentials, DIR/client-cert.pem: No such"));
    let empty = |name: &'static str| move |at: &Path| write(at, name, "nothing");
    let text = "TLS credentials, DIR/ca-cert.pem: there is no certificate in it";
    assert_eq!(load(&empty("ca-cert.pem")).0, text);
    let text = "TLS credentials, DIR/server-key.pem: there is no private key in it";
    assert!(load(&empty("server-key.pem")).0.starts_with(text));
    let swapped = |at: &Path| {
        std::fs::copy(at.join("client-key.pem"), at.join("server-key.pem")).unwrap();
    };
    let text = "TLS credentials, DIR/server-cert.pem: server-key.pem is not the key of it";
    assert_eq!(load(&swapped).0, text);
}

#[test]
fn one_time_keys_admit_each_other_alone() {
    let [here, there, stranger] = [(); 3].map(|()| OneTimeKey::generate().unwrap());
    let certificate = |key: &OneTimeKey| key.certificate().to_vec();
    let (of_here, of_there) = (certificate(&here), certificate(&there));
    assert!(!format!("{here:?}").contains("Pkcs8"), "{here:?}");
    let (here, there) = (here.with_peer(of_there.clone()), there.with_peer(of_here));
    let server = || TlsServer::one_time(&there).unwrap();
    assert_eq!(meet(TlsClient::one_time(&here).unwrap(), server()), (String::new(), String::new()));
    let stranger = stranger.with_peer(of_there);
    let (near, far) = meet(TlsClient::one_time(&stranger).unwrap(), server());
    assert!(near.contains("it ended TLS with the alert DecryptError"), "{near}");
    assert!(far.contains("it is not the other end of this copy"), "{far}");
    let (near, _) = meet(TlsClient::one_time(&here).unwrap(), TlsServer::one_time(&stranger).unwrap());
    assert!(near.contains("it is not the other end of this copy"), "{near}");
    let wrong = OneTimeKey::generate().unwrap().with_peer(vec![0; 9]);
    assert!(matches!(TlsServer::one_time(&wrong), Err(Error::TlsOneTime { .. })));
}

/// A client without TLS is named in the error, and the listener continues.
#[test]
fn a_client_without_tls_is_named_and_blocks_no_other() {
    let d = Directories::new();
    let server = TlsServer::load(d.far.path()).unwrap();
    let options = ListenOptions { tls: Some(server), ..Default::default() };
    let listener = Listener::bind_with(&"tcp:127.0.0.1:0".parse().unwrap(), &options).unwrap();
    let Address::Tcp { port, .. } = listener.local_address() else { panic!() };
    let here = ("127.0.0.1", *port);
    // Silent connections that stay open.
    let _silent: Vec<TcpStream> = (0..70).map(|_| TcpStream::connect(here).unwrap()).collect();
    for (words, what) in [
        (&b"QEVM\0\0\0\x03"[..], "it sent a migration without TLS: turn TLS on there (tls-creds"),
        (b"\x11\x22\x33\x44\0\0\0\x01", "it sent a migration's lane without TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "it sent HTTP without TLS"),
    ] {
        let mut stranger = TcpStream::connect(here).unwrap();
        stranger.write_all(words).unwrap();
        let error = listener.accept(soon(), &cancel()).unwrap_err();
        assert!(matches!(&error, Error::Tls { why, .. } if why.starts_with(what)), "{error}");
        // It may be reset, as not all it sent was read.
        let _ = stranger.read(&mut [0; 9]);
    }
    let client = TlsClient::load(d.near.path(), None).unwrap();
    let options = ConnectOptions { tls: Some(client), ..Default::default() };
    let (near, far) = meet_at(&listener, &options);
    send_all(near.as_ref(), b"hello").unwrap();
    assert_eq!(recv_exact(far.as_ref(), 5).unwrap(), b"hello");
}

#[test]
fn a_server_that_speaks_no_tls_is_named() {
    let d = Directories::new();
    for answer in [&b"QEVM this is not TLS"[..], b""] {
        let plain = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let client = TlsClient::load(d.near.path(), None).unwrap();
        let options = ConnectOptions { tls: Some(client), ..Default::default() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let channel = plain.accept(soon(), &cancel()).unwrap();
                let hello = recv_exact(channel.as_ref(), 4).unwrap();
                assert_eq!(towline_channel::describe_plain(&hello), Some("TLS"));
                send_all(channel.as_ref(), answer).unwrap();
            });
            let error = connect_with(plain.local_address(), soon(), &cancel(), &options).unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains("does not") && text.contains("TLS") && text.contains("tls-creds"),
                "{text}"
            );
        });
    }
}

#[test]
fn a_handshake_ends_when_it_is_cancelled_or_takes_too_long() {
    let d = Directories::new();
    let (near, _far) = tcp();
    let client = TlsClient::load(d.near.path(), Some("localhost")).unwrap();
    let soon_over = Instant::now() + Duration::from_millis(50);
    let error = TlsChannel::client(near, &client, "localhost", soon_over, &cancel()).unwrap_err();
    assert!(matches!(error, Error::Timeout { op: "TLS handshake", .. }), "{error:?}");
    let (near, _far) = tcp();
    let token = cancel();
    std::thread::scope(|scope| {
        let waiting = spawn_asleep(scope, || TlsChannel::client(near, &client, "localhost", soon(), &token));
        token.cancel();
        assert!(matches!(waiting.join().unwrap().unwrap_err(), Error::Cancelled));
    });
}

#[test]
fn a_unix_socket_has_no_name_of_its_own() {
    let d = Directories::new();
    let address = common::unix_address(d.near.path());
    let options = ListenOptions { tls: Some(TlsServer::load(d.far.path()).unwrap()), ..Default::default() };
    let listener = Listener::bind_with(&address, &options).unwrap();
    let client = |hostname| ConnectOptions {
        tls: Some(TlsClient::load(d.near.path(), hostname).unwrap()),
        ..Default::default()
    };
    let error = connect_with(&address, soon(), &cancel(), &client(None)).unwrap_err();
    assert!(
        matches!(error, Error::BadAddress { ref why, .. } if why.contains("give the name in its certificate")),
        "{error}"
    );
    let (near, far) = meet_at(&listener, &client(Some("localhost")));
    send_all(far.as_ref(), b"x").unwrap();
    assert_eq!(recv_exact(near.as_ref(), 1).unwrap(), b"x");
}
