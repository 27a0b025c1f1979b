//! Partial files: the staging files of active writers, and those left by writers that were killed.
//!
//! A writer has its partial locked while it runs ([`atomic_file`](crate::atomic_file)), so one that can be
//! locked is left over. The next writer of the same name takes it over; this module lists and removes them.

use std::ffi::OsStr;
use std::path::Path;

use rustix::fs::FlockOperation;

use crate::atomic_file::DirectoryEntry;
pub use crate::atomic_file::Partial;
use crate::directory::paths_in;
use crate::manifest::sidecar_path;
use crate::sidecar::staged_path;
use crate::working_set::path_beside;
use crate::{Error, Result};

/// Lists the partial files in a directory, of all images. Files of such names that are not regular, or that
/// this user cannot open, are logged and omitted.
///
/// # Errors
/// The directory cannot be read.
pub fn list(directory: &Path) -> Result<Vec<Partial>> {
    let mut found = Vec::new();
    for path in paths_in(directory)? {
        let name = path.file_name().and_then(OsStr::to_str);
        let stem = name.and_then(|name| name.strip_prefix('.')?.strip_suffix(".partial"));
        // `.` and `..` cannot be names of files.
        let Some(stem) = stem.filter(|stem| !matches!(*stem, "" | "." | "..")) else { continue };
        match DirectoryEntry::open(&directory.join(stem))
            .and_then(|entry| entry.find_partial(FlockOperation::NonBlockingLockShared))
        {
            Ok(left) => found.extend(left.map(|(partial, _)| partial)),
            Err(error) => tracing::warn!(%error, "skipped a partial file"),
        }
    }
    Ok(found)
}

/// Removes left-over partial files of the image at `path`, its manifest and its working set. Returns all
/// partial files found: those with an active writer are not removed.
///
/// # Errors
/// One of the files cannot be read or removed.
pub fn remove(path: &Path) -> Result<Vec<Partial>> {
    let mut found = Vec::new();
    for part in [path.to_owned(), sidecar_path(path), staged_path(path), path_beside(path)] {
        let entry = DirectoryEntry::open(&part)?;
        let locked = entry.find_partial(FlockOperation::NonBlockingLockExclusive)?;
        let Some((partial, _file)) = locked else { continue };
        if partial.writer.is_none() {
            // Still locked by this process.
            let removed = entry.unlink_partial();
            removed.map_err(|errno| Error::Write { path: partial.path.clone(), source: errno.into() })?;
        }
        found.push(partial);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::atomic_file::{AtomicFile, Existing};

    #[test]
    fn partials_without_a_writer_are_removed_and_others_stay() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let (image, other) = (path("guest.img"), path("other.img"));
        let left = [".guest.img.partial", ".guest.img.manifest.json.new.partial"];
        left.iter().for_each(|name| fs::write(path(name), [7; 8192]).unwrap());
        for name in [".guest.img.partial.x", "guest.img.partial", ".partial", "guest.img"] {
            fs::write(path(name), b"another's").unwrap();
        }
        let written = AtomicFile::open(&other, Existing::Refuse).unwrap();

        let paths = |found: &[Partial]| found.iter().map(|left| left.path.clone()).collect::<Vec<_>>();
        let listed = list(directory.path()).unwrap();
        assert_eq!(paths(&listed), [path(left[1]), path(left[0]), path(".other.img.partial")]);
        assert!(listed[1].allocated >= 8192 && listed[1].writer.is_none(), "{listed:?}");
        let writer = listed[2].writer.clone().unwrap();
        assert!(writer.contains(&std::process::id().to_string()) || writer == "another process", "{writer}");

        assert_eq!(paths(&remove(&image).unwrap()), [path(left[0]), path(left[1])]);
        let kept = remove(&other).unwrap();
        assert_eq!((paths(&kept), kept[0].writer.is_some()), (vec![path(".other.img.partial")], true));
        written.write_all_at(b"whole", 0).unwrap();
        written.commit().unwrap();
        assert_eq!(fs::read(&other).unwrap(), b"whole");
        assert_eq!(remove(&image).unwrap(), []);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 5);
    }

    #[test]
    fn odd_names_do_not_prevent_listing_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in [".guest.img.partial", "...partial", "....partial"] {
            fs::write(path(name), b"left").unwrap();
        }
        std::os::unix::fs::symlink(path(".guest.img.partial"), path(".link.partial")).unwrap();
        std::os::unix::fs::symlink("nowhere", path(".dangling.partial")).unwrap();
        fs::create_dir(path(".directory.partial")).unwrap();
        fs::hard_link(path("...partial"), path(".linked.partial")).unwrap();
        std::os::unix::net::UnixListener::bind(path(".socket.partial")).unwrap();
        let listed = list(directory.path()).unwrap();
        assert_eq!(listed.iter().map(|left| &left.path).collect::<Vec<_>>(), [&path(".guest.img.partial")]);
    }

    #[test]
    fn listing_partials_does_not_block_a_writer() {
        const ROUNDS: usize = 1000;
        let directory = tempfile::tempdir().unwrap();
        let (image, barrier) = (directory.path().join("guest.img"), std::sync::Barrier::new(2));
        let opened: Vec<_> = std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    barrier.wait();
                    list(directory.path()).unwrap();
                }
            });
            let open = |_| {
                fs::write(directory.path().join(".guest.img.partial"), b"left").unwrap();
                barrier.wait();
                AtomicFile::open(&image, Existing::Refuse).map(drop)
            };
            (0..ROUNDS).map(open).collect()
        });
        let failed: Vec<_> = opened.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
        assert!(failed.is_empty(), "{} of {ROUNDS}: {}", failed.len(), failed[0]);
    }

    #[test]
    fn a_list_that_a_busy_host_holds_up_is_no_writer() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("guest.img");
        fs::write(directory.path().join(".guest.img.partial"), b"left").unwrap();
        let entry = DirectoryEntry::open(&image).unwrap();
        let listed = entry.find_partial(FlockOperation::NonBlockingLockShared).unwrap().unwrap();
        assert_eq!(list(directory.path()).unwrap()[0].writer, None);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(300));
                drop(listed);
            });
            AtomicFile::open(&image, Existing::Refuse).unwrap();
        });
    }

    #[test]
    fn files_that_are_not_regular_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (image, partial) =
            (directory.path().join("guest.img"), directory.path().join(".guest.img.partial"));
        let victim = directory.path().join("victim");
        fs::write(&victim, b"another's").unwrap();
        fs::hard_link(&victim, &partial).unwrap();
        assert!(remove(&image).unwrap_err().to_string().contains("a file with several names"));
        fs::remove_file(&partial).unwrap();
        std::os::unix::fs::symlink(&victim, &partial).unwrap();
        assert!(remove(&image).unwrap_err().to_string().contains("symbolic link"));
        assert!(partial.is_symlink() && victim.exists());
    }
}
