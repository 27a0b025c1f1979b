//! The lab's unsafe code: the death signal of children, pseudoterminals, locks of drives, and the bytes of
//! the assembled guest.

mod guest_image;
mod lock;
mod spawn;
mod terminal;

pub(crate) use guest_image::guest_image;
pub(crate) use lock::lock_drive;
pub(crate) use spawn::{die_with_parent, keep_open};
pub(crate) use terminal::open_terminal;
