//! `towline store`: the images of a store's prefix, or of a directory.

mod common;
mod files;
#[cfg(feature = "store")]
mod objects;

use std::path::{Path, PathBuf};
#[cfg(feature = "store")]
use std::time::Duration;

use anyhow::Result;
#[cfg(feature = "store")]
use towline_image::store::{IfInUse, remove_image};

use crate::args::{CollectArgs, PlaceArgs, RemoveArgs, StoreArgs, StoreCommand};
use crate::endpoint::Endpoint;
use crate::errors;
use crate::events::{DiskSpace, FailedPart, InterimEvent, Reason};
use crate::exit::{Exit, UsageError};
use crate::progress::Reporter;
use crate::sandbox::policy_of_images;
use crate::units::size;
pub(crate) use common::Action;
#[cfg(feature = "store")]
pub(crate) use common::report_garbage;
use common::{View, end};

/// Minimum age of garbage in a store, without `--min-age`.
#[cfg(feature = "store")]
const GARBAGE_AGE: Duration = Duration::from_secs(24 * 3600);

/// A place with images.
enum ImageLocation {
    Directory(PathBuf),
    #[cfg(feature = "store")]
    Prefix(towline_image::store::Location),
}

/// Runs the command.
pub(crate) fn run(args: &StoreArgs) -> Result<Exit> {
    match &args.command {
        StoreCommand::Ls(args) => inspect(args, Some(View::List)),
        StoreCommand::Du(args) => inspect(args, Some(View::Usage)),
        StoreCommand::Rm(args) => remove(args),
        StoreCommand::Gc(args) => collect(args),
        StoreCommand::Verify(args) => inspect(args, None),
    }
}

/// Returns the place that an endpoint names, or the error text.
fn place(endpoint: &Endpoint) -> Result<ImageLocation, String> {
    match endpoint {
        Endpoint::Image(path) if is_store(path) => {
            let path = path.display();
            Err(format!("{path} is a store, not a directory of image files: name it store:{path}"))
        }
        Endpoint::Image(path) => Ok(ImageLocation::Directory(path.clone())),
        #[cfg(feature = "store")]
        Endpoint::Store(location) => Ok(ImageLocation::Prefix(location.clone())),
        #[cfg(feature = "store")]
        Endpoint::Secret(why) => Err(why.clone()),
        other => Err(format!(
            "{other}: expected the prefix of a store, such as s3://BUCKET/PREFIX, or a directory"
        )),
    }
}

/// Returns true for a directory with the objects of a store: indexes, or directories of chunks.
fn is_store(path: &Path) -> bool {
    let has = |directory: &Path, is: &dyn Fn(&str) -> bool| {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name()).any(|name| name.to_str().is_some_and(is))
    };
    has(path, &|name| name.ends_with(".towline"))
        || has(&path.join("chunks"), &|name| name.len() == 2 && u8::from_str_radix(name, 16).is_ok())
}

/// Shows the images of a place, or verifies them without a view.
fn inspect(args: &PlaceArgs, view: Option<View>) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    match place(&args.place).map_err(UsageError)? {
        ImageLocation::Directory(path) => {
            args.sandbox.confine(policy_of_images(&path));
            match view {
                Some(view) => files::show(&reporter, &path, view),
                None => files::verify(&reporter, &path),
            }
        }
        #[cfg(feature = "store")]
        ImageLocation::Prefix(prefix) => {
            args.sandbox.confine(crate::sandbox::policy_of_store(&prefix));
            match view {
                Some(view) => objects::show(&reporter, &prefix, view),
                None => objects::verify(&reporter, &prefix),
            }
        }
    }
}

fn remove(args: &RemoveArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    // All of them first: nothing is removed by a command line with an error.
    let places = args.images.iter().map(place).collect::<Result<Vec<_>, _>>().map_err(UsageError)?;
    let mut failed = 0;
    for (image, place) in args.images.iter().zip(&places) {
        let removed = match place {
            ImageLocation::Directory(path) => {
                towline_image::directory::remove(path).map(Some).map_err(anyhow::Error::from)
            }
            #[cfg(feature = "store")]
            ImageLocation::Prefix(location) => {
                remove_image(location, IfInUse::Refuse, None).map(|_| None).map_err(anyhow::Error::from)
            }
        };
        match removed {
            Ok(freed) => {
                reporter.event(InterimEvent::RemovedImage { image: image.to_string(), freed });
                let text = freed.map_or_else(
                    || {
                        "chunks that no other image references are garbage; `towline store gc` removes them"
                            .into()
                    },
                    |freed| format!("{} are free", size(freed)),
                );
                reporter.line(&format!("removed {image}: {text}"));
            }
            Err(error) => {
                failed += 1;
                let about = FailedPart::File { path: image.to_string() };
                reporter.failed_with(about, &errors::text(&error), Reason::Image, Exit::Failed);
            }
        }
    }
    let place = args.images.first().map(ToString::to_string).unwrap_or_default();
    Ok(end(&reporter, place, args.images.len(), failed, DiskSpace::Unknown {}))
}

fn collect(args: &CollectArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    let action = if args.dry_run { Action::List } else { Action::Remove };
    match place(&args.place).map_err(UsageError)? {
        ImageLocation::Directory(_) if args.min_age.is_some() => {
            let text =
                "--min-age: a partial file without a writer has no minimum age; leave it out for a directory";
            Err(UsageError(text.into()).into())
        }
        ImageLocation::Directory(path) => files::collect(&reporter, &path, action),
        #[cfg(feature = "store")]
        ImageLocation::Prefix(prefix) => {
            let age = args.min_age.unwrap_or(GARBAGE_AGE);
            crate::garbage::collect(&reporter, &prefix, action, age)
        }
    }
}
