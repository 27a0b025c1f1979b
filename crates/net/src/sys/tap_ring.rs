//! An io_uring that writes many frames to a tap with one system call (`io_uring(7)`).
//!
//! ```text
//!   frames ─► submission queue ── io_uring_enter ─► the kernel writes each at once, in their order ─► completion queue
//! ```
//! A tap does not block, so every request is complete when the call returns, and nothing is in flight between
//! two calls. The ring is restricted before it is enabled: it only writes, to descriptors that this process
//! has anyway. So a filter of system calls that permits `writev` may permit `io_uring_enter` too, while no
//! other ring can be created.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue, types};
use towline_channel::IoBuf;

/// Maximum number of frames in one call.
pub(crate) const FRAMES_MAX: usize = 64;

/// A ring without requests.
pub(crate) struct TapRing {
    ring: IoUring,
}

impl TapRing {
    pub(crate) fn new() -> io::Result<Self> {
        let entries = u32::try_from(FRAMES_MAX).expect("a small number");
        let ring = IoUring::builder().setup_r_disabled().build(entries)?;
        let operations = [opcode::Write::CODE, opcode::Writev::CODE];
        ring.submitter().register_restrictions(&mut operations.map(Restriction::sqe_op))?;
        ring.submitter().register_enable_rings()?;
        Ok(Self { ring })
    }

    /// Writes frames in their order; each consists of a range of `bufs`. Stores the number of bytes of each
    /// in `results`, or its negative error; that of a frame that was not written is -EAGAIN before.
    ///
    /// # Errors
    /// The call's own. The ring had requests left then, and is gone.
    pub(crate) fn write(
        mut self,
        tap: BorrowedFd<'_>,
        bufs: &[IoBuf<'_>],
        frames: &[Range<usize>],
        results: &mut [i32],
    ) -> io::Result<Self> {
        assert!(frames.len() <= FRAMES_MAX && frames.len() == results.len());
        let requests =
            frames.iter().zip(0..).map(|(frame, index)| request(tap, &bufs[frame.clone()]).user_data(index));
        for request in requests {
            // SAFETY: `bufs` and the memory of its buffers outlive this function. It returns the ring only
            // when every request is complete, and drops it only when each is complete or was not submitted.
            unsafe { self.ring.submission().push(&request) }.expect("the queue has room for all frames");
        }
        let mut completed = 0;
        while completed < frames.len() {
            let entered = self.ring.submit_and_wait(frames.len() - completed);
            for completion in self.ring.completion() {
                let index = usize::try_from(completion.user_data()).expect("an index of a frame");
                results[index] = completion.result();
                completed += 1;
            }
            if let Err(error) = entered
                && error.kind() != io::ErrorKind::Interrupted
                // Requests that were submitted are waited for.
                && completed + self.ring.submission().len() == frames.len()
            {
                return Err(error);
            }
        }
        Ok(self)
    }
}

impl std::fmt::Debug for TapRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TapRing").finish_non_exhaustive()
    }
}

fn request(tap: BorrowedFd<'_>, bufs: &[IoBuf<'_>]) -> squeue::Entry {
    let tap = types::Fd(tap.as_raw_fd());
    // An `IoBuf` has the layout of `struct iovec`.
    let iovecs: *const libc::iovec = bufs.as_ptr().cast();
    match bufs {
        // A single buffer needs no array to be copied.
        [one] => {
            // SAFETY: the slice has one element.
            let base = unsafe { (*iovecs).iov_base };
            opcode::Write::new(tap, base.cast(), u32::try_from(one.len()).unwrap_or(u32::MAX)).build()
        }
        many => opcode::Writev::new(tap, iovecs, u32::try_from(many.len()).unwrap_or(u32::MAX)).build(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn frames_are_written_in_their_order() {
        let mut ring = TapRing::new().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        for round in 0..3u8 {
            let bytes: Vec<[u8; 3]> = (0..64).map(|frame| [round, frame, 9]).collect();
            let bufs: Vec<IoBuf<'_>> =
                bytes.iter().flat_map(|frame| [IoBuf::from(&frame[..1]), IoBuf::from(&frame[1..])]).collect();
            let frames: Vec<_> = (0..64).map(|frame| 2 * frame..2 * frame + 2).collect();
            let mut results = [-libc::EAGAIN; 64];
            ring = ring.write(writer.as_fd(), &bufs, &frames, &mut results).unwrap();
            assert_eq!(results, [3; 64]);
            let mut found = vec![0; 3 * 64];
            assert_eq!(rustix::io::read(&reader, &mut found).unwrap(), found.len());
            assert_eq!(found, bytes.concat());
        }
    }

    #[test]
    fn each_frame_has_its_own_error() {
        let ring = TapRing::new().unwrap();
        let file = File::open("/dev/null").unwrap();
        let mut results = [-libc::EAGAIN; 2];
        let bufs = [IoBuf::from(b"a"), IoBuf::from(b"b")];
        ring.write(file.as_fd(), &bufs, &[0..1, 1..2], &mut results).unwrap();
        assert_eq!(results, [-libc::EBADF; 2], "it is open for reading");
    }

    #[test]
    fn a_ring_only_writes() {
        let mut ring = TapRing::new().unwrap();
        let mut byte = [0u8];
        let zero = File::open("/dev/zero").unwrap();
        let read = opcode::Read::new(types::Fd(zero.as_raw_fd()), byte.as_mut_ptr(), 1).build();
        for request in [read, opcode::Nop::new().build()] {
            // SAFETY: `byte` outlives the request, which is complete or refused when the call returns.
            unsafe { ring.ring.submission().push(&request) }.unwrap();
            let _ = ring.ring.submit_and_wait(1);
            assert_eq!(ring.ring.completion().next().unwrap().result(), -libc::EACCES);
        }
        assert!(ring.ring.submitter().register_files(&[0]).is_err(), "nor is anything registered");
    }
}
