//! Bytes in both directions, many connections, half-closed connections and deaths.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::process::{Command, Stdio};

use towline_lab::wait_until;

use crate::support::{Scene, WITHIN, hear_all, patient};

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

pub(crate) fn bytes_go_both_ways(scene: &mut Scene) {
    let content = bytes(mebibytes() << 20);
    // To the guest, by socat.
    scene.shell("(socat -u VSOCK-LISTEN:5000 STDOUT | sha256sum > /tmp/sum) > /dev/null 2>&1 & echo");
    let mut stream = scene.connect(5000);
    stream.write_all(&content).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let sum = wait_until("a sum", WITHIN, || {
        let sum = scene.guest.shell("touch /tmp/sum; cat /tmp/sum", WITHIN)?;
        Ok((!sum.is_empty()).then_some(sum))
    });
    assert!(sum.unwrap().starts_with(&sha256(&content)), "{:?}: to the guest", scene.version);
    assert!(hear_all(&mut stream).is_empty());
    // And from it.
    let listener = scene.listen(6000);
    let line = format!("head -c {} /dev/urandom > /tmp/data; sha256sum /tmp/data", mebibytes() << 20);
    let sum = scene.shell(&line);
    scene.shell("socat -u OPEN:/tmp/data VSOCK-CONNECT:2:6000 > /tmp/socat 2>&1 & echo");
    let mut stream = patient(listener.accept().unwrap().0);
    let heard = hear_all(&mut stream);
    assert!(sum.starts_with(&sha256(&heard)), "{:?}: {} bytes from the guest", scene.version, heard.len());
}

/// Needs an echo on port 5001.
pub(crate) fn many_connections_and_each_end_on_its_own(scene: &mut Scene) {
    let content = bytes(100_000);
    let streams: Vec<_> = (0..64).map(|_| scene.connect(5001)).collect();
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
                let heard = hear_all(&mut { stream });
                writing.join().unwrap();
                assert!(heard == content, "{} bytes came back of {}", heard.len(), content.len());
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    // The client half-closes, the server answers: twenty times, as other backends lost one answer in four.
    scene.perl("answer", "listen stream 5002 answer");
    for length in (0..20).map(|step| step * 7919) {
        let mut stream = scene.connect(5002);
        stream.write_all(&content[..length.min(content.len())]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let heard = String::from_utf8(hear_all(&mut stream)).unwrap();
        assert_eq!(heard, format!("heard {}", length.min(content.len())), "{:?}", scene.version);
    }
    // And with the guest as the client.
    let listener = scene.listen(6001);
    scene.perl("ask", "connect stream 6001 ask one two");
    let mut stream = patient(listener.accept().unwrap().0);
    assert_eq!(hear_all(&mut stream), b"onetwo");
    stream.write_all(b"three").unwrap();
    drop(stream);
    scene.wait_said("ask", "answered three");
}

/// Leaves no program in the guest.
pub(crate) fn a_death_is_seen_at_the_other_end(scene: &mut Scene) {
    // A program in the guest dies while we write to it, and while we wait for it.
    scene.perl("silent", "listen stream 5003 silent");
    let mut writing = scene.connect(5003);
    let mut waiting = scene.connect(5003);
    scene.shell("kill -9 $(busybox pidof perl)");
    let mut heard = [0; 1];
    assert!(matches!(waiting.read(&mut heard), Ok(0) | Err(_)));
    let broken = wait_until("an error", WITHIN, || Ok(writing.write_all(&[0; 65536]).err()));
    assert_eq!(broken.unwrap().kind(), std::io::ErrorKind::BrokenPipe, "{:?}", scene.version);
    // A program of the host dies.
    let listener = scene.listen(6002);
    scene.perl("writer", "connect stream 6002 write");
    scene.perl("reader", "connect stream 6002 echo");
    let streams = [(); 2].map(|()| listener.accept().unwrap().0);
    drop(streams);
    scene.wait_said("writer", "failed");
    scene.wait_said("reader", "ed ");
}
