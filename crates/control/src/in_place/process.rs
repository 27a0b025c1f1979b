//! The mappings of a QEMU's process, read when they are first needed.

use std::cell::OnceCell;

use super::Reason;
use super::maps::{Detail, Mapping, Proc};
use crate::qemu::{Process, Qemu};

/// The mappings of a QEMU's process, once they are needed.
pub(super) struct Mappings {
    process: Result<i32, Reason>,
    detail: Detail,
    read: OnceCell<Result<Vec<Mapping>, Reason>>,
}

impl Mappings {
    pub(super) fn of(qemu: &Qemu, detail: Detail) -> Self {
        let process = match qemu.process() {
            Process::Known { pid, .. } => Ok(*pid),
            Process::Unknown { reason } => Err(Reason::UnknownProcess { why: reason.clone() }),
        };
        Self { process, detail, read: OnceCell::new() }
    }

    pub(super) fn get(&self) -> Result<&[Mapping], Reason> {
        let read = || read_mappings(&self.process.clone()?.to_string(), self.detail);
        self.read.get_or_init(read).as_deref().map_err(Clone::clone)
    }
}

/// The mappings of this process.
pub(super) fn own_mappings() -> Result<Vec<Mapping>, Reason> {
    read_mappings("self", Detail::Mappings)
}

fn read_mappings(process: &str, detail: Detail) -> Result<Vec<Mapping>, Reason> {
    let proc = Proc::default();
    proc.mappings(process, detail)
        .map_err(|error| Reason::Unreadable { path: proc.path(process, detail), text: error.to_string() })
}
