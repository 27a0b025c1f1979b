//! The commands, one function each.

use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use memmap2::MmapMut;

use crate::dirty::Load;
use crate::net;
use crate::pattern;
use crate::tick::Tick;

/// State of the guest as set by the commands so far.
pub(crate) struct Agent {
    tick: Arc<Tick>,
    memory: Option<MmapMut>,
    load: Option<Load>,
}

impl Agent {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { tick: Tick::start()?, memory: None, load: None })
    }

    /// Runs one command.
    pub(crate) fn answer(&mut self, line: &str) -> Result<String> {
        let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words: Vec<&str> = rest.split_whitespace().collect();
        match (command, &words[..]) {
            ("sync", _) => Ok(rest.to_owned()),
            ("tick", []) => Ok(self.tick.value().to_string()),
            ("interval", [milliseconds]) => {
                self.tick.set_interval(number(milliseconds)?.max(1));
                Ok(String::new())
            }
            ("fill", [length, seed]) => {
                let (length, seed) = (number(length)?, number(seed)?);
                self.replace(|| pattern::filled(usize::try_from(length)?, seed))
            }
            ("zero", [length]) => {
                let length = number(length)?;
                self.replace(|| pattern::zeroed(usize::try_from(length)?))
            }
            ("hash", []) => Ok(format!("{:016x}", pattern::hash(self.filled()?))),
            ("dirty", [rate, length]) => {
                self.load = None;
                self.load = Some(Load::start(usize::try_from(number(length)?)?, number(rate)?)?);
                Ok(String::new())
            }
            ("dirtied", []) => Ok(self.loaded()?.pages_written().to_string()),
            ("stop", []) => {
                self.loaded()?.stop();
                Ok(self.loaded()?.pages_written().to_string())
            }
            ("check", []) => Ok(self.loaded()?.check()?.to_string()),
            ("tick_address", []) => Ok(self.tick.physical_address()?.to_string()),
            ("sh", [_, ..]) => shell(rest),
            ("echo", [port]) => net::echo(port.parse()?).map(|()| String::new()),
            ("talk", [address, bytes, times]) => {
                let (bytes, times) = (usize::try_from(number(bytes)?)?, number(times)?);
                net::talk(address, bytes, times).map(|()| String::new())
            }
            _ => bail!("unknown command or wrong arguments: `{line}`"),
        }
    }

    /// Frees the old memory first: there may not be room for both.
    fn replace(&mut self, make: impl FnOnce() -> Result<MmapMut>) -> Result<String> {
        self.memory = None;
        self.memory = Some(make()?);
        Ok(String::new())
    }

    fn filled(&self) -> Result<&MmapMut> {
        self.memory.as_ref().context("nothing is filled; ask for `fill` or `zero` first")
    }

    fn loaded(&mut self) -> Result<&mut Load> {
        self.load.as_mut().context("nothing was dirtied; ask for `dirty` first")
    }
}

/// Runs a line of shell; returns the exit status, a newline, and its output.
fn shell(line: &str) -> Result<String> {
    let output = Command::new("/bin/busybox")
        .args(["sh", "-c", &format!("exec 2>&1; {line}")])
        .env("PATH", "/bin:/sbin:/usr/bin:/usr/sbin")
        .stdin(Stdio::null())
        .output()
        .context("no shell in this guest")?;
    let status = output.status.code().unwrap_or(-1);
    Ok(format!("{status}\n{}", String::from_utf8_lossy(&output.stdout)))
}

fn number(word: &str) -> Result<u64> {
    word.parse().with_context(|| format!("`{word}` is not a number"))
}
