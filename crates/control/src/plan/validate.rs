//! Refuses, before anything is touched, options that exclude each other or do not fit the two ends.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use towline_channel::{Address, check_zero_copy};
use towline_compat::postcopy::HAS_LANES_SINCE;
use towline_migration::{Compression, ZeroCopySend};

use super::context::{connect_options, listen_options};
use super::ends::{Destination, Source};
use super::error::Error;
use super::invalid::{CopiedPages, Invalid, InvalidEnds, InvalidPostcopy, InvalidTls};
use super::request::{CopyRequest, PostcopyOptions, Throttling, TransferOptions};
use crate::check::{LANES_DEFAULT, LANES_OF_POSTCOPY};
use crate::qemu::Qemu;

/// Maximum of QEMU's parameter.
const LANES_MAX: usize = towline_protocol::limits::LANES_MAX;

/// Validates a request before anything is touched. Returns the number of lanes.
pub(super) fn validate(
    source: &Source,
    destination: &Destination,
    options: &CopyRequest,
) -> Result<usize, Error> {
    let request = Validation::of(source, destination, options)?;
    request.check_compression()?;
    request.check_tls()?;
    request.check_zero_copy_send()?;
    request.check_return_path()?;
    request.check_ends()?;
    request.check_credentials()?;
    Ok(request.lanes)
}

/// A request, its ends, and what follows from them.
struct Validation<'a> {
    source: &'a Source,
    destination: &'a Destination,
    options: &'a CopyRequest,
    transfer: TransferOptions,
    lanes: usize,
}

impl<'a> Validation<'a> {
    fn of(
        source: &'a Source,
        destination: &'a Destination,
        options: &'a CopyRequest,
    ) -> Result<Self, Invalid> {
        let (transfer, postcopy) = (options.transfer_options(), options.postcopy());
        let streams = [source.stream(), destination.stream()];
        let streams = || streams.iter().flatten();
        let default = if postcopy.is_some() {
            LANES_OF_POSTCOPY
        } else if streams().next().is_some() || options.is_snapshot() {
            0
        } else {
            LANES_DEFAULT
        };
        let lanes = transfer.multifd_channels.unwrap_or(default);
        let request = Self { source, destination, options, transfer, lanes };
        if let Some(PostcopyOptions { recover, .. }) = postcopy {
            request.check_postcopy(recover)?;
        }
        if lanes > LANES_MAX {
            return Err(Invalid::TooManyLanes { lanes, lanes_max: LANES_MAX });
        }
        let is_single = |address: &&&Address| {
            !matches!(address, Address::Tcp { .. } | Address::Unix(_) | Address::WebSocket { .. })
        };
        match streams().find(is_single) {
            Some(address) if lanes > 0 && postcopy.is_none() => {
                Err(Invalid::LanesOver { lanes, address: (*address).clone() })
            }
            _ => Ok(request),
        }
    }

    /// Refuses options that exclude postcopy.
    fn check_postcopy(&self, recovers: bool) -> Result<(), Invalid> {
        let (options, lanes) = (self.options, self.transfer.multifd_channels.unwrap_or(0));
        Err(Invalid::Postcopy(match self.source {
            Source::Stream(_) => InvalidPostcopy::OfStream,
            Source::Qmp(_) if recovers => InvalidPostcopy::RecoveryOfQemu,
            source if lanes > 0 && !matches!(source, Source::Qmp(_)) => InvalidPostcopy::LanesOfImage,
            _ if options.compression != Compression::None && lanes == 0 => InvalidPostcopy::Compressed,
            _ if options.zero_copy_send == ZeroCopySend::On => InvalidPostcopy::ZeroCopy,
            _ if !options.return_path => InvalidPostcopy::WithoutReturnPath,
            _ => return Ok(()),
        }))
    }

