//! Refuses, before anything is touched, options that exclude each other or do not fit the two ends.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use towline_channel::{Address, check_zero_copy};
use towline_migration::{Compression, ZeroCopySend};

use super::ends::{Destination, Source};
use super::error::Error;
use super::request::CopyRequest;
use super::tls;
use crate::check::{LANES_DEFAULT, LANES_OF_POSTCOPY};
use crate::qemu::Qemu;

/// The first QEMU that has lanes in a migration that may become postcopy.
const LANES_BESIDE_POSTCOPY_SINCE: (u32, u32) = (10, 1);
/// Maximum of QEMU's parameter.
const LANES_MAX: usize = towline_protocol::limits::LANES_MAX;

/// Validates a request before anything is touched. Returns the request as it applies to these ends, and the
/// number of lanes.
pub(super) fn validate(
    source: &Source,
    destination: &Destination,
    options: &CopyRequest,
) -> Result<(CopyRequest, usize), Error> {
    let lanes = lanes(source, destination, options)?;
    check_compression(source, destination, options, lanes)?;
    check_tls(source, destination, options)?;
    check_zero_copy_send(source, destination, options, lanes)?;
    check_return_path(source, destination, options)?;
    check_throttle(source, options)?;
    check_end(source, destination, options)?;
    check_vsock(source, destination, options)?;
    check_base(destination, options)?;
    check_snapshot(source, destination, options)?;
    check_pair(source, destination, options)?;
    Ok((one_guest(source, destination, options)?, lanes))
}

/// Validates a request to inspect a stream. Returns the number of lanes.
pub(super) fn validate_stream(source: &Source, options: &CopyRequest) -> Result<usize, Error> {
    let lanes = lanes(source, &Destination::Null, options)?;
    check_compression(source, &Destination::Null, options, lanes)?;
    check_tls(source, &Destination::Null, options)?;
    Ok(lanes)
}

fn lanes(source: &Source, destination: &Destination, options: &CopyRequest) -> Result<usize, Error> {
    if options.is_postcopy() {
        check_postcopy(source, options)?;
        let lanes = options.transfer_options().multifd_channels.unwrap_or(LANES_OF_POSTCOPY);
        return if lanes > LANES_MAX { Err(too_many(lanes)) } else { Ok(lanes) };
    }
    let streams = [source.stream(), destination.stream()];
    let streams = || streams.iter().flatten();
    let default = if streams().next().is_some() || options.is_snapshot() { 0 } else { LANES_DEFAULT };
    let lanes = options.transfer_options().multifd_channels.unwrap_or(default);
    if lanes > LANES_MAX {
        return Err(too_many(lanes));
    }
    if lanes > 0
        && let Some(address) = streams().find(|address| {
            !matches!(address, Address::Tcp { .. } | Address::Unix(_) | Address::WebSocket { .. })
        })
    {
        return Err(Error::Usage(format!(
            "--multifd-channels {lanes} with {address}: only tcp:, unix:, ws:// and wss:// have several connections; leave the option out"
        )));
    }
    Ok(lanes)
}

fn too_many(lanes: usize) -> Error {
    Error::Usage(format!("--multifd-channels {lanes}: at most {LANES_MAX}, as in QEMU"))
}

/// Refuses a QEMU that has no lanes in a migration that may become postcopy, at either end.
pub(super) fn check_multifd_with_postcopy(qemu: &Qemu) -> Result<(), Error> {
    let version = &qemu.facts().version.qemu;
    if (version.major, version.minor) >= LANES_BESIDE_POSTCOPY_SINCE {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "--multifd-channels with --postcopy: QEMU {} on {} has no lanes beside postcopy, which came with 10.1: leave the option out",
        qemu.version_text(),
        qemu.socket()
    )))
}

