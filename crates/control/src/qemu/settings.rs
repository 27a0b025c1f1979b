//! Capabilities and parameters for the duration of a migration.
//!
//! [`AppliedSettings::apply`] changes what differs and keeps the old values; [`AppliedSettings::restore`]
//! restores those, and nothing else, so another party's change in between survives. Both query QEMU first
//! instead of relying on cached values.
//!
//! Each change is recorded in the QEMU's [journal](crate::journal) before it is made, so it can be undone
//! after a towline was killed. The record is completed when everything is restored; it stays while QEMU runs
//! with a changed setting.
//!
//! Capabilities and parameters exclude each other (zero-copy and compression, for example), and QEMU checks
//! after each command. So capabilities are disabled first, then parameters are set, then capabilities are
//! enabled.
//!
//! The drives of a guest that stays paused at its destination are activated here as well.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value, json};
use towline_qmp as qmp;
use towline_qmp::commands::{
    Capability, CapabilityState, MigrateSetCapabilities, MigrateSetParameters, MigrationParameters,
};

use super::connection::Qemu;
use super::error::Error;
use crate::journal::{ChangedValue, JournalEntry, UndoRecord};

/// Requested capabilities and parameters of a QEMU.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct MigrationSettings {
    /// Capabilities to set; others are left alone.
    pub capabilities: BTreeMap<Capability, bool>,
    /// Parameters to set; others are left alone.
    pub parameters: MigrationParameters,
}

/// Settings that were changed, with the old values.
///
/// End it by [`AppliedSettings::restore`] or [`AppliedSettings::leave_applied`]; dropping it is logged.
#[derive(Debug)]
#[must_use = "only `restore` restores the old values"]
pub struct AppliedSettings {
    socket: String,
    change: Change,
    entries: Vec<JournalEntry>,
    ended: bool,
}

/// A setting could not be applied.
#[derive(Debug, thiserror::Error)]
pub struct ApplyError {
    /// The reason.
    #[source]
    pub cause: Error,
    /// Settings that could not be restored afterwards.
    pub left: Option<Box<RestoreError>>,
}

impl fmt::Display for ApplyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.cause)?;
        match &self.left {
            Some(left) => write!(f, "; then {left}"),
            None => Ok(()),
        }
    }
}

/// Settings that were not restored.
#[derive(Debug, thiserror::Error)]
#[error("QEMU on {socket} is left with changed migration settings {}: {}", .left.join(", "), reason(.cause.as_deref()))]
pub struct RestoreError {
    /// The socket.
    pub socket: String,
    /// `NAME (was VALUE)`, each.
    pub left: Vec<String>,
    /// The reason; `None` if QEMU has no way to unset them.
    #[source]
    pub cause: Option<Box<Error>>,
}

impl AppliedSettings {
    /// Applies settings that differ. On failure, those that were applied are restored.
    ///
    /// # Errors
    /// [`Error::UnknownCapability`] before anything was changed, [`Error::UnknownParameter`], and QEMU's
    /// refusals.
    pub fn apply(qemu: &mut Qemu, wanted: &MigrationSettings) -> Result<Self, ApplyError> {
        qemu.wait_for_replies();
        let parameters = wanted.parameters.to_map();
        let change = Change::between(qemu, &wanted.capabilities, &parameters)
            .map_err(|cause| ApplyError { cause, left: None })?;
        let entries = change.record().and_then(|record| qemu.record(&record)).into_iter().collect();
        let mut settings = Self { socket: qemu.socket().to_owned(), change, entries, ended: false };
        tracing::debug!(
            socket = settings.socket,
            capabilities = ?settings.change.capabilities,
            parameters = ?settings.change.parameters,
            "settings of QEMU, restored afterwards"
        );
        match settings.change.apply(qemu) {
            Ok(()) => Ok(settings),
            Err(cause @ Error::Qmp(qmp::Error::Disconnected { .. })) => {
                settings.leave_applied();
                Err(ApplyError { cause, left: None })
            }
            Err(cause) => {
                settings.drop_unset_parameters(qemu);
                Err(ApplyError { cause, left: settings.restore(qemu).err().map(Box::new) })
            }
        }
    }

    /// Changes parameters during a migration. [`Self::restore`] restores the values from before the first
    /// change.
    ///
    /// # Errors
    /// QEMU's refusals.
    pub fn change(&mut self, qemu: &mut Qemu, parameters: MigrationParameters) -> Result<(), Error> {
        let before = qemu.parameters_now()?.to_map();
        let change = Change::of_parameters(parameters.to_map(), &before);
        self.entries.extend(change.record().and_then(|record| qemu.record(&record)));
        for (name, value) in change.parameters_before {
            self.change.parameters_before.entry(name).or_insert(value);
        }
        qemu.client().execute(&MigrateSetParameters(parameters))?;
        Ok(())
    }

