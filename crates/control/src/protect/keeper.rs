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
mod decision;
mod mirrors;
mod process;
mod report;
mod request;

use std::time::{Duration, Instant};

use towline_channel::Cancel;

use crate::arbiter::Claimant;
use crate::waits::{Woken, wait};
use attempt::{Attempt, AttemptEnd};
use decision::Keeper;
pub(super) use request::check_departing;
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
    let mut keeper = Keeper {
        request,
        cancel,
        observer,
        claimant,
        guest,
        generation: 0,
        has_protected: false,
        left: None,
    };
    repeat(&mut keeper, &mut |keeper| Attempt::begin(keeper)?.run())
}

/// Makes attempts until one is the last, or until they are cancelled.
fn repeat(
    keeper: &mut Keeper<'_>,
    attempt: &mut dyn FnMut(&mut Keeper<'_>) -> Result<AttemptEnd, Error>,
) -> Result<ProtectEnd, Error> {
    let (cancel, mut retry) = (keeper.cancel, RETRY[0]);
    loop {
        let begun = Instant::now();
        let reason = match attempt(keeper) {
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
                None if error.has_no_listener() => return Ok(ProtectEnd::GuestEnded),
                None => {
                    let reason = error.to_string();
                    if error.needs_attention() {
                        keeper.left = Some(error);
                    }
                    reason
                }
            },
        };
        if !cancel.is_cancelled() {
            keeper.observer.unprotected(&reason);
        }
        if begun.elapsed() > RETRY[1] {
            retry = RETRY[0];
        }
        if wait(cancel, None, retry) == Woken::Cancelled {
            // No further attempt repairs it.
            return keeper.left.take().map_or(Ok(ProtectEnd::Cancelled), Err);
        }
        retry = (retry * 2).min(RETRY[1]);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
    };
    use towline_qmp as qmp;

    use super::*;
    use crate::plan::Observer;
    use crate::qemu::Qemu;
    use crate::remote::{NewGuest, SessionTimeouts};

    struct Silent;

    impl Observer for Silent {}

    impl ProtectObserver for Silent {
        fn protected(&self, _: u64) {}
        fn checkpoints(&self, _: &Checkpoints) {}
        fn losing(&self) {}
        fn unprotected(&self, _: &str) {}
    }

    /// Makes attempts for a guest that was protected.
    fn repeated(
        socket: &Path,
        cancel: &Cancel,
        attempt: &mut dyn FnMut(&mut Keeper<'_>) -> Result<AttemptEnd, Error>,
    ) -> Result<ProtectEnd, Error> {
        let request = ProtectRequest {
            socket: socket.to_owned(),
            target: "other".parse().unwrap(),
            ssh: "false".into(),
            timeouts: SessionTimeouts { connect: Duration::from_secs(1), peer: Duration::from_secs(1) },
            guest: NewGuest::default(),
            arbiter: "/nowhere".parse().unwrap(),
            epoch: Duration::from_millis(50),
            ends_on_output: false,
            peer_timeout: Duration::from_secs(1),
            checkpoint_bytes_max: 0,
            leaks_output: false,
            ferry: Vec::new(),
        };
        let mut keeper = Keeper {
            request: &request,
            cancel,
            observer: &Silent,
            claimant: Claimant::new(),
            guest: "web".into(),
            generation: 1,
            has_protected: true,
            left: None,
        };
        repeat(&mut keeper, attempt)
    }

    fn held() -> Error {
        Error::Card(qmp::Error::Refused { socket: "net0.qmp".into() })
    }

    #[test]
    fn a_cancelled_protection_whose_guest_is_left_held_does_not_say_that_it_runs_on() {
        let cancel = Cancel::new().unwrap();
        cancel.cancel();
        let ended = repeated(Path::new("/nowhere"), &cancel, &mut |_| Err(held()));
        assert!(matches!(ended, Err(Error::Card(_))), "{ended:?}");
        // It is cancelled while it waits for the next attempt, which may fail before it can repair anything.
        let cancel = Cancel::new().unwrap();
        let mut attempts = [Error::Cancelled, held()].into_iter();
        let ended = repeated(Path::new("/nowhere"), &cancel, &mut |_| {
            if attempts.len() == 1 {
                cancel.cancel();
            }
            Err(attempts.next_back().unwrap())
        });
        assert!(matches!(ended, Err(Error::Card(_))), "{ended:?}");
        let cancel = Cancel::new().unwrap();
        let ended = repeated(Path::new("/nowhere"), &cancel, &mut |_| {
            cancel.cancel();
            Ok(AttemptEnd::Lost { reason: "the other host is lost".into() })
        });
        assert!(matches!(ended, Ok(ProtectEnd::Cancelled)), "{ended:?}");
    }

    /// A socket whose queue of connections, which no one accepts, is full: a further `connect` waits.
    fn full_monitor(directory: &Path) -> (PathBuf, Vec<OwnedFd>) {
        let path = directory.join("qmp.sock");
        let address = SocketAddrUnix::new(&path).unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = || socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let mut sockets = vec![socket()];
        bind(&sockets[0], &address).unwrap();
        listen(&sockets[0], 0).unwrap();
        loop {
            let further = socket();
            if connect(&further, &address).is_err() {
                return (path, sockets);
            }
            sockets.push(further);
        }
    }

    #[test]
    fn a_monitor_that_others_have_is_no_end_of_the_guest_and_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let (socket, _held) = full_monitor(directory.path());
        let (cancel, mut attempts) = (Cancel::new().unwrap(), 0);
        let greeting_deadline = Duration::from_millis(50);
        let options = qmp::Options { greeting_deadline, ..qmp::Options::default() };
        let mut attempt = |keeper: &mut Keeper<'_>| {
            attempts += 1;
            if attempts == 2 {
                keeper.cancel.cancel();
            }
            Err(Qemu::connect(&keeper.request.socket, &options).unwrap_err().into())
        };
        let ended = repeated(&socket, &cancel, &mut attempt);
        assert!(matches!(ended, Ok(ProtectEnd::Cancelled)), "{ended:?}");
        let ended = repeated(&directory.path().join("gone"), &cancel, &mut attempt);
        assert!(matches!(ended, Ok(ProtectEnd::GuestEnded)), "{ended:?}");
    }
}
