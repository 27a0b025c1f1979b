//! Processes of the ends, as seen by the benchmark.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::end::ROLE_OPTION;

/// An end of a measured migration, which ends when this is dropped.
pub(super) struct End {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// Cost of a migration between two ends.
#[derive(Debug, Clone)]
pub(super) struct Cost {
    pub(super) seconds: f64,
    /// CPU time of both ends.
    pub(super) cpu_seconds: f64,
    /// Bytes of page contents.
    pub(super) bytes: f64,
    /// Other counters of the source.
    pub(super) source: Value,
}

impl Cost {
    pub(super) fn gigabytes_per_second(&self) -> f64 {
        self.bytes / self.seconds / 1e9
    }

    pub(super) fn cpu_per_gigabyte(&self) -> f64 {
        self.cpu_seconds / (self.bytes / 1e9)
    }
}

impl End {
    /// Starts a process with this role, and waits until it is ready.
    pub(super) fn start(program: &Path, role: &Value) -> Result<Self> {
        let mut command = Command::new(program);
        command.args([ROLE_OPTION, &role.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            command.spawn().with_context(|| format!("{} cannot be started", program.display()))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("standard output")?);
        let mut end = Self { child, input, output };
        let ready = end.receive()?;
        ensure!(ready == "ready", "{role}: unexpected reply {ready}, expected \"ready\"");
        Ok(end)
    }

    fn send(&mut self, request: &Value) -> Result<()> {
        let input = self.input.as_mut().context("standard input is closed")?;
        writeln!(input, "{request}")?;
        Ok(input.flush()?)
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("an end exited: {}", self.child.wait()?);
        }
        let value: Value = serde_json::from_str(&line)?;
        match value["failed"].as_str() {
            Some(text) => bail!("{text}"),
            None => Ok(value),
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // It exits at the end of its input; a hanging one is killed.
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Settings of a migration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) mode: &'a str,
    pub(super) lanes: usize,
    pub(super) is_cold: bool,
    /// CPUs of the source and of the destination, if they are pinned.
    pub(super) cpus: Option<(&'a [usize], &'a [usize])>,
    /// Certificates, for TLS channels.
    pub(super) tls: Option<&'a Path>,
}

/// Migrates from `source` to `destination`.
pub(super) fn migrate(source: &mut End, destination: &mut End, job: Job<'_>) -> Result<Cost> {
    let (from, to) = job.cpus.unzip();
    destination.send(&json!({ "lanes": job.lanes, "cold": job.is_cold, "cpus": to, "tls": job.tls }))?;
    let address = destination.receive()?["address"].take();
    let Job { lanes, mode, tls, .. } = job;
    source.send(&json!({ "address": address, "lanes": lanes, "mode": mode, "cpus": from, "tls": tls }))?;
    let (sent, received) = (source.receive(), destination.receive());
    let (sent, received) = (sent?, received?);
    let number =
        |value: &Value, key: &str| value[key].as_f64().with_context(|| format!("{value} without {key}"));
    Ok(Cost {
        seconds: number(&sent, "seconds")?,
        cpu_seconds: number(&sent, "cpu")? + number(&received, "cpu")?,
        bytes: number(&sent, "bytes")?,
        source: sent,
    })
}
