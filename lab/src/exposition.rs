//! A strict reader of metrics: Prometheus' text format 0.0.4, for counters and gauges.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// Beginning of a family of metrics.
const HELP: &str = "# HELP ";

/// Metrics of one scrape.
#[derive(Debug, Default)]
pub struct Exposition {
    /// Values by name and labels, as written.
    samples: BTreeMap<String, f64>,
}

/// Requests `/metrics` from this address and refuses all that a strict reader would.
///
/// # Errors
/// If the connection or the request fails, or the text is not valid.
pub fn scrape(address: SocketAddr, within: Duration) -> Result<Exposition> {
    let mut stream = TcpStream::connect_timeout(&address, within).with_context(|| address.to_string())?;
    stream.set_read_timeout(Some(within))?;
    stream.set_write_timeout(Some(within))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: towline\r\nAccept: */*\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no end of the headers")?;
    ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let kind = "Content-Type: text/plain; version=0.0.4; charset=utf-8";
    ensure!(head.lines().any(|line| line == kind), "{head}");
    Exposition::parse(body)
}

impl Exposition {
    /// Parses a whole text.
    ///
    /// # Errors
    /// The line that is not valid.
    pub fn parse(text: &str) -> Result<Self> {
        let lines: Vec<_> =
            text.strip_suffix('\n').context("the last line has no end")?.split('\n').collect();
        let (mut this, mut seen) = (Self::default(), BTreeSet::new());
        for family in lines.chunk_by(|_, next| !next.starts_with(HELP)) {
            let name = this.family(family).with_context(|| format!("{family:?}"))?;
            ensure!(seen.insert(name), "{name} in two places");
        }
        Ok(this)
    }

    /// Value of a sample by its name and labels, as `towline_net_packets_total{tap="a"}`.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.samples.get(name).copied()
    }

    /// Sum of all samples of a name, with any labels.
    pub fn sum(&self, name: &str) -> f64 {
        let of = |sample: &&String| sample.split('{').next() == Some(name);
        self.samples.keys().filter(of).map(|sample| self.samples[sample]).sum()
    }

    /// Reads a family of metrics: its HELP, its TYPE and its samples. Returns its name.
    fn family<'a>(&mut self, lines: &[&'a str]) -> Result<&'a str> {
        let [help, kind, samples @ ..] = lines else { bail!("a family without HELP or TYPE") };
        let help = help.strip_prefix(HELP).context("a family without HELP")?;
        let (name, _) = help.split_once(' ').context("a HELP without a text")?;
        is_name(name)?;
        let kind = kind.strip_prefix(&format!("# TYPE {name} ")).context("a family without TYPE")?;
        ensure!(["counter", "gauge"].contains(&kind), "an unexpected type");
        ensure!(name.ends_with("_total") == (kind == "counter"), "a {kind} called so");
        ensure!(!samples.is_empty(), "a family without samples");
        for line in samples {
            self.sample(line, name, kind).with_context(|| format!("{line:?}"))?;
        }
        Ok(name)
    }

    fn sample(&mut self, line: &str, family: &str, kind: &str) -> Result<()> {
        let (series, value) = line.rsplit_once(' ').context("no value")?;
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, labels.strip_suffix('}').context("labels without an end")?),
            None => (series, ""),
        };
        ensure!(name == family, "a sample of another family");
        check_labels(labels)?;
        let value: f64 = value.parse().context("no number")?;
        ensure!(value.is_finite() && (kind != "counter" || value >= 0.0), "such a {kind}");
        ensure!(self.samples.insert(series.to_owned(), value).is_none(), "twice");
        Ok(())
    }
}

fn is_name(name: &str) -> Result<()> {
    let letter = |c: char| c.is_ascii_alphabetic() || c == '_';
    let good = name.starts_with(letter) && name.chars().all(|c| letter(c) || c.is_ascii_digit());
    ensure!(good, "{name:?} is not a name");
    Ok(())
}

/// Checks `key="value",key="value"`, where `\\`, `\"` and `\n` are the only escapes of a value.
fn check_labels(text: &str) -> Result<()> {
    // Escapes become what no name has.
    let plain =
        [r"\\", "\\\"", r"\n"].iter().fold(text.to_owned(), |text, escape| text.replace(escape, "??"));
    ensure!(!plain.contains('\\'), "a value that is not escaped");
    if plain.is_empty() {
        return Ok(());
    }
    let mut keys = BTreeSet::new();
    for label in plain.strip_suffix('"').context("a value without an end")?.split("\",") {
        let (key, value) = label.split_once("=\"").context("a label without a value")?;
        is_name(key)?;
        ensure!(keys.insert(key), "the label {key} twice");
        ensure!(!value.contains('"'), "something after a value");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# HELP a_bytes_total b.\n# TYPE a_bytes_total counter\na_bytes_total{x=\"y\\\"\"} 1\na_bytes_total 2\n";

    #[test]
    fn a_valid_exposition_is_read() {
        let found = Exposition::parse(GOOD).unwrap();
        assert_eq!(found.get("a_bytes_total"), Some(2.0));
        assert_eq!(found.sum("a_bytes_total").to_bits(), 3f64.to_bits());
    }

    #[test]
    fn invalid_expositions_are_refused() {
        for (from, to) in [
            ("2\n", "2"),
            ("a_bytes_total 2", "a_bytes 2"),
            ("a_bytes_total 2", "a_bytes_total x"),
            ("a_bytes_total 2", "a_bytes_total{x=\"y\\\"\"} 2"),
            ("# TYPE a_bytes_total counter\n", ""),
            ("counter", "gauge"),
            ("x=\"y", "1x=\"y"),
            ("y\\\"", "y\\t"),
            ("l 2\n", "l 2\n# HELP a_bytes_total again.\n"),
        ] {
            assert!(Exposition::parse(&GOOD.replace(from, to)).is_err(), "{from:?} to {to:?}");
        }
    }
}
