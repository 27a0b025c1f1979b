//! QMP server of devices: statistics, run state, link, and compatibility with another device's guest.
//!
//! ```text
//!   clients ── qmp::Server ──► DeviceCommands ──► ManagedDevice (a network card, a guest's vsock …), one or several
//! ```
//! **`migration_version`**: `query-migration-version` reads a device's version string, which is built when
//! the device is started and which only its own type parses; `check-migration-version` writes the *source's*
//! string to the *destination's* device, which accepts it or returns an errno. The types are compared first.
//! Refusals begin with the errno's name, as `EINVAL: …`; the log has the reason as well.
//!
//! Out of scope: sockets, which [`Server`](towline_qmp::Server) opens, and the devices, which implement
//! [`ManagedDevice`].

use serde_json::{Map, Value, json};
use towline_compat::facts::DeviceFacts;
use towline_compat::{Facts, Subject as FactsSubject, limits};
use towline_qmp::{CommandError, Commands};

use crate::statistics::{self, StatsObject, StatsSource, check_names, text_argument};

const NAMES: [&str; 8] = [
    "query-status",
    "query-stats",
    "query-stats-schemas",
    "query-migration-version",
    "check-migration-version",
    "query-device-facts",
    "set_link",
    "quit",
];

/// Errno of a device that cannot be migrated.
pub const ENODEV: &str = "ENODEV";
/// Errno of a device for a version that it does not accept.
pub const EINVAL: &str = "EINVAL";

/// A device.
pub trait ManagedDevice: Send + Sync {
    /// Name among the devices of this process: a tap's name, a CID.
    fn name(&self) -> String;

    /// Type, version and features, as `check` compares them. They are fixed when the process starts: the
    /// string of [`DeviceFacts::migration_version`] is built once.
    fn facts(&self) -> DeviceFacts;

    /// Returns true if a frontend uses the device.
    fn is_running(&self) -> bool;

    /// Checks that a guest of a device with this version could continue here.
    ///
    /// # Errors
    /// The reason against it, as text.
    fn accepts(&self, version: &str) -> Result<(), String>;

    /// Current statistics.
    fn statistics(&self) -> Vec<StatsObject>;

    /// Sets the link: both directions stop, or continue.
    ///
    /// # Errors
    /// The device has no link; as text.
    fn set_link(&self, up: bool) -> Result<(), String>;
}

/// See the module's text.
pub struct DeviceCommands {
    devices: Vec<Box<dyn ManagedDevice>>,
    quit: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for DeviceCommands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.devices.iter().map(|device| device.name()).collect::<Vec<_>>();
        f.debug_struct("DeviceCommands").field("devices", &names).finish_non_exhaustive()
    }
}

impl DeviceCommands {
    /// A server for these devices, which `quit` ends.
    pub fn new(devices: Vec<Box<dyn ManagedDevice>>, quit: impl Fn() + Send + Sync + 'static) -> Self {
        Self { devices, quit: Box::new(quit) }
    }

    /// The device that the argument names; without it, the only one.
    fn named_or_only_device(
        &self,
        arguments: &Map<String, Value>,
        argument: &str,
    ) -> Result<&dyn ManagedDevice, CommandError> {
        let found = match text_argument(arguments, argument)? {
            Some(name) => self.devices.iter().find(|device| device.name() == name),
            None => self.devices.first().filter(|_| self.devices.len() == 1),
        };
        found.map(Box::as_ref).ok_or_else(|| {
            let names: Vec<_> = self.devices.iter().map(|device| device.name()).collect();
            CommandError::generic(format!("Parameter '{argument}' expects one of {}", names.join(", ")))
        })
    }

    fn version(&self, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        check_names(arguments, &["id"])?;
        let device = self.named_or_only_device(arguments, "id")?;
        let facts = device.facts();
        match (facts.unmigratable, facts.migration_version) {
            (None, Some(version)) => Ok(json!({ "type": facts.device_type, "version": version })),
            (reason, _) => Err(refused(device, ENODEV, &reason.unwrap_or_default())),
        }
    }

