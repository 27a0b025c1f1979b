//! The Linux guest: a client of its agent on the second serial port.
//!
//! The agent's protocol is in `lab/agent/src/main.rs`. After a migration the guest has another QEMU and with
//! it another socket: connect again, and [`LinuxGuest::wait_ready`] finds the beginning of a line and a
//! response with its own ID.

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::lines::Lines;
use crate::qemu::{Builder, Qemu};

/// Timeout of a request that needs no time.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of work on all of the guest's memory: an emulated processor hashes some 60 MiB/s.
const WORK_WITHIN: Duration = Duration::from_secs(300);
/// Interval after which `sync` is sent again: the port may not have been open for the first one.
const SYNC_INTERVAL: Duration = Duration::from_millis(100);
/// Interval at which the console of a guest that does not answer is read.
const CONSOLE_INTERVAL: Duration = Duration::from_secs(5);
/// Linux's message, after 20 s, of a processor that gets no more interrupts.
const TIMER_LOST: &str = "kthread timer wakeup didn't happen";
/// QEMU's messages of an emulated processor that used a memory map of before, and missed its device or met another one.
const MAP_LOST: [&str; 2] = ["iotlb_to_section: Assertion", "msix_table_mmio_write: Assertion"];
/// Time for which all processors of a guest halt that has lost an interrupt: one that boots never has nothing to do for so long.
const HALTED_FOR: Duration = Duration::from_secs(20);
/// One of the faults of stock QEMU that `docs/testing.md` describes: an emulated guest does not boot.
const EMULATION_FAULT: &str = "QEMU's emulation has failed the guest, see docs/testing.md";
/// Maximum number of guests that are started for one that boots.
const BOOTS_MAX: usize = 3;

/// A connection to the agent of one QEMU's guest.
pub struct LinuxGuest {
    lines: Lines,
    next_id: u64,
}

impl Builder {
    /// Starts a Linux and waits until its agent responds. A guest that QEMU's emulation fails is
    /// replaced (`docs/testing.md`).
    pub fn boot(&self, within: Duration) -> Result<(Qemu, LinuxGuest)> {
        let mut boots = 1;
        loop {
            let qemu = self.clone().start()?;
            match qemu.linux(within) {
                Ok(guest) => return Ok((qemu, guest)),
                Err(error) if error.downcast_ref::<&str>() == Some(&EMULATION_FAULT) && boots < BOOTS_MAX => {
                    // Past the test harness, which hides the output of a passing test.
                    let _ = writeln!(std::io::stderr(), "another guest is booted: {EMULATION_FAULT}");
                }
                Err(error) => return Err(error),
            }
            boots += 1;
        }
    }
}

impl Qemu {
    /// Connects to the agent of this QEMU's Linux and waits until it responds. Also right for a guest that
    /// has just been moved here.
    pub fn linux(&self, within: Duration) -> Result<LinuxGuest> {
        let mut guest = LinuxGuest::connect_at(&self.serial_path())?;
        let deadline = Instant::now() + within;
        let mut halted_since = None;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Err(error) = guest.wait_ready(left.min(CONSOLE_INTERVAL)) else { return Ok(guest) };
            let (exited, console) = (self.exited()?, self.console());
            let wrote = self.stderr();
            let processors = self.qmp().hmp("info registers -a").unwrap_or_default();
            let halts = processors.contains("HLT=1") && !processors.contains("HLT=0");
            halted_since = halted_since.or(Some(Instant::now())).filter(|_| halts);
            let is_halted = halted_since.is_some_and(|since| since.elapsed() >= HALTED_FOR);
            let has_lost_map = MAP_LOST.iter().any(|message| wrote.contains(message));
            let has_failed = console.contains(TIMER_LOST) || has_lost_map || is_halted;
            if exited.is_none() && !has_failed && left > CONSOLE_INTERVAL {
                continue;
            }
            let places =
                processors.lines().filter(|line| line.contains("HLT=")).collect::<Vec<_>>().join("; ");
            let state = exited.map_or("runs".to_owned(), |status| format!("has exited with {status}"));
            let error = error.context(format!(
                "QEMU {state}; it wrote: {}; its processors: {places}; the console says: {}",
                wrote.trim(),
                console.trim()
            ));
            return Err(if has_failed { error.context(EMULATION_FAULT) } else { error });
        }
    }
}

