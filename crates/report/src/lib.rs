//! Self-contained pages and their charts.
//!
//! ```text
//!   rows ─► table ──┐
//!   items ─► list ──┤
//!   parts ─► bar ───┤
//!   lines, bars ────┴─► body ─► document: HTML with its style, light and dark, no script, nothing to load
//! ```
//! Texts are escaped here, because they contain names that others chose. Out of scope: the facts of a page,
//! which the caller supplies, and interaction. The caller bounds the number of lines and bars of a chart.

mod bars;
mod document;
mod error;
mod lines;

pub use bars::{Bar, Emphasis, Group, bars};
pub use document::{PHASE_COLORS, Part, Row, document, escape, list, parts, table};
pub use error::Error;
pub use lines::{ChartLine, Ink, lines};
