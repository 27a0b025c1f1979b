//! Inherited signal dispositions, and signals that are held back.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::sync::Arc;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Signals that request an end, held back from this thread until the value is dropped.
#[derive(Debug)]
pub(crate) struct HeldSignals {
    before: libc::sigset_t,
    arrived: Arc<OwnedFd>,
}

impl HeldSignals {
    /// Holds them back. An ignored one would arrive if it were blocked.
    ///
    /// # Errors
    /// There are too many open files.
    pub(crate) fn hold() -> io::Result<Self> {
        // SAFETY: all zero is a valid `sigset_t`, and each call gets one.
        let (mut held, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
        for signal in of_end() {
            // SAFETY: as above.
            unsafe { libc::sigaddset(&raw mut held, signal) };
        }
        // SAFETY: as above; the call makes a new descriptor.
        let arrived = unsafe { libc::signalfd(-1, &raw const held, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if arrived < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is open, and nothing else has it.
        let arrived = Arc::new(unsafe { OwnedFd::from_raw_fd(arrived) });
        // SAFETY: as above; the mask is that of this thread.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held, &raw mut before) };
        Ok(Self { before, arrived })
    }

    /// Forgets those that have arrived, once their effect is reported: they would end the process before that is written.
    pub(crate) fn forget(&self) {
        let mut one = [0; size_of::<libc::signalfd_siginfo>()];
        while rustix::io::read(&self.arrived, &mut one).is_ok() {}
    }

    /// A descriptor that is readable once one of them has arrived.
    pub(crate) fn arrived(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.arrived)
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        // SAFETY: the mask that this thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

/// Signals that request an end; not SIGHUP where it is ignored (`nohup`).
pub(super) fn of_end() -> impl Iterator<Item = libc::c_int> {
    [SIGINT, SIGTERM].into_iter().chain((!is_ignored(SIGHUP)).then_some(SIGHUP))
}

/// Returns true if this signal is ignored.
fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: all zero is a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the new action is null, so the call only writes the present one into a valid `sigaction`.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    result == 0 && action.sa_sigaction == libc::SIG_IGN
}
