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

use std::num::NonZeroU64;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use towline_compat::facts::DeviceFacts;
use towline_compat::{Facts, Subject as FactsSubject, limits};
use towline_qmp::{CommandError, Commands};

use crate::statistics::{self, StatsObject, StatsSource, check_names, text_argument};

const NAMES: [&str; 16] = [
    "query-status",
    "query-stats",
    "query-stats-schemas",
    "query-migration-version",
    "check-migration-version",
    "query-device-facts",
    "set_link",
    "take-frames",
    "give-frames",
    "drop-frames",
    "hold",
    "mark",
    "release",
    "pass",
    "query-held",
    "quit",
];
/// Longest wait of `take-frames` and `query-held`.
const WAIT_MS_MAX: u64 = 500;

/// Errno of a device that cannot be migrated.
pub const ENODEV: &str = "ENODEV";
/// Errno of a device for a version that it does not accept.
pub const EINVAL: &str = "EINVAL";

/// Frames of a network card on their way to another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PassedFrames {
    /// Number of the pause in which they were received.
    pub series: u64,
    /// True while no receive ring runs.
    pub stopped: bool,
    /// Features that the driver negotiated.
    pub features: u64,
    /// The frames, as cards encode them.
    #[serde(serialize_with = "to_base64", deserialize_with = "from_base64")]
    pub frames: Vec<u8>,
}

/// A request about frames that a network card holds (output commit), as arguments of the command of its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
pub enum HoldRequest {
    /// Hold frames from now on, for this generation.
    Hold {
        /// Number of the guest's run.
        generation: NonZeroU64,
    },
    /// Close the open epoch, while no transmit ring runs.
    Mark {
        /// That of the last `hold`, as in all requests.
        generation: NonZeroU64,
        /// Number of the epoch, above that of the last one.
        epoch: u64,
    },
    /// Send the frames of the epochs up to this one.
    Release {
        /// As above.
        generation: NonZeroU64,
        /// Number of the epoch.
        epoch: u64,
    },
    /// Send all frames, and hold no more.
    Pass {
        /// As above.
        generation: NonZeroU64,
        /// MAC address of a guest that has come here, and is announced first.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        announce: Option<String>,
    },
    /// Wait until the open epoch has a frame, or a ring waits for room.
    QueryHeld {
        /// Maximum time.
        #[serde(default)]
        wait_ms: u64,
    },
}

/// Reply to a [`HoldRequest`]: the frames that the card holds then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HoldStatus {
    /// False if frames are sent at once.
    pub holding: bool,
    /// Generation of the last `hold`.
    pub generation: Option<NonZeroU64>,
    /// The last epoch that was marked.
    pub epoch: Option<u64>,
    /// Number of held frames.
    pub frames: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Number of those in the open epoch.
    pub open_frames: usize,
    /// True while a transmit ring waits for room.
    pub full: bool,
}

fn to_base64<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&BASE64.encode(bytes))
}

