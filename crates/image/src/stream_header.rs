//! Header of an incoming migration stream, kept until the image is written.

use std::sync::OnceLock;

use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};

/// Configuration and first `ram` section of a stream. Later values are ignored.
#[derive(Debug, Default)]
pub(crate) struct StreamHeader {
    configuration: OnceLock<Configuration>,
    section: OnceLock<RamSection>,
}

impl StreamHeader {
    pub(crate) fn set_configuration(&self, configuration: &Configuration) {
        self.configuration.get_or_init(|| configuration.clone());
    }

    /// Records the start of a `ram` section.
    pub(crate) fn add_section(&self, section: RamSection) {
        if section.kind == SectionKind::Start {
            self.section.get_or_init(|| section);
        }
    }

    pub(crate) fn configuration(&self) -> Option<&Configuration> {
        self.configuration.get()
    }

    /// The first `ram` section.
    pub(crate) fn section(&self) -> Option<&RamSection> {
        self.section.get()
    }
}
