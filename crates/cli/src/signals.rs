//! SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) cancel: the copy ends in order, and the source runs on. A second one
//! ends the process at once.

mod sys;

use std::thread;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use towline_channel::Cancel;

use crate::console;

/// The signals that ask for the end in order. SIGHUP is not among them where it is ignored (`nohup`).
pub(crate) fn ending() -> Vec<libc::c_int> {
    let hangs_up = (!sys::is_ignored(SIGHUP)).then_some(SIGHUP);
    [SIGINT, SIGTERM].into_iter().chain(hangs_up).collect()
}

/// A token that the signals cancel; `promise` says what becomes of what was begun. Starts threads: a process that confines
/// itself does so first.
pub(crate) fn cancel_on_signals(promise: &'static str) -> Result<Cancel> {
    console::start();
    let cancel = Cancel::new().context("no event descriptor can be had")?;
    let mut signals = Signals::new(ending()).context("signals cannot be caught")?;
    let token = cancel.clone();
    let listen = move || {
        let mut signals = signals.forever();
        if signals.next().is_some() {
            // Queued, not written: whoever reads it has no say in what follows.
            console::error(&format!("cancelling; {promise} (again to end at once)"));
            token.cancel();
            console::hurry();
        }
        if let Some(signal) = signals.next() {
            end_at_once(signal);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(listen)?;
    Ok(cancel)
}

/// The user insists: whatever is half done stays so. QEMU's own fall-back lets the guest run on; what it was set to for the copy
/// stays set.
fn end_at_once(signal: libc::c_int) {
    let _ = emulate_default_handler(signal);
}
