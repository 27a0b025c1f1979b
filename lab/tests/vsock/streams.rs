//! Bytes in both directions, many connections, half-closed connections and deaths.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::process::{Command, Stdio};

use towline_lab::wait_until;

use crate::support::{Fixture, WITHIN, patient, read_all};

/// MiB that are sent each way; `TOWLINE_SOAK_VSOCK_MIB` overrides it.
fn mebibytes() -> usize {
    std::env::var("TOWLINE_SOAK_VSOCK_MIB").ok().and_then(|mib| mib.parse().ok()).unwrap_or(16)
}

fn bytes(count: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut bytes = vec![0; count];
    rng.fill(&mut bytes);
    bytes
}

fn sha256(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap().split(' ').next().unwrap().to_owned()
}

pub(crate) fn bytes_go_both_ways(fixture: &mut Fixture) {
    let content = bytes(mebibytes() << 20);
    // To the guest, by socat.
    fixture.shell("(socat -u VSOCK-LISTEN:5000 STDOUT | sha256sum > /tmp/sum) > /dev/null 2>&1 & echo");
    let mut stream = fixture.connect(5000);
    stream.write_all(&content).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let sum = wait_until("a sum", WITHIN, || {
        let sum = fixture.guest.shell("touch /tmp/sum; cat /tmp/sum", WITHIN)?;
        Ok((!sum.is_empty()).then_some(sum))
    });
    assert!(sum.unwrap().starts_with(&sha256(&content)), "{:?}: to the guest", fixture.version);
    assert!(read_all(&mut stream).is_empty());
    // And from it.
    let listener = fixture.listen(6000);
    let line = format!("head -c {} /dev/urandom > /tmp/data; sha256sum /tmp/data", mebibytes() << 20);
    let sum = fixture.shell(&line);
    fixture.shell("socat -u OPEN:/tmp/data VSOCK-CONNECT:2:6000 > /tmp/socat 2>&1 & echo");
    let mut stream = patient(listener.accept().unwrap().0);
    let received = read_all(&mut stream);
    assert!(
        sum.starts_with(&sha256(&received)),
        "{:?}: {} bytes from the guest",
        fixture.version,
        received.len()
    );
}

/// Needs an echo on port 5001.
pub(crate) fn many_connections_and_half_closed_ones(fixture: &mut Fixture) {
    let content = bytes(100_000);
    let streams: Vec<_> = (0..64).map(|_| fixture.connect(5001)).collect();
    let threads: Vec<_> = streams
        .into_iter()
        .map(|stream| {
            let content = content.clone();
            std::thread::spawn(move || {
                let mut writer = stream.try_clone().unwrap();
                let sent = content.clone();
                let writing = std::thread::spawn(move || {
                    writer.write_all(&sent).unwrap();
                    writer.shutdown(Shutdown::Write).unwrap();
                });
                let received = read_all(&mut { stream });
                writing.join().unwrap();
                assert!(received == content, "{} bytes came back of {}", received.len(), content.len());
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    // The client half-closes, the server answers: twenty times, as other backends lost one answer in four.
    fixture.perl("answer", "listen stream 5002 answer");
    for length in (0..20).map(|step| step * 7919) {
        let mut stream = fixture.connect(5002);
        stream.write_all(&content[..length.min(content.len())]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let received = String::from_utf8(read_all(&mut stream)).unwrap();
        assert_eq!(received, format!("received {}", length.min(content.len())), "{:?}", fixture.version);
    }
    // And with the guest as the client.
    let listener = fixture.listen(6001);
    fixture.perl("ask", "connect stream 6001 ask one two");
    let mut stream = patient(listener.accept().unwrap().0);
    assert_eq!(read_all(&mut stream), b"onetwo");
    stream.write_all(b"three").unwrap();
    drop(stream);
    fixture.wait_output("ask", "answered three");
}

/// Leaves no program in the guest.
pub(crate) fn a_death_is_seen_at_the_other_end(fixture: &mut Fixture) {
    // A program in the guest dies while we write to it, and while we wait for it.
    fixture.perl("silent", "listen stream 5003 silent");
    let mut writing = fixture.connect(5003);
    let mut waiting = fixture.connect(5003);
    fixture.shell("kill -9 $(busybox pidof perl)");
    let mut received = [0; 1];
    assert!(matches!(waiting.read(&mut received), Ok(0) | Err(_)));
    let broken = wait_until("an error", WITHIN, || Ok(writing.write_all(&[0; 65536]).err()));
    assert_eq!(broken.unwrap().kind(), std::io::ErrorKind::BrokenPipe, "{:?}", fixture.version);
    // A program of the host dies.
    let listener = fixture.listen(6002);
    fixture.perl("writer", "connect stream 6002 write");
    fixture.perl("reader", "connect stream 6002 echo");
    let streams = [(); 2].map(|()| listener.accept().unwrap().0);
    drop(streams);
    fixture.wait_output("writer", "failed");
    fixture.wait_output("reader", "ed ");
}
