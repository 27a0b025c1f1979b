//! All unsafe code: ioctls of taps and interfaces, batches of frames, and memory that is shared with AF_XDP.

pub(crate) mod interface;
pub(crate) mod tap;
pub(crate) mod tap_ring;
#[cfg(feature = "af-xdp")]
pub(crate) mod umem_mapping;
#[cfg(feature = "af-xdp")]
pub(crate) mod xsk;

use std::io;

/// Maximum length of an interface's name with its NUL.
pub(crate) const NAME_BYTES: usize = libc::IFNAMSIZ;

/// A request about the interface of this name; EINVAL if it is not shorter than [`NAME_BYTES`].
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

/// Name of the interface in a response.
fn name_of(request: &libc::ifreq) -> String {
    let bytes: Vec<u8> =
        request.ifr_name.iter().take_while(|byte| **byte != 0).map(|byte| byte.cast_unsigned()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