    /// Restores the old values. QEMU refuses that while a migration is in progress.
    ///
    /// # Errors
    /// The settings that were not restored, and the reason: a disconnected QEMU, a refusal, or no way to
    /// unset them.
    pub fn restore(mut self, qemu: &mut Qemu) -> Result<(), RestoreError> {
        self.ended = true;
        let (capabilities, parameters) = (self.change.capabilities_before(), &self.change.parameters_before);
        let made = Change::between(qemu, &capabilities, parameters)
            .and_then(|change| change.apply_best_effort(qemu));
        let mut left = match &made {
            Ok(()) => Vec::new(),
            Err(_) => match Change::between(qemu, &capabilities, parameters) {
                Ok(change) => describe(&change.capabilities, &change.parameters),
                Err(_) => self.before(),
            },
        };
        // There is no value to restore.
        let unset = self.change.parameters.keys().filter(|name| !parameters.contains_key(*name));
        left.extend(unset.map(|name| format!("{name} (was unset)")));
        match made {
            Ok(()) if left.is_empty() => {
                self.entries.iter().for_each(JournalEntry::done);
                qemu.end_migrations();
                Ok(())
            }
            made => Err(RestoreError { socket: self.socket.clone(), left, cause: made.err().map(Box::new) }),
        }
    }

    /// Leaves QEMU's settings unchanged, because it has exited or does not reply. If it runs, its journal has
    /// the old values.
    pub fn leave_applied(mut self) {
        self.ended = true;
    }

    /// Changed settings, as `NAME (was VALUE)`.
    pub fn before(&self) -> Vec<String> {
        describe(&self.change.capabilities_before(), &self.change.parameters_before)
    }

    /// After a refusal, a parameter that QEMU still does not report was not set.
    fn drop_unset_parameters(&mut self, qemu: &mut Qemu) {
        if let Ok(now) = qemu.parameters_now() {
            let (now, Change { parameters, parameters_before, .. }) = (now.to_map(), &mut self.change);
            parameters.retain(|name, _| parameters_before.contains_key(name) || now.contains_key(name));
        }
    }
}

impl Drop for AppliedSettings {
    fn drop(&mut self) {
        let changed = !self.change.capabilities.is_empty() || !self.change.parameters_before.is_empty();
        if changed && !self.ended {
            tracing::warn!(socket = self.socket, left = ?self.before(), "migration settings are not restored");
        }
    }
}

/// Difference between a QEMU's settings and the requested ones.
#[derive(Debug)]
pub(super) struct Change {
    capabilities: BTreeMap<Capability, bool>,
    parameters: Map<String, Value>,
    /// Current values of `parameters` that QEMU reports.
    parameters_before: Map<String, Value>,
}

impl Change {
    /// A change of parameters only.
    fn of_parameters(parameters: Map<String, Value>, now: &Map<String, Value>) -> Self {
        let mut change = Self { capabilities: BTreeMap::new(), parameters, parameters_before: now.clone() };
        change.retain_changed();
        change
    }

    fn capabilities_before(&self) -> BTreeMap<Capability, bool> {
        self.capabilities.iter().map(|(name, &state)| (name.clone(), !state)).collect()
    }

    fn retain_changed(&mut self) {
        self.parameters.retain(|name, value| self.parameters_before.get(name) != Some(value));
        self.parameters_before.retain(|name, _| self.parameters.contains_key(name));
    }

    /// The undo record; `None` if nothing changes.
    fn record(&self) -> Option<UndoRecord> {
        if self.capabilities.is_empty() && self.parameters.is_empty() {
            return None;
        }
        let capabilities = self.capabilities.iter();
        let parameters = self.parameters.iter();
        Some(UndoRecord::Settings {
            capabilities: capabilities
                .map(|(name, &set)| (name.clone(), ChangedValue { before: Some(!set), set }))
                .collect(),
            parameters: parameters
                .map(|(name, set)| {
                    let before = self.parameters_before.get(name).cloned();
                    (name.clone(), ChangedValue { before, set: set.clone() })
                })
                .collect(),
        })
    }

    pub(super) fn between(
        qemu: &mut Qemu,
        capabilities: &BTreeMap<Capability, bool>,
        parameters: &Map<String, Value>,
    ) -> Result<Self, Error> {
        let (now, parameters_now) = qemu.settings_now()?;
        if let Some(unknown) = capabilities.keys().find(|name| !now.contains_key(*name)) {
            return Err(Error::UnknownCapability {
                capability: unknown.clone(),
                socket: qemu.socket().to_owned(),
                version: qemu.version_text(),
            });
        }
        let mut change = Self {
            capabilities: capabilities.clone(),
            parameters: parameters.clone(),
            parameters_before: parameters_now.to_map(),
        };
        change.capabilities.retain(|name, state| now.get(name) != Some(state));
        change.retain_changed();
        Ok(change)
    }

