//! All that is unsafe: the ioctls of taps and interfaces, and what is shared with AF_XDP.

pub(crate) mod interface;
pub(crate) mod span;
pub(crate) mod tap;
pub(crate) mod xsk;

use std::io;

/// Bytes of an interface's name with the NUL behind it.
pub(crate) const NAME_BYTES: usize = libc::IFNAMSIZ;

/// A request about the interface of this name, which is shorter than [`NAME_BYTES`].
fn request(name: &str) -> io::Result<libc::ifreq> {
    if name.is_empty() || name.len() >= NAME_BYTES || name.bytes().any(|byte| byte == 0) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: all zero is a valid `ifreq`: an empty name, and numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    Ok(request)
}

/// The name in an answer.
fn name_of(request: &libc::ifreq) -> String {
    let bytes: Vec<u8> =
        request.ifr_name.iter().take_while(|byte| **byte != 0).map(|byte| byte.cast_unsigned()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
