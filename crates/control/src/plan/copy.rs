//! The column of a copy: which source it has, and what that one does.

use towline_channel::Cancel;
use towline_migration::Snapshot;

use super::context::Run;
use super::endpoint::{Destination, Source};
use super::error::{Error, Failure};
use super::options::Options;
use super::progress::{Observer, Phase};
use super::report::Report;
#[cfg(feature = "store")]
use super::store;
use super::survey::Survey;
use super::validate::{checked, checked_survey};
use super::{fit, memory, receive, restore};

/// Copies a guest; returns when it is safe at its destination.
///
/// # Errors
/// Why not, and where the guest is; see [`Failure`].
pub fn copy(
    source: &Source,
    destination: &Destination,
    options: &Options,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Report, Failure> {
    let (options, lanes) = checked(source, destination, options).map_err(Failure::untouched)?;
    let run = Run::new(&options, lanes, cancel, observer);
    observer.phase(Phase::Prepare);
    fit::devices(&options.devices, observer).map_err(Failure::untouched)?;
    match source {
        Source::Image(path) => restore::restore(path, destination, &run),
        #[cfg(feature = "store")]
        Source::Store(location) => {
            let image = store::open(location, run.options, run.cancel, observer);
            let image = image.map_err(Failure::untouched)?;
            restore::restore_from(&image, destination, &run)
        }
        Source::Qmp(path) => receive::from_qemu(path, destination, &run),
        Source::Stream(address) => receive::from_stream(address, destination, &run),
        Source::Memory(shape) => memory::from_memory(shape, destination, &run),
    }
}

/// Receives the stream that `source` names into `survey` and keeps nothing: the guest stays where it is.
///
/// # Errors
/// The stream did not come to its end.
pub fn survey(
    source: &Source,
    survey: &Survey,
    options: &Options,
    cancel: &Cancel,
    observer: &dyn Observer,
) -> Result<Snapshot, Failure> {
    let Source::Stream(address) = source else {
        return Err(Failure::untouched(Error::Usage("only a stream can be surveyed".into())));
    };
    let lanes = checked_survey(source, options).map_err(Failure::untouched)?;
    receive::survey(address, survey, &Run::new(options, lanes, cancel, observer))
}
