//! Every kind of copy, on stock QEMU: the memory arrives unchanged to the byte, and the guest runs on.
//!
//! ```text
//!   cells          {10.0, 7.2} × {0, 1, 4, 8 lanes} × {through an image, image loaded by QEMU,
//!                  QEMU's own image, between two sockets}
//!   versions       7.2 → 10.0 and back                      relays     qmp: to qmp:
//!   endpoints      unix:, exec:, fd:, XBZRLE                 options    --paused, --run, --resume, several DESTs
//!   reports        inspect and the JSON of copy              linux      a real guest, and one that writes during a copy
//!   crossings      each QEMU of Debian 12 and 13 with the newest one, by every route
//!   footprint      memory of towline itself
//! ```
//! Equal means: BLAKE3 of all of the guest's RAM, as dumped by each QEMU, with both guests stopped.
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
