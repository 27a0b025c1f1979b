//! A guest's counter, read through `/proc/PID/mem` of its QEMU, whose monitor does not respond while it loads.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use towline_lab::Qemu;

/// A 64-bit counter in a guest's memory.
pub(crate) struct Counter {
    memory: File,
    address: u64,
}

impl Counter {
    /// Opens the counter at this guest-physical address, which QEMU translates (`gpa2hva`).
    pub(crate) fn at(qemu: &Qemu, guest_address: u64) -> Result<Self> {
        let reply = qemu.qmp().hmp(&format!("gpa2hva {guest_address:#x}"))?;
        let address = reply.split_whitespace().last().and_then(|word| word.strip_prefix("0x"));
        let address = address.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        let address = address.with_context(|| format!("gpa2hva: unexpected reply `{}`", reply.trim()))?;
        Self::open(qemu.pid().into(), address)
    }

    /// Opens the counter at this offset of the guest's RAM block, which the QEMU of this process maps from the file.
    pub(crate) fn mapped_from(file: &Path, offset: u64, pid: u64) -> Result<Self> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let file = file.to_str().context("path of the file")?;
        let mapping = maps.lines().find(|line| line.ends_with(file));
        let start = mapping.and_then(|line| line.split_once('-')).map(|(start, _)| start);
        let start = start.and_then(|start| u64::from_str_radix(start, 16).ok());
        Self::open(pid, start.context("QEMU does not map the file")? + offset)
    }

    fn open(pid: u64, address: u64) -> Result<Self> {
        let path = format!("/proc/{pid}/mem");
        let memory = File::open(&path).with_context(|| format!("{path} cannot be read"))?;
        Ok(Self { memory, address })
    }

    /// Reads the counter; 0 while its page has not arrived (postcopy), for which the kernel reports an input error.
    pub(crate) fn read(&self) -> Result<u64> {
        let mut word = [0; 8];
        match self.memory.read_exact_at(&mut word, self.address) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => Ok(0),
            read => {
                read.context("the guest's memory cannot be read")?;
                Ok(u64::from_le_bytes(word))
            }
        }
    }
}
