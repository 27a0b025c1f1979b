//! Descriptors that a service manager passes, by systemd's protocol (`sd_listen_fds(3)`): sockets, and those
//! in its file descriptor store.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use towline_channel::take_over;

/// `SD_LISTEN_FDS_START`.
const FIRST: i32 = 3;
/// Maximum number of descriptors.
const FDS_MAX: usize = 64;
/// Descriptors that were taken, as bits.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Names of the descriptors that were passed to this very process; none without a service manager.
pub(crate) fn names() -> Vec<String> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    if number("LISTEN_PID") != Some(std::process::id() as usize) {
        return Vec::new();
    }
    named(number("LISTEN_FDS").unwrap_or(0), &std::env::var("LISTEN_FDNAMES").unwrap_or_default())
}

/// Names of `count` descriptors. A manager that names none passes sockets.
fn named(count: usize, names: &str) -> Vec<String> {
    let names = names.split(':').map(str::to_owned).chain(std::iter::repeat(String::new()));
    names.take(count.min(FDS_MAX)).collect()
}

/// Takes a descriptor, once; `EBADF` if it is not open, or was taken.
pub(crate) fn take_fd(index: usize) -> Result<OwnedFd, Errno> {
    let number = FIRST + i32::try_from(index).map_err(|_| Errno::BADF)?;
    if index >= names().len() || TAKEN.fetch_or(1 << index, Ordering::Relaxed) & 1 << index != 0 {
        return Err(Errno::BADF);
    }
    take_over(number).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::BADF))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_descriptor_has_a_name() {
        assert_eq!(named(0, "net.socket"), [""; 0]);
        assert_eq!(named(2, "net.socket:towline-state"), ["net.socket", "towline-state"]);
        assert_eq!(named(2, ""), ["", ""]);
        assert_eq!(named(1, "a:b"), ["a"]);
        assert_eq!(named(usize::MAX, "").len(), FDS_MAX);
    }
}
