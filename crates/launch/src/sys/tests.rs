//! Signals to one thread, for tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Signals that a thread receives until this is dropped.
pub(crate) struct Signals {
    is_over: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
}

extern "C" fn handled(_signal: libc::c_int) {}

/// Interrupts the system calls of the calling thread again and again.
pub(crate) fn interrupt_this_thread() -> Signals {
    let handler: extern "C" fn(libc::c_int) = handled;
    // SAFETY: all zero is a valid `sigaction`: an empty mask and no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    // SAFETY: the handler has the type of one without SA_SIGINFO, and does nothing.
    let set = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
    // SAFETY: it has no conditions.
    let thread = unsafe { libc::pthread_self() };
    let is_over = Arc::new(AtomicBool::new(false));
    let sender = thread::spawn({
        let is_over = Arc::clone(&is_over);
        move || {
            while !is_over.load(Ordering::Relaxed) {
                // SAFETY: the thread waits for this one before it ends.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
                thread::sleep(Duration::from_millis(5));
            }
        }
    });
    Signals { is_over, sender: Some(sender) }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.sender.take().map(JoinHandle::join);
    }
}
