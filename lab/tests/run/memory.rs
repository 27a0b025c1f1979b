//! Memory that follows its guest, and memory of images in object stores.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use towline_lab::{Version, require_lab};

use crate::support::{Saved, WITHIN};

#[test]
fn a_guest_runs_before_its_memory_is_there() {
    if !require_lab("a_guest_runs_before_its_memory_is_there") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let mut run = saved.run(&["--name", "web", "--postcopy", "--json"], &saved.settings());
    saved.assert_runs_after(&mut run, "web", r#""memory":"postcopy""#);
    assert!(!run.stdout().contains("memory-backend-file"), "{}", run.stdout());
    saved.interrupt(run);
    saved.assert_intact();
}

/// Names of the files of images in a directory.
fn files(directory: &PathBuf) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "img")).collect()
}

#[test]
fn an_image_of_a_store_is_copied_to_the_host_once() {
    if !require_lab("an_image_of_a_store_is_copied_to_the_host_once") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let (store, cache) = (format!("store:{}", saved.path("vm/web").display()), saved.path("cache"));
    let copy = ["copy", &saved.image(), &store].map(str::to_owned);
    saved.towline(copy).wait_done(WITHIN).unwrap();
    let cache_dir = cache.display().to_string();
    let options = |name: &'static str| ["--name", name, "--cache-dir", cache_dir.as_str()];

    // At once, from the store.
    let mut first = saved.run_image(&store, &[&options("first")[..], &["--postcopy"]].concat());
    saved.assert_runs(&mut first, "first");
    assert_eq!(files(&cache), Vec::<PathBuf>::new());
    saved.interrupt(first);

    let mut second = saved.run_image(&store, &[&options("second")[..], &["--share"]].concat());
    saved.assert_runs(&mut second, "second");
    let made = files(&cache);
    assert_eq!(made.len(), 1);
    let inode = |path: &PathBuf| fs::metadata(path).unwrap().ino();
    let before = inode(&made[0]);
    assert!(second.stdout().contains("is copied to"), "{}", second.stdout());
    // The file is a guest's memory.
    assert_eq!(fs::metadata(&cache).unwrap().mode() & 0o777, 0o700);

    let mut third = saved.run_image(&store, &[&options("third")[..], &["--share"]].concat());
    saved.assert_runs(&mut third, "third");
    assert!(!third.stdout().contains("is copied to"), "{}", third.stdout());
    assert_eq!((files(&cache), inode(&made[0])), (made.clone(), before));
    let maps = |name: &str| fs::read_to_string(format!("/proc/{}/maps", saved.pid(name))).unwrap();
    for name in ["second", "third"] {
        assert!(maps(name).contains(made[0].to_str().unwrap()), "{name} maps the file");
    }
    saved.interrupt_one(second, "second");
    saved.interrupt(third);
    let verified = ["inspect", "--verify", made[0].to_str().unwrap()].map(str::to_owned);
    saved.towline(verified).wait_done(WITHIN).unwrap();

    // Another image of this name has another file.
    let copy = ["copy", "--overwrite", "mem:8M", &store].map(str::to_owned);
    saved.towline(copy).wait_done(WITHIN).unwrap();
    let other = saved.run_image(&store, &options("other")).wait(WITHIN).unwrap();
    assert_eq!(other.status.code(), Some(2), "a synthetic guest has no command line: {}", other.stdout);
    assert_eq!(files(&cache).len(), 2);
}