/// Refuses a source and a destination between which no transfer is possible.
fn check_pair(source: &Source, destination: &Destination, options: &CopyRequest) -> Result<(), Error> {
    let text = match (source, destination) {
        (Source::Qmp(from), Destination::Qmp(to)) if is_same_file(from, to) => {
            return Err(Error::Usage(format!(
                "qmp:{}: SOURCE and DEST are the same QEMU; DEST is another one, started with `-incoming defer`",
                to.display()
            )));
        }
        (Source::Qmp(_), Destination::Qmp(_)) => return Ok(()),
        (Source::Qmp(_), _) if options.is_postcopy() => {
            "--postcopy of a running guest is between two qmp: QEMUs, which do it themselves; an image goes to tcp: and unix: too"
        }
        (_, Destination::Qmp(_) | Destination::Stream(Address::Tcp { .. } | Address::Unix(_)))
            if options.is_postcopy() =>
        {
            return Ok(());
        }
        _ if options.is_postcopy() => {
            "--postcopy is for a destination that runs the guest: qmp:, tcp: or unix: with a QEMU behind it"
        }
        (source, Destination::Null) if source.is_image() => {
            "null: takes a stream; to check an image, `inspect --verify` it"
        }
        _ => return Ok(()),
    };
    Err(Error::Usage(text.into()))
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let identity =
        |path: &Path| std::fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
    identity(a).is_some_and(|found| identity(b) == Some(found))
}

/// Prevents a copy that would end with two running guests.
fn one_guest(
    source: &Source,
    destination: &Destination,
    options: &CopyRequest,
) -> Result<CopyRequest, Error> {
    let options = options.clone();
    if !options.resumes() || source.monitor().is_none() {
        return Ok(options);
    }
    match destination {
        Destination::Image(_) | Destination::Store(_) | Destination::Process(_) | Destination::Null => {}
        Destination::Qmp(_) if options.run() == Some(true) => {
            return Err(Error::Usage("--resume with --run: the same guest would run twice".into()));
        }
        Destination::Qmp(_) => return Ok(options.paused()),
        Destination::Stream(address) => {
            return Err(Error::Usage(format!(
                "--resume with {address}, which may run the guest by itself: the same guest would run twice"
            )));
        }
    }
    Ok(options)
}

fn check_throttle(source: &Source, options: &CopyRequest) -> Result<(), Error> {
    match source {
        Source::Qmp(_) | Source::Process(_) => Ok(()),
        _ if options.transfer_options().throttle => Err(Error::Usage(
            "--throttle is for a qmp: source, whose QEMU slows its guest down: set auto-converge on at the QEMU that sends".into(),
        )),
        _ => Ok(()),
    }
}

/// A source is ended only if its guest continues elsewhere, or is stored.
fn check_end(source: &Source, destination: &Destination, options: &CopyRequest) -> Result<(), Error> {
    let text = match (source, destination) {
        _ if !options.ends_source() => return Ok(()),
        (source, _) if source.monitor().is_none() => "only a qmp: source can be ended: copy this one",
        (_, Destination::Process(process)) => {
            return Err(Error::Usage(format!(
                "{process} is gone with this process, so its source is not ended: copy to it"
            )));
        }
        (_, Destination::Null) => "null: keeps nothing, so its source is not ended: copy to it",
        _ => return Ok(()),
    };
    Err(Error::Usage(text.into()))
}

/// A detached device must be attached somewhere.
fn check_vsock(source: &Source, destination: &Destination, options: &CopyRequest) -> Result<(), Error> {
    match (source.monitor(), destination.monitor()) {
        (None, _) | (_, None) if options.detaches_vsock() => Err(Error::Usage(
            "--detach-vsock needs a qmp: destination, where the device is attached again".into(),
        )),
        _ => Ok(()),
    }
}

fn check_base(destination: &Destination, options: &CopyRequest) -> Result<(), Error> {
    match (options.base(), destination) {
        (None, _) | (Some(_), Destination::Image(_)) => Ok(()),
        (Some(_), _) => {
            Err(Error::Usage("--base is for an image that is to be stored: name one as DEST".into()))
        }
    }
}

