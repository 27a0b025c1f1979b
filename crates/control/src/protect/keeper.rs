//! The process that keeps the monitor of a protected guest: begins and ends its protection.
//!
//! ```text
//!   begin ─► first copy ─► protected ─┬─► cancelled: the standby is released, the guest runs on, and its output goes
//!     ▲                               ├─► the guest has ended: the standby is released
//!     │                               └─► the standby or the ferry is lost ─► claim ─┬─► won: output goes ─► begin again
//!     └──────────────────────────────────────────────────────────────────────────────┤
//!                                                                                    └─► lost: the guest is ended here
//! ```

mod attempt;
mod checks;
mod decision;
mod mirrors;
mod process;
mod report;
mod request;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use towline_channel::Cancel;

use crate::arbiter::Claimant;
use crate::waits::{Woken, wait};
use attempt::{Attempt, AttemptEnd};
pub(super) use checks::check_departing;
use decision::Keeper;
pub use request::{Checkpoints, Error, ProtectEnd, ProtectObserver, ProtectRequest, Times};

/// Time before the guest is protected again, and its maximum.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// Protects a guest until `cancel`, or until it has ended or goes on elsewhere.
///
/// # Errors
/// The guest was never protected: it cannot be, or the other host refuses it. It runs on here, and its output goes, unless
/// [`Error::needs_attention`]. Once it was protected, a failure is reported to `observer`, and the guest is protected again.
pub fn protect(
    request: &ProtectRequest,
    cancel: &Cancel,
    observer: &dyn ProtectObserver,
) -> Result<ProtectEnd, Error> {
    let (claimant, guest) = (Claimant::new(), String::new());
    let mut keeper =
        Keeper { request, cancel, observer, claimant, guest, generation: 0, has_protected: false };
    let mut retry = RETRY[0];
    loop {
        let (begun, had_protected) = (Instant::now(), keeper.has_protected);
        let ended = match Attempt::begin(&mut keeper) {
            Ok(attempt) => attempt.run(),
            Err(_) if had_protected && cancel.is_cancelled() => return Ok(ProtectEnd::Cancelled),
            Err(_) if had_protected && has_ended(&request.socket) => {
                return Ok(ProtectEnd::GuestEnded);
            }
            Err(error) => Err(error),
        };
        let reason = match ended {
            Ok(AttemptEnd::Done(end)) => return Ok(end),
            Ok(AttemptEnd::Lost { reason }) => reason,
            Err(error) => match error.goes_on_elsewhere() {
                Some(generation) => {
                    let reason = "the towline that protected it here was killed".into();
                    return Ok(ProtectEnd::TakenOver { generation, reason });
                }
                None if !keeper.has_protected || matches!(error, Error::Undecided { .. }) => {
                    return Err(error);
                }
                None => error.to_string(),
            },
        };
        observer.unprotected(&reason);
        if begun.elapsed() > RETRY[1] {
            retry = RETRY[0];
        }
        if wait(cancel, None, retry) == Woken::Cancelled {
            return Ok(ProtectEnd::Cancelled);
        }
        retry = (retry * 2).min(RETRY[1]);
    }
}

/// Returns true if no QEMU listens at this socket any more.
fn has_ended(socket: &Path) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    UnixStream::connect(socket).is_err_and(|error| [ConnectionRefused, NotFound].contains(&error.kind()))
}
