//! Ctrl-C and SIGTERM cancel: the copy ends in order, and the source runs on. A second one ends the process at once.

use std::thread;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use towline_channel::Cancel;

/// A token that the signals cancel; `promise` says what becomes of what was begun.
pub(crate) fn cancel_on_signals(promise: &'static str) -> Result<Cancel> {
    let cancel = Cancel::new().context("no event descriptor can be had")?;
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals cannot be caught")?;
    let token = cancel.clone();
    thread::spawn(move || {
        for signal in signals.forever() {
            if token.is_cancelled() {
                // The user insists: whatever is half done stays so.
                let _ = emulate_default_handler(signal);
            }
            eprintln!("towline: cancelling; {promise} (again to end at once)");
            token.cancel();
        }
    });
    Ok(cancel)
}
