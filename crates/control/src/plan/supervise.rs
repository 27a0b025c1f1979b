//! Runs the engine in a separate thread while the plan's thread watches QMP, cancellation and timeouts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use towline_channel::Cancel;
use towline_migration::Session;

use super::context::Context;
use super::error::Error;
use super::shared_switchover::SharedSwitchover;

/// Interval at which the watcher polls.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Runs `work` and calls `poll` at intervals until it is done. A cancellation or an error of `poll` fails the
/// session, which ends `work`.
pub(super) fn supervise<T: Send>(
    session: &Session,
    switchover: &SharedSwitchover,
    cancel: &Cancel,
    poll: &mut dyn FnMut() -> Result<(), towline_migration::Error>,
    work: impl FnOnce() -> T + Send,
) -> T {
    let watcher = thread::current();
    // Not the thread's end, which comes a moment after its notification.
    let done = AtomicBool::new(false);
    let mut cancel_handled = false;
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let result = work();
            done.store(true, Ordering::Release);
            watcher.unpark();
            result
        });
        while !done.load(Ordering::Acquire) && !worker.is_finished() {
            thread::park_timeout(WATCH_INTERVAL);
            if done.load(Ordering::Acquire) {
                break;
            }
            if cancel.is_cancelled() && !cancel_handled {
                cancel_handled = true;
                // Not if the guest may already run at its destination.
                if switchover.cancel() {
                    session.fail(towline_migration::Error::Cancelled);
                }
            }
            if let Err(error) = poll() {
                session.fail(error);
            }
        }
        match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Runs the engine under supervision.
pub(super) fn run_supervised<T: Send>(
    context: &Context<'_>,
    session: &Session,
    switchover: &SharedSwitchover,
    poll: &mut dyn FnMut() -> Result<(), Error>,
    work: impl FnOnce() -> Result<T, towline_migration::Error> + Send,
) -> Result<T, Error> {
    session.set_tuning(&context.options.tuning);
    let mut poll = || poll().map_err(towline_migration::Error::guest);
    let result = supervise(session, switchover, context.cancel, &mut poll, work);
    result.map_err(|error| match error {
        towline_migration::Error::Cancelled => Error::Cancelled,
        towline_migration::Error::Guest(error) => match error.downcast::<Error>() {
            Ok(error) => *error,
            Err(error) => Error::Migration(towline_migration::Error::Guest(error)),
        },
        error => Error::Migration(error),
    })
}
