//! `towline protect`, and `towline ferry`.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use towline_control::plan::{Observer, Progress};
use towline_control::protect::{self, Checkpoints, ProtectEnd, ProtectObserver, ProtectRequest};
use towline_control::remote::{NewGuest, Place, SessionTimeouts};
use towline_control::statistics::StatsSource;
use towline_launch::RuntimeRoot;

use crate::args::{Epoch, ProtectArgs};
use crate::ctl;
use crate::endpoint::Endpoint;
use crate::events::{CheckpointsOf, FinalEvent, InterimEvent, ProtectionEnd, Reason};
use crate::exit::{Exit, UsageError};
use crate::notify::Notifier;
use crate::observability::ProtectionCounters;
use crate::progress::Reporter;
use crate::remote;
use crate::signals::{SignalEffects, cancel_on_signals};
use crate::units::{counted, size};

/// Time in which ssh connects.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Silence after which ssh takes the other host for lost. Checkpoints notice that earlier.
const SESSION_TIMEOUT: Duration = Duration::from_secs(30);

/// Least silence, beside two epochs, after which a host is lost.
const PEER_TIMEOUT_MIN: Duration = Duration::from_millis(200);
/// Longest epoch of a guest that sends nothing.
const EPOCH_MAX: Duration = Duration::from_millis(50);
/// Program before those that end by this process alone. Ctrl-C and Ctrl-Z are sent to all processes of a terminal, and a service manager's
/// SIGTERM to all of a service.
const IGNORING_SIGNALS: [&str; 2] = ["env", "--ignore-signal=HUP,INT,QUIT,TERM,TSTP"];

/// Runs the command.
pub(crate) fn run(args: &ProtectArgs) -> Result<Exit> {
    let request = request(args)?;
    let reporter = Reporter::new(&args.output);
    let cancel = cancel_on_signals(SignalEffects {
        first: "ending the protection; the guest runs on",
        second: Some("`towline repair` ends the protection; until then the guest's output is held"),
    })?;
    let output = Output {
        reporter: &reporter,
        notifier: Notifier::from_environment(),
        name: args.destination.to_string(),
        counters: Arc::new(ProtectionCounters::new(&args.destination)),
    };
    let counters: Arc<dyn StatsSource> = output.counters.clone();
    let _metrics = args.metrics.start(counters)?;
    let end = match protect::protect(&request, &cancel, &output) {
        Err(error) if error.needs_attention() => {
            return Ok(reporter.failed(&error.to_string(), Reason::Other, Exit::NeedsAttention));
        }
        end => end?,
    };
    output.notifier.stopping();
    let name = &output.name;
    let (text, event, exit) = match end {
        ProtectEnd::Cancelled => {
            ("ended; the guest runs on, unprotected".to_owned(), ProtectionEnd::Cancelled, Exit::Done)
        }
        ProtectEnd::GuestEnded => {
            ("the guest has ended, and so has its copy".to_owned(), ProtectionEnd::GuestEnded, Exit::Ended)
        }
        ProtectEnd::Died { is_confirmed } => (
            match is_confirmed {
                true => format!("the guest's QEMU has died: {name} goes on with the guest"),
                false => format!(
                    "the guest's QEMU has died: {name} goes on with the guest if it has the first checkpoint, which it had not confirmed; \
                     see towline ps there"
                ),
            },
            ProtectionEnd::Died,
            Exit::Ended,
        ),
        ProtectEnd::TakenOver { generation, reason } => (
            format!("{name} has the guest, as generation {generation} ({reason}): it was ended here"),
            ProtectionEnd::TakenOver,
            Exit::Ended,
        ),
    };
    reporter.line(&text);
    Ok(reporter.result(FinalEvent::ProtectionEnded { end: event }, exit))
}

