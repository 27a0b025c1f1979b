//! `fd:N`: an inherited descriptor.
//!
//! The descriptor is taken over, not duplicated: dropping the channel closes it; using the same number twice
//! is an error that cannot be detected here. The type of the descriptor decides the channel's capabilities:
//!
//! | found | channel |
//! |---|---|
//! | stream socket, Unix | as `unix:`, with descriptor passing |
//! | stream socket, IPv4 or IPv6 | as `tcp:` |
//! | stream socket of another family (vsock) | a plain socket |
//! | pipe, terminal, character device | a pipe, in the direction it was opened for |
//! | file, block device | a file, from the descriptor's position |

use crate::file::FileChannel;
use crate::pipe::PipeChannel;
use crate::socket::{STREAM, Socket};
use crate::tcp::TcpChannel;
use crate::unix::UnixChannel;
use crate::{Address, Channel, Error, Result, sys};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, tell};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use std::os::fd::{OwnedFd, RawFd};

/// Takes over an inherited descriptor of any type by its number; it is closed with the returned value, and no
/// child process inherits it.
///
/// # Errors
/// [`Error::Io`] if it is not open.
pub fn inherit(number: RawFd) -> Result<OwnedFd> {
    sys::fd::take_over(number).map_err(|source| Error::io("take over", &format!("fd:{number}"), source))
}

/// Takes over a descriptor and detects its type. A descriptor of an unusable type is closed.
pub(crate) fn open(number: RawFd) -> Result<Box<dyn Channel>> {
    let address = Address::Fd(number);
    let fd = sys::fd::take_over(number).map_err(|source| match source.raw_os_error() {
        Some(libc::EBADF) => {
            address.bad("it is not open in this process; was it inherited (not close-on-exec)?")
        }
        _ => Error::io("take over", &address.to_string(), source),
    })?;
    let failed = |errno: Errno| Error::io("inspect", &address.to_string(), errno);
    match FileType::from_raw_mode(fstat(&fd).map_err(failed)?.st_mode) {
        FileType::Socket => socket(fd, &address),
        FileType::Fifo | FileType::CharacterDevice => pipe(fd, &address),
        FileType::RegularFile | FileType::BlockDevice => {
            let offset = tell(&fd).map_err(failed)?;
            Ok(Box::new(FileChannel::new(fd.into(), offset, address.to_string())?))
        }
        FileType::Directory => Err(address.bad("it is a directory; expected a socket, a pipe or a file")),
        _ => Err(address.bad("expected a socket, a pipe or a file")),
    }
}

fn socket(fd: OwnedFd, address: &Address) -> Result<Box<dyn Channel>> {
    let failed = |errno: Errno| Error::io("inspect", &address.to_string(), errno);
    if socket_type(&fd).map_err(failed)? != SocketType::STREAM {
        return Err(address.bad("it is a datagram socket; expected a stream socket"));
    }
    if socket_acceptconn(&fd).map_err(failed)? {
        return Err(address.bad("it is a listening socket; expected a connected one"));
    }
    Ok(match socket_domain(&fd).map_err(failed)? {
        AddressFamily::UNIX => Box::new(UnixChannel::new(fd, address.to_string())?),
        AddressFamily::INET | AddressFamily::INET6 => Box::new(TcpChannel::new(fd)?),
        _ => Box::new(Socket::new(fd, address.to_string(), STREAM)?),
    })
}

fn pipe(fd: OwnedFd, address: &Address) -> Result<Box<dyn Channel>> {
    let failed = |source: std::io::Error| Error::io("inspect", &address.to_string(), source);
    let (input, output) = match fcntl_getfl(&fd).map_err(|errno| failed(errno.into()))? & OFlags::RWMODE {
        OFlags::WRONLY => (None, Some(fd)),
        // Each direction ends on its own, so each has its own number.
        OFlags::RDWR => (Some(fd.try_clone().map_err(failed)?), Some(fd)),
        _ => (Some(fd), None),
    };
    Ok(Box::new(PipeChannel::new(input, output, address.to_string())?))
}
