//! The lab's unsafe code: the death signal of children, and the bytes of
//! the assembled guest.

mod guest_image;
mod spawn;

pub(crate) use guest_image::guest_image;
pub(crate) use spawn::{die_with_parent, keep_open};