fn request(args: &ProtectArgs) -> Result<ProtectRequest> {
    let Endpoint::Ssh(end) = &args.destination else {
        bail!(UsageError(format!("{}: expected ssh:HOST", args.destination)));
    };
    let Place::Guest(given) = &end.place else {
        bail!(UsageError(format!("{end}: expected ssh:HOST, or ssh:HOST/NAME with the guest's name there")));
    };
    let (epoch, ends_on_output) = match args.epoch {
        Epoch::Interval(time) => (time, false),
        Epoch::Output => (EPOCH_MAX, true),
    };
    if args.peer_timeout < epoch * 2 + PEER_TIMEOUT_MIN {
        let least = (epoch * 2 + PEER_TIMEOUT_MIN).as_millis();
        let text = format!(
            "--peer-timeout: the other host receives one checkpoint in an epoch; expected at least {least}ms"
        );
        bail!(UsageError(text));
    }
    let guest = NewGuest {
        binary: args.qemu.clone(),
        settings: remote::texts(&args.set),
        is_trusted: args.trust_command_line,
        is_standby: true,
        ..given.clone()
    };
    let program = std::env::current_exe().context("the program of this process")?;
    Ok(ProtectRequest {
        socket: ctl::socket(&args.guest, &RuntimeRoot::of_user())?.into_owned(),
        target: end.target.clone(),
        ssh: format!("{} {}", IGNORING_SIGNALS.join(" "), args.ssh.ssh),
        timeouts: SessionTimeouts { connect: CONNECT_TIMEOUT, peer: SESSION_TIMEOUT },
        guest,
        arbiter: args.arbiter.clone(),
        epoch,
        ends_on_output,
        peer_timeout: args.peer_timeout,
        checkpoint_bytes_max: usize::try_from(args.max_checkpoint).unwrap_or(usize::MAX),
        leaks_output: args.leak_output,
        ferry: IGNORING_SIGNALS.iter().map(Into::into).chain([program.into(), "ferry".into()]).collect(),
    })
}

/// Runs `towline ferry`.
pub(crate) fn ferry() -> Result<Exit> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
    protect::ferry(socket);
    Ok(Exit::Done)
}

/// Receivers of what becomes of a protection.
struct Output<'a> {
    reporter: &'a Reporter,
    notifier: Notifier,
    name: String,
    counters: Arc<ProtectionCounters>,
}

impl Observer for Output<'_> {
    fn progress(&self, progress: &Progress) {
        self.reporter.progress(progress);
    }

    fn notice(&self, text: &str) {
        self.reporter.notice(text);
    }
}

impl ProtectObserver for Output<'_> {
    fn protected(&self, generation: u64) {
        self.counters.protected(generation);
        self.reporter.event(InterimEvent::Protected { generation });
        let text = format!("protected: {} goes on with the guest if this host is lost", self.name);
        self.notifier.ready(&text);
        self.reporter.line(&text);
    }

    fn checkpoints(&self, checkpoints: &Checkpoints) {
        self.reporter.event(InterimEvent::Checkpoints(CheckpointsOf::new(checkpoints)));
        self.counters.add(checkpoints);
        let ms = |us: u64| us as f64 / 1e3;
        let Checkpoints { pause, latency, .. } = checkpoints;
        tracing::info!(
            "{} to {}: {}; guest stopped for {:.1} ms ({:.1} at most), at the other host after {:.1} ms ({:.1})",
            counted(checkpoints.count, "checkpoint"),
            checkpoints.epoch,
            size(checkpoints.bytes),
            ms(pause.median_us),
            ms(pause.longest_us),
            ms(latency.median_us),
            ms(latency.longest_us),
        );
    }

    fn losing(&self) {
        self.counters.lost();
    }

    fn unprotected(&self, reason: &str) {
        self.reporter.event(InterimEvent::Unprotected { reason });
        self.reporter
            .notice(&format!("NOT PROTECTED: {reason}; the guest runs on here, and will be protected again"));
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A session that is stopped would not release the standby.
    #[test]
    fn no_signal_of_a_terminal_ends_or_stops_what_works_for_a_protection() {
        let script = "kill -HUP $$; kill -INT $$; kill -QUIT $$; kill -TERM $$; kill -TSTP $$; exit 7";
        let mut command = Command::new(IGNORING_SIGNALS[0]);
        let mut child = command.args([IGNORING_SIGNALS[1], "sh", "-c", script]).spawn().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if std::time::Instant::now() > deadline => {
                    child.kill().unwrap();
                    break child.wait().unwrap();
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        assert_eq!(status.code(), Some(7), "{status}");
    }
}
