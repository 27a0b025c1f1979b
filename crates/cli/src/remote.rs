//! Copies, moves and checks to another host: what is done before the guest's stream, and after it.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use towline_channel::{Address, Cancel};
use towline_control::check::{LANES_DEFAULT, PlannedTransfer};
use towline_control::plan::{
    self, ConnectingEnd, CopyRequest, CopyResult, Destination, Direct, Error, Failure, GuestAfterFailure,
    Observer, Source, WritableDisks,
};
use towline_control::remote::{
    self, DepartingGuest, DiskPolicy, Fit, FramePassing, NewGuest, Place, RemoteHost, SessionTimeouts,
};
use towline_launch::Setting;
use towline_migration::ZeroCopySend;

use crate::args::{HostArgs, MoveArgs, SshArgs, TransferArgs, Via};
use crate::endpoint::SshEndpoint;
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
    pub(crate) ssh: &'a str,
    /// `None` for an image.
    pub(crate) host: Option<&'a HostArgs>,
    pub(crate) lanes: usize,
    pub(crate) disks: DiskPolicy,
    pub(crate) via: Via,
    pub(crate) planned: PlannedTransfer,
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
        let disks = host.map_or(DiskPolicy::VouchedFor, HostArgs::disk_policy);
        let planned = PlannedTransfer::Precopy;
        Self { ssh: &ssh.ssh, host, lanes, disks, via: Via::Auto, planned, timeouts, interrupt }
    }

    /// Options for this move.
    pub(crate) fn of_move(args: &'a MoveArgs, interrupt: Arc<OwnedFd>) -> Self {
        let place = Self::of(&args.transfer, &args.host.ssh, Some(&args.host), interrupt);
        let lanes =
            args.transfer.multifd_channels.unwrap_or(if args.permits_postcopy() { 0 } else { place.lanes });
        let planned = PlannedTransfer::postcopy_if(args.permits_postcopy());
        Self { via: args.via, lanes, planned, ..place }
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
    let map = options.host.and_then(|args| args.map.as_ref());
    let guest = DepartingGuest::of(socket, place, options.disks, map, Some(Arc::clone(&options.interrupt)))?
        .planned(options.planned);
    let mut host = connect(end, options).map_err(Error::from)?;
    let fit = host.prepare(&guest, options.lanes).map_err(Error::from)?;
    Ok(PreparedPlace { host, guest, fit })
}

fn connect(end: &SshEndpoint, options: &PlaceOptions<'_>) -> Result<RemoteHost, remote::Error> {
    let interrupt = Arc::clone(&options.interrupt);
    RemoteHost::connect(&end.target, options.ssh, options.timeouts, Some(interrupt))
}

/// Chooses the way of the guest; `None`: through both towlines.
fn direct(
    guest: &DepartingGuest,
    via: Via,
    request: &CopyRequest,
    observer: &dyn Observer,
) -> Result<Option<Direct>, remote::Error> {
    let is_clear = request.zero_copy_send == ZeroCopySend::On;
    let reason = match (via, guest.needs_direct()) {
        _ if !guest.is_run_there() => return Ok(None),
        (Via::Relay, _) => return Ok(None),
        (Via::Auto, None) if !is_clear && !request.is_postcopy() => return Ok(None),
        (Via::Direct, _) => "--via direct".to_owned(),
        (Via::Auto, Some(reason)) => reason,
        (Via::Auto, None) if request.is_postcopy() => "postcopy".to_owned(),
        (Via::Auto, None) => "--zero-copy-send on".to_owned(),
    };
    let secrecy = if is_clear { "memory is not encrypted" } else { "with TLS by keys of this move" };
    observer.notice(&format!("from QEMU to QEMU ({reason}): {secrecy}"));
    guest.direct(!is_clear, request).map(Some)
}

fn started(given: &NewGuest, args: &HostArgs) -> NewGuest {
    NewGuest {
        binary: args.qemu.clone(),
        settings: texts(&args.set),
        is_trusted: args.trust_command_line,
        ..given.clone()
    }
}

/// Settings, as another host reads them.
pub(crate) fn texts(settings: &[Setting]) -> Vec<String> {
    settings.iter().map(|Setting { key, value }| format!("{key}={value}")).collect()
}

/// A guest's place on another host, where it is received, or is an image that is sent.
pub(crate) struct RemoteCopy {
    host: RemoteHost,
    /// The other end of the stream.
    pub(crate) address: Address,
    /// Notices about disks that stay here if the guest arrives.
    disks_left: Vec<String>,
    frames: FramePassing,
}

