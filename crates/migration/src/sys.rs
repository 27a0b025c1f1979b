//! System interfaces of the engine beside channels: private memory, and a guest's. All `unsafe` of this crate
//! is below here.

mod pagemap;
mod process_memory;
mod region;
mod span;
mod userfault;
mod zero;

pub(crate) use pagemap::{PageSelection, Pagemap, STEP_BYTES};
pub use process_memory::ProcessMemory;
pub(crate) use region::HUGE_PAGE_BYTES;
pub use region::RamMapping;
pub use span::Span;
pub(crate) use userfault::Userfault;
