//! Self-contained pages and their charts.
//!
//! ```text
//!   rows ─► table ──┐
//!   items ─► list ──┤
//!   parts ─► bar ───┤
//!   lines, bars ────┴─► body ─► document: HTML with its style, light and dark, no script, nothing to load
//!           └─► standalone: an SVG file for other documents
//! ```
//! Texts are escaped here, as they contain names that others chose. Out of scope: the facts of a page, which their owners have,
//! and interaction. A chart has at most as many lines or bars as it is given; callers bound their number.

mod bars;
mod document;
mod error;
mod lines;

pub use bars::{Bar, Emphasis, Group, bars};
pub use document::{PHASE_COLORS, Part, Row, document, escape, list, parts, standalone, table};
pub use error::Error;
pub use lines::{ChartLine, Ink, lines};
