//! Copies, moves and checks to another host: what is done before the guest's stream, and after it.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use towline_control::check::LANES_DEFAULT;
use towline_control::plan::{
    CopyRequest, CopyResult, Destination, Error, Failure, GuestAfterFailure, Observer as _, WritableDisks,
};
use towline_control::remote::{
    self, DepartingGuest, DiskPolicy, Fit, NewGuest, Place, RemoteHost, SessionTimeouts,
};
use towline_launch::Setting;

use crate::args::{HostArgs, SshArgs, TransferArgs};
use crate::endpoint::ssh::SshEndpoint;
use crate::progress::Reporter;

/// Time in which the other host reports the end of its part.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// A guest, and its place on another host, which waits for it.
pub(crate) struct PreparedPlace {
    pub(crate) host: RemoteHost,
    pub(crate) guest: DepartingGuest,
    pub(crate) fit: Fit,
}

/// Options of a place.
pub(crate) struct PlaceOptions<'a> {
    pub(crate) ssh: &'a SshArgs,
    /// `None` for an image.
    pub(crate) host: Option<&'a HostArgs>,
    pub(crate) lanes: usize,
    pub(crate) timeouts: SessionTimeouts,
    /// Ends every wait.
    pub(crate) interrupt: Arc<OwnedFd>,
}

impl<'a> PlaceOptions<'a> {
    /// Options for this transfer.
    pub(crate) fn of(
        transfer: &TransferArgs,
        ssh: &'a SshArgs,
        host: Option<&'a HostArgs>,
        interrupt: Arc<OwnedFd>,
    ) -> Self {
        let lanes = transfer.multifd_channels.unwrap_or(LANES_DEFAULT);
        let timeouts = SessionTimeouts { connect: transfer.connect_timeout, peer: transfer.peer_timeout };
        Self { ssh, host, lanes, timeouts, interrupt }
    }
}

/// Queries the guest of this QEMU, and has the other host make a place for it. Starts ssh, so it precedes the sandbox.
pub(crate) fn prepare(
    end: &SshEndpoint,
    options: &PlaceOptions<'_>,
    socket: &Path,
) -> Result<PreparedPlace, Box<Error>> {
    let place = match (&end.place, options.host) {
        (Place::Guest(given), Some(args)) => Place::Guest(started(given, args)),
        (place, _) => place.clone(),
    };
    let disks = options.host.map_or(DiskPolicy::VouchedFor, HostArgs::disk_policy);
    let map = options.host.and_then(|args| args.map.as_ref());
    let guest = DepartingGuest::of(socket, place, disks, map, Some(Arc::clone(&options.interrupt)))?;
    let mut host = RemoteHost::connect(
        &end.target,
        &options.ssh.ssh,
        options.timeouts,
        Some(Arc::clone(&options.interrupt)),
    )
    .map_err(Error::from)?;
    let fit = host.prepare(&guest, options.lanes).map_err(Error::from)?;
    Ok(PreparedPlace { host, guest, fit })
}

fn started(given: &NewGuest, args: &HostArgs) -> NewGuest {
    NewGuest {
        binary: args.qemu.clone(),
        settings: args.set.iter().map(|Setting { key, value }| format!("{key}={value}")).collect(),
        is_trusted: args.trust_command_line,
        ..given.clone()
    }
}

/// A guest's place on another host, where it is received.
pub(crate) struct RemoteCopy {
    host: RemoteHost,
    /// Where the stream goes.
    pub(crate) destination: Destination,
    /// Notices about disks that stay here if the guest arrives.
    disks_left: Vec<String>,
}

impl RemoteCopy {
    /// Has the other host receive the guest of a QEMU, after both hosts have judged that.
    pub(crate) fn open(
        end: &SshEndpoint,
        place: &PlaceOptions<'_>,
        socket: &Path,
        request: &mut CopyRequest,
        reporter: &Reporter,
    ) -> Result<Self, Failure> {
        let refused = |error: Box<Error>| {
            let is_unknown = matches!(*error, Error::Qemu(_));
            let error = match *error {
                Error::Remote(remote::Error::Cancelled) => Box::new(Error::Cancelled),
                _ => error,
            };
            let guest = if is_unknown { GuestAfterFailure::NOT_REACHED } else { GuestAfterFailure::SAFE };
            Failure { error, guest, notes: Vec::new() }
        };
        let PreparedPlace { mut host, guest, fit } = prepare(end, place, socket).map_err(refused)?;
        let checked = guest.check(&fit, place.lanes, &end.to_string(), reporter);
        checked.map_err(|error| refused(error.into()))?;
        let arrival = host.receive(&guest, request, place.lanes);
        let arrival = arrival.map_err(|error| refused(Error::from(error).into()))?;
        (request.tls, request.destination_name) = (Some(arrival.tls), Some(end.to_string()));
        if let Some(to) = arrival.disks {
            request.disks = WritableDisks::Mirrored { to };
        }
        let destination = Destination::Stream(arrival.address);
        Ok(Self { host, destination, disks_left: guest.disks_left() })
    }

    /// The process of its ssh.
    pub(crate) fn ssh_pid(&self) -> u32 {
        self.host.ssh_pid()
    }

    /// Adds what the other host has reported to the result.
    pub(crate) fn close(self, copied: &mut CopyResult, reporter: &Reporter) {
        let name = self.host.name();
        let from = |text: &str| format!("{name}: {text}");
        if copied.is_err() {
            // It may still wait for the guest.
            self.host.cancel();
        }
        let ended = self.host.await_end(END_TIMEOUT, &|text| reporter.notice(&from(text)));
        let remote::Ended { error, notes } = ended.unwrap_or_else(|| remote::Ended {
            error: Some("its end was not reported".into()),
            notes: Vec::new(),
        });
        let texts = error.iter().chain(&notes).map(|text| from(text));
        match copied {
            Ok(_) => texts.chain(self.disks_left).for_each(|text| reporter.notice(&text)),
            Err(failure) => failure.notes.extend(texts),
        }
    }
}