impl LinuxGuest {
    /// Connects to the serial port of a guest, which others may have started, and sends nothing yet.
    pub fn connect_at(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path);
        let stream = stream.with_context(|| format!("no serial port at {}", path.display()))?;
        // IDs begin at the current time: responses to an earlier connection must not be mistaken for ours.
        let start = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        Ok(Self { lines: Lines::over(stream), next_id: u64::try_from(start.as_micros())? })
    }

    /// Waits until the agent responds, even if the line still carries earlier bytes.
    pub fn wait_ready(&mut self, within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        let first = self.next_id;
        loop {
            let id = self.send("\n", "sync", deadline)?;
            let until = deadline.min(Instant::now() + SYNC_INTERVAL);
            // Any ID will do: an early request may be answered late.
            while let Some(line) = self.lines.next(until)? {
                if let Some((found, _)) = answer(&line)
                    && (first..=id).contains(&found)
                {
                    return Ok(());
                }
            }
            ensure!(
                Instant::now() < deadline,
                "no answer from the agent within {:.1} s",
                within.as_secs_f64()
            );
        }
    }

    /// Sends a request to the agent; returns the value of its response, or its text as an error.
    pub fn request(&mut self, command: &str, within: Duration) -> Result<String> {
        let deadline = Instant::now() + within;
        let id = self.send("", command, deadline)?;
        loop {
            let Some(line) = self.lines.next(deadline)? else {
                bail!("no answer to `{command}` within {:.1} s", within.as_secs_f64());
            };
            match answer(&line) {
                Some((found, Ok(value))) if found == id => return Ok(value),
                Some((found, Err(text))) if found == id => bail!("the guest refused `{command}`: {text}"),
                // Kernel messages, the greeting, or the response to a request that timed out.
                _ => {}
            }
        }
    }

    /// The counter that the guest steps every 5 ms, or at the interval that was set.
    pub fn tick(&mut self) -> Result<u64> {
        self.number("tick", REPLY_TIMEOUT)
    }

    /// Sets the interval of the counter: each step wakes an emulated processor, and a guest of many has to
    /// leave the host's processors to the others.
    pub fn set_interval(&mut self, interval: Duration) -> Result<()> {
        self.request(&format!("interval {}", interval.as_millis()), REPLY_TIMEOUT).map(drop)
    }

    /// Waits until the counter advances; returns it.
    pub fn wait_ticking(&mut self, within: Duration) -> Result<u64> {
        let before = self.tick()?;
        crate::wait_until(&format!("guest that ticks on from {before}"), within, || {
            let now = self.tick()?;
            Ok((now > before).then_some(now))
        })
    }

    /// Fills `bytes` of fresh memory with incompressible content; frees an earlier fill.
    pub fn fill(&mut self, bytes: u64, seed: u64) -> Result<()> {
        self.request(&format!("fill {bytes} {seed}"), WORK_WITHIN).map(drop)
    }

    /// As [`LinuxGuest::fill`], with zeros, every page touched.
    pub fn zero(&mut self, bytes: u64) -> Result<()> {
        self.request(&format!("zero {bytes}"), WORK_WITHIN).map(drop)
    }

    /// Returns a hash of the filled memory, in hexadecimal: XXH64 of the XXH64s of each 64 MiB.
    pub fn hash(&mut self) -> Result<String> {
        self.request("hash", WORK_WITHIN)
    }

    /// Starts writing `length` bytes of further memory, round and round, at `rate` bytes per second.
    pub fn dirty(&mut self, rate: u64, length: u64) -> Result<()> {
        self.request(&format!("dirty {rate} {length}"), WORK_WITHIN).map(drop)
    }

    /// Pages written by `dirty` so far, without its first round.
    pub fn dirtied_pages(&mut self) -> Result<u64> {
        self.number("dirtied", REPLY_TIMEOUT)
    }

    /// Stops writing; the range can still be checked. Returns the pages written.
    pub fn stop_dirtying(&mut self) -> Result<u64> {
        self.number("stop", REPLY_TIMEOUT)
    }

    /// Checks every page that `dirty` writes; the error names those that are torn or stale. Returns their
    /// number.
    pub fn check(&mut self) -> Result<u64> {
        self.number("check", WORK_WITHIN)
    }

    /// Returns the release of its kernel, as `6.1.0-37-amd64`.
    pub fn kernel(&mut self) -> Result<String> {
        Ok(self.shell("cat /proc/sys/kernel/osrelease", REPLY_TIMEOUT)?.trim().to_owned())
    }

    /// Returns the guest-physical address of the counter that the agent increments, for [`Qemu::read_u64`].
    pub fn tick_address(&mut self) -> Result<u64> {
        self.number("tick_address", REPLY_TIMEOUT)
    }

    /// Runs a line of busybox shell in the guest; fails unless it exits with 0. Returns its output.
    pub fn shell(&mut self, line: &str, within: Duration) -> Result<String> {
        let message = self.request(&format!("sh {line}"), within)?;
        let (status, output) = message.split_once('\n').context("`sh` answers with a status and output")?;
        ensure!(status == "0", "`{line}` exits with {status} in the guest: {output}");
        Ok(output.to_owned())
    }

    /// Starts an echo server in the guest on this port, TCP and UDP.
    pub fn echo(&mut self, port: u16) -> Result<()> {
        self.request(&format!("echo {port}"), REPLY_TIMEOUT).map(drop)
    }

    /// Connects to an echo server `times` times, one after the other, sends `bytes` bytes on each connection,
    /// and compares the echo.
    pub fn talk(&mut self, to: SocketAddr, bytes: u64, times: u64) -> Result<()> {
        self.request(&format!("talk {to} {bytes} {times}"), WORK_WITHIN).map(drop)
    }

    fn number(&mut self, command: &str, within: Duration) -> Result<u64> {
        let value = self.request(command, within)?;
        value.parse().with_context(|| format!("`{command}` is answered with `{value}`, expected a number"))
    }

    fn send(&mut self, before: &str, command: &str, deadline: Instant) -> Result<u64> {
        ensure!(!command.contains('\n'), "a command is one line: `{command}`");
        let id = self.next_id;
        self.next_id += 1;
        self.lines.send(&format!("{before}{id} {command}"), deadline)?;
        Ok(id)
    }
}

