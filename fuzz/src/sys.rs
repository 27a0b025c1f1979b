//! Set-up that Rust's runtime does for programs, but libFuzzer does not for targets.

use std::sync::Once;

/// Ignores SIGPIPE, as Rust's runtime does: a frontend may send descriptors of pipes and sockets without a
/// reader.
pub fn ignore_sigpipe() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: an ignored signal runs no handler.
        let before = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        assert_ne!(before, libc::SIG_ERR, "SIGPIPE can be ignored");
    });
}
