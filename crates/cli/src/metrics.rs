//! `--metrics`: statistics in [Prometheus' text format
//! 0.0.4](https://prometheus.io/docs/instrumenting/exposition_formats/).
//!
//! ```text
//!   GET /metrics ── a thread ── StatsSource::statistics ── text
//! ```
//! The part of HTTP/1.1 that a scraper needs: one request per connection, without a body. Limits:
//! [`CLIENTS_MAX`] connections at a time, of which the oldest ends when there is another one;
//! [`REQUEST_BYTES_MAX`] for a request; [`CLIENT_TIMEOUT`] for a request, and for the whole response.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use towline_control::statistics::{Metric, StatsObject, StatsSource, StatsType, StatsUnit, one_of_each_kind};

use crate::lock::lock;

/// Maximum number of connections served at a time.
const CLIENTS_MAX: usize = 8;
/// Maximum length of a request with its headers.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Timeout of a client's request, and of the response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay after a failed `accept`.
const RETRY_DELAY: Duration = Duration::from_millis(100);
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A listener and its threads, which end when this is dropped.
pub(crate) struct Metrics {
    server: Arc<MetricsServer>,
    acceptor: Option<JoinHandle<()>>,
}

struct MetricsServer {
    listener: TcpListener,
    counting: Arc<dyn StatsSource>,
    /// The oldest first.
    clients: Mutex<Vec<Client>>,
}

/// A connection, and the thread that serves it.
struct Client {
    stream: Arc<TcpStream>,
    thread: JoinHandle<()>,
}

impl Metrics {
    /// Starts to listen.
    pub(crate) fn start(address: SocketAddr, counting: Arc<dyn StatsSource>) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let server = Arc::new(MetricsServer { listener, counting, clients: Mutex::default() });
        let accepts = Arc::clone(&server);
        let acceptor = thread::Builder::new().name("metrics".into()).spawn(move || accepts.accept())?;
        Ok(Self { server, acceptor: Some(acceptor) })
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        // On Linux this wakes the thread in `accept`. Otherwise it would end with the process.
        if rustix::net::shutdown(&self.server.listener, Shutdown::Both).is_ok()
            && let Some(acceptor) = self.acceptor.take()
        {
            let _ = acceptor.join();
        }
        let clients = std::mem::take(&mut *lock(&self.server.clients));
        clients.into_iter().for_each(Client::end);
    }
}

impl Client {
    /// Ends the connection. Its thread stops waiting for the client.
    fn end(self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let _ = self.thread.join();
    }
}

impl MetricsServer {
    fn accept(&self) {
        loop {
            let accepted = self.listener.accept().and_then(|(stream, peer)| self.serve(stream, peer));
            if let Err(error) = accepted {
                // The listener is shut down.
                if error.kind() == io::ErrorKind::InvalidInput {
                    return;
                }
                tracing::warn!(%error, "metrics listener failed");
                thread::sleep(RETRY_DELAY);
            }
        }
    }

    /// Serves a connection on another thread.
    fn serve(&self, stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
        let mut clients = lock(&self.clients);
        clients.retain(|client| !client.thread.is_finished());
        if clients.len() >= CLIENTS_MAX {
            clients.remove(0).end();
        }
        let (stream, counting) = (Arc::new(stream), Arc::clone(&self.counting));
        let served = Arc::clone(&stream);
        let thread = thread::Builder::new().name("metrics".into()).spawn(move || {
            if let Err(error) = respond(&served, counting.as_ref()) {
                tracing::debug!(%peer, %error, "metrics client failed");
            }
            // The list has the socket too.
            let _ = served.shutdown(std::net::Shutdown::Both);
        })?;
        clients.push(Client { stream, thread });
        Ok(())
    }
}