    fn apply(&self, qemu: &mut Qemu) -> Result<(), Error> {
        self.set_capabilities(qemu, false)?;
        self.set_parameters(qemu)?;
        self.set_capabilities(qemu, true)
    }

    /// As [`Change::apply`], but continues after a refusal. Returns the first error.
    pub(super) fn apply_best_effort(&self, qemu: &mut Qemu) -> Result<(), Error> {
        let off = self.set_capabilities(qemu, false);
        let parameters = self.set_parameters(qemu);
        let on = self.set_capabilities(qemu, true);
        off.and(parameters).and(on)
    }

    fn set_capabilities(&self, qemu: &mut Qemu, to: bool) -> Result<(), Error> {
        let capabilities: Vec<_> = self
            .capabilities
            .iter()
            .filter(|(_, state)| **state == to)
            .map(|(name, &state)| CapabilityState { capability: name.clone(), state })
            .collect();
        if !capabilities.is_empty() {
            qemu.client().execute(&MigrateSetCapabilities { capabilities })?;
        }
        Ok(())
    }

    fn set_parameters(&self, qemu: &mut Qemu) -> Result<(), Error> {
        if self.parameters.is_empty() {
            return Ok(());
        }
        let command = MigrateSetParameters(MigrationParameters::from_map(self.parameters.clone()));
        let Err(error) = qemu.client().execute(&command) else { return Ok(()) };
        let qmp::Error::Refusal { desc, .. } = &error else { return Err(error.into()) };
        match self.parameters.keys().find(|name| *desc == format!("Parameter '{name}' is unexpected")) {
            Some(unknown) => Err(Error::UnknownParameter {
                parameter: unknown.clone(),
                socket: qemu.socket().to_owned(),
                version: qemu.version_text(),
            }),
            None => Err(error.into()),
        }
    }
}

fn describe(capabilities: &BTreeMap<Capability, bool>, parameters: &Map<String, Value>) -> Vec<String> {
    let on = |state| if state { "on" } else { "off" };
    let capabilities = capabilities.iter().map(|(name, state)| format!("{name} (was {})", on(*state)));
    let parameters = parameters.iter().map(|(name, value)| format!("{name} (was {value})"));
    capabilities.chain(parameters).collect()
}

fn reason(cause: Option<&Error>) -> String {
    cause.map_or_else(|| "QEMU has no way to unset them".to_owned(), ToString::to_string)
}

// Drives of a guest that has arrived and does not run.
//
// A QEMU that receives a guest has its drives inactive, without locks on their files, until `cont`. Before
// 10.0 it aborts if such a guest is migrated again (`bdrv_inactivate_recurse`), or if it is suspended, which
// `cont` does not change, and wakes up.

/// The first QEMU that needs no activation, and has a command for it.
const TRACKS_ACTIVATION_SINCE: (u32, u32) = (10, 0);
/// Id of a temporary export.
const EXPORT: &str = "towline-activates";

impl Qemu {
    /// Activates the drives of a guest that stays here and does not run. A drive that another process has
    /// locked stays inactive: `cont` reports that.
    ///
    /// # Errors
    /// The connection's.
    pub(crate) fn activate_drives(&mut self) -> Result<(), Error> {
        let version = &self.facts.version.qemu;
        if (version.major, version.minor) >= TRACKS_ACTIVATION_SINCE || self.status()?.running {
            return Ok(());
        }
        let flat = Map::from_iter([("flat".to_owned(), true.into())]);
        let nodes = self.client.execute_raw("query-named-block-nodes", Some(flat))?;
        for node in nodes.as_array().into_iter().flatten() {
            self.activate_node(&node["node-name"])?;
        }
        Ok(())
    }

    /// QEMUs before 10.0 have no command that only activates: the first step of an export does so, even
    /// without a server.
    fn activate_node(&mut self, node: &Value) -> Result<(), Error> {
        let Value::Object(export) = json!({ "type": "nbd", "id": EXPORT, "node-name": node }) else {
            unreachable!("an object")
        };
        match self.client.execute_raw("block-export-add", Some(export)) {
            Ok(_) => {
                let id = Map::from_iter([("id".to_owned(), EXPORT.into())]);
                self.client.execute_raw("block-export-del", Some(id))?;
            }
            Err(qmp::Error::Refusal { desc, .. }) => {
                tracing::debug!(%node, desc, "activated without an export");
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}
