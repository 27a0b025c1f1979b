//! The lab's unsafe code: the death signal of children, locks of drives, and the bytes of
//! the assembled guest.

mod guest_image;
mod lock;
mod spawn;

pub(crate) use guest_image::guest_image;
pub(crate) use lock::lock_drive;
pub(crate) use spawn::{die_with_parent, keep_open};
