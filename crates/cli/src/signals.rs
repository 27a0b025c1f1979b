//! SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) request an orderly end: a copy is undone, and its
//! source continues. A second signal ends the process at once, unless it is SIGHUP: a terminal that closes sends that one twice, by its shell
//! and by the kernel. The first one prints the effects of both. SIGTSTP (Ctrl-Z) is ignored: a guest waits for a towline that passes its
//! writes or its last memory on.

mod sys;

use std::thread;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGTSTP, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, signal_name};
use towline_channel::Cancel;

use crate::args::TransferArgs;
use crate::console;
use crate::endpoint::Endpoint;

pub(crate) use sys::HeldSignals;

/// Message of a process that is not stopped.
const NOT_STOPPED: &str =
    "SIGTSTP: ignored, because the guest would wait for towline meanwhile; SIGINT (Ctrl-C) cancels";

/// Effects of signals on a command, as parts of a sentence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SignalEffects {
    /// Effect of the first signal: `cancelling; nothing is changed`.
    pub(crate) first: &'static str,
    /// Consequence of ending the process by a second one: `its socket remains`.
    pub(crate) second: Option<&'static str>,
}

impl SignalEffects {
    /// Effects on a command that only reads.
    #[cfg(feature = "store")]
    pub(crate) const OF_READING: Self = Self { first: "cancelling; nothing is changed", second: None };

    /// Effects on a copy or move between these ends.
    pub(crate) fn of_copy(transfer: &TransferArgs, ends: &[&Endpoint]) -> Self {
        let has_qemu = ends.iter().any(|end| matches!(end, Endpoint::Qmp(_)));
        if transfer.postcopy.postcopy {
            return Self {
                first: "cancelling; the source keeps its guest, unless that runs at the destination already, which then \
                        gets its memory first",
                second: Some("a guest that runs at the destination then waits for the rest of its memory"),
            };
        }
        Self {
            first: "cancelling; the source keeps its guest, unless the switchover is in progress",
            second: has_qemu
                .then_some("QEMU keeps the settings of the copy until the next one, or `towline repair`"),
        }
    }

    /// Formats what the first signal prints.
    fn announcement(self, signal: libc::c_int) -> String {
        let name = signal_name(signal).unwrap_or("signal");
        let second = self.second.map(|consequence| format!(": {consequence}")).unwrap_or_default();
        format!("{name}: {}; a second SIGINT or SIGTERM ends towline at once{second}", self.first)
    }
}

/// Returns a token that the signals cancel. Starts threads, so a process confines itself before.
pub(crate) fn cancel_on_signals(effects: SignalEffects) -> Result<Cancel> {
    console::start();
    let cancel = Cancel::new().context("cancellation token")?;
    // A command without such an end holds no guest.
    let stop = effects.second.map(|_| SIGTSTP);
    let mut signals = Signals::new(sys::of_end().chain(stop)).context("signal handlers")?;
    let token = cancel.clone();
    let listen = move || {
        let is_end = |signal: &libc::c_int| {
            let stops = *signal == SIGTSTP;
            if stops {
                console::error(NOT_STOPPED);
            }
            !stops
        };
        let mut signals = signals.forever().filter(is_end);
        if let Some(signal) = signals.next() {
            // Queued, so a slow reader does not delay the end.
            console::error(&effects.announcement(signal));
            token.cancel();
            console::limit_flush();
        }
        if let Some(signal) = signals.find(|signal| *signal != SIGHUP) {
            // Without cleanup: the guest continues by QEMU's own fallback, and its migration settings remain
            // changed.
            let _ = emulate_default_handler(signal);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(listen)?;
    Ok(cancel)
}

/// Calls `report` at each SIGUSR1. Its thread never ends, so `report` should hold weak references: a dropped
/// device removes its sockets.
pub(crate) fn report_on_signal(report: impl Fn() + Send + 'static) -> Result<()> {
    let mut signals = Signals::new([SIGUSR1]).context("signal handlers")?;
    let listen = move || signals.forever().for_each(|_| report());
    thread::Builder::new().name("statistics".into()).spawn(listen)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, ExitStatus};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::low_level::raise;

    use super::*;

    /// Set in the process that gets the signals.
    const GETS_SIGNALS: &str = "TOWLINE_TEST_GETS_SIGNALS";

    /// Runs a test of this module in a separate process, started by this shell command.
    fn in_process(command: &str, name: &str) -> ExitStatus {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).arg(std::env::current_exe().unwrap());
        shell
            .args(["--exact", &format!("signals::tests::{name}")])
            .env(GETS_SIGNALS, "1")
            .output()
            .unwrap()
            .status
    }

    /// Waits up to this time until the descriptor is readable.
    fn is_readable(fd: impl std::os::fd::AsFd, tv_sec: i64) -> bool {
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec { tv_sec, tv_nsec: 0 })) == Ok(1)
    }

    #[test]
    fn sighup_is_no_second_signal() {
        if std::env::var_os(GETS_SIGNALS).is_none() {
            let status = in_process(r#"exec "$0" "$@""#, "sighup_is_no_second_signal");
            // Of both, SIGHUP is the one that is read first.
            return assert_eq!(status.signal(), Some(SIGINT), "{status}");
        }
        let cancel = cancel_on_signals(SignalEffects { first: "", second: None }).unwrap();
        raise(SIGTERM).unwrap();
        assert!(is_readable(&cancel, 60));
        raise(SIGHUP).unwrap();
        raise(SIGINT).unwrap();
        thread::sleep(std::time::Duration::from_secs(60));
    }

    #[test]
    fn an_ignored_sighup_is_not_held_either() {
        if std::env::var_os(GETS_SIGNALS).is_none() {
            let nohup = r#"trap "" HUP; exec "$0" "$@""#;
            return assert!(in_process(nohup, "an_ignored_sighup_is_not_held_either").success());
        }
        let held = HeldSignals::hold().unwrap();
        raise(SIGHUP).unwrap();
        assert!(!is_readable(held.arrived(), 0), "a process under `nohup` is cancelled");
    }

    #[test]
    fn the_first_signal_announces_the_effects_of_both() {
        let effects = SignalEffects { first: "cancelling; nothing is changed", second: None };
        assert_eq!(
            effects.announcement(SIGINT),
            "SIGINT: cancelling; nothing is changed; a second SIGINT or SIGTERM ends towline at once"
        );
        let effects = SignalEffects { second: Some("its socket remains"), ..effects };
        assert_eq!(
            effects.announcement(SIGTERM),
            "SIGTERM: cancelling; nothing is changed; a second SIGINT or SIGTERM ends towline at once: its socket remains"
        );
    }
}
