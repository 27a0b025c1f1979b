//! `--metrics`: statistics in OpenMetrics 1.0 for clients that accept it, otherwise in Prometheus' text format 0.0.4.
//!
//! ```text
//!   GET /metrics ── one of CLIENTS_MAX threads ── StatsSource::statistics ── text
//! ```
//! HTTP/1.1 as far as a scraper needs it: one request per connection, without a body. Limits: [`CLIENTS_MAX`] connections at a time,
//! further ones wait in the kernel's backlog; [`REQUEST_BYTES_MAX`] for a request, [`CLIENT_TIMEOUT`] for a client.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit as Suffix};
use rustix::net::Shutdown;
use towline_control::statistics::{Metric, StatsObject, StatsSource, StatsType, StatsUnit};

/// Maximum number of connections served at a time.
const CLIENTS_MAX: usize = 4;
/// Maximum length of a request with its headers.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Timeout of a client's request, and of the response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay after a failed `accept`.
const RETRY_DELAY: Duration = Duration::from_millis(100);
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A listener and its threads, which end when this is dropped.
#[derive(Debug)]
pub(crate) struct Metrics {
    listener: Arc<TcpListener>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Metrics {
    /// Starts to listen.
    pub(crate) fn start(address: SocketAddr, counting: &Arc<dyn StatsSource>) -> io::Result<Self> {
        let listener = Arc::new(TcpListener::bind(address)?);
        let stop = Arc::new(AtomicBool::new(false));
        let thread = |_| {
            let (listener, counting, stop) = (Arc::clone(&listener), Arc::clone(counting), Arc::clone(&stop));
            let name = "metrics".to_owned();
            thread::Builder::new().name(name).spawn(move || serve(&listener, counting.as_ref(), &stop))
        };
        let threads = (0..CLIENTS_MAX).map(thread).collect::<io::Result<_>>()?;
        Ok(Self { listener, stop, threads })
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // On Linux this wakes every thread in `accept`. Otherwise they would end with the process.
        if rustix::net::shutdown(&*self.listener, Shutdown::Both).is_ok() {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

/// Serves one connection after the other.
fn serve(listener: &TcpListener, counting: &dyn StatsSource, stop: &AtomicBool) {
    loop {
        let accepted = listener.accept();
        if stop.load(Ordering::Acquire) {
            return;
        }
        match accepted {
            Ok((stream, peer)) => {
                if let Err(error) = respond(&stream, counting) {
                    tracing::debug!(%peer, %error, "metrics client failed");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "metrics listener failed");
                thread::sleep(RETRY_DELAY);
            }
        }
    }
}

/// Responds to the request of a connection.
fn respond(mut stream: &TcpStream, counting: &dyn StatsSource) -> io::Result<()> {
    stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let request = request(stream)?;
    let target = request.as_ref().map(|request| request.target.as_str());
    let (status, kind, body) = match target {
        Some("GET /metrics" | "HEAD /metrics") => {
            let body = exposition(&counting.statistics());
            if request.as_ref().is_some_and(|request| prefers_open_metrics(&request.accept)) {
                ("200 OK", OPEN_METRICS, body)
            } else {
                ("200 OK", TEXT, prometheus_text(&body))
            }
        }
        Some(other) if other.starts_with("GET ") || other.starts_with("HEAD ") => {
            ("404 Not Found", "text/plain", "not found; see /metrics\n".to_owned())
        }
        Some(_) => ("405 Method Not Allowed", "text/plain", "only GET and HEAD are supported\n".to_owned()),
        None => ("431 Request Header Fields Too Large", "text/plain", "the request is too long\n".to_owned()),
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nVary: Accept\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    if target.is_some_and(|target| target.starts_with("HEAD ")) {
        Ok(())
    } else {
        stream.write_all(body.as_bytes())
    }
}

/// Target and accepted formats of a request.
#[derive(Debug)]
struct HttpRequest {
    /// Method and path.
    target: String,
    /// The values of its `Accept` headers.
    accept: String,
}

/// Reads a request. `None`: it is too long.
fn request(mut stream: &TcpStream) -> io::Result<Option<HttpRequest>> {
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
    let headers = text.lines().skip(1).filter_map(|line| line.split_once(':'));
    let accept = headers.filter(|(name, _)| name.eq_ignore_ascii_case("accept")).map(|(_, value)| value);
    Ok(Some(HttpRequest { target: format!("{method} {path}"), accept: accept.collect::<Vec<_>>().join(",") }))
}

/// Returns true if an `Accept` header names OpenMetrics, with a quality not below that of `text/plain`.
fn prefers_open_metrics(accept: &str) -> bool {
    let quality = |kind: &str| {
        let qualities = accept.split(',').filter_map(|range| {
            let mut parts = range.split(';').map(str::trim);
            parts.next().filter(|name| name.eq_ignore_ascii_case(kind))?;
            let quality = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
            Some(quality.map_or(1.0, |quality| quality.parse::<f64>().unwrap_or(0.0)))
        });
        qualities.fold(0.0, f64::max)
    };
    let open_metrics = quality("application/openmetrics-text");
    open_metrics > 0.0 && open_metrics >= quality("text/plain")
}

/// The older text format: a counter's metadata has the name of its samples, and there are no units and no end mark.
fn prometheus_text(open_metrics: &str) -> String {
    let lines = || open_metrics.lines();
    let counters: BTreeSet<&str> =
        lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut text = String::with_capacity(open_metrics.len());
    for line in lines().filter(|line| !line.starts_with("# UNIT ") && *line != "# EOF") {
        let metadata =
            ["# HELP ", "# TYPE "].into_iter().find_map(|key| Some((key, line.strip_prefix(key)?)));
        let named = metadata.and_then(|(key, rest)| Some((key, rest.split_once(' ')?)));
        let _ = match named {
            Some((key, (name, rest))) if counters.contains(name) => {
                writeln!(text, "{key}{name}_total {rest}")
            }
            _ => writeln!(text, "{line}"),
        };
    }
    text
}

/// Formats the statistics.
fn exposition(subjects: &[StatsObject]) -> String {
    let mut registry = Registry::with_prefix("towline");
    registry.register_collector(Box::new(MetricsSnapshot(subjects.to_vec())));
    let mut body = String::new();
    // Writing to a string cannot fail.
    let _ = text::encode(&mut body, &registry);
    body
}

/// Statistics at one time.
#[derive(Debug)]
struct MetricsSnapshot(Vec<StatsObject>);

impl Collector for MetricsSnapshot {
    /// Encodes a metric family for each number, with a sample for each object of its kind.
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut kinds: Vec<&StatsObject> = Vec::new();
        for subject in &self.0 {
            if kinds.iter().all(|kind| kind.kind != subject.kind) {
                kinds.push(subject);
            }
        }
        for kind in kinds {
            for number in &kind.metrics {
                self.family(&mut encoder, kind.kind, number)?;
            }
        }
        Ok(())
    }
}

impl MetricsSnapshot {
    fn family(&self, encoder: &mut DescriptorEncoder<'_>, kind: &str, number: &Metric) -> fmt::Result {
        let metric = match number.stats_type {
            StatsType::Cumulative => MetricType::Counter,
            StatsType::Instant => MetricType::Gauge,
        };
        let unit = match number.unit {
            StatsUnit::Count => None,
            StatsUnit::Bytes => Some(Suffix::Bytes),
            StatsUnit::Milliseconds => Some(Suffix::Seconds),
        };
        // The encoder appends the unit.
        let name = if unit.is_some() { number.name.trim_end_matches("bytes") } else { number.name };
        let name = format!("{kind}-{name}").trim_end_matches('-').replace('-', "_");
        let about = format!("{}.", number.help);
        let mut encoder = encoder.encode_descriptor(&name, &about, unit.as_ref(), metric)?;
        for subject in self.0.iter().filter(|subject| subject.kind == kind) {
            let Some(found) = subject.metrics.iter().find(|one| one.name == number.name) else { continue };
            let labels: Vec<(&str, &str)> =
                subject.labels.iter().map(|(key, value)| (*key, value.as_str())).collect();
            if labels.is_empty() {
                sample(&mut encoder, found)?;
            } else {
                sample(&mut encoder.encode_family(&labels)?, found)?;
            }
        }
        Ok(())
    }
}

/// Encodes one sample.
fn sample(encoder: &mut MetricEncoder<'_>, number: &Metric) -> fmt::Result {
    let seconds = number.value as f64 / 1e3;
    match (number.stats_type, number.unit) {
        (StatsType::Cumulative, StatsUnit::Milliseconds) => {
            encoder.encode_counter::<NoLabelSet, f64, f64>(&seconds, None)
        }
        (StatsType::Cumulative, _) => encoder.encode_counter::<NoLabelSet, u64, f64>(&number.value, None),
        (StatsType::Instant, StatsUnit::Milliseconds) => encoder.encode_gauge(&seconds),
        (StatsType::Instant, _) => encoder.encode_gauge(&number.value),
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
# HELP towline_net_queue_packets frames.
# TYPE towline_net_queue_packets counter
towline_net_queue_packets_total{tap=\"a\\\"b\\\\\",queue=\"0\"} 7
towline_net_queue_packets_total{tap=\"a\\\"b\\\\\",queue=\"1\"} 7
# HELP towline_net_queue_bytes their bytes.
# TYPE towline_net_queue_bytes counter
# UNIT towline_net_queue_bytes bytes
";
        assert!(text.starts_with(wanted), "{text}");
        for line in [
            "towline_net_queue_to_host_bytes_total{tap=\"a\\\"b\\\\\",queue=\"0\"} 1\n",
            "towline_net_queue_time_seconds{tap=\"a\\\"b\\\\\",queue=\"1\"} 1.5\n",
            "towline_net_queue_pending{tap=\"a\\\"b\\\\\",queue=\"1\"} 0\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    #[test]
    fn the_older_format_names_a_counter_as_its_samples() {
        let text = prometheus_text(&exposition(&subjects()));
        let wanted = "\
# HELP towline_net_queue_packets_total frames.
# TYPE towline_net_queue_packets_total counter
towline_net_queue_packets_total{tap=\"a\\\"b\\\\\",queue=\"0\"} 7
";
        assert!(text.starts_with(wanted), "{text}");
        assert!(text.contains("# TYPE towline_net_queue_pending gauge\n"), "{text}");
        assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
    }

    #[test]
    fn a_client_receives_the_format_that_it_accepts() {
        let counting: Arc<dyn StatsSource> = Arc::new(Fixed);
        let metrics = Metrics::start("127.0.0.1:0".parse().unwrap(), &counting).unwrap();
        let address = metrics.listener.local_addr().unwrap();
        let (open, text) = (exposition(&subjects()), prometheus_text(&exposition(&subjects())));
        for (accept, kind, wanted) in [
            ("Accept: text/plain;version=0.0.4", TEXT, &text),
            ("Accept: */*", TEXT, &text),
            ("Accept: application/openmetrics-text;q=0,*/*", TEXT, &text),
            ("Accept: application/openmetrics-text;q=0.2, text/plain;q=0.5", TEXT, &text),
            ("accept: application/openmetrics-text", OPEN_METRICS, &open),
            (
                "Accept: text/plain;version=0.0.4;q=0.3\r\nAccept: application/openmetrics-text",
                OPEN_METRICS,
                &open,
            ),
            (
                "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
                OPEN_METRICS,
                &open,
            ),
        ] {
            let response = get(address, &format!("GET /metrics HTTP/1.1\r\n{accept}\r\n\r\n"));
            let (head, body) = response.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(&format!("Content-Type: {kind}\r\n")), "{accept}: {head}");
            assert_eq!(body, wanted, "{accept}");
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
        let metrics = Metrics::start("127.0.0.1:0".parse().unwrap(), &counting).unwrap();
        let address = metrics.listener.local_addr().unwrap();
        let silent = TcpStream::connect(address).unwrap();
        let response = get(address, "GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n");
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains(TEXT), "{head}");
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        assert_eq!(body, prometheus_text(&exposition(&subjects())));
        assert_eq!(get(address, "HEAD /metrics HTTP/1.1\r\n\r\n"), format!("{head}\r\n\r\n"));
        assert!(get(address, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(get(address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        drop(silent);
        drop(metrics);
        assert!(TcpStream::connect(address).is_err(), "the listener is closed");
    }
}
