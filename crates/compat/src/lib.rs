//! Checks whether a guest would run elsewhere: facts of both sides in, a verdict with reasons out.
//!
//! ```text
//!   a QEMU (QMP) · an image · a QEMU binary's -dump-vmstate · a device · a file of them      collected elsewhere
//!        └──────────────────── Facts ───────────────────┘
//!                                 │  source, destination
//!                             evaluate()  ── rules/*: one file, one id each
//!                                 ▼
//!                              Report: findings (no · could not tell · note), each with its reason and remedy
//! ```
//!
//! A verdict has two readings, because QEMU negotiates nothing: settings that [`ConfiguredBy::Towline`] makes
//! equal at both ends must be equal already for a `migrate` [`ConfiguredBy::ByHand`].
//!
//! Out of scope: queries and files. Facts come as values or as the JSON that [`Facts::to_json`] writes, which
//! is bounded when it is read ([`limits`]) and whose unknown keys are ignored.
//!
//! Limits: a difference in no rule's table is reported as unknown ([`Severity::Unknown`]), never taken for
//! harmless. x86 guests. A device without migration state (there are few) counts as missing.

#![forbid(unsafe_code)]

pub mod attribute;
pub mod checkpoints;
pub mod facts;
pub mod limits;
mod report;
mod rules;
mod size;

pub use facts::{Error, Facts, Subject};
pub use report::{ConfiguredBy, Finding, Report, Severity, Verdict};
pub use rules::{Pair, RULES, Rule, evaluate, postcopy};

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
