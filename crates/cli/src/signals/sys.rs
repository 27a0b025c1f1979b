//! Inherited signal dispositions.

/// Returns true if this signal is ignored, as under `nohup`.
pub(super) fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: all zero is a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the new action is null, so the call only writes the present one into a valid `sigaction`.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    result == 0 && action.sa_sigaction == libc::SIG_IGN
}
