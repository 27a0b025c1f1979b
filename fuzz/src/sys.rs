//! What a program with Rust's own start has, and a fuzz target has not.

use std::sync::Once;

/// Has writes to pipes and sockets without a reader fail, as in every program whose `main` is Rust's: a frontend may give such
/// descriptors.
pub fn ignore_sigpipe() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: an ignored signal runs no handler.
        let before = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        assert_ne!(before, libc::SIG_ERR, "SIGPIPE can be ignored");
    });
}