    /// Refuses ends that the task does not have, or between which no transfer is possible.
    fn check_ends(&self) -> Result<(), Invalid> {
        let Self { source, destination, options, transfer, .. } = *self;
        let is_throttled = transfer.throttling != Throttling::Unchanged;
        let (is_ended, from_qemu) = (options.ends_source(), source.monitor().is_some());
        let reason = match (source, destination) {
            (Source::Stream(_) | Source::Image(_) | Source::Store(_), _) if is_throttled => {
                InvalidEnds::ThrottledWithoutQemu
            }
            // A source is ended only if its guest continues elsewhere, or is stored.
            _ if is_ended && !from_qemu => InvalidEnds::EndedWithoutQemu,
            (_, Destination::Process(process)) if is_ended => {
                InvalidEnds::EndedToProcess { destination: process.to_string() }
            }
            (_, Destination::Null) if is_ended => InvalidEnds::EndedToNull,
            // A detached device must be attached somewhere.
            _ if options.detaches_vsock() && !(from_qemu && destination.monitor().is_some()) => {
                InvalidEnds::DetachedWithoutQemu
            }
            (_, to) if options.base().is_some() && !matches!(to, Destination::Image(_)) => {
                InvalidEnds::BaseWithoutImage
            }
            // QEMU's background-snapshot goes from a QEMU to an image.
            _ if options.is_snapshot() && !(from_qemu && destination.is_image()) => InvalidEnds::Snapshot,
            // It could end with two running guests.
            (Source::Qmp(_), Destination::Stream(address)) if options.resumes() => {
                InvalidEnds::ResumedTo { address: address.clone() }
            }
            (Source::Qmp(from), Destination::Qmp(to)) if is_same_file(from, to) => {
                InvalidEnds::SameQemu { socket: to.clone() }
            }
            (Source::Qmp(_), Destination::Qmp(_)) => return Ok(()),
            (Source::Qmp(_), _) if options.is_postcopy() && options.direct.is_none() => {
                return Err(InvalidPostcopy::OfQemu.into());
            }
            (_, Destination::Qmp(_) | Destination::Stream(Address::Tcp { .. } | Address::Unix(_)))
                if options.is_postcopy() =>
            {
                return Ok(());
            }
            _ if options.is_postcopy() => return Err(InvalidPostcopy::WithoutGuest.into()),
            (source, Destination::Null) if source.is_image() => InvalidEnds::ImageToNull,
            _ => return Ok(()),
        };
        Err(reason.into())
    }

    fn check_return_path(&self) -> Result<(), Invalid> {
        if self.options.return_path {
            return Ok(());
        }
        let (source, destination) = (self.source, self.destination);
        let from_stream = matches!(source, Source::Stream(_));
        match (source, destination) {
            (Source::Qmp(_), _) => Err(Invalid::RunningWithoutReturnPath),
            // An image is as safe afterwards as before, and so is a file that is read through a pipe.
            (_, Destination::Stream(_)) if !from_stream => Ok(()),
            (Source::Stream(Address::File { path, .. }), Destination::Qmp(_) | Destination::Stream(_)) => {
                Err(Invalid::FileTo { path: path.clone(), destination: destination.to_string() })
            }
            (_, Destination::Qmp(_) | Destination::Stream(_)) => Err(Invalid::WithoutReturnPath),
            _ if from_stream => Ok(()),
            _ => Err(Invalid::WithoutReturnPath),
        }
    }

    /// Refuses compression that would have no effect.
    fn check_compression(&self) -> Result<(), Invalid> {
        let compression = self.options.compression;
        if compression == Compression::None {
            return Ok(());
        }
        let method = compression.method().name();
        if self.source.is_image() && self.destination.is_image() {
            return Err(Invalid::CompressionBetweenImages { method });
        }
        if self.lanes == 0 { Err(Invalid::CompressionWithoutLanes { method }) } else { Ok(()) }
    }

    /// Refuses `on` if pages would be copied all the same, with the reason.
    fn check_zero_copy_send(&self) -> Result<(), Error> {
        // QEMU sends, and has its own conditions.
        if self.options.zero_copy_send != ZeroCopySend::On || self.options.direct.is_some() {
            return Ok(());
        }
        let copied = match self.destination {
            Destination::Stream(Address::Tcp { .. }) => self.copied_over_tcp(),
            // Within this process, lanes are TCP over the loopback interface.
            Destination::Process(_) if !matches!(self.source, Source::Qmp(_) | Source::Stream(_)) => {
                self.copied_over_tcp()
            }
            Destination::Stream(address) => Some(CopiedPages::NotTcp { address: address.clone() }),
            Destination::Qmp(_) => Some(CopiedPages::UnixSocket),
            _ => Some(CopiedPages::NothingSent),
        };
        match copied {
            Some(reason) => Err(Invalid::ZeroCopy(reason).into()),
            None => Ok(check_zero_copy()?),
        }
    }

    fn copied_over_tcp(&self) -> Option<CopiedPages> {
        let compression = self.options.compression;
        if self.lanes == 0 {
            Some(CopiedPages::WithoutLanes)
        } else if compression != Compression::None {
            Some(CopiedPages::Compressed { method: compression.method().name() })
        } else {
            self.options.tls.is_some().then_some(CopiedPages::Encrypted)
        }
    }

    /// Refuses TLS that would have no effect.
    fn check_tls(&self) -> Result<(), Invalid> {
        let (from, to) = (self.source.stream(), self.destination.stream());
        let streams = || [from, to].into_iter().flatten();
        let Some(tls) = &self.options.tls else {
            return match streams().find(|address| matches!(address, Address::WebSocket { secure: true, .. }))
            {
                Some(address) => Err(InvalidTls::Missing { address: address.clone() }.into()),
                None => Ok(()),
            };
        };
        let carries = |address: &&Address| {
            matches!(
                address,
                Address::Tcp { .. } | Address::Unix(_) | Address::WebSocket { secure: true, .. }
            )
        };
        let plain = streams().find(|address| !carries(address));
        let reason = match (plain, to, tls.hostname()) {
            _ if from.is_none() && to.is_none() => InvalidTls::WithoutStream,
            (Some(address), _, _) => InvalidTls::Over { address: address.clone() },
            (_, None, Some(_)) => InvalidTls::NameWithoutDestination,
            (_, Some(address @ Address::Unix(_)), None) => {
                InvalidTls::NameMissing { address: address.clone() }
            }
            _ => return Ok(()),
        };
        Err(reason.into())
    }

