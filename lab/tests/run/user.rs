//! Guests of a user without privileges.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;

use rustix::process::{Signal, geteuid};
use serde_json::Value;
use towline_lab::{Towline, require_lab, signal, skip, towline_binary, wait_until};

use crate::forks::disk_written;
use crate::support::{DISK, Saved, WITHIN};

/// An id that Debian gives to no account with files.
const USER: u32 = 65_534;

/// The user may read the image and its programs, and write to one directory.
#[test]
fn a_user_without_privileges_runs_a_guest_of_a_readable_image() {
    let name = "a_user_without_privileges_runs_a_guest_of_a_readable_image";
    if !require_lab(name) {
        return;
    }
    if !geteuid().is_root() {
        return skip(name, "only root can be another user");
    }
    let saved = Saved::with_drive();
    let disk = saved.path("disk.raw");
    File::create(&disk).unwrap().set_len(DISK).unwrap();
    chown(&disk, Some(USER), Some(USER)).unwrap();
    fs::set_permissions(saved.path("."), Permissions::from_mode(0o755)).unwrap();
    for file in [saved.image(), format!("{}.manifest.json", saved.image())] {
        fs::set_permissions(file, Permissions::from_mode(0o644)).unwrap();
    }
    let home = saved.path("home");
    fs::create_dir(&home).unwrap();
    chown(&home, Some(USER), Some(USER)).unwrap();
    // The build directory may be one that others cannot enter.
    let copied = |from: &Path, name: &str| {
        let to = saved.path(name);
        fs::copy(from, &to).unwrap();
        fs::set_permissions(&to, Permissions::from_mode(0o755)).unwrap();
        to.display().to_string()
    };
    let program = copied(&towline_binary().unwrap(), "program");
    let settings =
        saved.settings_in("home/{name}.agent").into_iter().map(|setting| match setting.split_once('=') {
            Some((key @ ("kernel" | "initrd"), file)) => format!("{key}={}", copied(file.as_ref(), key)),
            _ => setting,
        });
    let of_disk = [format!("drive.disk0.file={}", disk.display()), "drive.disk0.format=raw".into()];
    let settings = settings.chain(of_disk);
    let settings: Vec<String> = settings.flat_map(|setting| ["--set".to_owned(), setting]).collect();
    let user = format!("--reuid={USER} --regid={USER} --clear-groups --inh-caps=-all --bounding-set=-all");
    let user = std::iter::once("setpriv".to_owned()).chain(user.split(' ').map(str::to_owned));
    let environment = ["env".to_owned(), format!("XDG_RUNTIME_DIR={}", home.display())];
    let image = saved.image();
    let words =
        [&program, "run", "--share", "--name", "web", &image, "--qemu", &saved.binary()].map(str::to_owned);
    let mut line = user.chain(environment).chain(words).chain(settings);
    let first = line.next().unwrap();
    let mut run = Towline::start(first.as_ref(), line).unwrap();
    let ran = wait_until("a guest that runs", WITHIN, || {
        assert!(run.runs()?, "{}{}", run.stdout(), run.stderr());
        Ok(run.stdout().contains("web runs, qmp:").then_some(()))
    });
    ran.unwrap();
    saved.assert_is_saved_guest(&mut saved.agent("home/web"));
    let state = fs::read_to_string(home.join("towline/guests/web/state.json")).unwrap();
    let pid = serde_json::from_str::<Value>(&state).unwrap()["pid"].as_u64().unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in [
        format!("Uid:\t{USER}\t{USER}\t{USER}\t{USER}"),
        "CapEff:\t0000000000000000".into(),
        "Seccomp:\t2".into(),
    ] {
        assert!(status.lines().any(|found| found == line), "{line}: {status}");
    }
    // Root stores it, with the disk that it goes on with.
    let source = format!("qmp:{}", home.join("towline/guests/web/qmp.sock").display());
    let words = ["copy", "--resume", "--with-disks", &source, &saved.path("next.img").display().to_string()];
    saved.towline(words.map(str::to_owned)).wait_done(WITHIN).unwrap();
    assert_eq!(fs::metadata(saved.path("disk.1.qcow2")).unwrap().uid(), USER);
    saved.agent("home/web").shell(&disk_written("after"), WITHIN).unwrap();
    signal(run.pid(), Signal::INT);
    run.wait_done(WITHIN).unwrap();
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is left");
    saved.assert_intact();
}
