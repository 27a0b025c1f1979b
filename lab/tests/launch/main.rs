//! The launcher against stock QEMUs: they start, answer, end with their owner, and show their own messages;
//! and a command line that was read from a process starts an equal QEMU.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod equal;
mod memory;
mod owner;
mod support;

use std::time::Duration;

use serde_json::Value;
use towline_lab::Qmp;
use towline_launch::{LaunchError, RuntimeError};

use support::{Place, VERSIONS, WITHIN, is_there, versions};

#[test]
fn a_started_qemu_answers_and_is_listed_until_it_is_dropped() {
    for version in versions("a_started_qemu_answers_and_is_listed_until_it_is_dropped", &VERSIONS) {
        let place = Place::new(version);
        let mut launcher = place.launcher("web");
        launcher.image = Some("/srv/web.img".into());
        let qemu = place.start(launcher, &["-machine", version.machine(), "-nodefaults"]).unwrap();
        let monitor = Qmp::connect(&qemu.qmp_path(), WITHIN).unwrap();
        assert_eq!(monitor.status().unwrap(), "running");
        let name = monitor.execute("query-name", Value::Null).unwrap();
        assert_eq!(name["name"], "web");
        let listed: Vec<_> = place.root.guests().unwrap().into_iter().flatten().collect();
        assert_eq!(listed.len(), 1);
        assert_eq!((listed[0].pid, listed[0].name.as_str()), (qemu.pid(), "web"));
        assert_eq!(listed[0].image.as_deref(), Some("/srv/web.img".as_ref()));
        let taken = place.root.claim(&"web".parse().unwrap()).unwrap_err();
        assert!(
            matches!(&taken, RuntimeError::Taken { holder, .. } if holder.contains(&qemu.pid().to_string())),
            "{taken}"
        );
        assert_eq!(support::inherited(qemu.pid()), [place.root.path().join("web/lock")]);
        let (pid, directory) = (qemu.pid(), qemu.directory().path().to_owned());
        assert_eq!(qemu.wait(Duration::ZERO), None);
        drop(qemu);
        assert!(!is_there(pid) && !directory.exists());
        assert!(place.root.guests().unwrap().is_empty());
    }
}

#[test]
fn a_qemu_that_ends_at_its_start_shows_its_own_message() {
    for version in versions("a_qemu_that_ends_at_its_start_shows_its_own_message", &VERSIONS) {
        let place = Place::new(version);
        let error = place.start(place.launcher("web"), &["-device", "no-such-model"]).unwrap_err();
        let LaunchError::Exited { status, log, .. } = &error else { panic!("{error}") };
        assert_eq!(status.code(), Some(1));
        assert!(log.contains("'no-such-model' is not a valid device model name"), "{log}");
        assert!(!place.root.path().join("web").exists());
        // The name is free.
        let qemu = place.start(place.launcher("web"), &["-machine", "none"]).unwrap();
        qemu.kill();
        assert!(qemu.wait(WITHIN).is_some());
    }
}
