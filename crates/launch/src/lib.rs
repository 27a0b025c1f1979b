//! The command line of a QEMU as a typed model, an allow-list for one that is not trusted, and the launcher
//! that starts every QEMU.
//!
//! ```text
//!  a running QEMU ── CommandLine::of_process ─► CommandLine ── record ─► Recorded, a part of an image: no secrets, no host's process
//!                                                   │                        │
//!                                                 trust                 allow or trust ◄── HostArguments: binary, --set, paths
//!                                                   └──────► AllowedCommandLine ◄┘
//!                                                                │ MappedMemory: RAM that is not copied
//!                                                                ▼
//!                    GuestDirectory ◄── claim ── Launcher ── QEMU, its QMP socket, its log, its state for `list`
//! ```
//! An image may come from anyone, and so may the command line in it. [`Recorded::allow`] accepts only
//! options, types, properties and forms of values that are listed as harmless; paths, interfaces, sockets,
//! scripts and programs come from [`HostArguments`] alone. Everything else is refused by name, with the
//! argument that replaces it. The result is an argv and never passes a shell.
//!
//! Out of scope: commands to the QEMU that was started. Linux only; `unsafe` only in `sys`.

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod command_line;
mod confinement;
mod generation_id;
mod host;
mod host_map;
mod in_use;
mod launcher;
pub mod limits;
mod log;
mod memory;
mod names;
mod networks;
mod options;
mod overlay;
mod policy;
mod record;
mod runtime;
mod settings;
mod sys;

pub use command_line::{CommandLine, ParseError};
pub use confinement::Confinement;
pub use host::{EnvironmentVariable, GuestIdentity, HostArguments, HostError};
pub use host_map::{HostMap, HostMapError};
pub use in_use::{InUse, Start, check_in_use};
pub use launcher::{IncomingOption, LaunchError, Launcher, ProcessSandbox, RunningQemu};
pub use memory::{MappedBlock, MappedMemory, MemoryFileError, QemuVersion, Sharing};
pub use networks::{SeparateNetworks, SharedNetwork};
pub use overlay::{CreatedDisk, DriveFiles, NewDisk, Overlay, OverlayError, OverlayPlan};
pub use policy::{AllowedCommandLine, Refusal, RefusalReason, Refused};
pub use record::Recorded;
pub use runtime::{
    GuestDirectory, GuestGenerations, GuestName, Lifetime, NameError, RunningGuest, RuntimeError, RuntimeRoot,
};
pub use settings::{Setting, SettingError};

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
