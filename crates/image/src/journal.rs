//! What is done to files and directories, step by step. Nothing of it is left outside of this crate's tests.
//!
//! Everything that writers do to a disk goes through [`step`]. A test records the steps and makes of them every state that a crash
//! may leave ([`crate::crash_tests`]), lets a step fail, or does something of its own between two of them.

use rustix::io::Errno;

/// Something done to a file, known by its [`Node`], or to a name in the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "read by tests"))]
pub(crate) enum Op {
    /// The file of that name is opened, or made.
    Open {
        name: String,
        node: Node,
    },
    Write {
        node: Node,
        at: u64,
        bytes: Vec<u8>,
    },
    SetLength {
        node: Node,
        length: u64,
    },
    Punch {
        node: Node,
        at: u64,
        length: u64,
    },
    Sync {
        node: Node,
    },
    Rename {
        from: String,
        to: String,
    },
    Exchange {
        first: String,
        second: String,
    },
    Unlink {
        name: String,
    },
    SyncDirectory,
}

/// Faults of earlier versions, each of which the tests of crashes must find when it is put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "put back by tests"))]
pub(crate) enum Fault {
    /// The manifest takes its name before the image does.
    ManifestFirst,
    /// No file is synced before it is renamed.
    FileNotSynced,
    /// No directory is synced.
    DirectoryNotSynced,
    /// The manifest of an image that is about to appear is removed where the directory cannot be synced afterwards.
    PendingRemoved,
    /// A manifest is taken for the image's own by what it says of the guest alone.
    SealIgnored,
    /// The old manifest is replaced by whatever file has its name then.
    ReplacedUnseen,
    /// What the base has is dropped without a look whether it still has it.
    BaseNotSeenAgain,
    /// A small file is written in its place.
    SidecarInPlace,
}

/// Tells files apart whatever their names.
pub(crate) type Node = u32;

#[cfg(not(test))]
pub(crate) fn step<T>(_op: impl FnOnce() -> Op, run: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    run()
}

/// Whether this fault is put back.
#[cfg(not(test))]
pub(crate) const fn is_on(_fault: Fault) -> bool {
    false
}

/// A number for a file that is opened.
#[cfg(not(test))]
pub(crate) fn node() -> Node {
    0
}

#[cfg(test)]
pub(crate) use recording::{Plan, is_on, node, record, step};

#[cfg(test)]
mod recording {
    use std::cell::RefCell;

    use super::{Errno, Fault, Node, Op};

    /// What happens while steps are recorded.
    #[derive(Default)]
    pub(crate) struct Plan {
        /// The step of this number fails.
        pub(crate) fails: Option<(usize, Errno)>,
        /// Done before the steps of these numbers.
        pub(crate) before: Vec<(usize, Box<dyn FnOnce()>)>,
        /// The fault that is put back.
        pub(crate) fault: Option<Fault>,
    }

    #[derive(Default)]
    struct Recording {
        ops: Vec<Op>,
        steps: usize,
        nodes: Node,
        plan: Plan,
    }

    thread_local! {
        static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
    }

    /// Runs `work` and returns, beside what it does, the steps that this thread did.
    pub(crate) fn record<T>(plan: Plan, work: impl FnOnce() -> T) -> (T, Vec<Op>) {
        RECORDING.set(Some(Recording { plan, ..Recording::default() }));
        let done = work();
        let recording = RECORDING.take();
        (done, recording.map(|recording| recording.ops).unwrap_or_default())
    }

    pub(crate) fn is_on(fault: Fault) -> bool {
        RECORDING.with_borrow(|recording| {
            recording.as_ref().is_some_and(|recording| recording.plan.fault == Some(fault))
        })
    }

    pub(crate) fn node() -> Node {
        RECORDING.with_borrow_mut(|recording| {
            recording.as_mut().map_or(0, |recording| {
                recording.nodes += 1;
                recording.nodes
            })
        })
    }

    pub(crate) fn step<T>(
        op: impl FnOnce() -> Op,
        run: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let planned = RECORDING.with_borrow_mut(|recording| {
            let recording = recording.as_mut()?;
            let number = recording.steps;
            recording.steps += 1;
            let (due, later): (Vec<_>, Vec<_>) =
                std::mem::take(&mut recording.plan.before).into_iter().partition(|(at, _)| *at == number);
            recording.plan.before = later;
            Some((due, recording.plan.fails.filter(|(at, _)| *at == number)))
        });
        let Some((due, fails)) = planned else { return run() };
        due.into_iter().for_each(|(_, before)| before());
        if let Some((_, errno)) = fails {
            return Err(errno);
        }
        let op = op();
        let left_out = match &op {
            Op::Sync { .. } => is_on(Fault::FileNotSynced),
            Op::SyncDirectory => is_on(Fault::DirectoryNotSynced),
            _ => false,
        };
        let done = run()?;
        if !left_out {
            RECORDING.with_borrow_mut(|recording| {
                if let Some(recording) = recording {
                    recording.ops.push(op);
                }
            });
        }
        Ok(done)
    }
}
