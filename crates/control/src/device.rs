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
mod tests;
