//! Self-contained pages and their charts.
//!
//! ```text
//!   sections: tables, lists, parts, maps, trees ──┐
//!   lines, bars ─► Svg ───────────────────────────┴─► page.html, the template: light and dark, no script,
//!                                                     nothing to load
//! ```
//! Texts are escaped here, because they contain names that others chose. Out of scope: the facts of a page,
//! which the caller supplies, and interaction. The caller bounds the number of lines and bars of a chart.

mod bars;
mod error;
mod lines;
mod page;
mod svg;

pub use bars::{Bar, bars};
pub use error::Error;
pub use lines::{ChartLine, Ink, lines};
pub use page::{PHASE_COLORS, page};
pub use svg::Svg;