/// Responds to the request of a connection.
fn respond(stream: &TcpStream, counting: &dyn StatsSource) -> io::Result<()> {
    let request = request(stream)?;
    let target = request.as_deref();
    let (status, kind, body) = match target {
        Some("GET /metrics" | "HEAD /metrics") => ("200 OK", TEXT, exposition(&counting.statistics())),
        Some(other) if other.starts_with("GET ") || other.starts_with("HEAD ") => {
            ("404 Not Found", "text/plain", "not found; see /metrics\n".to_owned())
        }
        Some(_) => ("405 Method Not Allowed", "text/plain", "only GET and HEAD are supported\n".to_owned()),
        None => ("431 Request Header Fields Too Large", "text/plain", "the request is too long\n".to_owned()),
    };
    let length = body.len();
    let mut response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    if target.is_none_or(|target| !target.starts_with("HEAD ")) {
        response.push_str(&body);
    }
    send(stream, response.as_bytes())
}

/// Sends a response, within one time limit.
fn send(mut stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let until = Instant::now() + CLIENT_TIMEOUT;
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        bytes = &bytes[stream.write(bytes)?..];
    }
    Ok(())
}

/// Reads a request, and returns its method and path. `None`: it is too long.
fn request(mut stream: &TcpStream) -> io::Result<Option<String>> {
    let until = Instant::now() + CLIENT_TIMEOUT;
    let mut bytes = Vec::new();
    let mut buffer = [0; 1024];
    while !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
        if bytes.len() > REQUEST_BYTES_MAX {
            return Ok(None);
        }
        let left = until.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    let mut words = text.split_ascii_whitespace();
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    Ok(Some(format!("{method} {path}")))
}

