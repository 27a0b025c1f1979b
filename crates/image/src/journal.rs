//! Every modification of files and directories, as a step. Compiled to nothing outside of this crate's tests.
//!
//! Everything that writers change on disk goes through [`step`]. A test records the steps and derives from
//! them every state that a crash may leave (`crash_tests`), makes a step fail, or runs a function
//! between two of them.

use rustix::io::Errno;

/// A modification of a file, identified by its [`FileNumber`], or of a name in the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "read by tests"))]
pub(crate) enum Op {
    /// The file of that name is opened or created.
    Open {
        name: String,
        node: FileNumber,
    },
    Write {
        node: FileNumber,
        at: u64,
        bytes: Vec<u8>,
    },
    SetLength {
        node: FileNumber,
        length: u64,
    },
    Punch {
        node: FileNumber,
        at: u64,
        length: u64,
    },
    Sync {
        node: FileNumber,
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

/// Bugs of earlier versions; the crash tests must detect each of them when it is enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "put back by tests"))]
pub(crate) enum PublicationBug {
    /// The manifest is renamed before the image.
    ManifestFirst,
    /// No file is synced before it is renamed.
    FileNotSynced,
    /// No directory is synced.
    DirectoryNotSynced,
    /// The staged manifest is removed if the directory cannot be synced afterwards.
    StagedManifestRemoved,
    /// A manifest is accepted if it describes the image's guest, without comparing the seal.
    SealIgnored,
    /// The old manifest is replaced without checking that it is still the same file.
    ReplacedUnchecked,
    /// Chunks of the base are deallocated without checking the base again.
    BaseNotRechecked,
    /// A small file is overwritten in place.
    SidecarInPlace,
}

/// Identifies a file under any name.
pub(crate) type FileNumber = u32;

#[cfg(not(test))]
pub(crate) fn step<T>(_op: impl FnOnce() -> Op, run: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    run()
}

/// Returns true if this bug is enabled.
#[cfg(not(test))]
pub(crate) const fn is_on(_fault: PublicationBug) -> bool {
    false
}

/// Number of a file that is opened.
#[cfg(not(test))]
pub(crate) fn next_file_number() -> FileNumber {
    0
}

#[cfg(test)]
pub(crate) use recording::{Interventions, is_on, next_file_number, record, step};

#[cfg(test)]
mod recording {
    use std::cell::RefCell;

    use super::{Errno, FileNumber, Op, PublicationBug};

    /// Interventions while steps are recorded.
    #[derive(Default)]
    pub(crate) struct Interventions {
        /// Index of a step that fails, and its error.
        pub(crate) fails: Option<(usize, Errno)>,
        /// Functions to run before the steps with these indexes.
        pub(crate) before: Vec<(usize, Box<dyn FnOnce()>)>,
        /// The bug to enable.
        pub(crate) fault: Option<PublicationBug>,
    }

    #[derive(Default)]
    struct StepRecording {
        ops: Vec<Op>,
        steps: usize,
        opened: FileNumber,
        plan: Interventions,
    }

    thread_local! {
        static RECORDING: RefCell<Option<StepRecording>> = const { RefCell::new(None) };
    }

    /// Runs `work`; returns its result and the steps of this thread.
    pub(crate) fn record<T>(plan: Interventions, work: impl FnOnce() -> T) -> (T, Vec<Op>) {
        RECORDING.set(Some(StepRecording { plan, ..StepRecording::default() }));
        let done = work();
        let recording = RECORDING.take();
        (done, recording.map(|recording| recording.ops).unwrap_or_default())
    }

    pub(crate) fn is_on(fault: PublicationBug) -> bool {
        RECORDING.with_borrow(|recording| {
            recording.as_ref().is_some_and(|recording| recording.plan.fault == Some(fault))
        })
    }

    pub(crate) fn next_file_number() -> FileNumber {
        RECORDING.with_borrow_mut(|recording| {
            recording.as_mut().map_or(0, |recording| {
                recording.opened += 1;
                recording.opened
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
            Op::Sync { .. } => is_on(PublicationBug::FileNotSynced),
            Op::SyncDirectory => is_on(PublicationBug::DirectoryNotSynced),
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
