//! Guests of `towline run` whose QEMU is replaced: the new one maps the image too, and gets what the guest has written.

use std::fs;
use std::path::PathBuf;

use towline_lab::downtime::{self, Times};
use towline_lab::expect::{completed, number};
use towline_lab::{Qmp, Version, require_lab, wait_until};

use crate::support::{MIB, Saved, WITHIN, ram_pss_of};

/// Bytes that the guest writes round and round.
const WRITTEN: u64 = 16 * MIB;
/// A monitor of the test, beside the launcher's.
const MONITOR: &str = "test.qmp";

impl Saved {
    /// The test's monitor of a new QEMU, which has a staging name until the old one has ended.
    fn staged_monitor(&self) -> Option<PathBuf> {
        let entries = fs::read_dir(self.path("")).unwrap().map(|entry| entry.unwrap().path());
        let is_staged = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with(&format!(".{MONITOR}.towline-"))
        };
        entries.into_iter().find(is_staged)
    }
}

#[test]
fn a_guest_on_an_image_is_upgraded_by_what_it_has_written() {
    if !require_lab("a_guest_on_an_image_is_upgraded_by_what_it_has_written") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    let monitor = format!("unix:{},server=on,wait=off", saved.path(MONITOR).display());
    let run = saved.run_with_more(&["--name", "web", "--detach"], &["-qmp", &monitor]);
    run.wait_done(WITHIN).unwrap();
    let mut guest = saved.agent("web");
    guest.dirty(WRITTEN, WRITTEN).unwrap();
    drop(guest);
    let mut old = Qmp::connect(&saved.path(MONITOR), WITHIN).unwrap();
    let (mut name, mut times) = ("web".to_owned(), Times::default());
    for _ in 0..number("TOWLINE_UPGRADES", 3) {
        let socket = format!("qmp:{}", saved.directory(&name).join("qmp.sock").display());
        let mut towline = saved.towline(["upgrade", "--json", &socket].map(str::to_owned));
        let new = wait_until("the new QEMU's monitor", WITHIN, || {
            let runs = towline.runs()?;
            let monitor = saved.staged_monitor().and_then(|path| Qmp::connect(&path, WITHIN).ok());
            assert!(monitor.is_some() || runs, "it ended: {}", towline.stderr());
            Ok(monitor)
        })
        .unwrap();
        completed(&towline.wait(WITHIN).unwrap());
        times.push(downtime::milliseconds(&old, &new));
        (old, name) = (new, saved.guests().pop().unwrap());
        let mut guest = saved.agent("web");
        saved.assert_is_saved_guest(&mut guest);
        assert_eq!(guest.check().unwrap(), WRITTEN / 4096);
    }
    let private = ram_pss_of(saved.pid(&name));
    println!("STOP to RESUME {times}; {} KiB of its memory are its own", private >> 10);
    // It is a guest of that image, as before.
    assert_eq!(saved.listed()[0]["image"], saved.image());
    saved.quit(&name);
    saved.assert_intact();
}
