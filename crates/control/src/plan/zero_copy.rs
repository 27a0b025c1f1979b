//! Zero-copy sends: what `on` cannot have, said before anything is touched.

use towline_channel::{Address, check_zero_copy};
use towline_migration::outgoing::LaneOptions;
use towline_migration::{Compression, ZeroCopySend};

use super::{Destination, Error, Options, Source};

/// Refuses `on` where pages would be copied all the same, with the reason.
pub(super) fn check(
    source: &Source,
    destination: &Destination,
    options: &Options,
    lanes: usize,
) -> Result<(), Error> {
    if options.zero_copy_send != ZeroCopySend::On {
        return Ok(());
    }
    let why = match destination {
        Destination::Stream(Address::Tcp { .. }) => return over_tcp(options, lanes),
        // Within this process, lanes are TCP over the loopback.
        Destination::Memory(_) if !matches!(source, Source::Qmp(_) | Source::Stream(_)) => {
            return over_tcp(options, lanes);
        }
        Destination::Stream(address) => {
            format!("{address} is no TCP connection, and the kernel has it for TCP only")
        }
        Destination::Qmp(_) => {
            "the stream to a qmp: DEST goes through a Unix socket on this host, where the kernel always copies"
                .to_owned()
        }
        _ => "nothing is sent to DEST".to_owned(),
    };
    Err(refused(&why))
}

fn over_tcp(options: &Options, lanes: usize) -> Result<(), Error> {
    if lanes == 0 {
        return Err(refused("only lanes have it; give both ends the same --multifd-channels, at least 1"));
    }
    if options.compression != Compression::None {
        let name = options.compression.method().name();
        return Err(refused(&format!("--compression {name} copies every page; leave one of the two out")));
    }
    if options.tls.is_some() {
        return Err(refused("--tls-creds encrypts a copy of every page; leave one of the two out"));
    }
    Ok(check_zero_copy()?)
}

fn refused(why: &str) -> Error {
    Error::Usage(format!("--zero-copy-send on: {why}; `auto` goes without where it must"))
}

/// Whether lanes are to be connected so that they can.
pub(super) fn is_wanted(options: &Options) -> bool {
    let copied = options.compression != Compression::None || options.tls.is_some();
    options.zero_copy_send != ZeroCopySend::Off && !copied
}

/// How lanes send.
pub(super) fn lane_options(options: &Options) -> LaneOptions {
    LaneOptions { compression: options.compression, zero_copy_send: options.zero_copy_send }
}
