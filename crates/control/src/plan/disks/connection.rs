//! Connections for disks from one host to the other.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use towline_channel::{Address, Channel, ChannelExt as _, IoBuf, IoBufMut, SendFlags, connect_with};

use super::super::context::{Context, connect_options};
use super::super::error::Error;
use crate::qemu::Drive;

/// Purpose of a connection between the hosts, which its first byte tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The content of a disk, by NBD.
    Content = b'c' as isize,
    /// Hashes of its parts.
    Hashes = b'h' as isize,
}

impl Purpose {
    /// Sends it.
    pub(super) fn announce(self, to: &dyn Channel) -> towline_channel::Result<()> {
        to.send_all(&[IoBuf::from(&[self as u8][..])], SendFlags::empty())
    }

    /// Waits for it.
    ///
    /// # Errors
    /// The connection is lost, or has another one.
    pub(super) fn receive(from: &dyn Channel) -> io::Result<Self> {
        let mut byte = [0];
        from.recv_exact(&mut [IoBufMut::from(&mut byte[..])]).map_err(io::Error::other)?;
        let known = [Self::Content, Self::Hashes].into_iter().find(|known| *known as u8 == byte[0]);
        known.ok_or_else(|| {
            let peer = from.peer();
            io::Error::other(format!("{peer} has a connection of the unknown purpose {:#04x}", byte[0]))
        })
    }
}

/// A connection for this drive to the other host.
pub(super) fn connected(
    drive: &Drive,
    to: &Address,
    purpose: Purpose,
    context: &Context<'_>,
) -> Result<Arc<dyn Channel>, Error> {
    let deadline = Instant::now() + context.options.connect_timeout;
    let connected = connect_with(to, deadline, context.cancel, &connect_options(context.options)?);
    let connected = connected.and_then(|channel| purpose.announce(&*channel).map(|()| channel));
    connected.map(Arc::from).map_err(|error| match error {
        towline_channel::Error::Cancelled => Error::Cancelled,
        error => Error::DiskNotCopied {
            drive: drive.name.clone(),
            text: format!("{error}; a firewall between the hosts has to let this port through"),
        },
    })
}

#[cfg(test)]
mod tests {
    use towline_channel::UnixChannel;

    use super::*;

    /// Its next bytes could be written to a disk.
    #[test]
    fn a_connection_of_an_unknown_purpose_is_refused() {
        for (sent, expected) in [(b"c", Some(Purpose::Content)), (b"h", Some(Purpose::Hashes)), (b"x", None)]
        {
            let (here, there) = UnixChannel::pair().unwrap();
            there.send_all(&[IoBuf::from(&sent[..])], SendFlags::empty()).unwrap();
            assert_eq!(Purpose::receive(&here).ok(), expected, "{sent:?}");
        }
    }
}
