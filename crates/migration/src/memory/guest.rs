//! Memory as the source of a migration.

use std::sync::atomic::Ordering;

use towline_channel::IoBuf;
use towline_protocol::configuration::Configuration;
use towline_protocol::{PageRef, RamBlock};

use super::{Memory, MemoryError, lock, offset_in_block};
use crate::{Extent, ExtentKind, Guest, Result};

/// Maximum number of pages examined for one extent: those of a unit that is sent.
const EXTENT_PAGES_MAX: u64 = 512;

/// Configuration of a memory that has not adopted a guest.
static NO_CONFIGURATION: Configuration = Configuration {
    machine_type: String::new(),
    target_page_bits: None,
    capabilities: Vec::new(),
    uuid: None,
};

impl Guest for Memory {
    fn configuration(&self) -> &Configuration {
        self.configuration.get().unwrap_or(&NO_CONFIGURATION)
    }

    fn blocks(&self) -> &[RamBlock] {
        Self::blocks(self)
    }

    fn ram_section_id(&self) -> u32 {
        self.section_id.load(Ordering::Relaxed)
    }

    fn extent(&self, page: PageRef) -> Extent {
        let ram = self.ram();
        if !ram.mapped[page.block.index()].is_ours {
            return Extent { pages: 1, kind: ExtentKind::Unknown };
        }
        let (pages, is_touched) = ram.touched.alike(page, EXTENT_PAGES_MAX);
        Extent { pages, kind: if is_touched { ExtentKind::Unknown } else { ExtentKind::Zero } }
    }

    fn memory(&self, page: PageRef, length: u64) -> IoBuf<'_> {
        let length = usize::try_from(length).expect("within a block that is mapped here");
        self.ram().span(page).io_buf(offset_in_block(page), length)
    }

    fn is_zero(&self, page: PageRef) -> bool {
        let page_bytes = towline_protocol::ram::PAGE_SIZE as usize;
        self.ram().span(page).is_zero(offset_in_block(page), page_bytes)
    }

    fn harvest_dirty(&self, report: &mut dyn FnMut(PageRef, u64)) -> Result<()> {
        self.ram().dirty.harvest(report);
        Ok(())
    }

    fn stop(&self) -> Result<()> {
        self.on_stop.as_ref().map_or(Ok(()), |stop| stop())
    }

    fn start(&self) -> Result<()> {
        self.on_start.as_ref().map_or(Ok(()), |start| start())
    }

    fn device_state(&self) -> Result<Vec<u8>> {
        if let Some(bytes) = &*lock(&self.given_state) {
            return Ok(bytes.clone());
        }
        match &*lock(&self.received_state) {
            Some(state) => Ok(state.bytes().to_vec()),
            None => Err(MemoryError::NoDeviceState.into()),
        }
    }
}
