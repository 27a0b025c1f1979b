//! An image goes out: to a waiting QEMU, into a stream, or into another image.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use towline_image::{Image, Origin, StoredGuest};
use towline_migration::Compression;

use super::context::Run;
use super::destination::QmpDestination;
use super::endpoint::Destination;
use super::error::{Error, Failure, GuestState};
use super::fit::Guest;
use super::options::Options;
use super::postcopy::{self, Stored};
use super::progress::{Observer, Phase};
use super::report::{DestinationState, Report, SourceState};
use super::send::send;
use super::send_out;
use super::switch::Switch;
use super::target::Target;
use super::{local, memory};
use crate::switchover::{DestinationKind, GuestRun, SourceKind};

/// Threads that compare an image with its manifest while QEMU loads it.
const VERIFY_THREADS: usize = 2;
/// How often a QEMU that loads by itself is asked.
const ASK_INTERVAL: Duration = Duration::from_millis(2);

/// Copies the image at `path`; the image stays as it is.
pub(super) fn restore(path: &Path, destination: &Destination, run: &Run<'_>) -> Result<Report, Failure> {
    let image = open(path, run.options, run.observer).map_err(Failure::untouched)?;
    #[cfg(feature = "store")]
    if let Destination::Store(location) = destination {
        return super::store::from_image(&image, location, run).map_err(Failure::untouched);
    }
    restore_from(&image, destination, run)
}

/// Opens the image at `path`, to be read by any number of copies.
pub(super) fn open(path: &Path, options: &Options, observer: &dyn Observer) -> Result<Image, Error> {
    let image = Image::open(path)?;
    if image.manifest().is_none() {
        let text = "has no manifest (made by QEMU itself?): there are no checksums to verify it by";
        observer.notice(&format!("{} {text}", path.display()));
    }
    Ok(if options.verify { image.verify_on_read()? } else { image })
}

/// Copies an image that is open, and that other copies may read at the same time.
pub(super) fn restore_from(
    image: &dyn StoredGuest,
    destination: &Destination,
    run: &Run<'_>,
) -> Result<Report, Failure> {
    if let Some(options) = run.options.postcopy {
        let ran = image.devices().run_state().is_none_or(|state| state == "running");
        let stored = Stored { guest: image, ran, path: image.local_path() };
        let restored = postcopy::restore(&stored, destination, options, run);
        return restored.and_then(|report| intact(image, report)).map_err(|failure| lost(image, failure));
    }
    precopy(image, destination, run).map_err(|failure| lost(image, failure))
}

/// A guest that runs before its memory has come got zeros where the image was cut short meanwhile.
fn intact(image: &dyn StoredGuest, report: Report) -> Result<Report, Failure> {
    image.check_intact().map(|()| report).map_err(|error| {
        let text = "it has its memory at its destination, but pages that were sent after the image was cut short may be zeros there: end it, and restore another copy of the image";
        Failure { error: Box::new(error.into()), guest: GuestState::LookAt(text.into()), notes: Vec::new() }
    })
}

/// Names the reason where an image was cut short: a send of what is not there only says "bad address".
fn lost(image: &dyn StoredGuest, failure: Failure) -> Failure {
    match image.check_intact() {
        Err(error) => Failure { error: Box::new(error.into()), ..failure },
        Ok(()) => failure,
    }
}

fn precopy(image: &dyn StoredGuest, destination: &Destination, run: &Run<'_>) -> Result<Report, Failure> {
    match destination {
        Destination::Qmp(path) => to_qemu(image, path, run),
        Destination::Stream(address) => send_out::to_stream(image, address, run),
        Destination::Image(path) => to_image(image, path, run).map_err(Failure::untouched),
        #[cfg(feature = "store")]
        Destination::Store(location) => {
            super::store::from_stored(image, location, run).map_err(Failure::untouched)
        }
        Destination::Memory(room) => memory::from_image(image, room, run).map_err(Failure::untouched),
        Destination::Null => Err(Failure::untouched(Error::Usage(
            "null: takes a stream; to check an image, `inspect --verify` it".into(),
        ))),
    }
}

fn to_qemu(image: &dyn StoredGuest, path: &Path, run: &Run<'_>) -> Result<Report, Failure> {
    let mut destination = QmpDestination::prepare(path).map_err(Failure::untouched)?;
    destination.check(&Guest::of_image(image), run).map_err(Failure::untouched)?;
    // QEMU reads the file itself as fast as it goes, and as it is.
    let is_plain = run.options.max_bandwidth.is_none() && run.options.compression == Compression::None;
    let loads = !run.options.stream && destination.loads_images() && is_plain;
    let file = image.file_image().filter(|_| loads);
    let handed_over = file.is_some();
    run.observer.phase(Phase::Connect);
    let switch = Switch::new(SourceKind::Stored, DestinationKind::Qemu, run.options);
    let moved = match file {
        Some(file) => load(file, &mut destination, run),
        None => stream(image, &mut destination, &switch, run),
    };
    let moved = moved.and_then(|moved| destination.wait_loaded().map(|()| moved));
    let directive = match &moved {
        Ok(_) => {
            run.observer.phase(Phase::Release);
            switch.loaded(GuestRun::from_state(image.devices().run_state()))
        }
        Err(error) => switch.failed(error),
    };
    let target = Target::Qemu { destination: Box::new(destination), relay: None };
    let report = send_out::conclude_stored(moved, target, &switch, directive, run)?;
    Ok(Report { handed_over, ..report })
}

fn stream(
    image: &dyn StoredGuest,
    destination: &mut QmpDestination,
    switch: &Arc<Switch>,
    run: &Run<'_>,
) -> Result<towline_migration::Snapshot, Error> {
    let connections = destination.start(run.lanes, run.options, run.cancel)?;
    let mut asked = Instant::now();
    send(image, &connections, switch, run, &mut || {
        if asked.elapsed() > Duration::from_millis(250) {
            asked = Instant::now();
            destination.has_not_failed()?;
        }
        Ok(())
    })
}

/// QEMU loads the file itself; if asked to, we hash it beside that, and no guest runs from a damaged image.
fn load(
    image: &Image,
    destination: &mut QmpDestination,
    run: &Run<'_>,
) -> Result<towline_migration::Snapshot, Error> {
    // A description of its own: a QEMU reads the stream at the file's position, and shares that with every duplicate.
    let file = image.reopen()?;
    destination.load(&file, run.lanes)?;
    run.observer.phase(Phase::Transfer);
    thread::scope(|scope| {
        let verify = || image.verify(VERIFY_THREADS, &|_| {});
        let verifier = run.options.verify.then(|| scope.spawn(verify));
        let mut loaded = false;
        while !loaded || verifier.as_ref().is_some_and(|verifier| !verifier.is_finished()) {
            run.check_cancelled()?;
            loaded = loaded || destination.has_loaded_file()?;
            thread::park_timeout(ASK_INTERVAL);
        }
        match verifier.map(thread::ScopedJoinHandle::join) {
            Some(Ok(result)) => result?,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => {}
        }
        Ok(image.loaded_by_qemu())
    })
}

/// Image to image: gives one that QEMU made its manifest, or a damaged copy no second life (`--verify`).
fn to_image(image: &dyn StoredGuest, path: &Path, run: &Run<'_>) -> Result<Report, Error> {
    let origin = Origin { source: format!("image {}", image.name()), ..Origin::default() };
    let writer = run.image_writer(path, origin)?;
    let moved = local::copy(image, &writer, 0, run)?;
    run.set_increment(&writer);
    Ok(run.done(moved, SourceState::Unchanged, DestinationState::Stored))
}
