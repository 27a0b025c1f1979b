use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::*;
use crate::statistics::Metric;

/// A device that accepts versions with its prefix.
struct Fake {
    name: &'static str,
    unmigratable: bool,
    up: Arc<AtomicBool>,
}

impl ManagedDevice for Fake {
    fn name(&self) -> String {
        self.name.into()
    }

    fn facts(&self) -> DeviceFacts {
        DeviceFacts {
            device_type: "net".into(),
            migration_version: (!self.unmigratable).then(|| "fake 1 mq=4".into()),
            unmigratable: self.unmigratable.then(|| "it was started so".into()),
            ..DeviceFacts::default()
        }
    }

    fn is_running(&self) -> bool {
        true
    }

    fn accepts(&self, version: &str) -> Result<(), String> {
        if version == "fake 1 mq=2" { Ok(()) } else { Err(format!("{version:?} is not a version of fake 1")) }
    }

    fn statistics(&self) -> Vec<StatsObject> {
        let labels = vec![("tap", self.name.to_owned())];
        vec![StatsObject {
            kind: "net-queue",
            labels,
            metrics: vec![Metric::counter("packets", "frames", 1)],
        }]
    }

    fn set_link(&self, up: bool) -> Result<(), String> {
        self.up.store(up, Relaxed);
        Ok(())
    }
}

fn server(names: &[&'static str], unmigratable: bool) -> (DeviceCommands, Arc<AtomicBool>) {
    let up = Arc::new(AtomicBool::new(true));
    let fake = |name: &&'static str| -> Box<dyn ManagedDevice> {
        Box::new(Fake { name, unmigratable, up: Arc::clone(&up) })
    };
    (DeviceCommands::new(names.iter().map(fake).collect(), || ()), up)
}

fn execute(server: &DeviceCommands, command: &str, arguments: &Value) -> Result<Value, String> {
    server.execute(command, arguments.as_object().unwrap()).map_err(|refusal| match refusal {
        CommandError::Generic(text) => text,
        CommandError::NotFound => panic!("{command} is unknown"),
    })
}

#[test]
fn version_is_reported_and_that_of_the_source_checked() {
    let (here, _) = server(&["vm0"], false);
    let version = execute(&here, "query-migration-version", &json!({})).unwrap();
    assert_eq!(version, json!({ "type": "net", "version": "fake 1 mq=4" }));
    let check = |kind: &str, version: &str| {
        execute(&here, "check-migration-version", &json!({ "type": kind, "version": version }))
    };
    assert_eq!(check("net", "fake 1 mq=2\n"), Ok(json!({})));
    assert!(check("net", "fake 2").unwrap_err().starts_with("EINVAL: \"fake 2\" is not a"));
    let long = "x".repeat(limits::MIGRATION_VERSION_BYTES_MAX + 1);
    assert!(check("net", &long).unwrap_err().starts_with("EINVAL: a version of 4097 bytes"));
    // The type comes first: the device does not see the version.
    assert_eq!(
        check("vsock", "fake 2").unwrap_err(),
        "EINVAL: the source's device is of type \"vsock\", this one of type \"net\""
    );
    assert!(
        execute(&here, "check-migration-version", &json!({ "type": "net" }))
            .unwrap_err()
            .contains("'version' is missing")
    );
}

#[test]
fn unmigratable_device_returns_enodev() {
    let (here, _) = server(&["vm0"], true);
    assert_eq!(
        execute(&here, "query-migration-version", &json!({})).unwrap_err(),
        "ENODEV: it was started so"
    );
    let version = json!({ "type": "net", "version": "fake 1 mq=2" });
    assert!(execute(&here, "check-migration-version", &version).unwrap_err().starts_with("ENODEV: "));
}

#[test]
fn one_of_several_devices_is_selected_by_name() {
    let (here, up) = server(&["vm0", "vm1"], false);
    let unnamed = execute(&here, "query-migration-version", &json!({})).unwrap_err();
    assert_eq!(unnamed, "Parameter 'id' expects one of vm0, vm1");
    execute(&here, "query-migration-version", &json!({ "id": "vm1" })).unwrap();
    execute(&here, "set_link", &json!({ "name": "vm1", "up": false })).unwrap();
    assert!(!up.load(Relaxed));
    assert!(
        execute(&here, "set_link", &json!({ "name": "vm1", "up": "no" })).unwrap_err().contains("a boolean")
    );
    let stats = execute(&here, "query-stats", &json!({ "target": "net-queue" })).unwrap();
    assert_eq!(stats[1]["qom-path"], "/net-queue/vm1");
    assert_eq!(
        execute(&here, "query-status", &json!({})).unwrap(),
        json!({ "running": true, "status": "running" })
    );
}

#[test]
fn device_facts_can_be_parsed() {
    let (here, _) = server(&["vm0"], false);
    let facts = execute(&here, "query-device-facts", &json!({})).unwrap();
    let facts = Facts::parse(facts.to_string().as_bytes()).unwrap();
    let FactsSubject::Device(device) = facts.subject else { panic!("{facts:?}") };
    assert_eq!(device.migration_version.as_deref(), Some("fake 1 mq=4"));
}

#[test]
fn quit_calls_the_callback() {
    let quits = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&quits);
    let here = DeviceCommands::new(Vec::new(), move || flag.store(true, Relaxed));
    execute(&here, "quit", &json!({})).unwrap();
    assert!(quits.load(Relaxed));
}
