//! The life of a QEMU when the process that started it is killed.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use towline_lab::{Qmp, Version, wait_until};
use towline_launch::{CommandLine, Launcher, Lifetime, RuntimeRoot};

use crate::support::{Place, VERSIONS, WITHIN, host, is_there, versions};

/// Root of the owner's guests.
const ROOT: &str = "TOWLINE_LAB_LAUNCH_ROOT";
/// Index of the version that it starts.
const VERSION: &str = "TOWLINE_LAB_LAUNCH_VERSION";
/// Set if the guest outlives its owner.
const DETACHED: &str = "TOWLINE_LAB_LAUNCH_DETACHED";

/// The process that starts a QEMU; killed when it is dropped.
struct Owner(Child);

impl Drop for Owner {
    fn drop(&mut self) {
        // It may have ended, and a destructor reports nothing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts this binary again as the owner of a QEMU, and returns the QEMU's process id.
fn owner(place: &Place, version: Version, lifetime: Lifetime) -> (Owner, u32) {
    let index = VERSIONS.iter().position(|known| *known == version).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "owner::owner_of_a_qemu", "--nocapture"]);
    command.env(ROOT, place.root.path()).env(VERSION, index.to_string());
    if lifetime == Lifetime::Detached {
        command.env(DETACHED, "1");
    }
    let mut owner = Owner(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(owner.0.stdout.take().unwrap()).lines();
    let started = lines.map(Result::unwrap).find_map(|line| line.strip_prefix("STARTED ")?.parse().ok());
    (owner, started.expect("the owner starts a QEMU"))
}

/// Not a test itself: the process of [`owner`]. It waits until it is killed.
#[test]
fn owner_of_a_qemu() {
    let Some(root) = std::env::var_os(ROOT) else { return };
    let root = RuntimeRoot::at(PathBuf::from(root));
    let version = VERSIONS[std::env::var(VERSION).unwrap().parse::<usize>().unwrap()];
    let host = host(version);
    let mut launcher = Launcher::new(root.claim(&"web".parse().unwrap()).unwrap());
    if std::env::var_os(DETACHED).is_some() {
        launcher.lifetime = Lifetime::Detached;
    }
    let guest = CommandLine::parse(["-machine", "none"]).unwrap().trust(&host).unwrap();
    let qemu = launcher.start(&guest, &host).unwrap();
    println!("\nSTARTED {}", qemu.pid());
    let read = std::io::stdin().read_to_end(&mut Vec::new());
    panic!("the owner was not killed: {read:?}");
}

#[test]
fn a_qemu_ends_with_an_owner_that_is_killed() {
    for version in versions("a_qemu_ends_with_an_owner_that_is_killed", &VERSIONS) {
        let place = Place::new(version);
        let (owner, pid) = owner(&place, version, Lifetime::WithOwner);
        assert_eq!(
            Qmp::connect(&place.root.path().join("web/qmp.sock"), WITHIN).unwrap().status().unwrap(),
            "running"
        );
        drop(owner);
        wait_until("the end of QEMU", WITHIN, || Ok((!is_there(pid)).then_some(()))).unwrap();
        // What it left is removed for the next of its name.
        let directory = place.root.claim(&"web".parse().unwrap()).unwrap();
        assert!(!directory.qmp_path().exists());
    }
}

#[test]
fn a_detached_qemu_outlives_its_owner_and_keeps_its_name() {
    for version in versions("a_detached_qemu_outlives_its_owner_and_keeps_its_name", &VERSIONS) {
        let place = Place::new(version);
        let (owner, pid) = owner(&place, version, Lifetime::Detached);
        drop(owner);
        let monitor = Qmp::connect(&place.root.path().join("web/qmp.sock"), WITHIN).unwrap();
        assert_eq!(monitor.status().unwrap(), "running");
        let listed: Vec<_> = place.root.guests().unwrap().into_iter().flatten().collect();
        assert_eq!((listed.len(), listed[0].pid, listed[0].is_detached), (1, pid, true));
        let taken = place.root.claim(&"web".parse().unwrap()).unwrap_err().to_string();
        assert!(taken.starts_with(&format!("name web is taken by process {pid} ")), "{taken}");
        monitor.execute("quit", Value::Null).unwrap();
        wait_until("the name to be free", WITHIN, || Ok(place.root.claim(&"web".parse().unwrap()).ok()))
            .unwrap();
        assert!(place.root.guests().unwrap().is_empty());
    }
}
