//! `cargo xtask pictures`: the pictures of README.md, below docs/pictures.
//!
//! ```text
//!   docs/benchmarks/*.txt ─► bars ─► move.svg, lanes.svg        cargo xtask demo ─► demo.cast ─► demo.svg
//! ```
//! Charts have the figures of the published tables, so that both agree. The recording is one of a real run, of which the SVG has other
//! pauses; `demo.cast` is asciicast v2, for players of terminals.

mod charts;
mod output;
mod recording;

use std::fs;

use anyhow::Result;

use crate::command::root;

/// Draws the pictures, and records the demonstration before unless what was recorded is drawn.
pub(crate) fn run(wanted: Wanted) -> Result<()> {
    let directory = root().join("docs/pictures");
    fs::create_dir_all(&directory)?;
    charts::draw(&root().join("docs/benchmarks"), &directory)?;
    if wanted == Wanted::All {
        recording::record(&directory)?;
    }
    recording::draw(&directory)?;
    println!("pictures: {}", directory.display());
    Ok(())
}

/// Pictures to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    All,
    Drawn,
}
