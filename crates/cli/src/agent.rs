//! `towline agent`: the other end of `ssh:`.

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::thread;

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline_channel::{Address, Cancel};
use towline_control::plan::{self, CopyResult, Observer, SourceCategory};
use towline_control::remote::{self, Agent, Ended, Reception};
use towline_launch::RuntimeRoot;
use towline_qmp::{Dialogue, Unreadable};

use crate::console::{self, OverflowPolicy};
use crate::errors;
use crate::exit::Exit;
use crate::sandbox;
use crate::signals::{HeldSignals, SignalEffects, cancel_on_signals};

/// Time in which the other end sends its next request. It asks its user nothing meanwhile, so it is lost after that, as where the network fails.
const IDLE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// Longest request: facts about a guest, and its command line.
const REQUEST_BYTES_MAX: usize = 8 << 20;

/// Runs the command.
pub(crate) fn run() -> Result<Exit> {
    // A QEMU that it starts is ended with it.
    let held = HeldSignals::hold()?;
    let Some(mut reception) = prepare(&held.arrived())? else { return Ok(Exit::Done) };
    let destinations = std::slice::from_ref(&reception.destination);
    // One that has started a QEMU has a thread, which would not be confined with it.
    if !reception.has_started()
        && let Some(mut policy) =
            sandbox::policy_of_copy(&reception.source, destinations, &reception.request, None)
    {
        let Reception { source, request, .. } = &reception;
        sandbox::permit_mapped_images(&mut policy, source, destinations, request, &held.arrived());
        policy.confine(sandbox::BEST_EFFORT);
    }
    let cancel = cancel_on_signals(SignalEffects {
        first: "cancelling; the source keeps its guest, unless the switchover is in progress",
        second: None,
    })?;
    drop(held);
    cancel_at_end_of_input(cancel.clone())?;
    let has_started = reception.has_started();
    let Reception { source, destination, request, .. } = &reception;
    let copied = plan::copy(source, destination, request, &cancel, &Events);
    reception.settle(&copied);
    emit(&remote::ended(&result(&copied, has_started)));
    Ok(match &copied {
        Ok(_) => Exit::Done,
        Err(failure) if failure.guest.needs_attention() => Exit::NeedsAttention,
        Err(_) => Exit::Failed,
    })
}

/// Executes requests until one has it receive a guest; `None`: the other end has none.
fn prepare(interrupt: &OwnedFd) -> Result<Option<Reception>> {
    let agent = Agent::new(RuntimeRoot::of_user());
    let (mut dialogue, negotiated) = (Dialogue::new(REQUEST_BYTES_MAX), AtomicBool::new(false));
    // Not its reader, whose buffer `poll` does not see.
    let (input, mut output) = (std::io::stdin(), std::io::stdout().lock());
    let mut send = |line: &str| output.write_all(line.as_bytes()).and_then(|()| output.flush());
    send(&remote::greeting()).context("standard output")?;
    let mut bytes = [0; 4096];
    loop {
        let mut fds = [PollFd::new(&input, PollFlags::IN), PollFd::new(interrupt, PollFlags::IN)];
        match poll(&mut fds, Some(&IDLE)) {
            Ok(0) => bail!("no request for {} s: the session is lost", IDLE.tv_sec),
            Ok(_) if !fds[1].revents().is_empty() => return Ok(None),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno).context("standard input"),
        }
        let count = rustix::io::read(&input, &mut bytes).context("standard input")?;
        if count == 0 {
            return Ok(None);
        }
        dialogue.feed(&bytes[..count]);
        loop {
            match dialogue.next_reply(&agent, &negotiated) {
                Ok(None) => break,
                Ok(Some(reply)) => send(&reply).context("standard output")?,
                Err(Unreadable(reply)) => {
                    send(&reply).context("standard output")?;
                    return Ok(None);
                }
            }
        }
        if let Some(reception) = agent.reception() {
            return Ok(Some(reception));
        }
    }
}

/// Cancels when the session has ended.
fn cancel_at_end_of_input(cancel: Cancel) -> Result<()> {
    let wait = move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        cancel.cancel();
    };
    thread::Builder::new().name("session".into()).spawn(wait)?;
    Ok(())
}

/// Notes on a QEMU that was started for the guest are left out: it is ended, or has the guest.
fn result(copied: &CopyResult, has_started: bool) -> Ended {
    let Err(failure) = copied else { return Ended { error: None, notes: Vec::new() } };
    let guest = failure.guest.sentence(SourceCategory::Qemu);
    let notes = failure.notes.iter().filter(|_| !has_started).cloned().chain(errors::notes(failure, None));
    let guest = failure.guest.needs_attention().then(|| format!("the guest: {guest}"));
    Ended { error: Some(errors::failure_text(failure)), notes: guest.into_iter().chain(notes).collect() }
}

/// Queues a line of the session, which may not be read while the guest is stopped.
fn emit(line: &str) {
    console::print(OverflowPolicy::Always, line.trim_end());
}

/// Events of the session.
struct Events;

impl Observer for Events {
    fn listening(&self, address: &Address) {
        remote::listening(address).iter().for_each(|line| emit(line));
    }

    fn notice(&self, text: &str) {
        console::print(OverflowPolicy::Limited, remote::notice(text).trim_end());
    }
}
