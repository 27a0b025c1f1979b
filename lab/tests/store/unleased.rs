//! Readers without write access: no lease protects their chunks, which they report.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};

use crate::support::{Fixture, WITHIN, last_event};

/// Starts a web server of a directory, for as long as the test runs. Returns its address.
fn serve(directory: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let directory = directory.clone();
            // A client that disconnects is not a failure of the server.
            std::thread::spawn(move || drop(answer(&stream, &directory)));
        }
    });
    address
}

fn answer(mut stream: &TcpStream, directory: &Path) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    while let Some(request) = lines.next().transpose()? {
        while lines.next().transpose()?.is_some_and(|header| !header.is_empty()) {}
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (status, body) = match std::fs::read(directory.join(path.trim_start_matches('/'))) {
            Ok(body) => ("200 OK", body),
            Err(_) => ("404 Not Found", Vec::new()),
        };
        let modified = "Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT";
        write!(stream, "HTTP/1.1 {status}\r\n{modified}\r\nContent-Length: {}\r\n\r\n", body.len())?;
        if method == "GET" {
            stream.write_all(&body)?;
        }
    }
    Ok(())
}

const NOTICE: &str = "is read without a lease (http:// and https:// are read-only): garbage collection does not know of this reader, so the \
    image must not be replaced or removed until it has finished; for a lease, read it with credentials that may also write objects \
    below readers/ of its prefix (docs/store.md)";

#[test]
fn a_reader_without_a_lease_reports_it_and_names_collected_chunks() {
    let fixture = Fixture::new();
    fixture.done(&["copy", "mem:80M,seed=4", &fixture.store("vm/a")]);
    let image = format!("{}/vm/a", serve(fixture.path("")));

    let finished = fixture.start(&["copy", "--json", &image, "mem:"]).wait_done(WITHIN).unwrap();
    assert_eq!(last_event(&finished)["memory"]["verified-pages"], 80 << 8, "{}", finished.stdout);
    let notice = format!("{image} {NOTICE}");
    let notices = finished
        .stdout
        .lines()
        .filter(|line| line.contains("\"event\":\"notice\"") && line.contains(&notice));
    assert_eq!(notices.count(), 1, "{}", finished.stdout);
    let finished = fixture.start(&["copy", &image, &fixture.name("out.img")]).wait_done(WITHIN).unwrap();
    assert!(finished.stderr.contains(&notice), "{}", finished.stderr);
    // With a lease there is no notice.
    let leased = fixture.start(&["copy", &fixture.store("vm/a"), "mem:"]).wait_done(WITHIN).unwrap();
    assert!(!leased.stderr.contains("lease"), "{}", leased.stderr);

    // The index is read, then the image is replaced and its chunks are collected.
    let slow = fixture.start(&["copy", "--json", "--max-bandwidth", "4M", &image, "mem:"]);
    towline_lab::wait_until("a MiB", WITHIN, || {
        let events = slow.stdout();
        let events = events.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let moved = events.filter_map(|event| event["ram"]["transferred"].as_u64()).max();
        Ok((moved >= Some(1 << 20)).then_some(()))
    })
    .unwrap();
    fixture.done(&["copy", "--overwrite", "mem:8M,seed=2", &fixture.store("vm/a")]);
    fixture.done(&["store", "gc", "--min-age", "0", &fixture.store("vm")]);
    let finished = slow.wait(WITHIN).unwrap();
    // 32 MiB are fetched ahead, not the whole image.
    assert_eq!(finished.status.code(), Some(1), "{}{}", finished.stdout, finished.stderr);
    let reason = "is missing in the store: this reader has no lease (http:// and https:// are read-only), so garbage collection may \
        have removed it after the image was replaced or removed; take another image, or store the guest again";
    assert!(finished.stderr.contains(reason), "{}", finished.stderr);
    assert!(finished.stderr.contains("the guest: in its image"), "{}", finished.stderr);
}