    /// Refuses credentials that cannot be loaded.
    fn check_credentials(&self) -> Result<(), Error> {
        if self.source.stream().is_some() {
            listen_options(self.options)?;
        }
        if self.destination.stream().is_some() {
            connect_options(self.options)?;
        }
        Ok(())
    }
}

/// Refuses a QEMU that has no lanes in a migration that may become postcopy, at either end.
pub(super) fn check_multifd_with_postcopy(qemu: &Qemu) -> Result<(), Error> {
    let version = &qemu.facts().version.qemu;
    if (version.major, version.minor) >= HAS_LANES_SINCE {
        return Ok(());
    }
    let (version, socket) = (qemu.version_text(), qemu.socket().to_owned());
    Err(InvalidPostcopy::LanesOfQemu { version, socket }.into())
}

/// Returns true if both names lead to one file.
pub(crate) fn is_same_file(a: &Path, b: &Path) -> bool {
    let identity =
        |path: &Path| std::fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
    identity(a).is_some_and(|found| identity(b) == Some(found))
}

#[cfg(test)]
mod tests {
    use super::super::request::{AfterCopy, PostcopyStart, RequestedPages, Task};
    use super::*;

    fn postcopy() -> CopyRequest {
        let start = PostcopyStart::Copy { run: None };
        let transfer = TransferOptions::default();
        CopyRequest::new(Task::Postcopy { transfer, start, requested_pages: RequestedPages::MainChannel })
    }

    fn refused(source: &Source, destination: &Destination, request: &CopyRequest) -> Invalid {
        match validate(source, destination, request) {
            Err(Error::Invalid(reason)) => reason,
            other => panic!("{other:?}"),
        }
    }

    fn qmp() -> Destination {
        Destination::Qmp("b.qmp".into())
    }

    #[test]
    fn pairs_without_a_transfer_are_refused() {
        let (image, running) = (Source::Image("a.img".into()), Source::Qmp("a.qmp".into()));
        let (file, tcp) =
            (Destination::Image("b.img".into()), Destination::Stream("tcp:b:1".parse().unwrap()));
        let exec = Destination::Stream("exec:cat".parse().unwrap());
        let no_guest = || Invalid::Postcopy(InvalidPostcopy::WithoutGuest);
        let no_qemus = || Invalid::Postcopy(InvalidPostcopy::OfQemu);
        let null = &Destination::Null;
        for (source, destination, request, reason) in [
            (&image, null, CopyRequest::default(), InvalidEnds::ImageToNull.into()),
            (&image, &file, postcopy(), no_guest()),
            (&image, &exec, postcopy(), no_guest()),
            (&image, null, postcopy(), no_guest()),
            (&running, &tcp, postcopy(), no_qemus()),
            (&running, &file, postcopy(), no_qemus()),
        ] {
            assert_eq!(refused(source, destination, &request), reason);
        }
        for (source, destination) in [(&image, &qmp()), (&image, &tcp), (&running, &qmp())] {
            assert!(validate(source, destination, &postcopy()).is_ok());
        }
        assert!(validate(&running, &Destination::Null, &CopyRequest::default()).is_ok());
    }

    #[test]
    fn copy_of_a_resumed_source_stays_paused() {
        let (transfer, after) = (TransferOptions::default(), AfterCopy::SourceResumed);
        let request = CopyRequest::new(Task::Copy { transfer, after, base: None });
        let source = Source::Qmp("a.qmp".into());
        assert_eq!(validate(&source, &qmp(), &request).unwrap(), LANES_DEFAULT);
        assert_eq!(request.run(), Some(false));
        let address: Address = "tcp:b:1".parse().unwrap();
        let reason = InvalidEnds::ResumedTo { address: address.clone() };
        assert_eq!(refused(&source, &Destination::Stream(address), &request), reason.into());
    }

    #[test]
    fn move_to_a_destination_that_keeps_nothing_is_refused() {
        let (transfer, devices) = (TransferOptions::default(), Vec::new());
        let task = Task::Move { transfer, run: None, detach_vsock: true, devices };
        let request = CopyRequest::new(task);
        let source = Source::Qmp("a.qmp".into());
        for (destination, reason) in [
            (Destination::Null, InvalidEnds::EndedToNull),
            (Destination::Image("a.img".into()), InvalidEnds::DetachedWithoutQemu),
        ] {
            assert_eq!(refused(&source, &destination, &request), reason.into());
        }
    }
}
