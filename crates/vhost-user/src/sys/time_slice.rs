//! Time slice of a thread, for which the C library has no function.

use std::io;
use std::time::Duration;

/// Sets the time slice of the calling thread, or the scheduler's default with [`Duration::ZERO`]. Linux
/// before 6.12 has no slices of threads and ignores it, and so do the realtime policies.
pub(crate) fn set_time_slice(slice: Duration) -> io::Result<()> {
    let mut attributes = attributes()?;
    if !matches!(attributes.sched_policy.cast_signed(), libc::SCHED_OTHER | libc::SCHED_BATCH) {
        return Ok(());
    }
    attributes.sched_runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: the kernel reads as many bytes of the structure as its field `size` has; 0 is the calling
    // thread.
    let written = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Scheduling attributes of the calling thread.
fn attributes() -> io::Result<libc::sched_attr> {
    let size = u32::try_from(size_of::<libc::sched_attr>()).expect("a short structure");
    // SAFETY: all zero is a valid `sched_attr`: numbers.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes there; 0 is the calling thread.
    let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if read < 0 { Err(io::Error::last_os_error()) } else { Ok(attributes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_set_and_reset() {
        let before = attributes().unwrap();
        let slice = Duration::from_micros(300);
        set_time_slice(slice).unwrap();
        let found = attributes().unwrap();
        // 0: before Linux 6.12.
        assert!([0, slice.as_nanos() as u64].contains(&found.sched_runtime), "{}", found.sched_runtime);
        set_time_slice(Duration::ZERO).unwrap();
        let after = attributes().unwrap();
        let policy = |found: &libc::sched_attr| (found.sched_policy, found.sched_nice, found.sched_runtime);
        assert_eq!(policy(&after), policy(&before));
    }
}
