//! The lab's own QMP client: blocking, one connection, one command at a time.
//!
//! Protocol: QEMU, docs/interop/qmp-spec.rst. Events that arrive before a reply are kept until they are
//! waited for.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::lines::Lines;
use crate::wait::wait_until;

/// Default timeout of a command.
const COMMAND_WITHIN: Duration = Duration::from_secs(60);
/// Maximum number of kept events; the oldest are dropped first.
const EVENTS_MAX: usize = 4096;

/// A connection to a QMP socket. Threads may share it.
pub struct Qmp {
    connection: Mutex<Connection>,
    stderr: Option<PathBuf>,
}

struct Connection {
    lines: Lines,
    events: VecDeque<Value>,
    next_id: u64,
}

impl Qmp {
    /// Connects to an existing QMP socket and negotiates. Fails if another client holds the monitor.
    pub fn connect(path: &Path, within: Duration) -> Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| format!("no QMP at {}", path.display()))?;
        Self::over(stream, within, None)
    }

    /// Negotiates on a new connection. Errors show the end of the file `stderr`.
    pub(crate) fn over(stream: UnixStream, within: Duration, stderr: Option<PathBuf>) -> Result<Self> {
        let deadline = Instant::now() + within;
        let mut connection = Connection { lines: Lines::over(stream), events: VecDeque::new(), next_id: 1 };
        let mut greeting = connection.message(deadline).context("no greeting from QMP")?;
        // QEMU sends its events also to a client that it has not greeted yet.
        while greeting.get("event").is_some() {
            connection.keep(greeting);
            greeting = connection.message(deadline).context("no greeting from QMP")?;
        }
        if greeting.get("QMP").is_none() {
            bail!("the socket greets with {greeting}, expected QMP");
        }
        returned("qmp_capabilities", connection.reply("qmp_capabilities", &Value::Null, deadline)?)?;
        Ok(Self { connection: Mutex::new(connection), stderr })
    }

    /// Runs a command; `Value::Null` stands for no arguments.
    pub fn execute(&self, command: &str, arguments: impl Into<Value>) -> Result<Value> {
        self.execute_within(command, arguments, COMMAND_WITHIN)
    }

    /// Runs a command with another timeout than a minute.
    pub fn execute_within(
        &self,
        command: &str,
        arguments: impl Into<Value>,
        within: Duration,
    ) -> Result<Value> {
        let reply =
            self.locked(|connection| connection.reply(command, &arguments.into(), Instant::now() + within));
        returned(command, reply.map_err(|error| self.explained(error))?)
    }

    /// Runs a command of the human monitor and returns its text.
    pub fn hmp(&self, line: &str) -> Result<String> {
        let output = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        Ok(output.as_str().context("the human monitor answers with text")?.to_owned())
    }

    /// Runs a command of the human monitor and returns the hexadecimal number that ends its text.
    pub fn hmp_number(&self, line: &str) -> Result<u64> {
        let output = self.hmp(line)?;
        let digits = output.split_whitespace().last().and_then(|word| word.strip_prefix("0x"));
        let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        number.with_context(|| format!("`{line}` says `{}`, expected a number", output.trim()))
    }

    /// Returns the next event of that name, kept or to come. Events before it stay kept.
    pub fn wait_event(&self, name: &str, within: Duration) -> Result<Value> {
        let deadline = Instant::now() + within;
        let outcome = self.locked(|connection| {
            loop {
                if let Some(at) = connection.events.iter().position(|event| event["event"] == name) {
                    return connection.events.remove(at).context("the event was just found");
                }
                let message = connection.message(deadline).with_context(|| format!("no event {name}"))?;
                connection.keep(message);
            }
        });
        outcome.map_err(|error| self.explained(error))
    }

    /// Returns and clears the kept events, without waiting.
    pub fn take_events(&self) -> Vec<Value> {
        self.locked(|connection| connection.events.drain(..).collect())
    }

    /// QEMU's run state, as `running`, `paused`, `postmigrate`.
    pub fn status(&self) -> Result<String> {
        let answer = self.execute("query-status", Value::Null)?;
        Ok(answer["status"].as_str().context("query-status without status")?.to_owned())
    }

    /// Waits for a run state.
    pub fn wait_status(&self, wanted: &str, within: Duration) -> Result<()> {
        let mut last = String::new();
        wait_until(&format!("run state {wanted}"), within, || {
            last = self.status()?;
            Ok((last == wanted).then_some(()))
        })
        .with_context(|| format!("the run state was {last}"))
    }

    /// Waits until the status of `query-migrate` is `wanted`; fails at once if it is `failed` instead.
    pub fn wait_migration(&self, wanted: &str, within: Duration) -> Result<Value> {
        wait_until(&format!("migration {wanted}"), within, || {
            let info = self.execute("query-migrate", Value::Null)?;
            let status = info["status"].as_str().unwrap_or("none");
            if status == "failed" && wanted != "failed" {
                bail!("the migration failed, expected {wanted}: {info}");
            }
            Ok((status == wanted).then_some(info))
        })
    }

    fn locked<T>(&self, work: impl FnOnce(&mut Connection) -> T) -> T {
        work(&mut self.connection.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds QEMU's standard error to an error of the connection.
    fn explained(&self, error: anyhow::Error) -> anyhow::Error {
        let output =
            self.stderr.as_ref().and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        if output.trim().is_empty() {
            return error;
        }
        error.context(format!("QEMU wrote: {}", output.trim()))
    }
}

impl Connection {
    /// Returns the reply to a command, which may be a refusal.
    fn reply(&mut self, command: &str, arguments: &Value, deadline: Instant) -> Result<Value> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            request["arguments"] = arguments.clone();
        }
        self.lines.send(&request.to_string(), deadline)?;
        loop {
            let message = self.message(deadline).with_context(|| format!("no answer to {command}"))?;
            if message.get("event").is_some() {
                self.keep(message);
            } else if message["id"] == id {
                return Ok(message);
            }
            // A reply with another ID belongs to a command that timed out.
        }
    }

    fn keep(&mut self, event: Value) {
        if event.get("event").is_some() {
            if self.events.len() == EVENTS_MAX {
                self.events.pop_front();
            }
            self.events.push_back(event);
        }
    }

    fn message(&mut self, deadline: Instant) -> Result<Value> {
        let line = self.lines.next(deadline)?.context("the deadline has passed")?;
        serde_json::from_str(&line).context("QMP sent what is not JSON")
    }
}

/// The value that a command returned, or QEMU's refusal as an error.
fn returned(command: &str, mut reply: Value) -> Result<Value> {
    if let Some(error) = reply.get("error") {
        let text = |key: &str| error[key].as_str().unwrap_or_default();
        bail!("QEMU refused {command}: {} ({})", text("desc"), text("class"));
    }
    Ok(reply["return"].take())
}
