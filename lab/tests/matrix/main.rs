//! Every kind of copy, on stock QEMU: what arrives is what was there, to the byte, and it goes on.
//!
//! ```text
//!   cells          {10.0, 7.2} × {0, 1, 4, 8 lanes} × {through an image, image loaded by QEMU,
//!                  QEMU's own image, between two sockets}
//!   versions       7.2 → 10.0 and back                      relays     qmp: to qmp:
//!   endpoints      unix:, exec:, fd:, XBZRLE                 options    --paused, --run, --resume, several DESTs
//!   reports        inspect and the JSON of copy              linux      a real guest, and one that writes while it moves
//!   crossings      each QEMU of Debian 12 and 13 with the newest one, in every way
//!   footprint      how much memory towline itself takes
//! ```
//! Equal means: BLAKE3 over all of the guest's RAM, as each QEMU writes it out, with both guests stopped.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod cells;
mod crossings;
mod endpoints;
mod footprint;
mod linux;
mod options;
mod relays;
mod reports;
mod sends;
mod support;
mod versions;
