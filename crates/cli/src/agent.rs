//! `towline agent`: the other end of `ssh:`.

use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline_channel::{Address, Cancel};
use towline_control::plan::{self, CopyResult, Observer, SourceCategory};
use towline_control::protect::StandbyEnd;
use towline_control::remote::{self, Agent, AgentCopy, AgentStandby, AgentTask, Ended, FrameReceiver};
use towline_launch::RuntimeRoot;
use towline_qmp::{Commands, Dialogue, Unreadable};

use crate::console::{self, OverflowPolicy};
use crate::errors;
use crate::exit::Exit;
use crate::sandbox;
use crate::serve;
use crate::signals::{HeldSignals, SignalEffects, cancel_on_signals};

/// Time in which the other end sends its next request. It asks its user nothing meanwhile, so it is lost after that, as where the network fails.
const IDLE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// Time after the guest's arrival in which the last of its frames come.
const FRAMES_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest request: facts about a guest, and its command line.
const REQUEST_BYTES_MAX: usize = 8 << 20;

/// Runs the command.
pub(crate) fn run() -> Result<Exit> {
    // A QEMU that it starts is ended with it.
    let held = HeldSignals::hold()?;
    let mut requests = Requests::new();
    let mut copy = match prepare(&mut requests, &held.arrived())? {
        Some(AgentTask::Copy(copy)) => *copy,
        Some(AgentTask::StandBy(standby)) => {
            drop(held);
            return stand_by(requests, *standby);
        }
        _ => return Ok(Exit::Done),
    };
    let destinations = std::slice::from_ref(&copy.destination);
    // One that has started a QEMU has a thread, which would not be confined with it.
    if !copy.has_started()
        && let Some(mut policy) = sandbox::policy_of_copy(&copy.source, destinations, &copy.request, None)
    {
        let AgentCopy { source, request, .. } = &copy;
        sandbox::permit_mapped_images(&mut policy, source, destinations, request, &held.arrived());
        policy.confine(sandbox::BEST_EFFORT);
    }
    let cancel = cancel_on_signals(SignalEffects {
        first: "cancelling; the source keeps its guest, unless the switchover is in progress",
        second: None,
    })?;
    drop(held);
    let frames = std::mem::take(&mut copy.frames);
    let awaits_end = !frames.is_empty();
    let ended = follow(requests, frames, cancel.clone())?;
    let has_started = copy.has_started();
    let AgentCopy { source, destination, request, .. } = &copy;
    let copied = plan::copy(source, destination, request, &cancel, &Events);
    copy.settle(&copied);
    emit(&remote::ended(&result(&copied, has_started)));
    if awaits_end && copied.is_ok() {
        // Of the frames; the thread holds the other end until then.
        let _ = ended.recv_timeout(FRAMES_TIMEOUT);
    }
    Ok(match &copied {
        Ok(_) => Exit::Done,
        Err(failure) if failure.guest.needs_attention() => Exit::NeedsAttention,
        Err(_) => Exit::Failed,
    })
}

/// Stands by for a guest, also when the session has ended.
fn stand_by(mut requests: Requests, standby: AgentStandby) -> Result<Exit> {
    let (commands, released) = (standby.control(), standby.control());
    let cancel = cancel_on_signals(SignalEffects {
        first: "not standing by any more; the guest runs on at its host",
        second: None,
    })?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        serve::wait(&[&cancel], None);
        released.release();
    })?;
    remote::listening(standby.address()).iter().for_each(|line| emit(line));
    thread::Builder::new().name("session".into()).spawn(move || requests.answer_all(&*commands))?;
    let ended = standby.run(&|text| Events.notice(text));
    let (error, exit) = match &ended {
        Ok(StandbyEnd::Released | StandbyEnd::TakenOver(_)) => (None, Exit::Done),
        Ok(StandbyEnd::Lost) => (Some("the guest runs on at its host".to_owned()), Exit::Failed),
        Err(error) => (Some(error.to_string()), Exit::Failed),
    };
    emit(&remote::ended(&Ended { error, notes: Vec::new() }));
    Ok(exit)
}

/// Requests of the other end.
struct Requests {
    dialogue: Dialogue,
    negotiated: AtomicBool,
}

impl Requests {
    fn new() -> Self {
        Self { dialogue: Dialogue::new(REQUEST_BYTES_MAX), negotiated: AtomicBool::new(false) }
    }

    /// Reads standard input once, and answers the requests that are complete. Breaks at the end of the session.
    fn answer_next(
        &mut self,
        commands: &dyn Commands,
        mut send: impl FnMut(&str) -> io::Result<()>,
    ) -> Result<ControlFlow<()>> {
        // Not its reader, whose buffer `poll` does not see.
        let mut bytes = [0; 4096];
        let count = rustix::io::retry_on_intr(|| rustix::io::read(io::stdin(), &mut bytes));
        let count = count.context("standard input")?;
        if count == 0 {
            return Ok(ControlFlow::Break(()));
        }
        self.dialogue.feed(&bytes[..count]);
        loop {
            match self.dialogue.next_reply(commands, &self.negotiated) {
                Ok(None) => return Ok(ControlFlow::Continue(())),
                Ok(Some(reply)) => send(&reply).context("standard output")?,
                Err(Unreadable(reply)) => {
                    send(&reply).context("standard output")?;
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
    }

    /// Answers requests until the session ends.
    fn answer_all(&mut self, commands: &dyn Commands) {
        let send = |line: &str| {
            emit(line);
            Ok(())
        };
        while self.answer_next(commands, send).is_ok_and(|session| session.is_continue()) {}
    }
}

/// Executes requests until one has it receive or send a guest; `None`: the other end has none.
fn prepare(requests: &mut Requests, interrupt: &OwnedFd) -> Result<Option<AgentTask>> {
    let agent = Agent::new(RuntimeRoot::of_user());
    let (input, mut output) = (io::stdin(), io::stdout().lock());
    let mut send = |line: &str| output.write_all(line.as_bytes()).and_then(|()| output.flush());
    send(&remote::greeting()).context("standard output")?;
    loop {
        let mut fds = [PollFd::new(&input, PollFlags::IN), PollFd::new(interrupt, PollFlags::IN)];
        match poll(&mut fds, Some(&IDLE)) {
            Ok(0) => bail!("no request for {} s: the session is lost", IDLE.tv_sec),
            Ok(_) if !fds[1].revents().is_empty() => return Ok(None),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno).context("standard input"),
        }
        if requests.answer_next(&agent, &mut send)?.is_break() {
            return Ok(None);
        }
        if let Some(task) = agent.task() {
            return Ok(Some(task));
        }
    }
}

/// Passes frames to the cards until the session ends, and cancels then. The channel is closed afterwards.
fn follow(mut requests: Requests, frames: FrameReceiver, cancel: Cancel) -> Result<Receiver<()>> {
    let (end, ended) = mpsc::channel();
    let wait = move || {
        let _end = end;
        requests.answer_all(&frames);
        cancel.cancel();
        frames.end();
    };
    thread::Builder::new().name("session".into()).spawn(wait)?;
    Ok(ended)
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