    fn check(&self, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        check_names(arguments, &["id", "type", "version"])?;
        let device = self.named_or_only_device(arguments, "id")?;
        let missing = |name| CommandError::generic(format!("Parameter '{name}' is missing"));
        let kind = text_argument(arguments, "type")?.ok_or_else(|| missing("type"))?;
        let version = text_argument(arguments, "version")?.ok_or_else(|| missing("version"))?;
        let facts = device.facts();
        if kind != facts.device_type {
            let reason =
                format!("the source's device is of type {kind:?}, this one of type {:?}", facts.device_type);
            return Err(refused(device, EINVAL, &reason));
        }
        if let Some(reason) = &facts.unmigratable {
            return Err(refused(device, ENODEV, reason));
        }
        if version.len() > limits::MIGRATION_VERSION_BYTES_MAX {
            let reason = format!(
                "a version of {} bytes, expected at most {}",
                version.len(),
                limits::MIGRATION_VERSION_BYTES_MAX
            );
            return Err(refused(device, EINVAL, &reason));
        }
        // An attribute's reader may keep the newline.
        let version = version.strip_suffix('\n').unwrap_or(version);
        device.accepts(version).map(|()| json!({})).map_err(|reason| refused(device, EINVAL, &reason))
    }

    fn facts(&self, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        check_names(arguments, &["id"])?;
        let facts = Facts::from(FactsSubject::Device(self.named_or_only_device(arguments, "id")?.facts()));
        serde_json::from_slice(&facts.to_json()).map_err(|error| CommandError::generic(error.to_string()))
    }

    fn set_link(&self, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        check_names(arguments, &["name", "up"])?;
        let device = self.named_or_only_device(arguments, "name")?;
        let up = arguments.get("up").and_then(Value::as_bool);
        let up = up.ok_or_else(|| CommandError::generic("Parameter 'up' expects a boolean"))?;
        device.set_link(up).map(|()| json!({})).map_err(CommandError::Generic)
    }

    fn status(&self) -> Value {
        let running = self.devices.iter().all(|device| device.is_running());
        json!({ "running": running, "status": if running { "running" } else { "prelaunch" } })
    }
}

impl StatsSource for DeviceCommands {
    fn statistics(&self) -> Vec<StatsObject> {
        self.devices.iter().flat_map(|device| device.statistics()).collect()
    }
}

impl Commands for DeviceCommands {
    fn names(&self) -> &[&'static str] {
        &NAMES
    }

    fn execute(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        match name {
            "query-status" => check_names(arguments, &[]).map(|()| self.status()),
            "query-stats" => statistics::query(&StatsSource::statistics(self), arguments),
            "query-stats-schemas" => statistics::schemas(&StatsSource::statistics(self), arguments),
            "query-migration-version" => self.version(arguments),
            "check-migration-version" => self.check(arguments),
            "query-device-facts" => self.facts(arguments),
            "set_link" => self.set_link(arguments),
            "quit" => {
                check_names(arguments, &[])?;
                (self.quit)();
                Ok(json!({}))
            }
            _ => Err(CommandError::NotFound),
        }
    }
}

/// Logs the reason too: the client may show the errno only.
fn refused(device: &dyn ManagedDevice, errno: &str, reason: &str) -> CommandError {
    tracing::warn!(device = device.name(), errno, reason, "migration_version");
    CommandError::generic(format!("{errno}: {reason}"))
}

#[cfg(test)]
mod tests {
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
            if version == "fake 1 mq=2" {
                Ok(())
            } else {
                Err(format!("{version:?} is not a version of fake 1"))
            }
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
            execute(&here, "set_link", &json!({ "name": "vm1", "up": "no" }))
                .unwrap_err()
                .contains("a boolean")
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
}
