//! The lab's guest: the first and only process of a small Linux.
//!
//! It mounts what a Linux needs, loads modules if there are virtio devices, steps a counter, and serves
//! commands on the second serial port (the kernel's console is the first, so its messages cannot mix in):
//!
//! ```text
//! → ID COMMAND ARGUMENTS\n
//! ← ID ok VALUE\n      or      ID error TEXT\n
//! ```
//! The ID is chosen by the client, so a response to an earlier client (the guest was moved, the socket is a
//! new one) can be recognised. Newlines and backslashes in a value are escaped with a backslash.
//!
//! It is not part of the product, holds no secrets, and trusts the client on its serial port.
#![forbid(unsafe_code)]

mod boot;
mod commands;
mod dirty;
mod net;
mod pattern;
mod tick;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};

use anyhow::{Context, Result};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use commands::Agent;

const COMMAND_PORT: &str = "/dev/ttyS1";
/// Maximum length of a command line.
const LINE_LENGTH_MAX: usize = 64 << 10;

fn main() {
    // The process is init: when it ends the kernel panics, reboots, and QEMU (-no-reboot) exits.
    if let Err(error) = run() {
        eprintln!("agent: {error:#}");
    }
}

fn run() -> Result<()> {
    boot::mount_all()?;
    boot::load_modules();
    let mut agent = Agent::new()?;
    let port = open_port()?;
    let mut answers = port.try_clone()?;
    let mut requests = BufReader::new(port);
    answers.write_all(b"0 ok ready\n")?;
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut bounded = std::io::Read::take(&mut requests, LINE_LENGTH_MAX as u64);
        if bounded.read_until(b'\n', &mut line)? == 0 {
            anyhow::bail!("{COMMAND_PORT} has ended");
        }
        let text = String::from_utf8_lossy(&line);
        if let Some((id, command)) = text.trim().split_once(' ') {
            let answer = match agent.answer(command) {
                Ok(value) => format!("{id} ok {}\n", escaped(&value)),
                Err(error) => format!("{id} error {}\n", escaped(&format!("{error:#}"))),
            };
            answers.write_all(answer.as_bytes())?;
        }
    }
}

/// Opens the command port without a line discipline.
fn open_port() -> Result<File> {
    let port = OpenOptions::new().read(true).write(true).open(COMMAND_PORT);
    let port =
        port.with_context(|| format!("{COMMAND_PORT} cannot be opened: is there a second -serial?"))?;
    let mut settings = tcgetattr(&port)?;
    settings.make_raw();
    tcsetattr(&port, OptionalActions::Now, &settings)?;
    Ok(port)
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r")
}
