//! What a process inherits of signals.

/// Whether this signal is ignored, as by a parent that is `nohup`.
pub(super) fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: all zero is a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the new action is null, so that only the present one is written, to a place of its type that is ours.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    asked == 0 && action.sa_sigaction == libc::SIG_IGN
}