impl RemoteCopy {
    /// Has the other host receive the guest of a QEMU, after both hosts have judged that.
    pub(crate) fn open(
        end: &SshEndpoint,
        place: &PlaceOptions<'_>,
        socket: &Path,
        request: &mut CopyRequest,
        observer: &dyn Observer,
    ) -> Result<Self, Failure> {
        let PreparedPlace { mut host, guest, fit } = prepare(end, place, socket).map_err(refused)?;
        observer.hosts(&host.hosts_of(&guest, &fit));
        let checked = guest.check(&fit, place.lanes, &end.to_string(), observer);
        let notes = disk_remedy(&fit, place.disks).into_iter().map(str::to_owned).collect();
        checked.map_err(|error| Failure { notes, ..refused(error.into()) })?;
        request.direct = direct(&guest, place.via, request, observer).map_err(failed)?;
        let arrival = host.receive(&guest, request, place.lanes).map_err(failed)?;
        (request.tls, request.peer_name) = (Some(arrival.tls), Some(end.to_string()));
        if !arrival.recovers {
            request.recover_timeout = Duration::ZERO;
        }
        if let Some(to) = arrival.disks {
            request.disks =
                WritableDisks::Mirrored { to, compare: place.host.is_some_and(|host| host.verify_disks) };
        }
        let disks_left = guest.disks_left();
        let frames = guest.into_frame_passing(&fit);
        Ok(Self { host, address: arrival.address, disks_left, frames })
    }

    /// Copies the guest by `copy`, and passes frames for it on meanwhile.
    pub(crate) fn copy(&mut self, copy: impl FnOnce() -> Result<CopyResult>) -> Result<CopyResult> {
        self.host.pass_frames(&mut self.frames, copy, |copied| matches!(copied, Ok(Ok(_))))
    }

    /// Moves the guest of a QEMU, without a sandbox.
    pub(crate) fn move_guest(
        end: &SshEndpoint,
        place: &PlaceOptions<'_>,
        socket: &Path,
        mut request: CopyRequest,
        cancel: &Cancel,
        reporter: &Reporter,
    ) -> Result<CopyResult> {
        let mut remote = match Self::open(end, place, socket, &mut request, reporter) {
            Ok(remote) => remote,
            Err(failure) => return Ok(Err(failure)),
        };
        let (from, to) = (Source::Qmp(socket.to_owned()), Destination::Stream(remote.address.clone()));
        let mut moved = remote.copy(|| Ok(plan::copy(&from, &to, &request, cancel, reporter)))?;
        remote.close(&mut moved, reporter);
        Ok(moved)
    }

    /// Has the other host send an image, after this one has judged whether its guest would run here.
    pub(crate) fn open_source(
        end: &SshEndpoint,
        place: &PlaceOptions<'_>,
        destination: &Destination,
        request: &mut CopyRequest,
        observer: &dyn Observer,
    ) -> Result<Self, Failure> {
        let mut host = connect(end, place).map_err(failed)?;
        observer.hosts(&host.hosts_of_image());
        let departure = host.send(&end.place, request, place.lanes).map_err(failed)?;
        let checked = departure.check(destination, place.lanes, observer);
        checked.map_err(|error| refused(error.into()))?;
        (request.tls, request.peer_name) = (Some(departure.tls), Some(end.to_string()));
        request.connects = ConnectingEnd::Destination;
        Ok(Self { host, address: departure.address, disks_left: Vec::new(), frames: FramePassing::default() })
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

fn failed(error: remote::Error) -> Failure {
    refused(Error::from(error).into())
}

/// The failure of a copy that has not begun.
fn refused(error: Box<Error>) -> Failure {
    let is_unknown = matches!(*error, Error::Qemu(_));
    let error = match *error {
        Error::Remote(remote::Error::Cancelled) => Box::new(Error::Cancelled),
        _ => error,
    };
    let guest = if is_unknown { GuestAfterFailure::NOT_REACHED } else { GuestAfterFailure::SAFE };
    Failure { error, guest, notes: Vec::new() }
}

/// The way out for disks that the other host has refused, if an option is one.
pub(crate) fn disk_remedy(fit: &Fit, policy: DiskPolicy) -> Option<&'static str> {
    let has = |text| fit.refusals.iter().any(|reason| reason.starts_with("disk ") && reason.contains(text));
    match policy {
        DiskPolicy::Proven if has("cannot be proven") => Some(
            "--with-disks copies the disks there; --shared-disks says that they are the same on both hosts",
        ),
        DiskPolicy::Proven if has("is another file there") => Some("--with-disks copies the disks there"),
        DiskPolicy::Copied if has("needs no copy") => Some("leave --with-disks out"),
        _ => None,
    }
}