/// Parses `ID ok VALUE` or `ID error TEXT`; anything else is noise.
fn answer(line: &str) -> Option<(u64, Result<String, String>)> {
    let (id, rest) = line.split_once(' ')?;
    let (kind, value) = rest.split_once(' ').unwrap_or((rest, ""));
    let value = unescaped(value);
    let outcome = match kind {
        "ok" => Ok(value),
        "error" => Err(value),
        _ => return None,
    };
    Some((id.parse().ok()?, outcome))
}

fn unescaped(value: &str) -> String {
    let parts = value.split(r"\\").map(|part| part.replace(r"\n", "\n").replace(r"\r", "\r"));
    parts.collect::<Vec<_>>().join(r"\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_distinguished_from_noise() {
        assert_eq!(answer("12 ok 7"), Some((12, Ok("7".into()))));
        assert_eq!(answer("12 ok"), Some((12, Ok(String::new()))));
        assert_eq!(answer(r"12 error a\nb\\n"), Some((12, Err("a\nb\\n".into()))));
        assert_eq!(answer(r"1 ok \\\n\\\\r"), Some((1, Ok("\\\n\\\\r".into()))));
        assert_eq!(answer("[    0.5] usb ok"), None);
        assert_eq!(answer("k 7"), None);
        assert_eq!(answer(""), None);
    }
}
