//! Unsafe parts: a mapping of a memfd, and io_uring.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use memmap2::{MmapMut, MmapOptions};

/// `MSG_MORE` and `MSG_WAITALL` of `socket.h`, the latter against partial sends.
const MORE: i32 = 0x8000;
const WAIT_ALL: i32 = 0x100;
const ENTRIES: u32 = 64;
const HEADER: u64 = 1;
const PAGES: u64 = 2;

/// Maps a file without other users.
pub(crate) fn map(file: &File, options: &MmapOptions) -> Result<MmapMut> {
    // SAFETY: the file is a new memfd, which no other process writes or truncates.
    Ok(unsafe { options.map_mut(file)? })
}

/// An io_uring that sends packets, with or without registered memory.
pub(crate) struct Ring {
    ring: IoUring,
    registered: bool,
    /// Number of pending notifications.
    outstanding: usize,
}

impl Ring {
    pub(crate) fn new(memory: &[u8], registered: bool) -> Result<Self> {
        let ring = IoUring::new(ENTRIES).context("io_uring")?;
        if registered {
            let whole = libc::iovec { iov_base: memory.as_ptr().cast_mut().cast(), iov_len: memory.len() };
            // SAFETY: the memory outlives the ring, and is only read.
            unsafe { ring.submitter().register_buffers(&[whole]) }.context("registering the memory")?;
        }
        Ok(Self { ring, registered, outstanding: 0 })
    }

    /// Sends a header, copied, and pages. Returns when both are sent.
    pub(crate) fn send(
        &mut self,
        fd: BorrowedFd<'_>,
        header: &[u8],
        memory: &[u8],
        pages: Range<usize>,
    ) -> Result<()> {
        let fd = types::Fd(fd.as_raw_fd());
        let (head_bytes, page_bytes) = (header.len() as u32, pages.len() as u32);
        let head = opcode::Send::new(fd, header.as_ptr(), head_bytes).flags(MORE | WAIT_ALL).build();
        let pages = opcode::SendZc::new(fd, memory[pages].as_ptr(), page_bytes).flags(WAIT_ALL);
        let pages = if self.registered { pages.buf_index(Some(0)) } else { pages };
        let both = [head.flags(squeue::Flags::IO_LINK).user_data(HEADER), pages.build().user_data(PAGES)];
        // SAFETY: both buffers live until their completions, which are awaited below, and the pages until the end of the run, which
        // awaits their notifications.
        unsafe { self.ring.submission().push_multiple(&both) }.context("the ring is full")?;
        let mut results = 0;
        while results < 2 {
            self.ring.submit_and_wait(1)?;
            results += self.reap([head_bytes, page_bytes])?;
        }
        Ok(())
    }

    /// Waits for all notifications.
    pub(crate) fn finish(&mut self) -> Result<()> {
        while self.outstanding > 0 {
            self.ring.submit_and_wait(1)?;
            self.reap([0; 2])?;
        }
        Ok(())
    }

    /// Processes completions. Returns the number of results.
    fn reap(&mut self, [header, pages]: [u32; 2]) -> Result<usize> {
        let mut results = 0;
        for entry in self.ring.completion() {
            if cqueue::notif(entry.flags()) {
                self.outstanding -= 1;
                continue;
            }
            let expected = if entry.user_data() == HEADER { header } else { pages };
            ensure!(entry.result() == expected as i32, "io_uring: {} of {expected} bytes", entry.result());
            self.outstanding += usize::from(cqueue::more(entry.flags()));
            results += 1;
        }
        Ok(results)
    }
}