/// QEMU's background-snapshot goes from a QEMU to an image.
fn check_snapshot(source: &Source, destination: &Destination, options: &CopyRequest) -> Result<(), Error> {
    match (source, destination) {
        (Source::Qmp(_), Destination::Image(_) | Destination::Store(_)) => Ok(()),
        _ if !options.is_snapshot() => Ok(()),
        _ => Err(Error::Usage("--live takes an image of a guest that runs on: from qmp: to an image".into())),
    }
}

fn check_return_path(source: &Source, destination: &Destination, options: &CopyRequest) -> Result<(), Error> {
    if options.return_path {
        return Ok(());
    }
    let from_stream = matches!(source, Source::Stream(_));
    match (source, destination) {
        (Source::Qmp(_), _) => Err(Error::Usage(
            "--return-path off with a running guest: QEMU would end it although its arrival is not acknowledged".into(),
        )),
        // An image is as safe afterwards as before, and so is a file that is read through a pipe.
        (_, Destination::Stream(_)) if !from_stream => Ok(()),
        (Source::Stream(Address::File { path, .. }), Destination::Qmp(_) | Destination::Stream(_)) => {
            let file = path.display();
            Err(Error::Usage(format!(
                "{file}: a file of `virsh save` goes by way of an image: `towline copy {file} IMAGE`, then `towline copy --run IMAGE {destination}`"
            )))
        }
        (_, Destination::Qmp(_) | Destination::Stream(_)) => Err(only_streams()),
        _ if from_stream => Ok(()),
        _ => Err(only_streams()),
    }
}

fn only_streams() -> Error {
    Error::Usage(
        "--return-path off is for a stream from an image to fd:, exec:, tcp: or unix:, or from one of these to an image; elsewhere go by way of an image".into(),
    )
}

/// Refuses compression that would have no effect.
fn check_compression(
    source: &Source,
    destination: &Destination,
    options: &CopyRequest,
    lanes: usize,
) -> Result<(), Error> {
    if options.compression == Compression::None {
        return Ok(());
    }
    let name = options.compression.method().name();
    if source.is_image() && destination.is_image() {
        return Err(Error::Usage(format!(
            "--compression {name} between two images, neither of which is a stream: leave the option out"
        )));
    }
    match lanes {
        0 => Err(Error::Usage(format!(
            "--compression {name} with 0 lanes: only lanes are compressed, the main channel never is; give both ends the same --multifd-channels, at least 1"
        ))),
        _ => Ok(()),
    }
}

/// Refuses `on` if pages would be copied all the same, with the reason.
fn check_zero_copy_send(
    source: &Source,
    destination: &Destination,
    options: &CopyRequest,
    lanes: usize,
) -> Result<(), Error> {
    if options.zero_copy_send != ZeroCopySend::On {
        return Ok(());
    }
    let reason = match destination {
        Destination::Stream(Address::Tcp { .. }) => return zero_copy_over_tcp(options, lanes),
        // Within this process, lanes are TCP over the loopback interface.
        Destination::Process(_) if !matches!(source, Source::Qmp(_) | Source::Stream(_)) => {
            return zero_copy_over_tcp(options, lanes);
        }
        Destination::Stream(address) => {
            format!("{address} is not a TCP connection, and the kernel supports it for TCP only")
        }
        Destination::Qmp(_) => {
            "the stream to a qmp: DEST goes through a Unix socket on this host, where the kernel always copies"
                .to_owned()
        }
        _ => "nothing is sent to DEST".to_owned(),
    };
    Err(zero_copy_refused(&reason))
}