fn from_base64<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = <std::borrow::Cow<'_, str>>::deserialize(from)?;
    BASE64.decode(text.as_bytes()).map_err(serde::de::Error::custom)
}

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

    /// Returns frames that the device has received since its guest stopped, after this time at most.
    ///
    /// # Errors
    /// The device has none; as text.
    fn take_frames(&self, wait: Duration) -> Result<PassedFrames, String> {
        let _ = wait;
        Err("it has no frames".into())
    }

    /// Drops its copies of these frames.
    fn drop_frames(&self) {}

    /// Takes frames for a guest that comes from another host, the last ones if `is_last`. Returns true once the guest has sent one here.
    ///
    /// # Errors
    /// It does not wait for them; as text.
    fn give_frames(&self, passed: &PassedFrames, is_last: bool) -> Result<bool, String> {
        let _ = (passed, is_last);
        Err("it takes no frames".into())
    }

    /// Executes a request about held frames.
    ///
    /// # Errors
    /// It is refused, or the device holds none; as text.
    fn hold(&self, request: &HoldRequest) -> Result<HoldStatus, String> {
        let _ = request;
        Err("it holds no frames".into())
    }
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

    fn take_frames(&self, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        check_names(arguments, &["id", "wait-ms"])?;
        let device = self.named_or_only_device(arguments, "id")?;
        let wait = wait_time(arguments.get("wait-ms").map_or(Some(0), Value::as_u64))?;
        let passed = device.take_frames(wait).map_err(CommandError::Generic)?;
        serde_json::to_value(passed).map_err(|error| CommandError::generic(error.to_string()))
    }

    fn give_frames(&self, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        check_names(arguments, &["id", "passed", "last"])?;
        let device = self.named_or_only_device(arguments, "id")?;
        let passed = PassedFrames::deserialize(arguments.get("passed").unwrap_or(&Value::Null));
        let passed = passed.map_err(|error| CommandError::generic(format!("Parameter 'passed': {error}")))?;
        let is_last = arguments.get("last").and_then(Value::as_bool).unwrap_or(false);
        let announced = device.give_frames(&passed, is_last).map_err(CommandError::Generic)?;
        Ok(json!({ "announced": announced }))
    }

    fn hold(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        let device = self.named_or_only_device(arguments, "id")?;
        let arguments: Map<_, _> = arguments.clone().into_iter().filter(|(key, _)| key != "id").collect();
        let request = HoldRequest::deserialize(&json!({ name: arguments }))
            .map_err(|error| CommandError::generic(format!("{name}: {error}")))?;
        if let HoldRequest::QueryHeld { wait_ms } = request {
            wait_time(Some(wait_ms))?;
        }
        let status = device.hold(&request).map_err(CommandError::Generic)?;
        serde_json::to_value(status).map_err(|error| CommandError::generic(error.to_string()))
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
            "take-frames" => self.take_frames(arguments),
            "give-frames" => self.give_frames(arguments),
            "drop-frames" => {
                check_names(arguments, &["id"])?;
                self.named_or_only_device(arguments, "id")?.drop_frames();
                Ok(json!({}))
            }
            "hold" | "mark" | "release" | "pass" | "query-held" => self.hold(name, arguments),
            "quit" => {
                check_names(arguments, &[])?;
                (self.quit)();
                Ok(json!({}))
            }
            _ => Err(CommandError::NotFound),
        }
    }
}

/// The time of `wait-ms`; `None`: it is not a number.
fn wait_time(ms: Option<u64>) -> Result<Duration, CommandError> {
    let text = || CommandError::generic(format!("Parameter 'wait-ms' expects a number up to {WAIT_MS_MAX}"));
    ms.filter(|ms| *ms <= WAIT_MS_MAX).map(Duration::from_millis).ok_or_else(text)
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

        fn hold(&self, request: &HoldRequest) -> Result<HoldStatus, String> {
            Err(format!("{request:?}"))
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
    fn requests_about_held_frames_are_parsed_whole() {
        let (here, _) = server(&["vm0"], false);
        for (command, arguments, expected) in [
            ("hold", json!({ "id": "vm0", "generation": 7 }), "Hold { generation: 7 }"),
            ("mark", json!({ "generation": 7, "epoch": 2 }), "Mark { generation: 7, epoch: 2 }"),
            ("release", json!({ "generation": 7, "epoch": 2 }), "Release { generation: 7, epoch: 2 }"),
            ("pass", json!({ "generation": 7 }), "Pass { generation: 7, announce: None }"),
            ("query-held", json!({}), "QueryHeld { wait_ms: 0 }"),
            ("query-held", json!({ "wait-ms": 500 }), "QueryHeld { wait_ms: 500 }"),
            ("query-held", json!({ "wait-ms": 501 }), "Parameter 'wait-ms' expects a number up to 500"),
            ("pass", json!({}), "pass: missing field `generation`"),
            ("hold", json!({ "generation": 0 }), "hold: invalid value: integer `0`, expected a nonzero u64"),
        ] {
            assert_eq!(execute(&here, command, &arguments).unwrap_err(), expected);
        }
        let unknown = execute(&here, "release", &json!({ "generation": 7, "epochs": 2 })).unwrap_err();
        assert!(unknown.starts_with("release: unknown field `epochs`"), "{unknown}");
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
