//! Migration capabilities and parameters of a source.

use std::collections::BTreeMap;
use std::time::Duration;

use towline_qmp::commands::{Capability, MigrationParameters};

use super::super::compression;
use super::super::request::CopyRequest;
use super::qmp_source::QmpSource;
use crate::qemu::MigrationSettings;

/// A rate that no host reaches, as QEMU has no value for unlimited.
pub(super) const BANDWIDTH_UNLIMITED: u64 = 1 << 40;
/// Capabilities with which the stream cannot be received here, or would stop midway.
const UNSUPPORTED_CAPABILITIES: [Capability; 10] = [
    Capability::XBZRLE,
    Capability::POSTCOPY_RAM,
    Capability::POSTCOPY_PREEMPT,
    Capability::PAUSE_BEFORE_SWITCHOVER,
    Capability::X_IGNORE_SHARED,
    Capability::BACKGROUND_SNAPSHOT,
    Capability::ZERO_COPY_SEND,
    Capability::SWITCHOVER_ACK,
    Capability::MAPPED_RAM,
    Capability::RELEASE_RAM,
];

/// Further capabilities that exclude a background snapshot; a migration does not change them.
const UNSUPPORTED_WITH_SNAPSHOT: [Capability; 5] = [
    Capability::AUTO_CONVERGE,
    Capability::DIRTY_BITMAPS,
    Capability::DIRTY_LIMIT,
    Capability::LATE_BLOCK_ACTIVATE,
    Capability::VALIDATE_UUID,
];

impl QmpSource {
    pub(super) fn migration_settings(&self, lanes: usize, options: &CopyRequest) -> MigrationSettings {
        let known = &self.qemu.facts().capabilities;
        let mut capabilities: BTreeMap<_, _> = UNSUPPORTED_CAPABILITIES
            .into_iter()
            .filter(|name| known.contains_key(name))
            .map(|name| (name, false))
            .collect();
        capabilities.insert(Capability::RETURN_PATH, !options.is_snapshot());
        capabilities.insert(Capability::EVENTS, true);
        capabilities.insert(Capability::MULTIFD, lanes > 0);
        if options.leaves_out_shared_memory() && known.contains_key(&Capability::X_IGNORE_SHARED) {
            // The new QEMU has it: what is sent all the same (a memfd's, from 8.1 on) is dropped.
            capabilities.insert(Capability::X_IGNORE_SHARED, true);
        }
        if options.transfer_options().throttle {
            capabilities.insert(Capability::AUTO_CONVERGE, true);
        }
        if options.is_snapshot() {
            let off = UNSUPPORTED_WITH_SNAPSHOT.into_iter().filter(|name| known.contains_key(name));
            capabilities.extend(off.map(|name| (name, false)));
            capabilities.insert(Capability::BACKGROUND_SNAPSHOT, true);
        }
        let parameters = MigrationParameters {
            multifd_channels: (lanes > 0).then(|| u8::try_from(lanes).unwrap_or(u8::MAX)),
            max_bandwidth: Some(options.transfer_options().max_bandwidth.unwrap_or(BANDWIDTH_UNLIMITED)),
            downtime_limit: Some(self.downtime_for_qemu(options.downtime_limit)),
            tls_creds: Some(String::new()),
            mode: self.qemu.facts().normal_mode(),
            ..compression::parameters(options.compression, lanes)
        };
        MigrationSettings { capabilities, parameters }
    }

    /// The milliseconds in which QEMU may send what is left: at least half of the limit.
    fn downtime_for_qemu(&self, limit: Duration) -> u64 {
        let limit = limit - self.downtime_reserve.min(limit / 2);
        u64::try_from(limit.as_millis()).unwrap_or(u64::MAX)
    }

    /// Applies changed limits. They are restored with all other settings. A refused limit does not end the
    /// copy.
    pub(super) fn apply_tuning(&mut self) {
        let changes = self.tuning.changes();
        if std::mem::replace(&mut self.applied_changes, changes) == changes {
            return;
        }
        let bandwidth = self.tuning.max_bandwidth().map(|rate| rate.unwrap_or(BANDWIDTH_UNLIMITED));
        let parameters = MigrationParameters {
            max_bandwidth: bandwidth,
            downtime_limit: self.tuning.downtime_limit().map(|limit| self.downtime_for_qemu(limit)),
            ..MigrationParameters::default()
        };
        let Some(settings) = &mut self.settings else { return };
        if let Err(error) = settings.change(&mut self.qemu, parameters) {
            tracing::warn!(%error, "the source refused changed limits");
        }
        if let Some(limit) = self.tuning.downtime_limit() {
            self.convergence.set_downtime(limit);
        }
    }
}
