//! SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) cancel: a copy is undone, and its source continues. A second signal ends
//! the process at once.

mod sys;

use std::thread;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use towline_channel::Cancel;

use crate::console;

/// Returns the signals that request an orderly end: not SIGHUP where it is ignored (`nohup`).
pub(crate) fn shutdown_signals() -> Vec<libc::c_int> {
    let hangup = (!sys::is_ignored(SIGHUP)).then_some(SIGHUP);
    [SIGINT, SIGTERM].into_iter().chain(hangup).collect()
}

/// Returns a token that the signals cancel. `consequence` is printed then. Starts threads, so a process confines itself before.
pub(crate) fn cancel_on_signals(consequence: &'static str) -> Result<Cancel> {
    console::start();
    let cancel = Cancel::new().context("cancellation token")?;
    let mut signals = Signals::new(shutdown_signals()).context("signal handlers")?;
    let token = cancel.clone();
    let listen = move || {
        let mut signals = signals.forever();
        if signals.next().is_some() {
            // Queued, so that a slow reader does not delay the cancellation.
            console::error(&format!("cancelling; {consequence} (again to end at once)"));
            token.cancel();
            console::limit_flush();
        }
        if let Some(signal) = signals.next() {
            end_at_once(signal);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(listen)?;
    Ok(cancel)
}

/// Ends the process without cleanup. The guest continues by QEMU's own fallback; its migration settings remain changed.
fn end_at_once(signal: libc::c_int) {
    let _ = emulate_default_handler(signal);
}