fn zero_copy_over_tcp(options: &CopyRequest, lanes: usize) -> Result<(), Error> {
    if lanes == 0 {
        return Err(zero_copy_refused(
            "only lanes have it; give both ends the same --multifd-channels, at least 1",
        ));
    }
    if options.compression != Compression::None {
        let name = options.compression.method().name();
        return Err(zero_copy_refused(&format!(
            "--compression {name} copies every page; leave one of the two out"
        )));
    }
    if options.tls.is_some() {
        return Err(zero_copy_refused("--tls-creds encrypts a copy of every page; leave one of the two out"));
    }
    Ok(check_zero_copy()?)
}

fn zero_copy_refused(why: &str) -> Error {
    Error::Usage(format!("--zero-copy-send on: {why}; `auto` goes without where it must"))
}

/// Refuses TLS that would have no effect, and invalid credentials, before anything is touched.
fn check_tls(source: &Source, destination: &Destination, options: &CopyRequest) -> Result<(), Error> {
    let (from, to) = (source.stream(), destination.stream());
    let streams = || [from, to].into_iter().flatten();
    let Some(tls) = &options.tls else {
        return match streams().find(|address| matches!(address, Address::WebSocket { secure: true, .. })) {
            Some(address) => {
                Err(Error::Usage(format!("{address} needs --tls-creds DIR; ws:// is the one without TLS")))
            }
            None => Ok(()),
        };
    };
    if from.is_none() && to.is_none() {
        return Err(Error::Usage(
            "--tls-creds is for a stream (tcp:, unix:), and neither end is one: between a qmp: QEMU and towline there is a private Unix socket, which needs none; leave the option out".into(),
        ));
    }
    let carries = |address: &&Address| {
        matches!(address, Address::Tcp { .. } | Address::Unix(_) | Address::WebSocket { secure: true, .. })
    };
    if let Some(address) = streams().find(|address| !carries(address)) {
        return Err(Error::Usage(format!(
            "--tls-creds with {address}: only tcp:, unix: and wss:// support TLS; leave the option out"
        )));
    }
    match (to, &tls.hostname) {
        (None, Some(_)) => {
            return Err(Error::Usage(
                "--tls-hostname is the name of a destination that is connected to (tcp:, unix:), and there is none here: leave the option out".into(),
            ));
        }
        (Some(address @ Address::Unix(_)), None) => {
            return Err(Error::Usage(format!(
                "--tls-creds with {address}, which has no host name: give that of its certificate with --tls-hostname"
            )));
        }
        _ => {}
    }
    if from.is_some() {
        tls::listening(options)?;
    }
    if to.is_some() {
        tls::connecting(options)?;
    }
    Ok(())
}

/// Refuses options that exclude postcopy, before anything is touched.
fn check_postcopy(source: &Source, options: &CopyRequest) -> Result<(), Error> {
    let lanes = options.transfer_options().multifd_channels.unwrap_or(0);
    let recovers = options.postcopy().is_some_and(|postcopy| postcopy.recover);
    let text = match source {
        Source::Stream(_) => {
            "--postcopy with a stream as its source: its sender decides; set postcopy-ram at both QEMUs and connect them without towline"
        }
        Source::Qmp(_) if recovers => {
            "--recover is for the guest of an image: two QEMUs that lost each other have `migrate-recover` and `migrate` with resume"
        }
        source if lanes > 0 && !matches!(source, Source::Qmp(_)) => {
            "--multifd-channels with --postcopy: the guest of an image runs before its memory is sent, and no QEMU receives pages on lanes once it runs; leave it out"
        }
        _ if options.compression != Compression::None && lanes == 0 => {
            "--compression applies to lanes, and --postcopy has none: leave it out"
        }
        _ if options.zero_copy_send == ZeroCopySend::On => {
            "--zero-copy-send on applies to lanes, and --postcopy has none: leave it out"
        }
        _ if !options.return_path => "--postcopy needs the return path, on which pages are requested",
        _ => return Ok(()),
    };
    Err(Error::Usage(text.into()))
}

#[cfg(test)]
mod tests;
