//! The other end of a copy by postcopy: a QEMU whose monitor we have, or an address of somebody else's.

use towline_channel::Address;
use towline_migration::Compression;
use towline_protocol::RamBlock;
use towline_protocol::ram::PAGE_SIZE;

use super::super::blame;
use super::super::context::Run;
use super::super::destination::{Fate, QmpDestination};
use super::super::endpoint::Destination;
use super::super::error::{Error, Failure, GuestState, look_at};
use super::super::fit::Guest as Fits;
use super::super::options::PostcopyOptions;
use super::stored::Stored;

/// See the module's text.
pub(super) enum End {
    Qmp(Box<QmpDestination>),
    Stream(Address),
}

impl End {
    /// Checks what can be checked; nothing is changed.
    pub(super) fn prepare(
        destination: &Destination,
        stored: &Stored<'_>,
        options: PostcopyOptions,
        run: &Run<'_>,
    ) -> Result<Self, Error> {
        match destination {
            Destination::Qmp(path) => {
                let mut qemu = match options.recover {
                    true => QmpDestination::prepare_lost(path)?,
                    false => QmpDestination::prepare_postcopy(path)?,
                };
                let machine_type = &stored.guest.configuration().machine_type;
                let guest = Fits::of_blocks(machine_type, stored.guest.blocks());
                qemu.check(&guest, run)?;
                if options.recover && qemu.preempts() != options.preempt {
                    let (has, option) = match qemu.preempts() {
                        true => ("a preempt channel", "pass --postcopy-preempt"),
                        false => ("no preempt channel", "leave --postcopy-preempt out"),
                    };
                    return Err(Error::Usage(format!("the guest was begun with {has}: {option}")));
                }
                Ok(Self::Qmp(Box::new(qemu)))
            }
            Destination::Stream(address @ (Address::Tcp { .. } | Address::Unix(_))) => {
                Ok(Self::Stream(address.clone()))
            }
            _ => Err(Error::Usage(
                "--postcopy is for a destination that runs the guest: qmp:, tcp: or unix: with a QEMU behind it".into(),
            )),
        }
    }

    /// Whether we can ask it, and tell it to listen again.
    pub(super) fn is_driven(&self) -> bool {
        matches!(self, Self::Qmp(_))
    }

    /// Whether the guest ran when we came.
    pub(super) fn ran(&self) -> bool {
        match self {
            Self::Qmp(qemu) => qemu.ran(),
            Self::Stream(_) => true,
        }
    }

    /// The size of the pages behind each block; of one that cannot be asked 4 KiB.
    pub(super) fn page_bytes(&self, blocks: &[RamBlock]) -> Vec<u64> {
        match self {
            Self::Qmp(qemu) => qemu.page_bytes(blocks),
            Self::Stream(_) => vec![PAGE_SIZE; blocks.len()],
        }
    }

    /// Where it listens, told to if it can be.
    pub(super) fn listen(&mut self, options: PostcopyOptions, runs: bool) -> Result<Address, Error> {
        match self {
            Self::Qmp(qemu) => qemu.start_postcopy(options.preempt, runs, 0, Compression::None),
            Self::Stream(address) => Ok(address.clone()),
        }
    }

    /// Whether the guest is seen to run.
    pub(super) fn runs_now(&mut self) -> bool {
        match self {
            Self::Qmp(qemu) => qemu.runs_now().is_ok_and(|runs| runs == Some(true)),
            Self::Stream(_) => false,
        }
    }

    /// What became of it when its connection was lost.
    pub(super) fn fate(&mut self) -> Result<Fate, Error> {
        match self {
            Self::Qmp(qemu) => qemu.fate(),
            // Nobody to ask: it listens again when somebody has told it to.
            Self::Stream(address) => Ok(Fate::Listens(address.clone())),
        }
    }

    /// It does not listen again by itself.
    pub(super) fn wait_for_help(&mut self, why: &towline_migration::Error, run: &Run<'_>) {
        match self {
            Self::Qmp(qemu) => qemu.break_connection(),
            Self::Stream(address) => run.observer.notice(&format!(
                "{why}; the guest waits at its destination; {address} is tried again and again: if its QEMU does not listen there any more, tell it `migrate-recover` with that uri"
            )),
        }
    }

    /// Before the guest runs: puts things back. Returns the reason, the destination's own if that is better, and notes.
    pub(super) fn undo(&mut self, error: Error) -> (Error, Vec<String>) {
        match self {
            Self::Qmp(qemu) => (qemu.explain(error), qemu.undo(false)),
            Self::Stream(_) => (error, Vec::new()),
        }
    }

    /// The guest did not come to run here. Returns notes.
    pub(super) fn give_back(&mut self) -> Vec<String> {
        match self {
            Self::Qmp(qemu) => qemu.undo(false),
            Self::Stream(_) => Vec::new(),
        }
    }

    /// The destination says that it could not take the guest.
    pub(super) fn given_up(
        &mut self,
        why: towline_migration::Error,
        text: &str,
        had_loaded: bool,
    ) -> Failure {
        let Self::Qmp(qemu) = self else { return self.left(why.into()) };
        let error = qemu.failed(text);
        qemu.leave();
        match had_loaded {
            true => look_at(error, RAN),
            false => Failure { error: Box::new(error), guest: GuestState::Safe, notes: qemu.undo(false) },
        }
    }

    /// Its monitor is lost.
    pub(super) fn ended(&mut self, error: Error, had_loaded: bool) -> Failure {
        if let Self::Qmp(qemu) = self {
            qemu.leave();
        }
        match blame::is_gone(&error) {
            true if !had_loaded => {
                Failure { error: Box::new(error), guest: GuestState::Safe, notes: Vec::new() }
            }
            true => look_at(error, RAN),
            false => self.left(error),
        }
    }

    /// Nobody brings it its memory any more.
    pub(super) fn left(&mut self, error: Error) -> Failure {
        if let Self::Qmp(qemu) = self {
            qemu.leave();
        }
        look_at(
            error,
            "it runs at its destination and stands still where it needs memory that has not come (postcopy-paused): `towline copy --postcopy --recover` with the same image and destination goes on; the image is as it was",
        )
    }

    /// All memory is there.
    pub(super) fn finish(&mut self, runs: bool) -> Result<Vec<String>, Failure> {
        let Self::Qmp(qemu) = self else { return Ok(Vec::new()) };
        let finished = qemu.wait_completed().and_then(|()| if runs { qemu.check_runs() } else { Ok(()) });
        finished.and_then(|()| qemu.release()).map_err(|error| match blame::is_gone(&error) {
            true => look_at(error, RAN),
            false => look_at(error, "at its destination, with all of its memory: look what it does there"),
        })
    }
}

const RAN: &str =
    "it ran at its destination, which has ended, and the guest with it; the image holds it as it was stored";