/// Formats the statistics: a metric family for each number, with a sample for each object of its kind.
fn exposition(objects: &[StatsObject]) -> String {
    let mut text = String::new();
    let kinds = one_of_each_kind(objects).into_iter();
    for (kind, metric) in kinds.flat_map(|kind| kind.metrics.iter().map(|metric| (kind.kind, metric))) {
        let name = family(kind, metric);
        let metric_type = if is_counter(metric) { "counter" } else { "gauge" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {name} {}.\n# TYPE {name} {metric_type}", metric.help);
        for object in objects.iter().filter(|object| object.kind == kind) {
            if let Some(found) = object.metrics.iter().find(|found| found.name == metric.name) {
                let _ = writeln!(text, "{name}{} {}", labels(object), value(found));
            }
        }
    }
    text
}

fn is_counter(metric: &Metric) -> bool {
    metric.stats_type == StatsType::Cumulative
}

/// Name of a metric family: kind, metric, unit.
fn family(kind: &str, metric: &Metric) -> String {
    let (name, unit) = match metric.unit {
        StatsUnit::Count => (metric.name, ""),
        StatsUnit::Bytes => (metric.name.trim_end_matches("bytes"), "-bytes"),
        StatsUnit::Milliseconds => (metric.name, "-seconds"),
    };
    let total = if is_counter(metric) { "-total" } else { "" };
    let stem = format!("towline-{kind}-{name}");
    format!("{}{unit}{total}", stem.trim_end_matches('-')).replace('-', "_")
}

fn labels(object: &StatsObject) -> String {
    let escaped = |value: &str| value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
    let one = |(key, value): &(&str, String)| format!("{key}=\"{}\"", escaped(value));
    let all: Vec<String> = object.labels.iter().map(one).collect();
    if all.is_empty() { String::new() } else { format!("{{{}}}", all.join(",")) }
}

fn value(metric: &Metric) -> String {
    match metric.unit {
        StatsUnit::Milliseconds => (metric.value as f64 / 1e3).to_string(),
        StatsUnit::Count | StatsUnit::Bytes => metric.value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subjects() -> Vec<StatsObject> {
        let queue = |queue: &str| StatsObject {
            kind: "net-queue",
            labels: vec![("tap", "a\"b\\".into()), ("queue", queue.into())],
            metrics: vec![
                Metric::counter("packets", "frames", 7),
                Metric::byte_counter("bytes", "their bytes", 700),
                Metric::byte_counter("to-host-bytes", "to the host", 1),
                Metric::gauge("time", "duration", 1500).in_milliseconds(),
                Metric::gauge("pending", "in flight", 0),
            ],
        };
        vec![queue("0"), queue("1")]
    }

    #[test]
    fn each_number_is_a_metric_family() {
        let text = exposition(&subjects());
        let wanted = "\
# HELP towline_net_queue_packets_total frames.
# TYPE towline_net_queue_packets_total counter
towline_net_queue_packets_total{tap=\"a\\\"b\\\\\",queue=\"0\"} 7
towline_net_queue_packets_total{tap=\"a\\\"b\\\\\",queue=\"1\"} 7
# HELP towline_net_queue_bytes_total their bytes.
";
        assert!(text.starts_with(wanted), "{text}");
        for line in [
            "towline_net_queue_to_host_bytes_total{tap=\"a\\\"b\\\\\",queue=\"0\"} 1\n",
            "towline_net_queue_time_seconds{tap=\"a\\\"b\\\\\",queue=\"1\"} 1.5\n",
            "# TYPE towline_net_queue_pending gauge\n",
            "towline_net_queue_pending{tap=\"a\\\"b\\\\\",queue=\"1\"} 0\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }

    struct Fixed;

    impl StatsSource for Fixed {
        fn statistics(&self) -> Vec<StatsObject> {
            subjects()
        }
    }

    fn get(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    #[test]
    fn other_requests_than_a_scrape_are_errors() {
        let counting: Arc<dyn StatsSource> = Arc::new(Fixed);
        let metrics = Metrics::start("127.0.0.1:0".parse().unwrap(), counting).unwrap();
        let address = metrics.server.listener.local_addr().unwrap();
        let silent = TcpStream::connect(address).unwrap();
        let response = get(address, "GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n");
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains(TEXT), "{head}");
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        assert_eq!(body, exposition(&subjects()));
        assert_eq!(get(address, "HEAD /metrics HTTP/1.1\r\n\r\n"), format!("{head}\r\n\r\n"));
        assert!(get(address, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(get(address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        drop(silent);
        drop(metrics);
        assert!(TcpStream::connect(address).is_err(), "the listener is closed");
    }

    /// A response of many megabytes, which no socket's buffers take.
    struct Large;

    impl StatsSource for Large {
        fn statistics(&self) -> Vec<StatsObject> {
            let labels = |index: usize| vec![("connection", format!("{index:0>200}"))];
            let metrics = || vec![Metric::counter("packets", "packets", 1)];
            let object = |index| StatsObject { kind: "vsock", labels: labels(index), metrics: metrics() };
            (0..50_000).map(object).collect()
        }
    }

    #[test]
    fn clients_that_do_not_read_delay_neither_others_nor_the_end() {
        let counting: Arc<dyn StatsSource> = Arc::new(Large);
        let metrics = Metrics::start("127.0.0.1:0".parse().unwrap(), counting).unwrap();
        let address = metrics.server.listener.local_addr().unwrap();
        let slow = || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            // Its thread has the response.
            stream.read_exact(&mut [0]).unwrap();
            stream
        };
        let clients: Vec<_> = (0..CLIENTS_MAX).map(|_| slow()).collect();
        let head = get(address, "HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
        // One that reads a little now and then has no further time.
        let mut clients = clients;
        let trickles = clients.pop().unwrap();
        let reads = thread::spawn(move || {
            let (mut stream, mut total) = (trickles, 0);
            while let Ok(count @ 1..) = stream.read(&mut [0; 4096]) {
                total += count;
                thread::sleep(Duration::from_millis(20));
            }
            total
        });
        assert!(reads.join().unwrap() < 10_000_000, "the whole response was sent");
        let last = slow();
        let began = Instant::now();
        drop(metrics);
        assert!(began.elapsed() < CLIENT_TIMEOUT, "{:?}", began.elapsed());
        drop((clients, last));
    }
}
