//! How the stream of a guest that arrives began: kept for as long as it takes to write it down.

use std::sync::OnceLock;

use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{RamSection, SectionKind};

/// See the module's text. What came first counts.
#[derive(Debug, Default)]
pub(crate) struct Began {
    configuration: OnceLock<Configuration>,
    section: OnceLock<RamSection>,
}

impl Began {
    pub(crate) fn set_configuration(&self, configuration: &Configuration) {
        self.configuration.get_or_init(|| configuration.clone());
    }

    /// A `ram` section begins.
    pub(crate) fn add_section(&self, section: RamSection) {
        if section.kind == SectionKind::Start {
            self.section.get_or_init(|| section);
        }
    }

    pub(crate) fn configuration(&self) -> Option<&Configuration> {
        self.configuration.get()
    }

    /// The first `ram` section, which begins them all.
    pub(crate) fn section(&self) -> Option<&RamSection> {
        self.section.get()
    }
}
