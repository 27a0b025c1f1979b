//! Items of an incoming migration stream that are not pages, kept until the image is written.

use std::sync::{Mutex, OnceLock};

use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};
use towline_protocol::device_state::DeviceState;

use crate::lock::lock;

/// Configuration, first `ram` section and device state of a stream.
#[derive(Debug, Default)]
pub(crate) struct StreamItems {
    configuration: OnceLock<Configuration>,
    section: OnceLock<RamSection>,
    device_state: Mutex<Option<DeviceState>>,
}

/// Text of the error for an item that is missing in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Missing(pub(crate) &'static str);

impl StreamItems {
    /// Records the configuration. Later ones are ignored.
    pub(crate) fn set_configuration(&self, configuration: &Configuration) {
        self.configuration.get_or_init(|| configuration.clone());
    }

    /// Records the start of a `ram` section. Later ones are ignored.
    pub(crate) fn add_section(&self, section: RamSection) {
        if section.kind == SectionKind::Start {
            self.section.get_or_init(|| section);
        }
    }

    pub(crate) fn set_device_state(&self, state: DeviceState) {
        *lock(&self.device_state) = Some(state);
    }

    pub(crate) fn configuration(&self) -> Result<&Configuration, Missing> {
        self.configuration.get().ok_or(Missing("the stream has no configuration"))
    }

    /// Id of the first `ram` section.
    pub(crate) fn section_id(&self) -> Result<u32, Missing> {
        let section = self.section.get().ok_or(Missing("the stream has no `ram` section"))?;
        Ok(section.id)
    }

    /// Returns the device state, once.
    pub(crate) fn take_device_state(&self) -> Result<DeviceState, Missing> {
        lock(&self.device_state).take().ok_or(Missing("the stream has no device state"))
    }
}
