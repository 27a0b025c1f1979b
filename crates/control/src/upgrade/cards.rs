//! Network cards in other processes, which must serve the new QEMU while the old one is connected.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::Error;

/// Time limit of the reply. A process that serves one frontend at a time does not accept a second one until
/// then.
const REPLY_WITHIN: Duration = Duration::from_secs(2);
/// `VHOST_USER_GET_FEATURES`, of version 1, without a payload: the first request of QEMU, which changes
/// nothing.
const GET_FEATURES: [u32; 3] = [1, 1, 0];
/// Header and features.
const REPLY_BYTES: usize = 12 + 8;

/// Treatment of vhost-user network cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cards {
    /// Refused.
    Refused,
    /// The new QEMU connects to each process while the old one is connected.
    Shared,
}

/// A network card whose process serves both QEMUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SharedCard {
    /// The chardev by which QEMU is connected to it.
    pub(super) chardev: String,
    /// The process's socket.
    pub(super) socket: PathBuf,
}

/// Checks that the process at this socket replies to a frontend beside the one that it has.
///
/// # Errors
/// [`Error::OneFrontend`].
pub(super) fn check_second_frontend(socket: &Path) -> Result<(), Error> {
    request_features(socket).map_err(|source| Error::OneFrontend { path: socket.to_owned(), source })
}

fn request_features(socket: &Path) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(REPLY_WITHIN))?;
    stream.set_write_timeout(Some(REPLY_WITHIN))?;
    let request: Vec<u8> = GET_FEATURES.iter().flat_map(|word| word.to_ne_bytes()).collect();
    stream.write_all(&request)?;
    stream.read_exact(&mut [0; REPLY_BYTES])
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_process_that_does_not_reply_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("net.sock");
        let kind = |found: Result<(), Error>| match found {
            Err(Error::OneFrontend { source, .. }) => source.kind(),
            other => panic!("{other:?}"),
        };
        assert_eq!(kind(check_second_frontend(&path)), ErrorKind::NotFound);
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(kind(check_second_frontend(&path)), ErrorKind::WouldBlock);
        let server = std::thread::spawn(move || {
            // The error of the previous attempt.
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 12];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(request[..4], 1_u32.to_ne_bytes());
            stream.write_all(&[0; REPLY_BYTES]).unwrap();
        });
        check_second_frontend(&path).unwrap();
        server.join().unwrap();
    }
}
